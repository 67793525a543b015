"""Owns feeding a parser with a text that was cut into pieces.
Never looks into a parser."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from serve_app.parsing.deltas import Delta
from serve_app.parsing.tool_parser import Tool
from serve_app.parsing.tools import TOOL_PARSERS


def cut(text: str, places: Iterable[int]) -> list[str]:
    """Cut a text into pieces; a place beyond its end counts from the beginning again."""
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


def deltas(name: str, pieces: Iterable[str], tools: Sequence[Tool] = ()) -> list[list[Delta]]:
    """Return what each piece gave, and then the end. Ids are `call_0`, `call_1`, ..."""
    numbers = itertools.count()
    parser = TOOL_PARSERS[name](tools, lambda: f"call_{next(numbers)}")
    return [*(parser.push(piece) for piece in pieces), parser.flush()]
