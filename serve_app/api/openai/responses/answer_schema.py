"""Owns what responses look like, for the OpenAPI document; tests hold real answers against it.
Never makes an answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from serve_app.api.openai.answer_schema import Shape

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Shape):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    """Empty."""
    logprobs: list[dict[str, Any]]
    """One entry per token, if `include` or `top_logprobs` asks for them."""


class ReasoningText(Shape):
    type: Literal["reasoning_text"]
    text: str


class _OutputItem(Shape):
    id: str
    status: ItemStatus


class MessageOutput(_OutputItem):
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class CallOutput(_OutputItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str = ""
    """Names the namespace that the function was offered in."""
    arguments: str
    """JSON, as the model wrote it."""


class CustomCallOutput(_OutputItem):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str = ""
    """Names the namespace that the tool was offered in."""
    input: str
    """Text, as the tool takes it."""


class LocalShellItem(_OutputItem):
    type: Literal["local_shell_call"]
    call_id: str
    action: dict[str, Any]
    """What to run, in the form of OpenAI's tool of that name."""


class ShellItem(_OutputItem):
    type: Literal["shell_call"]
    call_id: str
    action: dict[str, Any]
    """What to run, in the form of OpenAI's tool of that name."""


class PatchItem(_OutputItem):
    type: Literal["apply_patch_call"]
    call_id: str
    operation: dict[str, Any]
    """What to do, and with which file."""


class ReasoningOutput(_OutputItem):
    type: Literal["reasoning"]
    summary: list[dict[str, Any]]
    """Empty."""
    content: list[ReasoningText]
    encrypted_content: str = ""
    """The content, sealed, if `include` asks for it. It can be sent back instead of the content."""


Output = Annotated[
    MessageOutput | CallOutput | CustomCallOutput | LocalShellItem | ShellItem | PatchItem | ReasoningOutput,
    Field(discriminator="type"),
]


class InputTokensDetails(Shape):
    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputTokensDetails(Shape):
    reasoning_tokens: int
    """Tokens before the content begins; 0 for models that do not mark their reasoning."""


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Shape):
    reason: Literal["max_output_tokens"]


class ResponseFailure(Shape):
    code: Literal["server_error"]
    message: str


class ResponseAnswer(Shape):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    """Null unless the status is `completed`."""
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[Output]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    """`effort`, if it has an effect."""
    store: bool
    """Whether the response is kept. Until the answer has ended: whether it is to be kept."""
    temperature: float
    text: dict[str, Any]
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    max_tool_calls: None
    service_tier: Literal["default"]
    safety_identifier: str | None
    prompt_cache_key: str | None
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    """Null until the answer has ended."""
    user: str | None
    metadata: dict[str, str]


class DeletedResponse(Shape):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(Shape):
    object: Literal["list"]
    data: list[dict[str, Any]]
    """Items as they were sent or returned, each with an id."""
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseEvent(Shape):
    """One event of a stream. The fields other than the first two depend on the type."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "error",
    ]
    sequence_number: int
    """From zero."""
    response: ResponseAnswer | None = None
    output_index: int = 0
    item_id: str = ""
    content_index: Literal[0] = 0
    item: Output | None = None
    part: Annotated[OutputText | ReasoningText, Field(discriminator="type")] | None = None
    delta: str = ""
    text: str = ""
    name: str = ""
    arguments: str = ""
    input: str = ""
    logprobs: list[dict[str, Any]] | None = None
    code: str | None = None
    message: str = ""
    param: str | None = None
