"""Owns the search for stop strings in text that arrives in pieces, and the text held back meanwhile.
Never lets a part of a stop string through, and never depends on how the text was cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The match that is complete first wins; of two that end together, the longer one.

    That is the only rule that does not depend on the pieces: a longer stop that started earlier, but would end
    later, cannot be waited for, or a stop could be answered only after text that was never asked for.
    """

    def __init__(self, stops: Sequence[str], *, shown: bool = False) -> None:
        """`shown`: the text ends with the stop string, not before it."""
        self._stops = tuple(stops)
        self._shown = shown
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def push(self, piece: str) -> str:
        """Return the text that is safe to send. After a match: the last of it, and `matched` is set."""
        if not self._stops:
            return piece
        text = self._held + piece
        if (found := self._find(text)) is not None:
            self.matched, self._held = text[slice(*found)], ""
            return text[: found[self._shown]]
        safe = len(text) - self._overlap(text)
        self._held = text[safe:]
        return text[:safe]

    def skip(self, text: str) -> str:
        """Text in which no stop string is looked for; nothing was held back before it."""
        return text

    def flush(self) -> str:
        """Return what was held back: the answer ended, and it was no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, int] | None:
        """[start, end) of the match."""
        hits = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(hits)[::-1] if hits else None

    def _overlap(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        return max(_overlap(text, stop) for stop in self._stops)


def _overlap(text: str, stop: str) -> int:
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
