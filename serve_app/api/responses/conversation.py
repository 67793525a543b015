"""Owns what a Responses request means as a chat request.
Never renders it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from serve_app.api.image_prompt import image_names
from serve_app.api.responses.items import CallItem, Item, ItemImage, ItemText, MessageItem, OutputItem, ReasoningItem
from serve_app.api.responses.schema import (
    ChosenFunction,
    ChosenTools,
    FunctionTool,
    ResponsesRequest,
    SchemaFormat,
    TextOptions,
    ToolChoice,
)
from serve_app.api.schema import ChatRequest
from serve_app.api.tool_grammars import can_be_kept
from serve_app.engine_client import ServedModel
from serve_app.errors import from_validation

Json = dict[str, Any]
_SAME = ("model", "temperature", "top_p", "top_k", "stream", "parallel_tool_calls", "prompt_cache_key")
NAMES = {
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    ".function.parameters": ".parameters",
    ".function.name": ".name",
}
"""What a chat request calls otherwise."""


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """The chat with the same answer.

    Raises:
        ApiError: there is none.
    """
    system = [{"role": "system", "content": request.instructions}] if request.instructions is not None else []
    fields = {name: getattr(request, name) for name in _SAME} | {
        "messages": system + _messages(request.input),
        "max_tokens": request.max_output_tokens,
        "logprobs": request.shows_logprobs,
        "top_logprobs": request.top_logprobs,
        "tools": [_tool(tool) for tool in request.tools or ()] or None,
        "tool_choice": _choice(request.tool_choice),
        "response_format": _format(request.text),
    }
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error) from error


def _messages(given: str | Sequence[Item]) -> list[Json]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Json] = []
    for item in given:
        _add(messages, item)
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
    return messages


def _add(messages: list[Json], item: Item) -> None:
    match item:
        case MessageItem(role="assistant"):
            _turn(messages, after=("content", "tool_calls"))["content"] = _text(item.content)
        case MessageItem():
            messages.append({"role": item.role, "content": _parts(item.content)})
        case ReasoningItem():
            thoughts = "\n".join(thought.text for thought in item.content or item.summary or ())
            _turn(messages, after=("content", "tool_calls"))["reasoning_content"] = thoughts
        case CallItem():
            _turn(messages).setdefault("tool_calls", []).append(_call(item))
        case OutputItem():
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})


def _turn(messages: list[Json], after: Sequence[str] = ()) -> Json:
    """The assistant's message that goes on: what follows one of `after` begins another."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(name) is not None for name in after):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _text(content: str | Sequence[ItemText | ItemImage]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content if isinstance(part, ItemText))


def _parts(content: str | Sequence[ItemText | ItemImage]) -> str | list[Json]:
    if isinstance(content, str) or not any(isinstance(part, ItemImage) for part in content):
        return _text(content)
    return [
        {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}
        if isinstance(part, ItemImage)
        else {"type": "text", "text": part.text}
        for part in content
    ]


def names_of(request: ResponsesRequest, chat: ChatRequest) -> dict[str, str]:
    """What the chat with the same answer calls otherwise."""
    items = () if isinstance(request.input, str) else request.input
    images = [
        f"input.{number}.content.{place}.image_url"
        for number, item in enumerate(items)
        if isinstance(item, MessageItem)
        for place, part in enumerate(item.content)
        if isinstance(part, ItemImage)
    ]
    return NAMES | image_names(chat.messages, images)


def _call(item: CallItem) -> Json:
    return {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}


def _choice(choice: ToolChoice | None) -> Any:
    match choice:
        case ChosenFunction():
            return _named(choice)
        case ChosenTools():
            tools = [_named(one) for one in choice.tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice


def _named(function: ChosenFunction) -> Json:
    return {"type": "function", "function": {"name": function.name}}


def _format(text: TextOptions | None) -> Any:
    if text is None or not isinstance(text.format, SchemaFormat):
        return None if text is None or text.format is None else {"type": text.format.type}
    return {"type": "json_schema", "json_schema": {"name": text.format.name, "schema": text.format.schema_}}


def with_strictness(request: ResponsesRequest, model: ServedModel) -> ResponsesRequest:
    """The request with each function strict or not: where it does not say so, it is if its schema can be kept."""
    if not request.tools:
        return request
    tools = [
        tool.model_copy(update={"strict": _can_be_strict(tool, model) if tool.strict is None else tool.strict})
        for tool in request.tools
    ]
    return request.model_copy(update={"tools": tools})


def _can_be_strict(tool: FunctionTool, model: ServedModel) -> bool:
    return model.tool_parser is not None and can_be_kept(tool.name, tool.parameters, model.tool_parser)


def _tool(tool: FunctionTool) -> Json:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function | {"strict": tool.strict}}
