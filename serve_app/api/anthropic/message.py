"""Writes the JSON of an answer in Anthropic's form: a message, its blocks, why it stopped, and its usage.
Never decides what an answer says."""

from __future__ import annotations

import math
from typing import Any

from engine.protocol import Usage
from serve_app.api.generation.blocks import Block
from serve_app.api.generation.completion import Piece
from serve_app.api.generation.sealing import Seal
from serve_app.parsing.call_arguments import UNREADABLE, read_arguments

Json = dict[str, Any]


def message_json(message_id: str, model: str, usage: Json) -> Json:
    """Write a message that has no content yet."""
    named = {"id": message_id, "type": "message", "role": "assistant", "model": model}
    stop = {"stop_reason": None, "stop_sequence": None, "stop_details": None, "container": None}
    return named | {"content": [], "context_management": None, "diagnostics": None, "usage": usage} | stop


def usage_json(usage: Usage) -> Json:
    """Write the usage. Cached tokens are not counted as input."""
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
        "speed": "standard",
        "iterations": None,
        "fallback_credit": None,
    }


SIGNATURE = "chunkserve"
"""Never checked. Without a signature clients drop thoughts, or send them back as text."""


def stop_json(last: Piece, *, has_called: bool, fills_context: bool) -> Json:
    """`fills_context`: the context is the answer's length limit, because it holds less than `max_tokens`."""
    sequence = None
    if last.finish_reason == "length":
        reason = "model_context_window_exceeded" if fills_context else "max_tokens"
    elif has_called:
        reason = "tool_use"  # a stop sequence after a call has cut off only words; clients run the call for this reason
    elif last.stop_string is not None:
        reason, sequence = "stop_sequence", last.stop_string
    else:
        reason = "end_turn"
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None, "container": None}


def block_json(block: Block, *, is_cut: bool = False, seal: Seal | None = None) -> Json:
    """`is_cut`: the length limit ended the answer inside this block. `seal`: if given, thoughts are not shown, and
    their signature has them sealed."""
    if block.kind == "reasoning" and seal is not None:
        return {"type": "thinking", "thinking": "", "signature": seal.close(block.text)}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": SIGNATURE}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    called = {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(block.text, is_cut=is_cut)}
    return called | {"caller": {"type": "direct"}}


def _input(arguments: str, *, is_cut: bool) -> Json:
    """Return the arguments as an object, which clients need; wrap unreadable text in an object."""
    parsed = read_arguments(arguments, is_cut=is_cut)
    return {UNREADABLE: arguments} if parsed is None else _finite(parsed)


def _finite(value: Any) -> Any:
    """Replace infinite numbers by null, as JavaScript does: `1e999` is read as infinite, which JSON cannot write."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
