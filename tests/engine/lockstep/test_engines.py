"""Contracts of engines that are ranks in lockstep, each on its thread: answers, rest, drain, and one end for all.
Never a test of what their steps carry: tests/engine/test_lockstep_lives.py has that."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from engine.async_engine import AsyncEngine
from engine.core.core import EngineCore
from engine.fake.executor import FakeExecutor
from engine.lockstep.threads import make_thread_ranks
from engine.protocol import EngineError, ErrorCode, Failed, Finished, SamplingParams, Token
from engine.step import ExecutorFatalError, ExecutorOutOfMemoryError, RowKind, StepPlan
from tests.support.conditions import until
from tests.support.engines import answer_alone, resolved_config
from tests.support.lockstep import ExpertsExecutor, Meetings

pytestmark = pytest.mark.anyio

PROMPT = (1, 2, 3, 4, 5)
LOOPS: dict[str, dict[str, Any]] = {"plain": {}, "overlap": {"overlap": True}}
Hook = Callable[[StepPlan], None]


@dataclass
class Ranks:
    engines: list[AsyncEngine]
    executors: list[ExpertsExecutor]
    meetings: Meetings

    async def answer(self, rank: int, prompt: tuple[int, ...], max_tokens: int) -> list[int] | Failed:
        """A request's tokens, or its failure."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        events = [event async for event in self.engines[rank].generate(prompt, params)]
        if isinstance(events[-1], Failed):
            return events[-1]
        assert isinstance(events[-1], Finished)
        return [event.token_id for event in events if isinstance(event, Token)]

    async def come_round(self) -> None:
        """Let every engine's thread do what it has been told so far, and a step."""
        for engine in self.engines:
            for _ in range(2):
                await engine.cached_digests(1)


MakeRanks = Callable[..., Ranks]


@pytest.fixture
def make_ranks() -> Iterator[MakeRanks]:
    made: list[AsyncEngine] = []

    def make(
        size: int, hooks: dict[int, Hook] | None = None, own: list[dict[str, Any]] | None = None, **overrides: Any
    ) -> Ranks:
        """`hooks`, by rank: called before its steps. `own`: each rank's own settings."""
        meetings = Meetings(size)
        ranks = Ranks([], [], meetings)
        for end in make_thread_ranks(size):
            config = resolved_config(**overrides, **(own[end.rank] if own else {}))
            before_step = (hooks or {}).get(end.rank)
            fake = FakeExecutor(config.num_kv_blocks, config.block_size, range(32), before_step=before_step)
            ranks.executors.append(ExpertsExecutor(fake, end.rank, meetings))
            core = EngineCore(ranks.executors[-1], config, lockstep=True)
            ranks.engines.append(AsyncEngine(core, end))
            made.append(ranks.engines[-1])
        return ranks

    yield make
    for engine in made:
        engine.shutdown()


