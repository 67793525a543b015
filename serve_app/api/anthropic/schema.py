"""Owns the requests of /v1/messages and /v1/messages/count_tokens: fields, types, ranges.
Never reads text; a field is honoured, changes nothing by its nature, or is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from serve_app.api.anthropic.blocks import AnthropicMessage, CacheControl, TextOrBlocks
from serve_app.api.messages import FUNCTION_NAME, MAX_TOOLS
from serve_app.api.stop_schema import StopList
from serve_app.api.strict_model import UNSUPPORTED, StrictModel, Unsupported

_NEVER: tuple[Any, ...] = ()
_NO = (False,)


class Tool(StrictModel):
    unsupported: ClassVar[Unsupported] = {
        "defer_loading": _NO,
        "input_examples": ([],),
        "allowed_callers": (["direct"],),
        "eager_input_streaming": (False, True),  # arguments are streamed as they are written in any case
    }
    type: Literal["custom"] | None = None
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    input_schema: dict[str, Any]
    """A JSON schema."""
    strict: bool | None = None
    """Inputs are what the schema allows, wherever the model uses this tool."""
    cache_control: CacheControl | None = None


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
    unsupported: ClassVar[Unsupported] = {"effort": (), "task_budget": ()}
    format: OutputFormat | None = None


class Thinking(StrictModel):
    unsupported: ClassVar[Unsupported] = {"display": ("summarized",)}
    type: Literal["disabled", "adaptive"]
    """`adaptive` needs a model that thinks."""


class Metadata(StrictModel):
    """Accepted and without effect."""

    user_id: str | None = None


def _supported_type(*supported: str) -> BeforeValidator:
    """Other types than these are refused by name."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in supported:
            text = f"the type {kind[:50]} is not supported by the server; supported are: {', '.join(supported)}"
            raise PydanticCustomError("unsupported", "{text}", {"text": text, "code": UNSUPPORTED})
        return value

    return BeforeValidator(check)


class CountTokensRequest(StrictModel):
    """A conversation."""

    unsupported: ClassVar[Unsupported] = {
        "mcp_servers": ([],),
        "context_management": _NEVER,
    }
    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, fail_fast=True)]
    """Where the last is the assistant's, the answer goes on with it."""
    system: TextOrBlocks | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Annotated[Thinking, _supported_type("disabled", "adaptive")] | None = None
    cache_control: CacheControl | None = None
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

    @model_validator(mode="after")
    def _last_calls_have_results(self) -> CountTokensRequest:
        last = self.messages[-1]
        if any(block.type == "tool_use" for block in last.blocks):
            text = "the last message calls a tool, and no message follows with its result"
            raise PydanticCustomError("messages", "{text}", {"text": text, "field": "messages"})
        return self


class MessagesRequest(CountTokensRequest):
    unsupported: ClassVar[Unsupported] = {
        **CountTokensRequest.unsupported,
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
        **dict.fromkeys(("container", "inference_geo"), _NEVER),
    }
    max_tokens: int = Field(ge=1)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    stop_sequences: StopList | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
