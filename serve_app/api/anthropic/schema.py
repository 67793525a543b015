"""Defines the requests of /v1/messages and /v1/messages/count_tokens: fields, types, ranges.
Never reads text. Each field is honoured, taken as a hint, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from serve_app.api.anthropic.blocks import CacheMark, TextOrBlocks
from serve_app.api.anthropic.hinted import hint_where_refused
from serve_app.api.anthropic.message_schema import AnthropicMessage
from serve_app.api.anthropic.read_blocks import Silent
from serve_app.api.anthropic.tools import FAMILIES, AnyTool
from serve_app.api.requests.effort import Effort, ThinkingWishes
from serve_app.api.requests.foreign_fields import LONGER_THAN_THE_CONTEXT
from serve_app.api.requests.messages import FUNCTION_NAME, MAX_TOOLS
from serve_app.api.requests.stop_schema import StopList
from serve_app.api.requests.strict_model import UNSUPPORTED, USED_IF_POSSIBLE, StrictModel, Unsupported
from serve_app.api.requests.unions import of_types
from serve_app.errors.refusal import THREAD

_NEVER: tuple[Any, ...] = ()
MIN_BUDGET = 1024
"""The least budget of thoughts in tokens, as in Anthropic's API."""


class ToolChoice(StrictModel):
    """With `any` the answer must use a tool; with `tool` it must use the named one, once."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, pattern=FUNCTION_NAME)
    disable_parallel_tool_use: bool | None = None
    """If true, at most one tool is used, once."""

    @model_validator(mode="after")
    def _names_a_tool(self) -> ToolChoice:
        if (self.type == "tool") is (self.name is None):
            text = "only allowed, and needed, where the type is tool"
            raise PydanticCustomError("name", "{text}", {"text": text, "field": "name"})
        return self


class OutputFormat(StrictModel):
    """The answer is JSON that the schema allows, on one line. The prompt must describe it: the model gets no schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")
    """A JSON schema."""


class OutputConfig(StrictModel):
    hint_path: ClassVar[str] = "output_config."
    hints: ClassVar[Unsupported] = {"task_budget": _NEVER}
    format: OutputFormat | None = None
    effort: Annotated[Effort | None, USED_IF_POSSIBLE] = None
    """Like a chat's `reasoning_effort`."""


_THINKING = ("disabled", "adaptive", "enabled")


class Thinking(StrictModel):
    hint_path: ClassVar[str] = "thinking."
    hints: ClassVar[Unsupported] = {"block_binding": ({},)}
    type: Annotated[Literal["disabled", "adaptive", "enabled"], USED_IF_POSSIBLE]
    """Like a chat's `enable_thinking`. It is a hint for a model that does not think, and so is `disabled` for one that
    always thinks."""
    budget_tokens: Annotated[int | None, Field(ge=MIN_BUDGET), USED_IF_POSSIBLE] = None
    """Like a chat's `thinking_budget`."""
    display: Literal["summarized", "omitted", "updates"] | None = None
    """With `omitted`, thoughts are not shown: a block's signature has them sealed, and can be sent back. `updates` is a
    hint."""

    @property
    def wanted(self) -> bool:
        return self.type != "disabled"

    @model_validator(mode="after")
    def _has_a_budget(self) -> Thinking:
        if (self.type == "enabled") is (self.budget_tokens is None):
            text = "only allowed, and needed, where the type is enabled"
            raise PydanticCustomError("budget", "{text}", {"text": text, "field": "budget_tokens"})
        return self


class Metadata(StrictModel):
    """Accepted, without effect."""

    user_id: str | None = None


