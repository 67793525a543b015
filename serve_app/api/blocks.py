"""Owns an answer as blocks, one after the other: thoughts, text and calls, as they open, grow and close.
Never writes JSON; whoever answers in blocks, or items, gives them a form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from serve_app.api.chat_reader import ChatReader
from serve_app.api.completion import Piece
from serve_app.api.logprobs import ScoredToken, TokenTexts, chat_token_json
from serve_app.parsing.deltas import Arguments, CallStart, Content, Delta

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """`text`: what it says so far; of a call, the JSON of its arguments."""

    index: int
    kind: Kind
    text: str = ""
    call_id: str = ""
    name: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """Of the tokens of a text, where they are asked for."""


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
    """Reads one answer. One block is open at a time, and each step is told once."""

    def __init__(self, reader: ChatReader) -> None:
        self._reader = reader
        self._space = ""  # between blocks: it begins a text, or is nothing
        self._is_open = False
        self.blocks: list[Block] = []

    @property
    def has_called(self) -> bool:
        return self._reader.has_called

    def read(self, text: str, *, last: bool) -> list[Step]:
        """`last`: no text follows."""
        steps = [*self._steps(*self._reader.read_in_order(text, last=last))]
        if last and self._space and all(block.kind == "reasoning" for block in self.blocks):
            steps += self._grow("text", self._space)  # there is nothing else
        return [*steps, *(self._close() if last else ())]

    def _steps(self, reasoning: str, deltas: Sequence[Delta]) -> Iterator[Step]:
        if reasoning:
            yield from self._grow("reasoning", reasoning)
        for delta in deltas:
            match delta:
                case Content(text):
                    yield from self._say(text)
                case CallStart():
                    yield from self._open(Block(len(self.blocks), "call", "", delta.id, delta.name))
                case Arguments(_, text):
                    yield self._extend(text)

    def _say(self, content: str) -> Iterator[Step]:
        if self._is_open and self.blocks[-1].kind == "text":
            yield self._extend(content)
            return
        self._space += content
        if self._space.strip():
            yield from self._grow("text", self._space)

    def _grow(self, kind: Kind, text: str) -> Iterator[Step]:
        if not self._is_open or self.blocks[-1].kind != kind:
            yield from self._open(Block(len(self.blocks), kind))
        yield self._extend(text)

    def _open(self, block: Block) -> Iterator[Step]:
        yield from self._close()
        self._is_open, self._space = True, ""
        self.blocks.append(block)
        yield Opened(block)

    def _extend(self, text: str) -> Step:
        block = self.blocks[-1]
        block.text += text
        return Grown(block, text)

    def _close(self) -> Iterator[Step]:
        if self._is_open:
            self._is_open = False
            yield Closed(self.blocks[-1])


class ScoredBlocks:
    """Reads the pieces of one answer whose tokens are shown: each block of text is told with its tokens' scores.

        pieces   | </think> | \\n\\n | Hel | lo | <eos> |        a reader may keep text until it knows what it is
        grown    |                 | Hel | lo |              the tokens of a text are the last that are as long

    Tokens of thoughts, of calls and of marks are in no text, and neither is what has none.
    """

    def __init__(self, blocks: BlockReader, texts: TokenTexts) -> None:
        self._blocks = blocks
        self._texts = texts
        self._read = 0  # characters
        self._waiting: list[tuple[ScoredToken, int]] = []  # with how much text each added

    def read(self, piece: Piece) -> list[Step]:
        steps: list[Step] = []
        last = piece.finish_reason is not None
        begin, cuts = self._read, [token.text_offset for token in piece.tokens or ()]
        ends = [*(min(max(cut - begin, 0), len(piece.text)) for cut in cuts), len(piece.text)]
        steps += self._blocks.read(piece.text[: ends[0]], last=last and not cuts)
        for number, token in enumerate(piece.tokens or ()):
            text = piece.text[ends[number] : ends[number + 1]]
            self._waiting.append((token, len(text)))
            steps += self._scored(self._blocks.read(text, last=last and number + 1 == len(cuts)))
        self._read += len(piece.text)
        return steps

    def _scored(self, steps: Sequence[Step]) -> Iterator[Step]:
        for step in steps:
            if isinstance(step, Grown) and step.block.kind == "text":
                scores = [token.scores for token in self._take(len(step.text))]
                logprobs = [chat_token_json(score, self._texts) for score in scores if score is not None]
                step.block.logprobs += logprobs
                yield Grown(step.block, step.text, logprobs)
                continue
            if isinstance(step, Grown):
                self._waiting.clear()
            yield step

    def _take(self, num_chars: int) -> list[ScoredToken]:
        """The last that wait, and are together as long."""
        taken: list[ScoredToken] = []
        while self._waiting and not self._waiting[-1][1]:
            self._waiting.pop()  # a stop token, or one whose text was cut off: a character's last token has its text
        for token, length in reversed(self._waiting):
            num_chars -= length
            if taken and num_chars < 0:
                break
            taken.insert(0, token)
        self._waiting.clear()
        return taken
