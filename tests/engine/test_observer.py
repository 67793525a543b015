"""Contracts of what an engine tells an observer: every request once, before its readers learn of it, however it ends.
Never measures time: what is observed is counted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

import pytest

from engine.async_engine import AsyncEngine
from engine.config import SchedulerConfig
from engine.core.core import EngineCore
from engine.fake.executor import FakeExecutor
from engine.observer import StepFacts
from engine.protocol import (
    TERMINAL,
    ErrorCode,
    Event,
    Failed,
    Finished,
    FinishReason,
    RequestRejected,
    SamplingParams,
    Submission,
)
from engine.step import ExecutorFatalError, StepPlan
from tests.support.conditions import until
from tests.support.engines import RecordingCore, resolved_config

PROMPT = (1, 2, 3, 4, 5)
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


class Notes:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.submissions: list[str] = []
        self.codes: list[ErrorCode] = []
        self.facts: list[StepFacts] = []
        self.events: list[Event] = []

    def submitted(self, submission: Submission) -> None:
        self.submissions.append(submission.request_id)

    def rejected(self, code: ErrorCode) -> None:
        self.codes.append(code)

    def stepped(self, facts: StepFacts, events: Sequence[Event]) -> None:
        self.facts.append(facts)
        self.events += events

    @property
    def ends(self) -> list[Event]:
        return [event for event in self.events if isinstance(event, TERMINAL)]


@asynccontextmanager
async def observed(
    before_step: Callable[[StepPlan], None] | None = None, **overrides: object
) -> AsyncIterator[tuple[AsyncEngine, Notes]]:
    config = resolved_config(**overrides)
    executor = FakeExecutor(config.num_kv_blocks, config.block_size, range(32), before_step=before_step)
    engine, notes = AsyncEngine(EngineCore(executor, config)), Notes()
    engine.observe(notes)
    try:
        yield engine, notes
    finally:
        await asyncio.to_thread(engine.shutdown)


def test_an_answer_that_has_arrived_was_observed_to_its_end() -> None:
    async def main() -> None:
        async with observed() as (engine, notes):
            events = [event async for event in engine.generate(PROMPT, SHORT, "r")]
            assert notes.events == events
            assert notes.submissions == ["r"]
            assert sum(facts.num_tokens for facts in notes.facts) == len(PROMPT) + 5  # the last one is not fed back

    asyncio.run(main())


def test_an_aborted_request_is_observed_to_its_end_like_any_other() -> None:
    steps = threading.Semaphore(1)  # otherwise the answer might be complete before its reader has left

    def wait_for_turn(plan: StepPlan) -> None:
        assert steps.acquire(timeout=30)

    async def main() -> None:
        async with observed(wait_for_turn) as (engine, notes):
            stream = engine.stream(Submission("r", PROMPT, LONG))
            async with aclosing(stream):
                await anext(stream)
            steps.release(1000)
            await until(lambda: notes.ends)
            (end,) = notes.ends
            assert isinstance(end, Finished)
            assert end.reason is FinishReason.ABORT

    asyncio.run(main())


def test_a_refusal_is_observed_with_its_code_and_is_no_submission() -> None:
    async def main() -> None:
        async with observed() as (engine, notes):
            with pytest.raises(RequestRejected):
                await anext(engine.stream(Submission("r", (), SHORT)))
            assert (notes.submissions, notes.codes) == ([], [ErrorCode.EMPTY_PROMPT])

    asyncio.run(main())


def test_requests_that_die_with_the_engine_are_observed_as_failed() -> None:
    def die(plan: StepPlan) -> None:
        raise ExecutorFatalError("gone")

    async def main() -> None:
        async with observed(die) as (engine, notes):
            events = [event async for event in engine.generate(PROMPT, SHORT, "r")]
            assert isinstance(events[-1], Failed)
            assert notes.ends == [events[-1]]

    asyncio.run(main())


def test_a_fault_in_an_observer_costs_no_request_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Notes):
        def stepped(self, facts: StepFacts, events: Sequence[Event]) -> None:
            raise ValueError("broken")

    async def main() -> None:
        async with observed() as (engine, _):
            engine.observe(Broken())
            events = [event async for event in engine.generate(PROMPT, SHORT, "r")]
            assert isinstance(events[-1], Finished)

    asyncio.run(main())
    assert "the observer failed" in caplog.text


def test_a_preemption_is_reported_once_with_the_step_that_did_it() -> None:
    core = RecordingCore(num_kv_blocks=10, scheduler=SchedulerConfig(reserve_mode="prompt", watermark_blocks=0))
    preempted: list[str] = []
    for name in "ab":
        core.send(name, range(1, 9), max_tokens=28, ignore_eos=True)
    while core.has_work:
        core.keep(core.step())
        preempted += core.last_step.preempted
    assert len(preempted) == core.load().num_preemptions > 0


def test_the_step_is_reported_with_the_tokens_it_computed_also_when_it_is_read_back_later() -> None:
    for overlap in (False, True):
        core = RecordingCore(overlap=overlap)
        core.send("a", range(1, 9), max_tokens=4, ignore_eos=True)
        told = []
        while core.has_work:
            core.keep(core.step())
            told.append(core.last_step.num_tokens)
        assert [count for count in told if count] == [plan.num_tokens for plan in core.plans] == [8, 1, 1, 1]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_is_reported_with_its_decode_rows_and_each_of_its_chunks(overlap: bool) -> None:
    """A step has 32 tokens, in blocks of 4: the second prompt begins in the step that completes the first."""
    core = RecordingCore(overlap=overlap)
    core.send("a", range(1, 5), max_tokens=8, ignore_eos=True)
    core.keep(core.step())
    told = list(core.last_step.computed)
    for name, prompt in (("b", [2] * 40), ("c", [3] * 20)):
        core.send(name, prompt, max_tokens=1, ignore_eos=True)
    while core.has_work:
        core.keep(core.step())
        told += core.last_step.computed
    assert [(step.num_decodes, step.chunks) for step in told[:4]] == [(0, (4,)), (1, (28,)), (1, (12, 16)), (1, (4,))]
    assert [step.step_id for step in told] == [plan.step_id for plan in core.plans]
    assert all(step.num_tokens == step.num_decodes + sum(step.chunks) for step in told)
    assert all(step.duration_s > 0 for step in told)


def test_drafted_tokens_are_tokens_of_their_row_and_no_rows_of_their_own() -> None:
    core = RecordingCore(num_speculative_tokens=3)
    core.send("a", range(1, 9), max_tokens=9, ignore_eos=True)
    told = []
    while core.has_work:
        core.keep(core.step())
        told += core.last_step.computed
    assert {step.num_decodes for step in told[1:]} == {1}
    assert max(step.num_tokens for step in told[1:]) == 4


def test_a_step_is_reported_with_how_many_wait_behind_it() -> None:
    core = RecordingCore(max_num_seqs=1)
    for name in "abc":
        core.send(name, range(1, 5), max_tokens=2, ignore_eos=True)
    core.keep(core.step())
    assert [step.num_waiting for step in core.last_step.computed] == [2]


def test_a_step_that_failed_is_no_step_that_was_computed() -> None:
    def fail(plan: StepPlan) -> None:
        raise RuntimeError("kernel fault")

    core = RecordingCore(before_step=fail)
    core.send("a", range(1, 5), max_tokens=2)
    core.keep(core.step())
    assert core.last_step.computed == ()
    assert core.last_step.num_tokens == 0


def test_submissions_are_reported_before_their_first_event() -> None:
    """The step thread may run in between."""
    ready = threading.Event()

    class Slow(Notes):
        def submitted(self, submission: Submission) -> None:
            ready.wait(0.05)
            super().submitted(submission)

        def stepped(self, facts: StepFacts, events: Sequence[Event]) -> None:
            assert {event.request_id for event in events} <= set(self.submissions)
            super().stepped(facts, events)

    async def main() -> None:
        async with observed() as (engine, _):
            notes = Slow()
            engine.observe(notes)
            events = [event async for event in engine.generate(PROMPT, SHORT, "r")]
            assert notes.events == events

    asyncio.run(main())
