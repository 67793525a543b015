"""Finds stop strings in an answer that may have thoughts and tool calls: only those within its content end it.
Never shows text: another reader of the same answer does, and receives what is released here."""

from __future__ import annotations

from collections import deque

from serve_app.api.text.stop_strings import StopStrings
from serve_app.parsing.reasoning import ReasoningParser, Split
from serve_app.parsing.tool_parser import ToolParser


class ContentStops:
    """Works like StopStrings, but only searches the text that the parsers recognize as content. Thoughts and calls,
    with their tags, pass unsearched. Characters are held back until it is known what they are, as in the reader."""

    def __init__(
        self,
        stops: StopStrings,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        *,
        is_either: bool = False,
    ) -> None:
        """`reasoning`, `tools`: fresh parsers, used for this answer only. `is_either`: the answer is either text or
        calls, as for the reader."""
        self._stops = stops
        self._reasoning = reasoning
        self._tools = tools
        self._is_either = is_either
        self._found: list[str] = []
        """The content that the call parser has recognized."""
        if tools is not None:
            tools.on_content = self._found.append
        # Lists of characters: a string would be copied at each of them, and all of a call's arguments may wait.
        self._unsplit: list[str] = []
        """Characters that may be a tag of thoughts."""
        self._unread: deque[str] = deque()
        """Characters that may belong to a call."""
        self._num_skipped = 0
        """How many of the characters that are not released yet, from the first one on, are not to be searched."""

    @property
    def matched(self) -> str | None:
        return self._stops.matched

    def push(self, text: str) -> str:
        """Return the text that is safe to send, like StopStrings.push."""
        return self._push(text)

    def skip(self, text: str) -> str:
        """Read text without searching it for stop strings."""
        self._num_skipped = len(self._unread) + len(self._unsplit) + len(text)
        return self._push(text)

    def flush(self) -> str:
        """Return what was held back, because the answer has ended."""
        split = None if self._reasoning is None else self._reasoning.flush()
        found = "" if split is None else self._sort(split, num_held=0)
        if self._tools is not None and not self.matched:
            self._tools.flush()
            found += self._settled(0)
        return found if self.matched else found + self._stops.flush()

    def _push(self, text: str) -> str:
        found = ""
        for character in text:
            found += self._character(character)
            if self.matched:
                break
        return found

    def _character(self, character: str) -> str:
        if self._reasoning is None:
            return self._read(character)
        self._unsplit.append(character)
        split = self._reasoning.push(character)
        if split.content:
            return self._sort(split, self._reasoning.num_held)
        if self._reasoning.inside or split.reasoning:
            return self._pass_thought(self._take_unsplit())
        return ""

    def _sort(self, split: Split, num_held: int) -> str:
        """Split the characters held back, except the last `num_held`: their end is this content, and what precedes it
        was a tag. The content may begin with characters that are not in the answer, or have passed as thoughts; the
        call parser reads them, too."""
        content, unsplit = split.content, self._take_unsplit()
        until = len(unsplit) - num_held
        self._unsplit += unsplit[until:]
        at = until - _common_end(unsplit[:until], content)
        found = self._end_message() if any(part.is_new for part in split.parts) else ""
        if self.matched:
            return found
        if self._tools is not None:
            self._tools.push(content[: len(content) - (until - at)])
        found += self._pass_thought(unsplit[:at])
        for character in unsplit[at:until]:
            found += self._read(character)
            if self.matched:
                break
        return found

    def _end_message(self) -> str:
        if self._tools is None or not self._tools.frames_content:
            return ""
        self._tools.end_message()
        return self._settled(0)

    def _pass_thought(self, text: str) -> str:
        """Release a thought, and before it everything that was held back."""
        if not text:
            return ""
        return self._pass(self._take_unread(len(self._unread)) + text)

    def _read(self, character: str) -> str:
        """Read a character that belongs to no thought."""
        if self._tools is None:
            return self._search(character)
        self._unread.append(character)
        self._tools.push(character)
        if self._is_either and self._is_text(self._tools):
            self._tools = None
            self._found.clear()
            return self._search(self._take_unread(len(self._unread)))
        return self._settled(self._tools.num_held)

    def _is_text(self, tools: ToolParser) -> bool:
        """Decide by what comes first, unless it is white space, as the reader does."""
        if tools.calls:
            self._is_either = False
        return self._is_either and any(text.strip() for text in self._found)

    def _settled(self, num_held: int) -> str:
        """Release the characters held back, except the last `num_held`: first a part of calls, then content."""
        content = "".join(self._found)
        self._found.clear()
        settled = self._take_unread(max(0, len(self._unread) - num_held))
        size = _common_end(settled, content)
        return self._pass(settled[: len(settled) - size]) + self._search(settled[len(settled) - size :])

    def _take_unsplit(self) -> str:
        taken = "".join(self._unsplit)
        self._unsplit.clear()
        return taken

    def _take_unread(self, size: int) -> str:
        return "".join([self._unread.popleft() for _ in range(size)])

    def _pass(self, text: str) -> str:
        """Release calls or thoughts. A stop string cannot extend across them, so what waited for one is released,
        too."""
        self._num_skipped = max(0, self._num_skipped - len(text))
        return self._stops.flush() + text if text else ""

    def _search(self, text: str) -> str:
        """Release content. Search only what was not skipped when it arrived: some may have been held back since."""
        num_skipped = min(self._num_skipped, len(text))
        self._num_skipped -= num_skipped
        found = self._stops.skip(text[:num_skipped]) if num_skipped else ""
        return found + self._stops.push(text[num_skipped:])


def _common_end(text: str, other: str) -> int:
    """Return the length of the common end of both texts."""
    most = min(len(text), len(other))
    return next((size for size in range(most) if text[-1 - size] != other[-1 - size]), most)