class CountTokensRequest(StrictModel):
    """A conversation."""

    hints: ClassVar[Unsupported] = {
        "context_management": _NEVER,  # nothing is removed from the prompt
        "mcp_servers": ([],),
        "speed": ("standard",),
    }
    value_hints: ClassVar[Mapping[str, str]] = {
        "cache_control": "With other fields or values than this table lists, wherever it stands.",
        **{
            f"tools.{name}": "This server does not run this tool, or not this version. Forcing its use is refused."
            for name in dict.fromkeys(FAMILIES.values())
        },
        "tools.allowed_callers": "With callers other than `direct`.",
        **{f"messages.{kind}": "Such a block adds nothing to the prompt." for kind in get_args(Silent)},
        "messages.thinking.signature": "Of thoughts without text that this server has not sealed, or not with its key.",
        "thinking.display": "With `updates`: thoughts are shown in full.",
    }
    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, fail_fast=True)]
    """A trailing assistant message is continued by the answer."""
    system: TextOrBlocks | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Annotated[Annotated[Thinking, of_types(*_THINKING)] | None, USED_IF_POSSIBLE] = None
    cache_control: CacheMark | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older name of `output_config.format`."""

    @model_validator(mode="after")
    def _one_format(self) -> CountTokensRequest:
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            text = "not allowed together with output_config.format"
            raise PydanticCustomError("format", "{text}", {"text": text, "field": "output_format"})
        return self

    @property
    def omits_thoughts(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

    @property
    def format(self) -> OutputFormat | None:
        return self.output_format or (None if self.output_config is None else self.output_config.format)

    @property
    def thinking_wishes(self) -> ThinkingWishes:
        stated = [message.output_config.effort for message in self.messages if message.output_config is not None]
        last = next((effort for effort in reversed(stated) if effort is not None), None)
        own = None if last is not None or self.output_config is None else self.output_config.effort
        efforts: dict[str, Effort | None] = {"messages.output_config.effort": last, "output_config.effort": own}
        budget = None if self.thinking is None else self.thinking.budget_tokens
        wanted = None if self.thinking is None else self.thinking.wanted
        return ThinkingWishes.from_fields(efforts, {"thinking": wanted}, {"thinking.budget_tokens": budget})

    @model_validator(mode="after")
    def _last_calls_have_results(self) -> CountTokensRequest:
        last = self.messages[-1]
        if any(block.type == "tool_use" for block in last.blocks):
            text = "the last message calls a tool, and no message follows with its result"
            raise PydanticCustomError("messages", "{text}", {"text": text, "field": "messages"})
        return self


def _pauses(edit: dict[str, Any]) -> bool:
    kind = edit.get("type")
    return (
        isinstance(kind, str)
        and kind.startswith("compact_")
        and edit.get("pause_after_compaction") not in (None, False)
    )


class MessagesRequest(CountTokensRequest):
    unsupported: ClassVar[Unsupported] = {"container": _NEVER, "inference_geo": _NEVER, THREAD: _NEVER}
    hints: ClassVar[Unsupported] = {
        **CountTokensRequest.hints,
        "service_tier": ("auto", "standard_only"),
        "diagnostics": _NEVER,
    }
    value_hints: ClassVar[Mapping[str, str]] = {
        **CountTokensRequest.value_hints,
        "max_tokens": LONGER_THAN_THE_CONTEXT,
        "metadata": "With other fields than this table lists.",
    }
    max_tokens: int = Field(ge=1)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    stop_sequences: StopList | None = None
    stream: bool | None = None
    metadata: Annotated[Metadata, hint_where_refused("metadata")] | None = None

    @model_validator(mode="before")
    @classmethod
    def _never_pauses(cls, data: Any) -> Any:
        """Refuse the one field of `context_management` that is no hint, because it would end an answer early."""
        given = data.get("context_management") if isinstance(data, dict) else None
        edits = given.get("edits") if isinstance(given, dict) else None
        for place, edit in enumerate(edits if isinstance(edits, list) else ()):
            if isinstance(edit, dict) and _pauses(edit):
                field = f"context_management.edits.{place}.pause_after_compaction"
                text = "the server never compacts a conversation; leave it out, or send false"
                raise PydanticCustomError(UNSUPPORTED, "{text}", {"text": text, "field": field, "code": UNSUPPORTED})
        return data

    @model_validator(mode="after")
    def _thoughts_leave_room(self) -> MessagesRequest:
        """Check the budget only without tools: with them it covers all turns from the user's message to its answer."""
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens and not self.tools:
            text = f"should be less than max_tokens, which is {self.max_tokens}, but it is {budget}"
            raise PydanticCustomError("budget", "{text}", {"text": text, "field": "thinking.budget_tokens"})
        return self
