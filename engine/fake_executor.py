"""Owns a scripted executor: deterministic tokens without weights, for tests, demos and simulation.
Never needs torch. Its KV slots remember what was written, so that a scheduling bug is an error, not odd text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.config import FakeConfig
from engine.step import ScheduledRequest, StepOutput, StepPlan

_MASK = (1 << 64) - 1


def mix64(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): 64 bits in, 64 well-mixed bits out."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class KvMismatchError(Exception):
    """A row was told to build on KV that is not its own prefix: the scheduler or block manager is at fault."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """What a forward pass left in a KV slot: `digest` covers every token up to and including this one."""

    position: int
    token_id: int
    digest: int


class FakeExecutor:
    """Answers with a hash of (prefix, seed, position), or with a fixed reply followed by `eos_token_id`.

    Hash tokens depend on the whole prefix as read back through the block table, so that any schedule that gives a
    request the wrong KV changes its answer.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        alphabet: Sequence[int],
        *,
        reply: Sequence[int] | None = None,
        eos_token_id: int = 0,
        config: FakeConfig | None = None,
        before_step: Callable[[StepPlan], None] | None = None,
        failing: Callable[[ScheduledRequest], str | None] | None = None,
        verify_prefix: bool = False,
    ) -> None:
        """`alphabet`: the tokens that hashes choose from. `before_step` may raise or block, to script a
        step's failure; `failing` says why a row fails alone.
        `verify_prefix` checks every slot that a row builds on (O(context) a row) and not the newest one alone."""
        self._slots: list[_Slot | None] = [None] * (num_blocks * block_size)
        self._block_size = block_size
        self._alphabet = tuple(alphabet)
        self._reply = None if reply is None else tuple(reply)
        self._eos_token_id = eos_token_id
        self._config = config or FakeConfig()
        self._before_step = before_step
        self._failing = failing or (lambda row: None)
        self._verify_prefix = verify_prefix
        self._prompt_ends: dict[str, int] = {}  # request id -> position of its first sampled token
        self._output: StepOutput | None = None

    def launch(self, plan: StepPlan) -> None:
        delay_ms = self._config.step_delay_ms + self._config.token_delay_ms * plan.num_tokens
        if delay_ms:
            time.sleep(delay_ms / 1000)
        if self._before_step:
            self._before_step(plan)
        failed = tuple((i, why) for i, row in enumerate(plan.rows) if (why := self._failing(row)))
        bad = {i for i, _ in failed}
        sampled = tuple(() if i in bad else self._compute(row) for i, row in enumerate(plan.rows))
        self._output = StepOutput(plan.step_id, sampled, failed)

    def collect(self) -> StepOutput:
        assert self._output is not None, "collect without launch"
        output, self._output = self._output, None
        return output

    def forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._prompt_ends.pop(request_id, None)

    def shutdown(self) -> None:
        self._slots.clear()

    def _compute(self, row: ScheduledRequest) -> tuple[int, ...]:
        digest = self._read_prefix(row)
        for position, token_id in enumerate(row.token_ids, row.start):
            digest = mix64(digest ^ mix64(token_id))
            self._slots[self._slot_index(row, position)] = _Slot(position, token_id, digest)
        return () if row.sampling is None else (self._sample(row, digest),)

    def _slot_index(self, row: ScheduledRequest, position: int) -> int:
        return row.block_ids[position // self._block_size] * self._block_size + position % self._block_size

    def _read_prefix(self, row: ScheduledRequest) -> int:
        """Read the KV below `start` through the block table, as attention would, and return its digest."""
        if not self._verify_prefix:
            return self._read_slot(row, row.start - 1).digest if row.start else 0
        digest = 0
        for position in range(row.start):
            slot = self._read_slot(row, position)
            digest = mix64(digest ^ mix64(slot.token_id))
            if digest != slot.digest:
                raise KvMismatchError(f"{row.request_id}: position {position} was computed after another prefix")
        return digest

    def _read_slot(self, row: ScheduledRequest, position: int) -> _Slot:
        slot = self._slots[self._slot_index(row, position)]
        if slot is None or slot.position != position:
            raise KvMismatchError(f"{row.request_id}: position {position} holds {slot}")
        return slot

    def _sample(self, row: ScheduledRequest, digest: int) -> int:
        assert row.sampling is not None
        position = row.sampling.position
        if self._reply is not None:
            index = position - self._prompt_ends.setdefault(row.request_id, position)
            return self._reply[index] if index < len(self._reply) else self._eos_token_id
        seed = row.sampling.seed if row.sampling.temperature else 0
        choices = [token for token in self._alphabet if token not in row.sampling.banned_token_ids]
        choices = choices or [self._eos_token_id]
        return choices[mix64(digest ^ mix64(seed ^ mix64(position))) % len(choices)]
