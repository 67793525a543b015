"""Defines what a tool parser finds in a text, as a stream of deltas and as a whole.
Never knows how a model writes its calls."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Begins call number `index`, counted from zero. Only this delta of a call has its name."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A fragment of the JSON text of the arguments of call number `index`."""

    index: int
    text: str


Delta: TypeAlias = Content | CallStart | Arguments


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    content: str
    calls: tuple[ToolCall, ...]


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def merged(deltas: list[Delta]) -> list[Delta]:
    """Join neighbouring deltas of the same kind. Arguments of two calls are never neighbours: a start lies between."""
    if len(deltas) < 2:  # nearly always
        return deltas
    joined: list[Delta] = []
    for first, same in groupby(deltas, key=type):
        group = list(same)
        if first is CallStart:
            joined += group
        else:
            joined.append(_joined(group))
    return joined


def _joined(group: list[Delta]) -> Delta:
    text = "".join(delta.text for delta in group if not isinstance(delta, CallStart))
    return Arguments(group[0].index, text) if isinstance(group[0], Arguments) else Content(text)


def collect(deltas: Iterable[Delta]) -> Parsed:
    """Join all deltas to a whole answer."""
    content: list[str] = []
    starts: list[CallStart] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        match delta:
            case Content(text):
                content.append(text)
            case CallStart():
                starts.append(delta)
                arguments.append([])
            case Arguments(index, text):
                arguments[index].append(text)
    calls = zip(starts, arguments, strict=True)
    return Parsed("".join(content), tuple(ToolCall(start.id, start.name, "".join(parts)) for start, parts in calls))
