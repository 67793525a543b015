"""Owns the text of a call's arguments, which a model writes and which may be no JSON: its repair, and its reading.
Never decides what a client or a template is shown of arguments that cannot be read."""

from __future__ import annotations

import re
from typing import Any

import pydantic_core

Json = dict[str, Any]

UNREADABLE = "INVALID_JSON"
"""The key under which arguments that are no JSON object stand where an object is needed, as Anthropic advises."""

BEGUN_ESCAPE = re.compile(
    r"\\(u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(\\(u([dD]([c-fC-F][0-9a-fA-F]?)?)?)?)?)?\Z"
)
"""An escape that may go on."""
_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_INSIDE = re.compile(
    rf'{_PAIR}|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{{2}})|\\.?|"|[^"\\\0-\x1f]+|(?P<raw>.)', re.DOTALL
)
_OUTSIDE = re.compile(r'[^"]*"?')


class ArgumentRepair:
    """Repairs one call's arguments as they arrive: inside a JSON string, a raw control character is escaped, and a half
    of a surrogate pair is U+FFFD. The rest is the model's text, letter for letter, and may still be no JSON."""

    def __init__(self) -> None:
        self._is_inside = False
        self._rest = ""
        """An escape that the next piece may go on with."""

    def push(self, text: str) -> str:
        """What is certain so far. Takes time in proportion to the text."""
        return self._repaired(text, last=False)

    def finish(self) -> str:
        """What was held back: no text follows."""
        return self._repaired("", last=True)

    def _repaired(self, text: str, *, last: bool) -> str:
        text, found, at = self._rest + text, [], 0
        while at < len(text):
            if self._is_inside and not last and BEGUN_ESCAPE.match(text, at):
                break
            piece = (_INSIDE if self._is_inside else _OUTSIDE).match(text, at)
            assert piece is not None, "the patterns take any letter"
            at = piece.end()
            found.append(_escaped(piece) if self._is_inside else piece[0])
            if piece[0].endswith('"') and not piece[0].startswith("\\"):
                self._is_inside = not self._is_inside
        self._rest = text[at:]
        return "".join(found)


def _escaped(piece: re.Match[str]) -> str:
    if piece["lone"]:
        return "\\ufffd"
    return f"\\u{ord(piece['raw']):04x}" if piece["raw"] else piece[0]


def repaired(text: str) -> str:
    repair = ArgumentRepair()
    return repair.push(text) + repair.finish()


def read_arguments(text: str, *, is_cut: bool = False) -> Json | None:
    """The object, repaired where that is possible; of arguments that were cut, as much as there is. None: there is no
    object. Empty text is an empty object. What a body could not hold, such as very deep nesting, is not read."""
    try:
        found = _read(text or "{}", is_cut=False)
    except ValueError:
        try:
            found = _read(repaired(text), is_cut=is_cut)
        except ValueError:
            return None
    return found if isinstance(found, dict) else None


def _read(text: str, *, is_cut: bool) -> Any:
    return pydantic_core.from_json(text.encode(), allow_partial=is_cut)
