"""Repairs and reads the text of a call's arguments, which a model writes and which may not be valid JSON.
Never decides how a client or a template sees arguments that cannot be read."""

from __future__ import annotations

import re
from typing import Any

import pydantic_core

Json = dict[str, Any]

UNREADABLE = "INVALID_JSON"
"""The key that wraps arguments in an object if they are not one, as Anthropic advises."""

BEGUN_ESCAPE = re.compile(
    r"\\(u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(\\(u([dD]([c-fC-F][0-9a-fA-F]?)?)?)?)?)?\Z"
)
"""An escape sequence that may be incomplete."""
_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_INSIDE = re.compile(
    rf'{_PAIR}|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{{2}})|\\.?|"|[^"\\\0-\x1f]+|(?P<raw>.)', re.DOTALL
)
_OUTSIDE = re.compile(r'[^"]*"?')


class ArgumentRepair:
    """Repairs one call's arguments as they arrive: inside a JSON string, raw control characters are escaped, and half a
    surrogate pair becomes U+FFFD. The rest is the model's text unchanged, and may still not be valid JSON."""

    def __init__(self) -> None:
        self._is_inside = False
        self._rest = ""
        """An escape sequence that the next piece may complete."""

    def push(self, text: str) -> str:
        """Return the text that is final. Takes time in proportion to the text."""
        return self._repaired(text, last=False)

    def finish(self) -> str:
        """Return what was held back, because no text follows."""
        return self._repaired("", last=True)

    def _repaired(self, text: str, *, last: bool) -> str:
        text, parts, at = self._rest + text, [], 0
        while at < len(text):
            if self._is_inside and not last and BEGUN_ESCAPE.match(text, at):
                break
            piece = (_INSIDE if self._is_inside else _OUTSIDE).match(text, at)
            assert piece is not None, "the patterns match any character"
            at = piece.end()
            parts.append(_escaped(piece) if self._is_inside else piece[0])
            if piece[0].endswith('"') and not piece[0].startswith("\\"):
                self._is_inside = not self._is_inside
        self._rest = text[at:]
        return "".join(parts)


def _escaped(piece: re.Match[str]) -> str:
    if piece["lone"]:
        return "\\ufffd"
    return f"\\u{ord(piece['raw']):04x}" if piece["raw"] else piece[0]


def repaired(text: str) -> str:
    repair = ArgumentRepair()
    return repair.push(text) + repair.finish()


def read_arguments(text: str, *, is_cut: bool = False) -> Json | None:
    """Read the object, with repairs if possible; None if there is none. `is_cut`: the text may end early, and its
    beginning is read. Empty text is an empty object. Text that no request body could have, such as very deep nesting,
    is not read."""
    try:
        value = _read(text or "{}", is_cut=False)
    except ValueError:
        try:
            value = _read(repaired(text), is_cut=is_cut)
        except ValueError:
            return None
    return value if isinstance(value, dict) else None


def _read(text: str, *, is_cut: bool) -> Any:
    return pydantic_core.from_json(text.encode(), allow_partial=is_cut)
