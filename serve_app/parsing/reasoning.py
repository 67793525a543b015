"""Owns the split of an answer into reasoning and content, by the names that vLLM's `--reasoning-parser` has.
Never shows a tag, or a part of one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from serve_app.parsing.cursor import ANYTHING, LETTER, SPACES, Cursor, Steps

BEGIN, END = "<think>", "</think>"
CALL, FUNCTION = "<tool_call>", "<function="
_NO_TAG = re.compile(r"[^<]*")
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

    markers: ClassVar[tuple[str, ...]] = (BEGIN, END)
    """As in ToolParser: tags that must be in the text even where they are special tokens."""

    ends: ClassVar[tuple[str, ...]] = (END, CALL)
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
        if (yield from self._cursor.literal(BEGIN)):
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
        while (yield from self._cursor.peek()):
            self._think(self._cursor.take(_NO_TAG))
            self._cursor.hold()
            tag = yield from self._cursor.literal(*self.ends)
            if tag == END:
                self._cursor.drop()
                self.inside = False
                yield from self._cursor.run(_NEWLINES)
                return
            if tag == CALL:
                yield from self._call()
                if not self.inside:
                    return
            else:
                self._cursor.take(LETTER)
                self._think(self._cursor.release())
        self._reasoning += self._newlines

    def _call(self) -> Steps[None]:
        """The first tag of a call is held. With the second one it is content, without it reasoning."""
        yield from self._cursor.run(SPACES)
        if (yield from self._cursor.literal(FUNCTION)):
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

    ends: ClassVar[tuple[str, ...]] = (END,)

    def __init__(self, *, opened: bool = True, enabled: bool = True) -> None:
        super().__init__(opened=True, enabled=enabled)


REASONING_PARSERS: Mapping[str, type[ReasoningParser]] = MappingProxyType(
    {"qwen3": ReasoningParser, "deepseek_r1": DeepSeekR1ReasoningParser}
)


def reasoning_parser(name: str, prompt_end: str) -> ReasoningParser:
    """A parser for the answer to a prompt, whose last tag says whether the template opened the block, or closed it."""
    end = prompt_end.rstrip()
    return REASONING_PARSERS[name](opened=end.endswith(BEGIN), enabled=not end.endswith(END))
