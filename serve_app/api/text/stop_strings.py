"""Finds stop strings in text that arrives in pieces, and holds text back meanwhile.
Never lets a part of a stop string through, and never depends on how the text was cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the first match to be complete; of two that end together, the longer one.

    No other rule is independent of the pieces. Waiting for a longer stop string that began earlier but would end later
    could generate text that was never asked for.
    """

    def __init__(self, stops: Sequence[str], *, shown: bool = False) -> None:
        """`shown`: the text includes the stop string at its end."""
        self._stops = tuple(stops)
        self._shown = shown
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found, if one was."""

    def push(self, piece: str) -> str:
        """Return the text that is safe to send. On a match it is the last text, and `matched` is set."""
        if not self._stops:
            return piece
        text = self._held + piece
        if (match := self._find(text)) is not None:
            self.matched, self._held = text[slice(*match)], ""
            return text[: match[self._shown]]
        safe = len(text) - self._overlap(text)
        self._held = text[safe:]
        return text[:safe]

    def skip(self, text: str) -> str:
        """Return text unsearched. Only allowed while nothing is held back."""
        return text

    def flush(self) -> str:
        """Return what was held back: the answer has ended, so it was no stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, int] | None:
        """Return [start, end) of the match."""
        hits = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(hits)[::-1] if hits else None

    def _overlap(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        return max(_overlap(text, stop) for stop in self._stops)


def _overlap(text: str, stop: str) -> int:
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
