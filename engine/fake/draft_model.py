"""Owns the fake executor's draft model: it remembers what it has read, as the executor remembers its KV.
Never chooses a token: the caller passes a function that does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from engine.step import DRAFT_TOKEN, ScheduledRequest, StepPlan

Propose = Callable[[ScheduledRequest, int], tuple[int, ...]]
"""(row, count) -> the tokens to propose after the row's newest one."""


class UnreadTextError(Exception):
    """A row needs drafts after a text that the draft model has not read: a fault of whoever planned it."""


class FakeDraftModel:
    """Reads along with rows. Each of its slots holds (position, hash of all tokens up to there). When it writes to a
    block, it clears the rest of the block, as kernels may."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._slots: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)
        self._block_size = block_size
        self.num_read = 0
        """Number of the requests' tokens that it has read so far; its own proposals do not count."""

    def fill(self, plan: StepPlan, propose: Propose) -> StepPlan:
        """Replace every DRAFT_TOKEN of the plan.

        Raises:
            UnreadTextError: a row reads or needs drafts after a text that was not read.
        """
        return replace(plan, rows=tuple(self._fill_row(row, propose) for row in plan.rows))

    def holds(self, block_ids: Sequence[int], token_ids: Sequence[int]) -> bool:
        """Whether it has read exactly this text into these blocks."""
        slots = (self._slots[index] for index in self._indices(block_ids, 0, len(token_ids)))
        return all(slot == read for slot, read in zip(slots, _chain(0, 0, token_ids), strict=True))

    def _fill_row(self, row: ScheduledRequest, propose: Propose) -> ScheduledRequest:
        count = row.token_ids.count(DRAFT_TOKEN)
        context = row.draft_context
        if context is not None:
            self._read(row, context.start, context.token_ids)
            self.num_read += len(context.token_ids)
        if not count:
            return row
        if context is None or context.end != row.start + 1:
            raise UnreadTextError(f"{row.request_id}: {context} does not end with the newest token, at {row.start}")
        drafts = propose(row, count)
        self._read(row, row.start + 1, drafts[:-1])
        return row._replace(token_ids=(row.token_ids[0], *drafts))

    def _read(self, row: ScheduledRequest, start: int, token_ids: Sequence[int]) -> None:
        digest = 0
        for position, index in enumerate(self._indices(row.block_ids, 0, start)):
            slot = self._slots[index]
            if slot is None or slot[0] != position:
                raise UnreadTextError(f"{row.request_id}: position {position} holds {slot}, and {start} builds on it")
            digest = slot[1]
        indices = self._indices(row.block_ids, start, len(token_ids))
        for index, slot in zip(indices, _chain(digest, start, token_ids), strict=True):
            self._slots[index] = slot
        end = start + len(token_ids)
        for index in self._indices(row.block_ids, end, -end % self._block_size):
            self._slots[index] = None

    def _indices(self, block_ids: Sequence[int], start: int, count: int) -> Iterator[int]:
        """Slots of `count` positions from `start` on."""
        for position in range(start, start + count):
            yield block_ids[position // self._block_size] * self._block_size + position % self._block_size


def _chain(digest: int, start: int, token_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    for position, token in enumerate(token_ids, start):
        digest = hash((digest, token))
        yield position, digest
