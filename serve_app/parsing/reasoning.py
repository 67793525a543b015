"""Splits an answer into reasoning and content, for models that put reasoning in a block between two tags.
Never shows a tag, or a part of one."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar, Self

from serve_app.parsing.call_sections import KimiK2ToolParser
from serve_app.parsing.cursor import ANYTHING, LETTER, SPACES, Cursor, Steps

BEGIN, END = "<think>", "</think>"
CALL, FUNCTION = "<tool_call>", "<function="
_NEWLINES = re.compile(r"\n*")


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive text of one kind. `is_new`: it begins a message, and what precedes it has ended. `line`: the line
    break that separates it from earlier text of its kind."""

    is_reasoning: bool
    text: str
    is_new: bool = False
    line: str = ""


@dataclass(frozen=True, slots=True)
class Split:
    """Text that is final, split in two. `parts`: the same text in the order of the answer."""

    reasoning: str
    content: str
    parts: tuple[Part, ...] = field(default=(), compare=False)


class ReasoningParser:
    """Reads one answer. Used once.

    The block is at the beginning of the answer, or nowhere. If it does not end, all of it is reasoning, as in vLLM,
    because the answer was cut off inside it.

    Newlines next to the tags are not shown, on either side: templates strip them from messages that clients send back,
    and write their own. All other text is passed on unchanged.
    """

    begin: ClassVar[str] = BEGIN
    end: ClassVar[str] = END
    markers: ClassVar[tuple[str, ...]] = (BEGIN, END)
    """Tags that must be in the text even if they are special tokens, as in ToolParser."""

    calls: ClassVar[tuple[tuple[str, str], ...]] = ((CALL, FUNCTION),)
    # Qwen3.5 may call a function without closing the block. As in vLLM, the two tags at the beginning of a Qwen3-Coder
    # call then end the block, and are content. The first tag alone does not end it: the model may reason about it.

    def __init__(self, *, opened: bool = False, enabled: bool = True) -> None:
        """`opened`: the prompt ends with the begin tag; the answer may repeat it. `enabled`: false if the request, or a
        closed block in the prompt, turned thinking off; then everything is content."""
        self._cursor = Cursor()
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._newlines: list[str] = []
        self._begun = False
        self.enabled = enabled
        self.inside = opened and enabled
        """Whether the next text is reasoning."""
        self._steps = self._parse() if enabled else self._rest()

    @classmethod
    def after(cls, prompt_end: str, continued: str = "") -> Self:
        """Make a parser for the answer to a prompt. The prompt's last tag shows if the template opened or closed the
        block. `continued`: the text of the message that the answer continues; its block may be open still."""
        if continued.strip():
            is_open = continued.rfind(cls.begin) > continued.rfind(cls.end)
            return cls(opened=is_open, enabled=is_open)
        last = prompt_end.rstrip()
        return cls(opened=last.endswith(cls.begin), enabled=not last.endswith(cls.end))

    def push(self, piece: str) -> Split:
        self._cursor.feed(piece, self._steps)
        return self._take_split()

    def flush(self) -> Split:
        """Return what was held back, because the answer has ended."""
        self._cursor.end(self._steps)
        return self._take_split()

    @property
    def num_held(self) -> int:
        """How many characters at the end of the received text may still be a tag."""
        return self._cursor.num_held

    def _take_split(self) -> Split:
        texts = "".join(self._reasoning), "".join(self._content)
        self._reasoning, self._content = [], []
        parts = [Part(is_reasoning, text) for is_reasoning, text in zip((True, False), texts, strict=True) if text]
        return Split(*texts, tuple(parts))

    def _parse(self) -> Steps[None]:
        self._cursor.hold()
        yield from self._cursor.run(SPACES)
        if (yield from self._cursor.literal(self.begin)):
            self._cursor.drop()
            self.inside = True
        elif self.inside:
            self._think(self._cursor.release())
        else:
            self._content.append(self._cursor.release())
        if self.inside:
            yield from self._block()
        yield from self._rest()

    def _block(self) -> Steps[None]:
        """Read the block, up to the text after it."""
        no_tag = re.compile(f"[^{re.escape(self.end[0])}]*")
        seconds = dict(self.calls)
        while (yield from self._cursor.peek()):
            self._think(self._cursor.take(no_tag))
            self._cursor.hold()
            tag = yield from self._cursor.literal(self.end, *seconds)
            if tag == self.end:
                self._cursor.drop()
                self.inside = False
                yield from self._cursor.run(_NEWLINES)
                return
            if tag:
                yield from self._call(seconds[tag])
                if not self.inside:
                    return
            else:
                self._cursor.take(LETTER)
                self._think(self._cursor.release())
        self._reasoning += self._newlines

    def _call(self, second: str) -> Steps[None]:
        """Decide about the first tag of a call, which is held: before the second tag it is content, otherwise
        reasoning.
        """
        yield from self._cursor.run(SPACES)
        if (yield from self._cursor.literal(second)):
            self._content.append(self._cursor.release())
            self.inside = False
        else:
            self._think(self._cursor.release())

    def _think(self, text: str) -> None:
        """Add reasoning. Newlines wait until it is certain that the end tag does not follow them."""
        text = text if self._begun else text.lstrip("\n")
        shown = text.rstrip("\n")
        if shown:
            self._reasoning += [*self._newlines, shown]
            self._newlines, self._begun = [], True
        self._newlines.append(text[len(shown) :])

    def _rest(self) -> Steps[None]:
        while (yield from self._cursor.peek()):
            self._content.append(self._cursor.take(ANYTHING))


class DeepSeekR1ReasoningParser(ReasoningParser):
    """For models with templates that open the block, so that the answer begins with reasoning."""

    calls: ClassVar[tuple[tuple[str, str], ...]] = ()

    def __init__(self, *, opened: bool = True, enabled: bool = True) -> None:
        super().__init__(opened=True, enabled=enabled)


class KimiK2ReasoningParser(ReasoningParser):
    """For models that may leave the block open before a call, which then ends it."""

    calls: ClassVar[tuple[tuple[str, str], ...]] = ((KimiK2ToolParser.section[0], KimiK2ToolParser.call[0]),)
    markers: ClassVar[tuple[str, ...]] = (BEGIN, END, *calls[0])


class MistralReasoningParser(ReasoningParser):
    """For Magistral's and Ministral's tags."""

    begin: ClassVar[str] = "[THINK]"
    end: ClassVar[str] = "[/THINK]"
    markers: ClassVar[tuple[str, ...]] = (begin, end)
    calls: ClassVar[tuple[tuple[str, str], ...]] = ()
