"""Owns a free-form tool's input as a model writes it: the one string in a call's JSON arguments, read as it arrives.
Never knows where a call begins."""

from __future__ import annotations

import json
import re

from serve_app.parsing.call_arguments import BEGUN_ESCAPE

INPUT = "input"
"""The argument's name."""

_HEAD = f'{{"{INPUT}":"'
_GAPS = frozenset({0, 1, _HEAD.index(":"), len(_HEAD) - 1})
"""Positions in the head before which white space may stand."""
_PIECE = re.compile(
    r'[^"\\]+|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\["\\/bfnrt]'
)


def arguments_of(text: str) -> str:
    """Write the JSON arguments of a call with this input."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Return all of the input that the arguments hold, even if they are cut off."""
    reader = InputReader()
    return reader.push(arguments) + reader.finish()


class InputReader:
    """Reads one call. Unconstrained arguments of another form become the input once they are complete."""

    def __init__(self) -> None:
        self._before: list[str] = []
        """All of the text until the input begins."""
        self._num_met = 0
        """How many characters of the head have arrived."""
        self._is_other = False
        self._rest = ""
        """Text that the rest of an escape may follow."""
        self._is_inside = False
        self._has_ended = False

    def push(self, text: str) -> str:
        """Return what the text adds to the input. Takes time in proportion to the text."""
        if self._has_ended:
            return ""
        if not self._is_inside:
            self._before.append(text)
            if (end := self._end_of_head(text)) is None:
                return ""
            self._is_inside, text = True, text[end:]
            self._before.clear()
        self._rest += text
        return self._read()

    def finish(self) -> str:
        """Return the rest of the input; no more text follows."""
        return "" if self._is_inside else _other("".join(self._before))

    def _end_of_head(self, text: str) -> int | None:
        for place, character in enumerate(() if self._is_other else text):
            if character == _HEAD[self._num_met]:
                self._num_met += 1
                if self._num_met == len(_HEAD):
                    return place + 1
            elif not (character.isspace() and self._num_met in _GAPS):
                self._is_other = True
                break
        return None

    def _read(self) -> str:
        found, place, text = "", 0, self._rest
        while place < len(text):
            if text[place] == '"':
                self._has_ended = True
                break
            if BEGUN_ESCAPE.match(text, place):
                break
            piece = _PIECE.match(text, place)
            found += _unescaped(piece[0]) if piece else text[place]
            place = piece.end() if piece else place + 1
        self._rest = text[place:]
        return found


def _unescaped(piece: str) -> str:
    if not piece.startswith("\\"):
        return piece
    text = json.loads(f'"{piece}"')
    assert isinstance(text, str)
    return _whole(text)


def _whole(text: str) -> str:
    """Replace lone surrogates, which no answer could be encoded with."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _other(arguments: str) -> str:
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        begun = re.sub(r"\s", "", arguments)
        return "" if _HEAD.startswith(begun) else arguments
    if isinstance(given, dict):
        texts = [given[INPUT]] if INPUT in given else list(given.values())
        if len(texts) == 1 and isinstance(texts[0], str):
            return _whole(texts[0])
    return arguments
