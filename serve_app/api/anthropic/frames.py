"""Writes the events of a streamed message, in their order and with their names.
Never sends one; `sse` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from serve_app.api.anthropic.message import Json, block_json, message_json, stop_json, usage_json
from serve_app.api.generation.blocks import Block, BlockReader, Closed, Grown, Step
from serve_app.api.generation.completion import Piece
from serve_app.api.generation.sealing import Seal
from serve_app.api.openai.choices import Choices
from serve_app.api.openai.sse import Frames, event_frame
from serve_app.errors.api_error import ApiError
from serve_app.errors.refusal import anthropic_error
from serve_app.parsing.call_arguments import ArgumentRepair

_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageFrames(Frames):
    end: ClassVar[bytes] = b""

    def __init__(
        self,
        message_id: str,
        model: str,
        request_id: str,
        choices: Choices,
        blocks: BlockReader,
        seal: Seal | None,
        *,
        fills_context: bool,
    ) -> None:
        """`request_id`: the one in the response's headers. `seal`: if given, thoughts are sealed instead of shown.
        `fills_context`: as for `stop_json`."""
        self._request_id = request_id
        self._message_id = message_id
        self._model = model
        self._choices = choices
        self._blocks = blocks
        self._seal = seal
        self._fills_context = fills_context
        self._has_begun = False
        self._last = Piece("")
        self._repair = ArgumentRepair()
        """Repairs the arguments of the call block that is open."""

    def opening(self, index: int) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        message = message_json(self._message_id, self._model, usage_json(self._choices.usage))
        return _frame("message_start", message=message) + _frame("ping")

    def unopened(self, index: int) -> Sequence[int]:
        return ()

    def content(self, index: int, piece: Piece) -> bytes:
        self._last = piece
        steps = self._blocks.read(piece.text, last=piece.finish_reason is not None)
        return b"".join(map(self._step, steps))

    async def closing(self) -> bytes:
        delta = stop_json(self._last, has_called=self._blocks.has_called, fills_context=self._fills_context)
        usage = usage_json(self._choices.usage)
        return _frame("message_delta", delta=delta, usage=usage, context_management=None) + _frame("message_stop")

    def _step(self, step: Step) -> bytes:
        block = step.block
        match step:
            case Grown() if block.kind == "reasoning" and self._seal is not None:
                return b""
            case Grown(_, text):
                return _delta(block, self._repair.push(text) if block.kind == "call" else text)
            case Closed():
                rest = self._repair.finish() if block.kind == "call" else ""
                signed = self._signed(block) if block.kind == "reasoning" else b""
                return _delta(block, rest) + signed + _frame("content_block_stop", index=block.index)
            case _:
                self._repair = ArgumentRepair()
                return _frame("content_block_start", index=block.index, content_block=_empty(block))

    def _signed(self, block: Block) -> bytes:
        signature = block_json(block, seal=self._seal)["signature"]
        delta: Json = {"type": "signature_delta", "signature": signature}
        return _frame("content_block_delta", index=block.index, delta=delta)

    def failure(self, error: ApiError) -> bytes:
        return event_frame(anthropic_error(error, self._request_id))


def _delta(block: Block, text: str) -> bytes:
    kind, key = _DELTAS[block.kind]
    return _frame("content_block_delta", index=block.index, delta={"type": kind, key: text}) if text else b""


def _empty(block: Block) -> Json:
    """Write a block as it is before its first delta. Its signature is empty, because it comes last."""
    opened = block_json(block.as_opened())
    return opened | {"signature": ""} if "signature" in opened else opened


def _frame(kind: str, **fields: Json | int | None) -> bytes:
    return event_frame({"type": kind, **fields})
