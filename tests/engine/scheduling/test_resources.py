"""Contracts of what requests hold besides KV blocks: the scheduler serves a resource that it has never heard of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from engine.config import SchedulerConfig
from engine.multimodal_inputs import EncodeJob
from engine.protocol import ErrorCode, Failed
from engine.scheduling.request import Request
from engine.scheduling.resources import Resource, RowParts, StepParts
from engine.step import ExecutorOutOfMemoryError, RowKind, ScheduledRequest, StepPlan
from tests.support.engines import RecordingCore, answer_alone

DIGEST = b"one for each step"
TIGHT = SchedulerConfig(reserve_mode="prompt", watermark_blocks=0, preempt_policy="lifo")


class Ledger(Resource):
    """Counts what it is told, and fails when it is told the same twice."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.open_rows: Counter[str] = Counter()
        self.open_steps = 0
        self.lost = 0
        self.discarded: Counter[str] = Counter()
        self.released: Counter[str] = Counter()

    def admit(self, request: Request, num_prefix_blocks: int) -> None:
        assert request.request_id not in self.held
        assert request.scheduled == num_prefix_blocks * 4
        self.held.add(request.request_id)

    def take(self, request: Request, start: int, end: int, parts: RowParts) -> None:
        assert request.request_id in self.held, "a row of a request that was not admitted"
        assert start == request.scheduled < end
        self.open_rows[request.request_id] += 1

    def finish(self, parts: StepParts) -> None:
        parts.encodes = (EncodeJob(DIGEST, (1, 1, 1), b""),)

    def advance(self, request: Request, row: ScheduledRequest, end: int) -> None:
        assert len(request.block_hashes) >= end // 4, "full blocks are hashed"
        self.open_rows[row.request_id] -= 1

    def discard(self, row: ScheduledRequest) -> None:
        self.open_rows[row.request_id] -= 1
        self.discarded[row.request_id] += 1

    def lose(self, step: StepPlan) -> None:
        assert step.encodes[0].digest == DIGEST
        self.lost += 1

    def release(self, request: Request) -> None:
        self.held.remove(request.request_id)  # KeyError: released twice
        self.released[request.request_id] += 1


def kept_by(ledger: Resource, **overrides: Any) -> RecordingCore:
    core = RecordingCore(**overrides)
    core._scheduler.resources = (ledger,)
    return core


def check_settled(ledger: Ledger) -> None:
    assert not ledger.held
    assert set(ledger.open_rows.values()) <= {0}, "each row ends once, in advance or in discard"


@pytest.mark.parametrize("overlap", [False, True])
def test_every_request_is_released_once_for_each_time_that_it_started(overlap: bool) -> None:
    ledger = Ledger()
    core = kept_by(ledger, block_size=4, num_kv_blocks=16, scheduler=TIGHT, overlap=overlap)
    for i in range(6):
        core.send(f"r{i}", [1 + i] * 9, max_tokens=12, ignore_eos=True)
    core.send("waits", [9] * 9, max_tokens=2)
    core.keep(core.abort("waits"))
    for _ in range(4):
        core.keep(core.step())
    core.keep(core.abort("r0"))
    core.run()
    check_settled(ledger)
    assert core.load().num_preemptions, "nobody lost its memory"
    assert ledger.released["waits"] == 0, "it never had anything"
    assert sum(ledger.released.values()) == 6 + core.load().num_preemptions
    for i in range(1, 6):
        assert core.tokens(f"r{i}") == answer_alone([1 + i] * 9, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("again", [False, True], ids=["an error", "out of memory"])
def test_a_failed_step_is_lost_before_its_rows_are_discarded(again: bool) -> None:
    ledger, faults = Ledger(), [ExecutorOutOfMemoryError("full") if again else RuntimeError("broken")]

    def fail_once(plan: StepPlan) -> None:
        if any(row.kind is not RowKind.DECODE for row in plan.rows) and plan.step_id == 1:
            assert not ledger.lost
            raise faults.pop()

    core = kept_by(ledger, before_step=fail_once)
    core.send("decodes", [1] * 5, max_tokens=6, ignore_eos=True)
    core.keep(core.step())
    core.send("begins", [2] * 5, max_tokens=2, ignore_eos=True)
    core.run()
    assert ledger.lost == 1
    assert ledger.discarded == {"decodes": 1, "begins": 1}
    check_settled(ledger)
    last = core.events["begins"][-1]
    assert (isinstance(last, Failed) and last.code is ErrorCode.STEP_FAILED) is not again


class OneAtATime(Resource):
    """A plan may have a chunk of one request only, and that chunk may have no more than two blocks."""

    class Turn:
        def __init__(self) -> None:
            self.taken = False
            self.awaited = False

        def reach(self, request: Request, start: int, end: int, gone: Iterable[str]) -> int:
            return start if self.taken else min(end, start + 8)

        def take(self, request: Request, start: int, end: int) -> None:
            self.taken = True

        def put_off(self, request: Request) -> None:
            self.awaited = True

        def is_kept_from(self, request: Request) -> bool:
            return self.awaited

    def allowance(self) -> Turn:
        return OneAtATime.Turn()


def test_a_prompt_goes_as_far_as_every_allowance_reaches_and_the_next_one_waits_for_it() -> None:
    core = kept_by(OneAtATime())
    for name in "ab":
        core.send(name, [3] * 20, max_tokens=1)
    core.run()
    prefill = [[(row.request_id, len(row.token_ids)) for row in plan.rows] for plan in core.plans]
    assert prefill[:3] == [[("a", 8)], [("a", 8)], [("a", 4)]]
    assert all(len(rows) == 1 for rows in prefill)
    assert core.tokens("b") == answer_alone([3] * 20, max_tokens=1)


class Reachable(Resource):
    """A request can start from as many blocks as are reachable, but not from an odd number of them."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._num_changes = 0

    @property
    def epoch(self) -> int:
        return self._num_changes

    def change(self, num_blocks: int) -> None:
        self._num_blocks, self._num_changes = num_blocks, self._num_changes + 1

    def usable_prefix(self, request: Request, num_blocks: int) -> int:
        return min(num_blocks, self._num_blocks) // 2 * 2


def test_a_prefix_hit_goes_as_far_as_every_resource_can_use_it() -> None:
    core = kept_by(Ledger(), block_size=4)
    core._scheduler.resources += (Reachable(5), Reachable(6))
    for name in ("first", "second"):
        core.send(name, [5] * 30, max_tokens=1)
        core.run()
    assert core.finished("second").usage.cached_tokens == 16, "of 28 that match"


def test_a_prefix_is_looked_up_again_once_a_resource_could_answer_differently() -> None:
    reachable = Reachable(6)
    core = kept_by(reachable, block_size=4)
    core.send("first", [5] * 30, max_tokens=1)
    core.run()
    core.send("second", [5] * 30, max_tokens=1)
    assert core._scheduler.plan(core.now).rows[0].start == 24
    reachable.change(2)
    assert core._scheduler.plan(core.now).rows[0].start == 8
