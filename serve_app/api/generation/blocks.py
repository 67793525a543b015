"""Splits an answer into consecutive blocks of thoughts, text and calls, and reports each as it opens, grows and closes.
Never writes JSON: the APIs that answer in blocks or items do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from serve_app.api.generation.chat_reader import ChatReader, Item, Line, Thought
from serve_app.parsing.deltas import Arguments, CallStart, Content

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    index: int
    kind: Kind
    call_id: str = ""
    name: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """The scores of a text block's tokens, if the request asked for them."""
    _parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The block's text so far; for a call, the JSON of its arguments so far."""
        return "".join(self._parts)

    def extend(self, text: str) -> None:
        """Add text. A string would be copied at every token."""
        self._parts.append(text)

    def as_opened(self) -> Block:
        """Return the block as it was before its first text."""
        return Block(self.index, self.kind, self.call_id, self.name)


@dataclass(frozen=True, slots=True)
class Opened:
    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    block: Block
    text: str
    logprobs: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Closed:
    block: Block


Step: TypeAlias = Opened | Grown | Closed


class BlockReader:
    """Reads one answer. One block is open at a time, and each step is returned once.

    Text between the parts of a call waits for the call's end: a stream of blocks cannot go back to the call."""

    def __init__(self, reader: ChatReader) -> None:
        self._reader = reader
        self._space: list[str] = []  # white space between blocks: dropped, unless a text follows, which it then begins
        self._waiting: list[Line | Content] = []  # what follows a call whose arguments may go on
        self._is_open = False
        self._has_line = False  # the white space has a line break that no block before it needs
        self.blocks: list[Block] = []

    @property
    def _open_kind(self) -> Kind | None:
        return self.blocks[-1].kind if self._is_open else None

    @property
    def has_called(self) -> bool:
        return self._reader.has_called

    @property
    def num_held(self) -> int:
        """How many characters at the end of the received text are in no step yet."""
        waiting = sum(len(item.text) for item in self._waiting if isinstance(item, Content))
        return self._reader.num_held + waiting + sum(map(len, self._space))

    def read(self, text: str, *, last: bool) -> list[Step]:
        """Read the next text of the answer. `last`: no text follows."""
        steps = [*self._steps(self._reader.read_in_order(text, last=last))]
        if last and self._space and all(block.kind == "reasoning" for block in self.blocks):
            steps += self._grow("text", "".join(self._space))  # the answer has no other content
        return [*steps, *(self._close() if last else ())]

    def _steps(self, items: Sequence[Item]) -> Iterator[Step]:
        for item in items:
            match item:
                case Thought(text, line):
                    yield from self._waited()
                    is_same = self._open_kind == "reasoning"
                    yield from self._grow("reasoning", f"{line}{text}" if is_same else text)
                case Line() | Content():
                    self._waiting.append(item)
                    if self._open_kind != "call":
                        yield from self._waited()
                case CallStart():
                    yield from self._waited()
                    yield from self._open(Block(len(self.blocks), "call", item.id, item.name))
                case Arguments(_, text):
                    assert self._open_kind == "call", "no other block opens before a call ends"
                    yield self._extend(text)
        if not self._reader.is_in_call:
            yield from self._waited()

    def _waited(self) -> Iterator[Step]:
        waiting, self._waiting = self._waiting, []
        for item in waiting:
            if isinstance(item, Content):
                yield from self._say(item.text)
            else:
                self._has_line = True

    def _say(self, content: str) -> Iterator[Step]:
        if self._open_kind == "text":
            self._has_line = False
            yield self._extend(content)
            return
        self._space.append(content)
        if content.strip():
            text = "".join(self._space)
            yield from self._grow("text", text.lstrip("\n") if self._has_line else text)

    def _grow(self, kind: Kind, text: str) -> Iterator[Step]:
        if self._open_kind != kind:
            yield from self._open(Block(len(self.blocks), kind))
        yield self._extend(text)

    def _open(self, block: Block) -> Iterator[Step]:
        yield from self._close()
        self._is_open, self._has_line, self._space = True, False, []
        self.blocks.append(block)
        yield Opened(block)

    def _extend(self, text: str) -> Step:
        block = self.blocks[-1]
        block.extend(text)
        return Grown(block, text)

    def _close(self) -> Iterator[Step]:
        if self._is_open:
            self._is_open = False
            yield Closed(self.blocks[-1])