def alone(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    return answer_alone(prompt, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("size", [2, 3])
async def test_every_rank_answers_as_an_engine_alone_does_and_all_make_the_same_exchanges(
    make_ranks: MakeRanks, size: int, loop: str
) -> None:
    ranks = make_ranks(size, max_prefill_tokens=8, **LOOPS[loop])
    asked = [(rank, tuple(range(1, 2 + 7 * number)), 3 + 4 * rank) for rank in range(size) for number in range(5)]
    answers = await asyncio.gather(*(ranks.answer(*one) for one in asked))
    assert answers == [alone(prompt, most) for _, prompt, most in asked]
    await ranks.come_round()
    assert ranks.meetings.made[0]
    assert all(made == ranks.meetings.made[0] for made in ranks.meetings.made)


@pytest.mark.parametrize("loop", LOOPS)
async def test_a_rank_at_rest_is_woken_for_the_steps_of_others_and_all_rest_when_none_has_work(
    make_ranks: MakeRanks, loop: str
) -> None:
    ranks = make_ranks(3, **LOOPS[loop])
    assert await ranks.answer(1, PROMPT, 4) == alone(PROMPT, 4)
    assert [executor.num_padded > 0 for executor in ranks.executors] == [True, False, True]
    await ranks.come_round()
    made = [len(made) for made in ranks.meetings.made]
    await ranks.come_round()
    assert [len(made) for made in ranks.meetings.made] == made, "nobody steps for nothing"


@pytest.mark.parametrize("error", [ExecutorOutOfMemoryError, RuntimeError])
async def test_a_rank_whose_steps_fail_still_makes_its_exchanges_and_only_its_own_requests_fail(
    make_ranks: MakeRanks, error: type[Exception]
) -> None:
    def fail(plan: StepPlan) -> None:
        if any(row.kind is not RowKind.DECODE for row in plan.rows):
            raise error("injected")

    ranks = make_ranks(2, {1: fail})
    good, bad = await asyncio.gather(ranks.answer(0, PROMPT, 20), ranks.answer(1, PROMPT, 20))
    assert good == alone(PROMPT, 20)
    assert isinstance(bad, Failed)
    assert bad.code is ErrorCode.STEP_FAILED
    await ranks.come_round()
    assert ranks.meetings.made[0] == ranks.meetings.made[1]


async def test_a_rank_that_can_run_no_further_step_ends_all_with_their_streams(make_ranks: MakeRanks) -> None:
    def die(plan: StepPlan) -> None:
        raise ExecutorFatalError("injected")

    ranks = make_ranks(3, {1: die})
    answers = await asyncio.gather(*(ranks.answer(rank, PROMPT, 100) for rank in (0, 1)))
    assert [answer.code for answer in answers if isinstance(answer, Failed)] == [ErrorCode.ENGINE_DEAD] * 2
    await until(lambda: not any(engine._thread.is_alive() for engine in ranks.engines))
    for engine in ranks.engines:
        with pytest.raises(EngineError):
            await engine.check_health()


async def test_a_rank_that_is_shut_down_ends_all_between_two_steps_and_is_named(make_ranks: MakeRanks) -> None:
    runs = threading.Event()
    ranks = make_ranks(3, {1: lambda plan: runs.set()})
    answer = asyncio.create_task(ranks.answer(1, PROMPT, 200))
    await until(runs.is_set)
    await asyncio.to_thread(ranks.engines[2].shutdown)
    failed = await answer
    assert isinstance(failed, Failed)
    assert "rank 2 has left: The engine was shut down" in failed.message
    await until(lambda: not any(engine._thread.is_alive() for engine in ranks.engines))
    assert ranks.meetings.made[0] == ranks.meetings.made[1] == ranks.meetings.made[2], "no step was left half done"


async def test_a_rank_drains_when_all_do_and_until_then_makes_the_others_steps(make_ranks: MakeRanks) -> None:
    runs, may_go_on = threading.Event(), threading.Event()

    def hold(plan: StepPlan) -> None:
        runs.set()
        assert may_go_on.wait(30)

    ranks = make_ranks(2, {1: hold})
    answer = asyncio.create_task(ranks.answer(1, PROMPT, 30))
    await until(runs.is_set)
    drains = [asyncio.create_task(ranks.engines[0].drain())]
    await asyncio.sleep(0)
    with pytest.raises(EngineError) as refused:
        await ranks.answer(0, PROMPT, 1)
    assert refused.value.code is ErrorCode.DRAINING
    may_go_on.set()
    assert await answer == alone(PROMPT, 30)
    assert not drains[0].done(), "rank 1 may still get requests"
    assert await ranks.answer(1, PROMPT, 3) == alone(PROMPT, 3)
    drains.append(asyncio.create_task(ranks.engines[1].drain()))
    await asyncio.wait_for(asyncio.gather(*drains), 30)
    for engine in ranks.engines:
        engine.shutdown()
    assert ranks.meetings.made[0] == ranks.meetings.made[1]


async def test_ranks_may_differ_in_the_size_of_their_kv_cache_and_in_no_other_setting(make_ranks: MakeRanks) -> None:
    even = make_ranks(2, own=[{"num_kv_blocks": 30}, {"num_kv_blocks": 60}])
    assert await even.answer(0, PROMPT, 3) == alone(PROMPT, 3)
    uneven = make_ranks(2, own=[{"max_num_batched_tokens": 32}, {"max_num_batched_tokens": 64}])
    failed = await uneven.answer(0, PROMPT, 3)
    assert isinstance(failed, Failed)
    assert "The ranks have different settings" in failed.message
    await until(lambda: not any(engine._thread.is_alive() for engine in uneven.engines))


def test_an_executor_without_exchanges_cannot_be_a_rank() -> None:
    config = resolved_config()
    with pytest.raises(AssertionError, match="no exchanges"):
        EngineCore(FakeExecutor(config.num_kv_blocks, config.block_size, range(32)), config, lockstep=True)
