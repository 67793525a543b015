"""Owns the requests of /v1/messages and /v1/messages/count_tokens: fields, types, ranges.
Never reads text; a field is honoured, a hint, or refused by name."""

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
from serve_app.api.requests.effort import Asked, Effort
from serve_app.api.requests.foreign_fields import LONGER_THAN_THE_CONTEXT
from serve_app.api.requests.messages import FUNCTION_NAME, MAX_TOOLS
from serve_app.api.requests.stop_schema import StopList
from serve_app.api.requests.strict_model import UNSUPPORTED, USED_IF_POSSIBLE, StrictModel, Unsupported
from serve_app.api.requests.unions import of_types
from serve_app.errors.refusal import THREAD

_NEVER: tuple[Any, ...] = ()
MIN_BUDGET = 1024
"""Tokens of thoughts, as Anthropic has it."""


class ToolChoice(StrictModel):
    """With `any` the answer uses a tool, with `tool` the one that is named, once."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, pattern=FUNCTION_NAME)
    disable_parallel_tool_use: bool | None = None
    """True: at most one tool is used, once."""

    @model_validator(mode="after")
    def _names_a_tool(self) -> ToolChoice:
        if (self.type == "tool") is (self.name is None):
            text = "only allowed, and needed, where the type is tool"
            raise PydanticCustomError("name", "{text}", {"text": text, "field": "name"})
        return self


class OutputFormat(StrictModel):
    """JSON that the schema allows, on one line. The model is not told of it; the prompt should say what is wanted."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")
    """A JSON schema."""


class OutputConfig(StrictModel):
    hint_path: ClassVar[str] = "output_config."
    hints: ClassVar[Unsupported] = {"task_budget": _NEVER}
    format: OutputFormat | None = None
    effort: Annotated[Effort | None, USED_IF_POSSIBLE] = None
    """As a chat's `reasoning_effort`."""


_THINKING = ("disabled", "adaptive", "enabled")


class Thinking(StrictModel):
    hint_path: ClassVar[str] = "thinking."
    hints: ClassVar[Unsupported] = {"block_binding": ({},)}
    type: Annotated[Literal["disabled", "adaptive", "enabled"], USED_IF_POSSIBLE]
    """As a chat's `enable_thinking`: a hint for a model that does not think, and `disabled` for one that does in any
    case."""
    budget_tokens: Annotated[int | None, Field(ge=MIN_BUDGET), USED_IF_POSSIBLE] = None
    """As a chat's `thinking_budget`."""
    display: Literal["summarized", "omitted", "updates"] | None = None
    """With `omitted` no thoughts are shown; `updates` is a hint."""

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
    """Accepted and without effect."""

    user_id: str | None = None


class CountTokensRequest(StrictModel):
    """A conversation."""

    hints: ClassVar[Unsupported] = {
        "context_management": _NEVER,  # nothing is taken out of the prompt
        "mcp_servers": ([],),
        "speed": ("standard",),
    }
    value_hints: ClassVar[Mapping[str, str]] = {
        "cache_control": "Where it has more, or other values, than this table says; wherever it stands.",
        **{
            f"tools.{name}": "This server runs no such tool, or not of that version. One that is forced is refused."
            for name in dict.fromkeys(FAMILIES.values())
        },
        "tools.allowed_callers": "Where others than `direct` are among them.",
        **{f"messages.{kind}": "The model reads nothing of such a block." for kind in get_args(Silent)},
        "thinking.display": "With `updates`: thoughts are shown as they are.",
    }
    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, fail_fast=True)]
    """Where the last is the assistant's, the answer goes on with it."""
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
    def format(self) -> OutputFormat | None:
        return self.output_format or (None if self.output_config is None else self.output_config.format)

    @property
    def asked_thinking(self) -> Asked:
        effort = None if self.output_config is None else self.output_config.effort
        budget = None if self.thinking is None else self.thinking.budget_tokens
        wanted = None if self.thinking is None else self.thinking.wanted
        return Asked.of({"output_config.effort": effort}, {"thinking": wanted}, {"thinking.budget_tokens": budget})

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
        "metadata": "Where it has more than this table says.",
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
        """`context_management` is a hint but for this, which would end an answer early."""
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
        """With tools the budget is that of all the turns between a user's words and the answer to them."""
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens and not self.tools:
            text = f"should be less than max_tokens, which is {self.max_tokens}, but it is {budget}"
            raise PydanticCustomError("budget", "{text}", {"text": text, "field": "thinking.budget_tokens"})
        return self
