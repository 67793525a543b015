"""Owns the request of /v1/responses: fields, types, ranges.
Never reads text; a field is honoured, changes nothing by its nature, or is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag
from pydantic_core import PydanticCustomError

from engine.protocol import MAX_LOGPROBS
from serve_app.api.messages import FUNCTION_NAME, MAX_TOOLS
from serve_app.api.responses.items import Item
from serve_app.api.session import MAX_CHARS
from serve_app.api.strict_model import UNSUPPORTED, StrictModel, Unsupported
from serve_app.api.structured import TextFormat
from serve_app.api.tool_choice import choice_kinds
from serve_app.api.unions import by_type, text_or_list_of

_NEVER: tuple[Any, ...] = ()
_NO = (False,)


class FunctionTool(StrictModel):
    unsupported: ClassVar[Unsupported] = {
        "defer_loading": _NO,
        "async": _NO,
        "allowed_callers": (["direct"],),
        "output_schema": _NEVER,
    }
    type: Literal["function"]
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None
    """Arguments are what the schema allows. The default is true where the schema can be kept; the answer says which."""


class ObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(StrictModel):
    """JSON that the schema allows, on one line. The model is not told of it; the input should say what is wanted."""

    type: Literal["json_schema"]
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    """A JSON schema."""
    strict: bool | None = None
    """The schema is kept in any case."""


TextFormats = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[ObjectFormat, Tag("<json_object>")]
    | Annotated[SchemaFormat, Tag("<json_schema>")],
    by_type(("text", "json_object", "json_schema"), "an object of type text, json_object or json_schema"),
]


class TextOptions(StrictModel):
    unsupported: ClassVar[Unsupported] = {"verbosity": ("medium",)}
    format: TextFormats | None = None


class ChosenFunction(StrictModel):
    """The answer is one call of this function."""

    type: Literal["function"]
    name: str = Field(pattern=FUNCTION_NAME)


class ChosenTools(StrictModel):
    """The model is told of all tools, and can call these."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[ChosenFunction, Tag("<function>")]
    | Annotated[ChosenTools, Tag("<allowed_tools>")],
    choice_kinds(),
]


class ReasoningOptions(StrictModel):
    """Nothing of it can be chosen."""

    unsupported: ClassVar[Unsupported] = dict.fromkeys(("effort", "summary", "generate_summary"), _NEVER)


_ITEMS = Annotated[list[Item], Field(min_length=1, fail_fast=True)]
Input = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[_ITEMS, Tag("<list>")], text_or_list_of("a string or a list of items")
]


LOGPROBS = "message.output_text.logprobs"
MAX_INCLUDED = 16


def _supported(value: Any) -> Any:
    if isinstance(value, str) and value != LOGPROBS:
        text = f"{value[:50]} is not supported by the server; supported is {LOGPROBS}"
        raise PydanticCustomError("unsupported", "{text}", {"text": text, "code": UNSUPPORTED})
    return value


Included = Annotated[Literal["message.output_text.logprobs"], BeforeValidator(_supported)]


class ResponsesRequest(StrictModel):
    unsupported: ClassVar[Unsupported] = {
        "background": _NO,
        "truncation": ("disabled",),
        "service_tier": ("auto", "default"),
        "stream_options": ({}, {"include_obfuscation": False}),
        "prompt_cache_options": ({},),
        **dict.fromkeys(("previous_response_id", "conversation", "prompt"), _NEVER),
        **dict.fromkeys(("max_tool_calls", "context_management", "moderation"), _NEVER),
    }
    model: str
    input: Input
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    """0 and -1 keep all tokens."""
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """This many alternatives with the log-probability of each token of the text, which above 0 needs no `include`."""
    include: Annotated[list[Included], Field(max_length=MAX_INCLUDED, fail_fast=True)] | None = None
    """The log-probability of each token of the text."""
    stream: bool | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    prompt_cache_key: str | None = Field(None, max_length=MAX_CHARS)
    """Requests of one key go to the same engine while its load allows."""
    metadata: dict[str, str] | None = None
    """Told in the answer."""

    # Accepted and without effect.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    store: bool | None = None
    """Nothing is kept: the answer says `false`."""

    @property
    def shows_logprobs(self) -> bool:
        return bool(self.top_logprobs) or bool(self.include)
