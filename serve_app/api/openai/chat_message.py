"""Writes the JSON of an assistant's message with thoughts and tool calls: whole, and as a stream's deltas.
Never parses text: a ChatReader has done so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve_app.api.generation.chat_reader import ChatReader, Read
from serve_app.parsing.deltas import Arguments, CallStart, collect

Json = dict[str, Any]


def message_json(reader: ChatReader, text: str) -> Json:
    """Return the fields of a message that a whole answer adds or changes."""
    read = reader.read(text, last=True)
    calls = collect(read.calls).calls
    fields: Json = {"content": read.content or (None if calls else "")} | _reasoning(read.reasoning)
    if calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return fields


def delta_json(read: Read) -> Json:
    """Return the delta's fields; empty if there are none."""
    fields = _reasoning(read.reasoning)
    if read.content:
        fields["content"] = read.content
    if read.calls:
        fields["tool_calls"] = _calls(read.calls)
    return fields


def _reasoning(text: str) -> Json:
    """Write the thoughts under both names that clients know."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _calls(deltas: Sequence[CallStart | Arguments]) -> list[Json]:
    """Write one entry per call, as OpenAI does: some clients read only the first entry of a chunk."""
    entries: list[Json] = []
    for delta in deltas:
        if isinstance(delta, CallStart):
            function = {"name": delta.name, "arguments": ""}
            entries.append({"index": delta.index, "id": delta.id, "type": "function", "function": function})
        elif entries and entries[-1]["index"] == delta.index:
            entries[-1]["function"]["arguments"] += delta.text
        else:
            entries.append({"index": delta.index, "function": {"arguments": delta.text}})
    return entries
