"""Translates each message of an Anthropic request to messages of a chat.
Never decides where a template shows them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from serve_app.api.anthropic.blocks import ImageBlock, TextBlock, ThinkingBlock, ToolUseBlock, UrlSource
from serve_app.api.anthropic.message import SIGNATURE
from serve_app.api.anthropic.message_schema import AnthropicMessage, ToolResultBlock
from serve_app.api.generation.sealing import Seal
from serve_app.api.requests.content_parts import IMAGE_PLACE
from serve_app.api.requests.hints import ignore_or_refuse
from serve_app.parsing.call_arguments import UNREADABLE

Json = dict[str, Any]
_Shown = str | ImageBlock


def chat_turns(message: AnthropicMessage, seal: Seal | None) -> list[Json]:
    """Translate one message; the list is empty if the message is. `seal`: opens thoughts that were sealed.

    Raises:
        ApiError: thoughts were sealed elsewhere, and the server is strict.
    """
    if message.role == "assistant":
        return _of_assistant(message, seal)
    if message.role == "system":
        text = "\n".join(block.text for block in message.blocks if isinstance(block, TextBlock) and block.text)
        return [{"role": "system", "content": text}] if text else []
    return _of_user(message)


def _of_assistant(message: AnthropicMessage, seal: Seal | None) -> list[Json]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for block in message.blocks:
        if isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking or _opened(block.signature, seal))
        elif isinstance(block, ToolUseBlock):
            calls.append(_call(block))
        elif isinstance(text := _shown(block), str):
            texts.append(text)
    content = "\n".join(filter(None, texts))
    reasoning = "\n".join(filter(None, thoughts))
    if not (content or reasoning or calls):
        return []
    content_or_null = None if calls and not content else content
    fields = {"content": content_or_null, "reasoning_content": reasoning or None, "tool_calls": calls or None}
    return [{"role": "assistant", **fields}]


def _opened(signature: str | None, seal: Seal | None) -> str:
    if not signature or signature == SIGNATURE:
        return ""
    thoughts = None if seal is None else seal.open(signature)
    if thoughts is None:
        text = "messages: the signature of thoughts without text is not of this server, or its key is gone."
        ignore_or_refuse("messages.thinking.signature", text)
    return thoughts or ""


def _of_user(message: AnthropicMessage) -> list[Json]:
    """Make one message per tool result, and others for the blocks between them. Images within results follow the last
    of consecutive results."""
    turns: list[Json] = []
    shown: list[_Shown] = []
    images: list[_Shown] = []
    for block in message.blocks:
        if isinstance(block, ToolResultBlock):
            turns += [*_user(shown), _result(block)]
            images += images_of(block)
            shown = []
        elif one := _shown(block):
            shown += [*images, one]
            images = []
    return turns + _user([*images, *shown])


def _shown(block: Any) -> _Shown:
    if isinstance(block, TextBlock):
        return block.text
    return block if isinstance(block, ImageBlock) else str(block.as_text)


def _user(shown: Sequence[_Shown]) -> list[Json]:
    if any(isinstance(one, ImageBlock) for one in shown):
        return [{"role": "user", "content": [_part(one) for one in shown]}]
    return [{"role": "user", "content": "\n".join(map(str, shown))}] if shown else []


def _part(shown: _Shown) -> Json:
    if isinstance(shown, str):
        return {"type": "text", "text": shown}
    source = shown.source
    url = source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _result(block: ToolResultBlock) -> Json:
    parts = [block.content or ""] if not isinstance(block.content, list) else [_shown(part) for part in block.content]
    content = "\n".join(IMAGE_PLACE if isinstance(part, ImageBlock) else part for part in parts if part)
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": f"Error: {content}" if block.is_error else content,
    }


def images_of(block: Any) -> list[ImageBlock]:
    """List the images that a block is or contains."""
    if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
        return [part for part in block.content if isinstance(part, ImageBlock)]
    return [block] if isinstance(block, ImageBlock) else []


def image_paths(messages: Sequence[AnthropicMessage]) -> list[str]:
    """List the request's names of its images, in the order in which the chat has the images. Each contains the block's
    type, as in the paths of the schema's errors."""
    paths: list[str] = []
    for number, message in enumerate(messages):
        for place, block in enumerate(message.blocks):
            at = f"messages.{number}.content.{place}"
            if isinstance(block, ImageBlock):
                paths.append(f"{at}.image.source")
            elif isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                parts = enumerate(block.content)
                of_result = f"{at}.tool_result.content"
                paths += [f"{of_result}.{index}.image.source" for index, part in parts if isinstance(part, ImageBlock)]
    return paths


def _call(block: ToolUseBlock) -> Json:
    function = {"name": block.name, "arguments": _arguments(block.input)}
    return {"id": block.id, "type": "function", "function": function}


def _arguments(given: Json) -> str:
    """Write a call's arguments as JSON. An object that wraps unreadable arguments becomes their original text."""
    text = given.get(UNREADABLE)
    return text if len(given) == 1 and isinstance(text, str) else json.dumps(given, ensure_ascii=False)
