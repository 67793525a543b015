"""Translates an Anthropic request to a chat request.
Never renders it, and knows nothing about the model except how it thinks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from serve_app.api.anthropic.billing import without_billing_header
from serve_app.api.anthropic.blocks import joined
from serve_app.api.anthropic.schema import (
    CountTokensRequest,
    MessagesRequest,
    OutputFormat,
    ToolChoice,
)
from serve_app.api.anthropic.tools import AbsentTool, ClientTool, Tool
from serve_app.api.anthropic.turns import chat_turns, image_paths
from serve_app.api.generation.field_grammars import refused
from serve_app.api.generation.image_prompt import image_names
from serve_app.api.generation.sealing import Seal
from serve_app.api.requests.effort import thinking_options
from serve_app.api.requests.hints import ignore_or_refuse
from serve_app.api.requests.schema import ChatRequest
from serve_app.api.requests.strict_model import UNSUPPORTED
from serve_app.api.text.chat_template import ChatTemplate
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import ServedModel
from serve_app.errors.api_error import ApiError, from_validation

Json = dict[str, Any]


def as_chat(
    request: CountTokensRequest,
    tokenizer: Tokenizer,
    model: ServedModel,
    seal: Seal | None,
    *,
    drop_billing_header: bool,
) -> ChatRequest:
    """Build the chat request that has the same answer. `seal`: of thoughts that are not shown.

    Raises:
        ApiError: no chat request has the same answer.
    """
    choice = request.tool_choice
    may_call = bool(_offered_tools(request)) and (choice is None or choice.type != "none")
    template = tokenizer.template_for(tools=may_call)
    fields = _conversation(request, seal, drop_billing_header) | _thinking(request, template, model, seal)
    if isinstance(request, MessagesRequest):
        fields |= {name: getattr(request, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "stream")}
        fields["stop"] = request.stop_sequences
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error) from error


def _conversation(request: CountTokensRequest, seal: Seal | None, drop_billing_header: bool) -> Json:
    system = _system(request, drop_billing_header)
    turns = [turn for message in request.messages for turn in chat_turns(message, seal)]
    if not turns:
        text = "No message has any content: there is nothing to answer."
        raise ApiError(400, text, param="messages", code="invalid_value")
    offered = _offered_tools(request)
    _check_names(offered)
    tools = [tool for _, tool in offered]
    choice = request.tool_choice
    if choice is not None:
        _check_forced(choice, request, [tool.name for tool in tools])
    return {
        "model": request.model,
        "messages": [*system, *turns],
        "tools": [_tool(tool) for tool in tools] or None,
        "tool_choice": None if choice is None else _choice(choice),
        "response_format": None if request.format is None else _format(request.format),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "continue_final_message": turns[-1]["role"] == "assistant" or None,
    }


def _offered_tools(request: CountTokensRequest) -> list[tuple[int, Tool | ClientTool]]:
    """List the tools that the model may call, with their places in the request."""
    numbered = enumerate(request.tools or ())
    return [(number, tool) for number, tool in numbered if not isinstance(tool, AbsentTool) and tool.is_offered]


def _check_names(offered: Sequence[tuple[int, Tool | ClientTool]]) -> None:
    """Raises:
    ApiError: two tools have one name, so that nobody could say which is called.
    """
    names = set[str]()
    for number, tool in offered:
        if tool.name in names:
            raise refused(f"tools.{number}.name", f"is the name of two tools, {tool.name!r}")
        names.add(tool.name)


def _moved_tools(request: CountTokensRequest) -> dict[str, str]:
    """Map the chat's names of tools to the request's, for tools whose places differ."""
    names = {}
    for place, (number, _) in enumerate(_offered_tools(request)):
        if place != number:
            names[f"tools.{place}.function.parameters"] = f"tools.{number}.input_schema"
            names[f"tools.{place}.function.name"] = f"tools.{number}.name"
    return names


def _system(request: CountTokensRequest, drop_billing_header: bool) -> list[Json]:
    given = request.system or ""
    text = "\n".join(filter(None, without_billing_header(given))) if drop_billing_header else joined(given)
    return [{"role": "system", "content": text}] if text else []


def _thinking(
    request: CountTokensRequest, template: ChatTemplate | None, model: ServedModel, seal: Seal | None
) -> Json:
    """Translate how the model is to think, and whether the answer has its thoughts, shown or sealed."""
    thinking, thinks = request.thinking, model.reasoning_parser is not None
    translated = thinking_options(request.thinking_wishes, template, (), thinks=thinks)
    shown: Json = {"chat_template_kwargs": translated.options} if translated.options else {}
    if thinking is None or (thinking.wanted and not thinks):
        return shown
    if thinking.display == "updates":
        ignore_or_refuse("thinking.display", "thinking.display: thoughts are shown as they are, or not at all.")
    return shown | {"include_reasoning": thinking.wanted and (seal is not None or not request.omits_thoughts)}


def _tool(tool: Tool | ClientTool) -> Json:
    shape = tool if isinstance(tool, Tool) else tool.form
    function = {"name": tool.name, "description": shape.description, "parameters": shape.input_schema}
    return {"type": "function", "function": function | {"strict": tool.strict}}


def _check_forced(choice: ToolChoice, request: CountTokensRequest, offered: Sequence[str]) -> None:
    """Raises:
    ApiError: the answer must be a call of a tool that the model does not get.
    """
    given = [tool.name for tool in request.tools or ()]
    if choice.type == "tool" and choice.name in given and choice.name not in offered:
        text = f"The tool {choice.name} cannot be used here: this server does not run it."
        raise ApiError(400, text, param="tool_choice.name", code=UNSUPPORTED)
    if choice.type == "any" and given and not offered:
        text = "None of the tools can be used here: this server does not run them."
        raise ApiError(400, text, param="tool_choice", code=UNSUPPORTED)


def _choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _format(given: OutputFormat) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given.schema_}}


def names_of(request: CountTokensRequest, chat: ChatRequest) -> dict[str, str]:
    """Map the chat's names of fields to the request's, where they differ."""
    output = "output_config.format" if request.output_format is None else "output_format"
    return {
        "response_format.json_schema.schema": f"{output}.schema",
        "response_format": output,
        **_moved_tools(request),
        ".function.parameters": ".input_schema",
        ".function.name": ".name",
        **image_names(chat.messages, image_paths(request.messages)),
    }
