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
        self._num_passed = 0  # characters of `_held` in which no stop string may end
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
        return self._release(text)

    def skip(self, piece: str) -> str:
        """Return the text that is safe to send, of text in which no stop string may end. One that begins there may end
        in what follows."""
        if not self._stops:
            return piece
        text = self._held + piece
        self._num_passed = len(text)
        return self._release(text)

    def flush(self) -> str:
        """Return what was held back: the answer has ended, so it was no stop string."""
        held, self._held, self._num_passed = self._held, "", 0
        return held

    def _release(self, text: str) -> str:
        """Hold back the end of the text that may begin a stop string, and return the rest."""
        safe = len(text) - self._overlap(text)
        self._held, self._num_passed = text[safe:], max(0, self._num_passed - safe)
        return text[:safe]

    def _find(self, text: str) -> tuple[int, int] | None:
        """Return [start, end) of the match."""
        passed = self._num_passed + 1
        hits = [
            (at + len(stop), at) for stop in self._stops if (at := text.find(stop, max(0, passed - len(stop)))) >= 0
        ]
        return min(hits)[::-1] if hits else None

    def _overlap(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        return max(_overlap(text, stop) for stop in self._stops)


def _overlap(text: str, stop: str) -> int:
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
