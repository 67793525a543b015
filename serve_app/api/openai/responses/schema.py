"""Owns the request of /v1/responses: fields, types, ranges.
Never reads text. Each field is honoured, is a hint, has no effect by its nature, or is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from engine.protocol import MAX_LOGPROBS
from serve_app.api.openai.responses.choice import Choice
from serve_app.api.openai.responses.includes import LOGPROBS, MAX_INCLUDED, Included
from serve_app.api.openai.responses.includes import VALUE_HINTS as INCLUDE_HINTS
from serve_app.api.openai.responses.items import Item
from serve_app.api.openai.responses.replays import UNREAD
from serve_app.api.openai.responses.tools import HOSTED, Tool
from serve_app.api.requests.effort import Effort
from serve_app.api.requests.foreign_fields import LONGER_THAN_THE_CONTEXT
from serve_app.api.requests.messages import FUNCTION_NAME, MAX_TOOLS
from serve_app.api.requests.session import MAX_CHARS
from serve_app.api.requests.strict_model import USED_IF_POSSIBLE, StrictModel, Unsupported
from serve_app.api.requests.structured import TextFormat
from serve_app.api.requests.unions import by_type, text_or_list_of

_NEVER: tuple[Any, ...] = ()
_NO = (False,)
MOST_OUTPUT_TOKENS = 2**53 - 1
"""The answer repeats the number, and this is the largest that every JSON reader keeps."""


class ObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(StrictModel):
    """JSON that the schema allows, on one line. The model does not see the schema: the input says what is wanted."""

    type: Literal["json_schema"]
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    """A JSON schema."""
    strict: bool | None = None
    """The schema is enforced in any case."""


TextFormats = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[ObjectFormat, Tag("<json_object>")]
    | Annotated[SchemaFormat, Tag("<json_schema>")],
    by_type(("text", "json_object", "json_schema"), "an object of type text, json_object or json_schema"),
]


class TextOptions(StrictModel):
    hints: ClassVar[Unsupported] = {"verbosity": ("medium",)}
    hint_path: ClassVar[str] = "text."
    format: TextFormats | None = None


class ReasoningOptions(StrictModel):
    hints: ClassVar[Unsupported] = {
        **dict.fromkeys(("summary", "generate_summary"), _NEVER),
        "context": ("auto",),
        "mode": ("standard",),
    }
    hint_path: ClassVar[str] = "reasoning."
    effort: Annotated[Effort | None, USED_IF_POSSIBLE] = None
    """As a chat's `reasoning_effort`."""


_ITEMS = Annotated[list[Item], Field(min_length=1, fail_fast=True)]
Input = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[_ITEMS, Tag("<list>")], text_or_list_of("a string or a list of items")
]


class ResponsesRequest(StrictModel):
    unsupported: ClassVar[Unsupported] = {
        "background": _NO,
        **dict.fromkeys(("conversation", "prompt", "moderation", "access_programs"), _NEVER),
    }
    # `truncation` and `context_management` permit dropping parts, which is never required. `max_tool_calls` is about
    # hosted tools, which are never called.
    hints: ClassVar[Unsupported] = {
        "truncation": ("disabled",),
        "context_management": ([],),
        "max_tool_calls": _NEVER,
        "client_metadata": ({},),
        "service_tier": ("auto", "default"),
        "stream_options": ({}, {"include_obfuscation": False}),
        "prompt_cache_options": ({},),
        "image": ({},),
    }
    value_hints: ClassVar[Mapping[str, str]] = {
        "max_output_tokens": LONGER_THAN_THE_CONTEXT,
        **INCLUDE_HINTS,
        **{f"tools.{kind}": "This server runs no such tool. One that is forced is refused." for kind in HOSTED},
        "tools.shell": "In a container of OpenAI's.",
        "tools.format": "A grammar that cannot be kept, of a tool that need not be called: its text is free.",
        **{f"input.{kind}": "The model reads nothing of such an item." for kind in UNREAD},
        "input.reasoning.encrypted_content": "Sealed by another server, or with a key that is gone.",
    }
    model: str
    input: Input
    instructions: str | None = None
    """A system message before the input, and before the conversation that the input continues."""
    previous_response_id: str | None = None
    """A kept response. Its input and output, and those of the responses that it continues, come before the input. Its
    instructions do not."""
    max_output_tokens: int | None = Field(None, ge=1, le=MOST_OUTPUT_TOKENS)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    """0 and -1 keep all tokens."""
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    """As in the Open Responses specification, like the field below. OpenAI's own requests have neither."""
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """How many alternatives come with each log-probability of the text's tokens. Above 0, `include` is not needed."""
    include: Annotated[list[Included], Field(max_length=MAX_INCLUDED, fail_fast=True)] | None = None
    """Log-probabilities of the text's tokens, and sealed thoughts, which can be sent back. Other values are hints."""
    stream: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    prompt_cache_key: str | None = Field(None, max_length=MAX_CHARS)
    """Requests with the same key go to the same engine while its load allows."""
    metadata: dict[str, str] | None = None
    """Repeated in the answer."""
    store: bool | None = None
    """False: the response is not kept. Otherwise it is, as long as `responses_store` allows. The answer says whether it
    was."""

    # Accepted, without effect.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def shows_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())
