"""Splits gpt-oss's answers: messages on the channel `analysis` are reasoning, and the others are content.
Never removes a call's header: the tool parser reads it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Self

from serve_app.parsing.cursor import LETTER, SPACES, Steps
from serve_app.parsing.harmony import ANALYSIS, CHANNEL, ENDS, MESSAGE, START, TAGS, TO, Header, read_header
from serve_app.parsing.reasoning import Part, ReasoningParser, Split

_NO_TAG = re.compile(r"[^<]*")
_IN_ANALYSIS = re.compile(rf"{re.escape(CHANNEL)}{ANALYSIS}[^<]*{re.escape(MESSAGE)}[^<]*\Z")


class HarmonyReasoningParser(ReasoningParser):
    """Reads an answer that consists of messages. Consecutive messages of reasoning, or of content, are separated by
    line breaks.

    Headers and end tags are not shown, except the headers of messages to others than the user. Text outside a message
    is content.
    """

    markers: ClassVar[tuple[str, ...]] = TAGS

    @classmethod
    def after(cls, prompt_end: str, continued: str = "") -> Self:
        return cls(opened=_IN_ANALYSIS.search(prompt_end) is not None)

    def __init__(self, *, opened: bool = False, enabled: bool = True) -> None:
        super().__init__(opened=opened, enabled=enabled)
        self._lines: dict[bool, str] = {True: "", False: ""}
        self._is_new = False
        self._parts: list[Part] = []

    def _take_split(self) -> Split:
        parts, self._parts = tuple(self._parts if len(self._parts) < 2 else _joined(self._parts)), []
        reasoning, content = (
            "".join(f"{one.line}{one.text}" for one in parts if one.is_reasoning is kind) for kind in (True, False)
        )
        return Split(reasoning, content, parts)

    def _parse(self) -> Steps[None]:
        if not self.inside:
            self._cursor.hold()
            yield from self._cursor.run(SPACES)
            if (yield from self._cursor.literal(TO)):
                yield from self._header(TO)
            else:
                self._show(self._cursor.release())
        while character := (yield from self._cursor.peek()):
            if character != START[0]:
                self._show(self._cursor.take(_NO_TAG))
                continue
            self._cursor.hold()
            tag = yield from self._cursor.literal(START, CHANNEL, *ENDS)
            if tag in (START, CHANNEL):
                yield from self._header(tag)
            elif tag:
                self._cursor.drop()
                self._begin(is_reasoning=False)
            else:
                self._cursor.take(LETTER)
                self._show(self._cursor.release())

    def _header(self, tag: str) -> Steps[None]:
        """Read a header; the cursor holds its beginning."""
        header = yield from read_header(self._cursor, tag)
        if header is None:
            self._show(self._cursor.release())
            return
        is_call = _is_call(header)
        self._begin(is_reasoning=header.channel == ANALYSIS and not is_call)
        if is_call:
            self._lines[False] = ""
            self._show(self._cursor.release())
        else:
            self._cursor.drop()

    def _begin(self, *, is_reasoning: bool) -> None:
        self.inside, self._is_new = is_reasoning, True
        self._lines = {kind: "\n" if line else "" for kind, line in self._lines.items()}

    def _show(self, text: str) -> None:
        if not text:
            return
        line = "\n" if self._lines[self.inside] == "\n" else ""
        self._parts.append(Part(self.inside, text, self._is_new, line))
        self._lines[self.inside], self._is_new = "shown", False


def _joined(parts: Sequence[Part]) -> Iterator[Part]:
    """Join text that nothing but the parser's own steps divided: readers give each part an event of its own."""
    start = 0
    for end in range(1, len(parts) + 1):
        if end == len(parts) or parts[end].is_new or parts[end].line:
            yield replace(parts[start], text="".join(part.text for part in parts[start:end]))
            start = end


def _is_call(header: Header) -> bool:
    """Whether a message is for another recipient than the user. The model's built-in tools were not offered, so what it
    writes to them while it thinks is reasoning."""
    return bool(header.function) or (bool(header.recipient) and header.channel != ANALYSIS)
