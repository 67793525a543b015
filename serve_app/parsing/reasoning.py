"""Owns the split of an answer into reasoning and content, where a block of tags holds the reasoning.
Never shows a tag, or a part of one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Self

from serve_app.parsing.call_sections import KimiK2ToolParser
from serve_app.parsing.cursor import ANYTHING, LETTER, SPACES, Cursor, Steps

BEGIN, END = "<think>", "</think>"
CALL, FUNCTION = "<tool_call>", "<function="
_NEWLINES = re.compile(r"\n*")


@dataclass(frozen=True, slots=True)
class Split:
    """Text that is final."""

    reasoning: str
    content: str


class ReasoningParser:
    """Reads one answer. Used once.

    The block is at the beginning of the answer, or nowhere. If it does not end, all of it is reasoning, as in vLLM:
    the answer was cut off inside it.
    Newlines next to the tags are not shown, on either side: templates strip them from what they are given back, and
    write their own. Other text is passed on letter for letter, and all of it if there is no block.
    """

    begin: ClassVar[str] = BEGIN
    end: ClassVar[str] = END
    markers: ClassVar[tuple[str, ...]] = (BEGIN, END)
    """As in ToolParser: tags that must be in the text even where they are special tokens."""

    calls: ClassVar[tuple[tuple[str, str], ...]] = ((CALL, FUNCTION),)
    # Qwen3.5 may call a function and leave the block open. As in vLLM, the two tags that Qwen3-Coder's calls begin with
    # end it then, and are content; reasoning about the first one alone goes on.

    def __init__(self, *, opened: bool = False, enabled: bool = True) -> None:
        """`opened`: the prompt ends with the begin tag; the answer may repeat it.
        `enabled`: False if the request, or the prompt's closed block, has turned thinking off: then all is content."""
        self._cursor = Cursor()
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._newlines: list[str] = []
        self._begun = False
        self.enabled = enabled
        self.inside = opened and enabled
        """Whether the text that comes next is reasoning."""
        self._steps = self._parse() if enabled else self._rest()

    @classmethod
    def after(cls, prompt_end: str) -> Self:
        """For the answer to a prompt, whose last tag says whether the template opened the block, or closed it."""
        last = prompt_end.rstrip()
        return cls(opened=last.endswith(cls.begin), enabled=not last.endswith(cls.end))

    def push(self, piece: str) -> Split:
        self._cursor.feed(piece, self._steps)
        return self._take_split()

    def flush(self) -> Split:
        """Return what was held back: the answer has ended."""
        self._cursor.end(self._steps)
        return self._take_split()

    def _take_split(self) -> Split:
        split = Split("".join(self._reasoning), "".join(self._content))
        self._reasoning, self._content = [], []
        return split

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
        """Up to the text after it."""
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
        """The first tag of a call is held. With the second one it is content, without it reasoning."""
        yield from self._cursor.run(SPACES)
        if (yield from self._cursor.literal(second)):
            self._content.append(self._cursor.release())
            self.inside = False
        else:
            self._think(self._cursor.release())

    def _think(self, text: str) -> None:
        """Newlines wait until it is known that the end tag does not follow them."""
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
    """These models' templates open the block: the answer is reasoning from its first letter."""

    calls: ClassVar[tuple[tuple[str, str], ...]] = ()

    def __init__(self, *, opened: bool = True, enabled: bool = True) -> None:
        super().__init__(opened=True, enabled=enabled)


class KimiK2ReasoningParser(ReasoningParser):
    """A call ends the block that these models leave open before it."""

    calls: ClassVar[tuple[tuple[str, str], ...]] = ((KimiK2ToolParser.section[0], KimiK2ToolParser.call[0]),)
    markers: ClassVar[tuple[str, ...]] = (BEGIN, END, *calls[0])


class MistralReasoningParser(ReasoningParser):
    """Magistral's and Ministral's tags."""

    begin: ClassVar[str] = "[THINK]"
    end: ClassVar[str] = "[/THINK]"
    markers: ClassVar[tuple[str, ...]] = (begin, end)
    calls: ClassVar[tuple[tuple[str, str], ...]] = ()
