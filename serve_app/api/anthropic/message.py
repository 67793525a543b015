"""Owns the JSON of an answer in Anthropic's words: a message, its blocks, why it stopped, and what it took.
Never decides what an answer says."""

from __future__ import annotations

from typing import Any

import pydantic_core

from engine.protocol import Usage
from serve_app.api.blocks import Block
from serve_app.api.completion import Piece

Json = dict[str, Any]


def message_json(message_id: str, model: str, usage: Json) -> Json:
    """One that has said nothing yet."""
    named = {"id": message_id, "type": "message", "role": "assistant", "model": model}
    stop = {"stop_reason": None, "stop_sequence": None, "stop_details": None}
    return named | {"content": [], "container": None, "usage": usage} | stop


def usage_json(usage: Usage) -> Json:
    """Tokens that were cached are not counted as input."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_creation": None,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": None,
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
    }


def stop_json(last: Piece, *, has_called: bool) -> Json:
    if last.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_string}
    if last.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    return {"stop_reason": "tool_use" if has_called else "end_turn", "stop_sequence": None}


def block_json(block: Block) -> Json:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    called = {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(block.text)}
    return called | {"caller": {"type": "direct"}}


def _input(arguments: str) -> Json:
    """As far as it goes, where the answer was cut off."""
    try:
        found = pydantic_core.from_json(arguments, allow_inf_nan=False, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
