"""Owns the events of a streamed response: their order, their names and their numbers.
Never sends one; `sse` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from serve_app.api.generation.blocks import Block, BlockReader, Closed, Grown, Step
from serve_app.api.generation.completion import Piece
from serve_app.api.generation.logprobs import json_chars, told_chars
from serve_app.api.generation.scored_blocks import ScoredBlocks
from serve_app.api.http.offload import run_sized
from serve_app.api.openai.responses.answer import Answer
from serve_app.api.openai.responses.input_text import InputReader
from serve_app.api.openai.responses.output import part_json
from serve_app.api.openai.responses.response import Json, status_of
from serve_app.api.openai.sse import Frames, event_frame
from serve_app.errors.api_error import ApiError

_DELTA = {
    "text": "response.output_text",
    "call": "response.function_call_arguments",
    "reasoning": "response.reasoning_text",
}
_INPUT = "response.custom_tool_call_input"
_PART = {"content_index": 0}
_ENDS = 3
"""Events at the end of a text that have all of its log-probabilities."""


class ResponseFrames(Frames):
    end: ClassVar[bytes] = b""

    def __init__(self, answer: Answer, blocks: BlockReader, scored: ScoredBlocks) -> None:
        self._answer = answer
        self._blocks = blocks
        self._scored = scored
        self._items = answer.items
        self._input = InputReader()
        """Reads the input of the latest call of a free-form tool."""
        self._number = 0
        self._cut_off = False
        self._begun = b""

    async def begin(self) -> None:
        """Write the first two events, which have the request's tools and instructions."""
        self._begun = await run_sized(2 * self._answer.num_repeated, self._first_events)

    def _first_events(self) -> bytes:
        begun = self._answer.begun()
        created = self._frame("response.created", response=begun)
        return created + self._frame("response.in_progress", response=begun)

    def opening(self, index: int) -> bytes:
        begun, self._begun = self._begun, b""
        return begun

    def unopened(self, index: int) -> Sequence[int]:
        return ()

    def content(self, index: int, piece: Piece) -> bytes:
        return self._written(piece, self._scored.read(piece))

    async def scored(self, index: int, piece: Piece) -> bytes:
        """Write the frames of a piece, in a thread if there are many log-probabilities: the end of a text has all of
        its own again."""
        steps = await run_sized(json_chars(piece.tokens or ()), lambda: self._scored.read(piece))
        return await run_sized(sum(map(_chars, steps)), lambda: self._written(piece, steps))

    async def closing(self) -> bytes:
        """Write the last event. The response is kept before the client learns that it is complete and can be referred
        to."""
        blocks = self._blocks.blocks
        response = self._answer.ended(blocks, cut_off=self._cut_off)
        await self._answer.keep(response)
        size = self._answer.num_repeated + sum(told_chars(block.logprobs) for block in blocks)
        return await run_sized(size, lambda: self._frame(f"response.{response['status']}", response=response))

    def failure(self, error: ApiError) -> bytes:
        told = self._frame("error", code=error.code, message=error.message, param=error.param)
        return told + self._frame("response.failed", response=self._answer.failed(error))

    def _written(self, piece: Piece, steps: Sequence[Step]) -> bytes:
        self._cut_off = piece.finish_reason == "length"
        return b"".join(frame for step in steps for frame in self._step(step))

    def _step(self, step: Step) -> Iterator[bytes]:
        match step:
            case Grown(block, text, _) if self._items.takes_text(block):
                yield from self._input_goes_on(block, self._input.push(text))
            case Grown(block) if self._items.comes_whole(block):
                pass
            case Grown(block, text, logprobs):
                yield self._of(block, f"{_DELTA[block.kind]}.delta", **self._text(block, "delta", text, logprobs))
            case Closed(block):
                yield from self._closed(block)
            case _ if not self._items.comes_whole(step.block):
                yield from self._opened(step.block.as_opened())

    def _opened(self, block: Block) -> Iterator[bytes]:
        self._input = InputReader()
        yield self._item("response.output_item.added", block, self._items.json(block, "in_progress"))
        if block.kind != "call":
            yield self._of(block, "response.content_part.added", **_PART, part=part_json(block))

    def _input_goes_on(self, block: Block, text: str) -> Iterator[bytes]:
        if text:
            yield self._of(block, f"{_INPUT}.delta", delta=text)

    def _closed(self, block: Block) -> Iterator[bytes]:
        status = status_of(cut_off=self._cut_off and block is self._blocks.blocks[-1])
        item = self._items.json(block, status)
        if self._items.comes_whole(block):
            yield from self._came_whole(block, item)
        elif self._items.takes_text(block):
            yield from self._input_goes_on(block, self._input.finish())
            yield self._of(block, f"{_INPUT}.done", input=item["input"])
        else:
            yield self._said(block)
        if block.kind != "call":
            yield self._of(block, "response.content_part.done", **_PART, part=part_json(block))
        yield self._item("response.output_item.done", block, item)

    def _came_whole(self, block: Block, item: Json) -> Iterator[bytes]:
        """Write the events of an item whose call came whole. Arguments that do not fit the tool become a function's."""
        if item["type"] != "function_call":
            yield self._item("response.output_item.added", block, item | {"status": "in_progress"})
            return
        yield from self._opened(block.as_opened())
        yield self._of(block, f"{_DELTA['call']}.delta", delta=block.text)
        yield self._said(block)

    def _said(self, block: Block) -> bytes:
        is_call = block.kind == "call"
        key, named = ("arguments", {"name": self._items.name(block)}) if is_call else ("text", {})
        text = self._text(block, key, block.text, block.logprobs)
        return self._of(block, f"{_DELTA[block.kind]}.done", **text, **named)

    def _text(self, block: Block, key: str, text: str, logprobs: Sequence[Json]) -> Json:
        part: Json = {} if block.kind == "call" else _PART
        return part | {key: text} | ({"logprobs": list(map(_without_bytes, logprobs))} if block.kind == "text" else {})

    def _of(self, block: Block, kind: str, **fields: object) -> bytes:
        named = {"item_id": self._items.id(block), "output_index": block.index}
        return self._frame(kind, **named, **fields)

    def _item(self, kind: str, block: Block, item: Json) -> bytes:
        return self._frame(kind, output_index=block.index, item=item)

    def _frame(self, kind: str, **fields: object) -> bytes:
        number, self._number = self._number, self._number + 1
        return event_frame({"type": kind, "sequence_number": number, **fields})


def _chars(step: Step) -> int:
    """Estimate the length of the log-probabilities in a step's events."""
    match step:
        case Grown(_, _, logprobs):
            return told_chars(logprobs)
        case Closed(block):
            return _ENDS * told_chars(block.logprobs)
    return 0


def _without_bytes(scored: Json) -> Json:
    """Drop the bytes of log-probabilities. OpenAI's events have none; its items do."""
    top = [{name: one[name] for name in ("token", "logprob")} for one in scored["top_logprobs"]]
    return {"token": scored["token"], "logprob": scored["logprob"], "top_logprobs": top}
