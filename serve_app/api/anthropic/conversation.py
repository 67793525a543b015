"""Owns what an Anthropic request means as a chat request.
Never renders it, and knows no model but for how it thinks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from serve_app.api.anthropic.blocks import (
    AnthropicMessage,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)
from serve_app.api.anthropic.schema import (
    CountTokensRequest,
    MessagesRequest,
    OutputFormat,
    Thinking,
    Tool,
    ToolChoice,
)
from serve_app.api.image_prompt import image_names
from serve_app.api.schema import ChatRequest
from serve_app.api.strict_model import UNSUPPORTED
from serve_app.api.tokenizer import Tokenizer
from serve_app.engine_client import ServedModel
from serve_app.errors import ApiError, from_validation

Json = dict[str, Any]
_THINKS = "enable_thinking"


def as_chat(request: CountTokensRequest, tokenizer: Tokenizer, model: ServedModel) -> ChatRequest:
    """The chat with the same answer.

    Raises:
        ApiError: there is none.
    """
    fields = _conversation(request) | _thinking(request.thinking, tokenizer, model)
    if isinstance(request, MessagesRequest):
        fields |= {name: getattr(request, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "stream")}
        fields["stop"] = request.stop_sequences
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error) from error


def _conversation(request: CountTokensRequest) -> Json:
    system = [] if request.system is None else [{"role": "system", "content": _joined(request.system)}]
    choice = request.tool_choice
    return {
        "model": request.model,
        "messages": system + [told for message in request.messages for told in _told(message)],
        "tools": [_tool(tool) for tool in request.tools or ()] or None,
        "tool_choice": None if choice is None else _choice(choice),
        "response_format": None if request.format is None else _format(request.format),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "continue_final_message": request.messages[-1].role == "assistant" or None,
    }


def _thinking(thinking: Thinking | None, tokenizer: Tokenizer, model: ServedModel) -> Json:
    if thinking is None:
        return {}
    wanted = thinking.type != "disabled"
    if wanted and model.reasoning_parser is None:
        raise ApiError(400, "This model does not think.", param="thinking", code=UNSUPPORTED)
    template = tokenizer.chat_template
    known = template is not None and _THINKS in template.variables
    return {"include_reasoning": wanted} | ({"chat_template_kwargs": {_THINKS: wanted}} if known else {})


def _told(message: AnthropicMessage) -> list[Json]:
    if message.role == "assistant":
        return [_of_assistant(message)]
    if message.role == "system":
        return [{"role": "system", "content": _joined([one for one in message.blocks if isinstance(one, TextBlock)])}]
    return _of_user(message)


def _of_assistant(message: AnthropicMessage) -> Json:
    texts = [block.text for block in message.blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in message.blocks if isinstance(block, ThinkingBlock)]
    calls = [_call(block) for block in message.blocks if isinstance(block, ToolUseBlock)]
    content = "\n".join(texts) if texts or not calls else None
    return {
        "role": "assistant",
        "content": content,
        "reasoning_content": "\n".join(thoughts) or None,
        "tool_calls": calls or None,
    }


def _of_user(message: AnthropicMessage) -> list[Json]:
    """A chat has a message for each result of a tool, and others for the texts around them."""
    told: list[Json] = []
    shown: list[TextBlock | ImageBlock] = []
    for block in message.blocks:
        if isinstance(block, ToolResultBlock):
            told += [*_user(shown), _result(block)]
            shown = []
        elif isinstance(block, TextBlock | ImageBlock):
            shown.append(block)
    return told + _user(shown)


def _user(shown: Sequence[TextBlock | ImageBlock]) -> list[Json]:
    texts = [block for block in shown if isinstance(block, TextBlock)]
    if len(texts) == len(shown):
        return [{"role": "user", "content": _joined(texts)}] if texts else []
    return [{"role": "user", "content": [_part(block) for block in shown]}]


def _part(block: TextBlock | ImageBlock) -> Json:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    url = source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _result(block: ToolResultBlock) -> Json:
    content = "" if block.content is None else _joined(block.content)
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": f"Error: {content}" if block.is_error else content,
    }


def _call(block: ToolUseBlock) -> Json:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _tool(tool: Tool) -> Json:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function | {"strict": tool.strict}}


def _choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _format(given: OutputFormat) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given.schema_}}


def names_of(request: CountTokensRequest, chat: ChatRequest) -> dict[str, str]:
    """What the chat with the same answer calls otherwise."""
    images = [
        f"messages.{number}.content.{place}.source"
        for number, message in enumerate(request.messages)
        for place, block in enumerate(message.blocks)
        if isinstance(block, ImageBlock)
    ]
    output = "output_config.format" if request.output_format is None else "output_format"
    return {
        "response_format.json_schema.schema": f"{output}.schema",
        "response_format": output,
        ".function.parameters": ".input_schema",
        ".function.name": ".name",
        **image_names(chat.messages, images),
    }


def _joined(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
