"""Owns what the fake executor makes of contents: numbers, kept as long as plans say, in the place of token ids.
Never forgives a plan that needs what it has not had encoded."""

from __future__ import annotations

from hashlib import blake2b

from engine.multimodal_inputs import PlacedInput
from engine.step import ScheduledRequest, StepPlan


class MissingContentError(Exception):
    """A row stands on a content that no plan had encoded, or that one had dropped: the scheduler is at fault."""


class FakeEncoder:
    """A token's number depends on its position, too, where that is not its index: a wrong shift changes answers."""

    def __init__(self) -> None:
        self.encoded: dict[bytes, int] = {}

    def prepare(self, plan: StepPlan) -> None:
        """Drop and encode what the plan says, before its rows."""
        for digest in plan.dropped:
            self.encoded.pop(digest, None)
        for work in plan.encodes:
            self.encoded[work.digest] = int.from_bytes(blake2b(work.data, digest_size=7).digest(), "little")

    def numbers(self, row: ScheduledRequest, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Of each token of a row; those of a prompt without inputs are their ids."""
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
