"""Owns the fake executor's encoder: it turns contents into numbers that replace token ids, kept as long as plans say.
Never forgives a plan whose rows need a content that no plan had encoded."""

from __future__ import annotations

from hashlib import blake2b

from engine.multimodal_inputs import PlacedInput
from engine.step import ScheduledRequest, StepPlan


class MissingContentError(Exception):
    """A row needs a content that no plan had encoded, or that one has dropped: a fault of the scheduler."""


class FakeEncoder:
    """Makes a token's number depend on its position, too, if that is not its index: so a wrong shift changes
    answers."""

    def __init__(self) -> None:
        self.encoded: dict[bytes, int] = {}

    def prepare(self, plan: StepPlan) -> None:
        """Drop and encode what the plan says, before its rows run."""
        for digest in plan.dropped:
            self.encoded.pop(digest, None)
        for work in plan.encodes:
            self.encoded[work.digest] = int.from_bytes(blake2b(work.data, digest_size=7).digest(), "little")

    def numbers(self, row: ScheduledRequest, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The number of each token of a row. Without inputs these are the token ids."""
        if row.inputs is None:
            return token_ids
        numbers = [_shifted(token_id, row.inputs.shift) for token_id in token_ids]
        for one in row.inputs.placed:
            content = self._content(row, one)
            for index in range(max(one.start, row.start), min(one.end, row.end)):
                numbers[index - row.start] = _shifted(content + index - one.start, one.position)
            for index in range(max(one.end, row.start), row.end):
                numbers[index - row.start] = _shifted(token_ids[index - row.start], one.shift_after)
        return tuple(numbers)

    def _content(self, row: ScheduledRequest, one: PlacedInput) -> int:
        if one.digest not in self.encoded:
            raise MissingContentError(f"{row.request_id}: its input at {one.start} is not encoded")
        return self.encoded[one.digest]


def _shifted(number: int, shift: int) -> int:
    return number ^ (shift % 2**32) << 24
