"""Owns the JSON of an assistant's message that may think and call tools: whole, and as a stream's deltas.
Never reads text; a ChatReader has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve_app.api.generation.chat_reader import ChatReader, Read
from serve_app.parsing.deltas import Arguments, CallStart, collect

Json = dict[str, Any]


def message_json(reader: ChatReader, text: str) -> Json:
    """What a whole answer adds to, and changes in, a message."""
    read = reader.read(text, last=True)
    calls = collect(read.calls).calls
    told: Json = {"content": read.content or (None if calls else "")} | _reasoning(read.reasoning)
    if calls:
        told["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return told


def delta_json(read: Read) -> Json:
    """Empty where there is nothing to tell."""
    told = _reasoning(read.reasoning)
    if read.content:
        told["content"] = read.content
    if read.calls:
        told["tool_calls"] = _calls(read.calls)
    return told


def _reasoning(text: str) -> Json:
    """Clients know it by either name."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _calls(deltas: Sequence[CallStart | Arguments]) -> list[Json]:
    """One entry for each call, as at OpenAI: some clients read only the first entry of a chunk."""
    told: list[Json] = []
    for delta in deltas:
        if isinstance(delta, CallStart):
            function = {"name": delta.name, "arguments": ""}
            told.append({"index": delta.index, "id": delta.id, "type": "function", "function": function})
        elif told and told[-1]["index"] == delta.index:
            told[-1]["function"]["arguments"] += delta.text
        else:
            told.append({"index": delta.index, "function": {"arguments": delta.text}})
    return told
