"""Contracts of the engine as a library: threads, loops, cancellation, health. Long: every way to leave. No HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing
from functools import partial

import pytest

from engine import async_engine
from engine.async_engine import AsyncEngine
from engine.core.core import EngineCore
from engine.core.step_clock import StepClock
from engine.fake.executor import FakeExecutor
from engine.fake.kv_mover import FakeMover
from engine.prefix import extend_chain
from engine.protocol import (
    AdapterRef,
    EngineError,
    ErrorCode,
    Event,
    Failed,
    Finished,
    FinishReason,
    RequestRejected,
    SamplingParams,
    Scheduled,
    Submission,
    TimeCause,
    Token,
)
from engine.step import ExecutorFatalError, StepPlan
from tests.support.conditions import until
from tests.support.engines import answer_alone, resolved_config

PROMPT = (1, 2, 3, 4, 5)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
MakeEngine = Callable[..., AsyncEngine]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    engines: list[AsyncEngine] = []

    def make(before_step: Callable[[StepPlan], None] | None = None, **overrides: object) -> AsyncEngine:
        config = resolved_config(**overrides)
        executor = FakeExecutor(
            config.num_kv_blocks, config.block_size, range(32), before_step=before_step, verify_prefix=True
        )
        engines.append(AsyncEngine(EngineCore(executor, config)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


async def collect(stream: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in stream]


async def submitted() -> None:
    """Let every task that was made run to its first wait, which comes after it has submitted its request."""
    await asyncio.sleep(0)


async def until_idle(engine: AsyncEngine) -> None:
    await until(lambda: not (load := engine.load()).num_running + load.num_waiting + load.num_held_blocks)


def test_what_a_grammar_and_an_adapter_cost_before_the_request_came_is_told_with_its_end(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: object) -> None:
        return

    async def main() -> Event:
        engine = make_engine()
        monkeypatch.setattr(engine._compilation, "compile", nothing)
        monkeypatch.setattr(engine.adapters, "have", nothing)
        monkeypatch.setattr(engine.adapters, "hold", lambda *_: None)
        now = iter(range(1000, 10**6))  # a second whenever the clock is read
        monkeypatch.setattr(async_engine.time, "monotonic", lambda: float(next(now)))
        spent = await engine.make_ready(
            Submission("r", PROMPT, SamplingParams(grammar="start: /a/"), adapter=AdapterRef("a", "/a", "0f"))
        )
        assert spent == {TimeCause.ADAPTER: 1.0, TimeCause.GRAMMAR: 1.0}
        monkeypatch.undo()
        sink = Sink()
        engine.submit(Submission("r", PROMPT, SamplingParams(max_tokens=1)), sink, spent)
        await until(lambda: sink.ended("r"))
        return sink.of("r")[-1]

    last = asyncio.run(main())
    assert isinstance(last, Finished)
    assert last.times is not None
    assert last.times.seconds[TimeCause.ADAPTER] == last.times.seconds[TimeCause.GRAMMAR] == 1.0
    assert TimeCause.PREFILL in last.times.seconds


def test_generate_yields_scheduled_tokens_and_one_terminal(make_engine: MakeEngine) -> None:
    async def main() -> None:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        events = await collect(make_engine().generate(PROMPT, params, "r"))
        assert events[0] == Scheduled("r", 0)
        assert [e.token_id for e in events[1:-1] if isinstance(e, Token)] == answer_alone(
            PROMPT, max_tokens=6, ignore_eos=True
        )
        assert isinstance(events[-1], Finished)

    asyncio.run(main())


def test_a_seed_is_drawn_where_none_is_given(make_engine: MakeEngine) -> None:
    async def main() -> None:
        params = SamplingParams(temperature=1, max_tokens=30, ignore_eos=True)
        engine = make_engine()
        first, second = [await collect(engine.generate(PROMPT, params, "r")) for _ in range(2)]
        assert first != second

    asyncio.run(main())


def test_streams_of_several_event_loops_share_one_engine(make_engine: MakeEngine) -> None:
    engine = make_engine()
    answers: list[list[Event]] = []

    def client(index: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        answers.append(asyncio.run(collect(engine.generate(PROMPT, params, f"r{index}"))))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    tokens = [[e.token_id for e in events if isinstance(e, Token)] for events in answers]
    assert tokens == [answer_alone(PROMPT, max_tokens=40, ignore_eos=True)] * 4


def test_a_busy_reader_gets_everything_queued_since_its_last_item(make_engine: MakeEngine) -> None:
    async def main() -> None:
        gate = threading.Semaphore(1)
        engine = make_engine(before_step=lambda plan: gate.acquire() and None)
        async with aclosing(engine.stream(Submission("r", PROMPT, LONG))) as stream:
            first = await anext(stream)
            assert isinstance(first[0], Scheduled)
            gate.release(1000)
            await until(lambda: not engine.load().num_running)
            rest = await anext(stream)
            assert len(first) + len(rest) == 1 + 200 + 1

    asyncio.run(main())


def test_closing_a_stream_early_aborts_its_request_and_frees_its_blocks(make_engine: MakeEngine) -> None:
    async def main() -> None:
        gate = threading.Semaphore(3)  # the request cannot finish by itself
        engine = make_engine(before_step=lambda plan: gate.acquire() and None)
        async with aclosing(engine.stream(Submission("r", PROMPT, LONG))) as stream:
            await anext(stream)
        gate.release(3)
        await until_idle(engine)
        gate.release(100)
        assert (await collect(engine.generate(PROMPT, SamplingParams(max_tokens=1), "r")))[-1].usage  # type: ignore[union-attr]

    asyncio.run(main())


def test_a_request_is_ended_for_the_reason_that_its_caller_gives(make_engine: MakeEngine) -> None:
    async def main() -> None:
        gate = threading.Semaphore(3)  # the request cannot finish by itself
        engine = make_engine(before_step=lambda plan: gate.acquire() and None)
        async with aclosing(engine.stream(Submission("r", PROMPT, LONG))) as stream:
            events = await anext(stream)
            engine.abort("r", FinishReason.STOP)
            engine.abort("r")  # the first reason counts
            gate.release(3)
            async for items in stream:
                events += items
        assert isinstance(last := events[-1], Finished)
        assert last.reason is FinishReason.STOP

    asyncio.run(main())


def test_a_cancelled_task_aborts_its_request_while_it_waits_for_the_first_token(make_engine: MakeEngine) -> None:
    async def main() -> None:
        gate = threading.Event()
        engine = make_engine(before_step=lambda plan: gate.wait() and None)
        task = asyncio.create_task(collect(engine.generate(PROMPT, LONG)))
        await submitted()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        await until_idle(engine)

    asyncio.run(main())


def test_aborting_by_id_ends_the_stream_with_that_reason(make_engine: MakeEngine) -> None:
    async def main() -> None:
        gate = threading.Semaphore(2)
        engine = make_engine(before_step=lambda plan: gate.acquire() and None)
        stream = engine.generate(PROMPT, LONG, "r")
        await anext(stream)
        engine.abort("r")
        engine.abort("unknown")
        gate.release(10)
        assert (await collect(stream))[-1].reason is FinishReason.ABORT  # type: ignore[union-attr]

    asyncio.run(main())


def test_a_rejected_request_raises_before_its_first_event_and_takes_nothing(make_engine: MakeEngine) -> None:
    async def main() -> None:
        engine = make_engine()
        with pytest.raises(RequestRejected, match="no tokens"):
            await collect(engine.generate((), LONG))
        answer = await collect(engine.generate(PROMPT, SamplingParams(max_tokens=1)))
        assert isinstance(answer[-1], Finished)

    asyncio.run(main())


def test_an_id_in_use_is_refused_until_its_request_has_ended(make_engine: MakeEngine) -> None:
    """A second stream under a live id would receive the first one's last events."""

    async def main() -> None:
        gate = threading.Semaphore(0)
        engine = make_engine(before_step=lambda plan: gate.acquire() and None)
        task = asyncio.create_task(collect(engine.generate(PROMPT, LONG, "r")))
        await submitted()
        try:
            with pytest.raises(RequestRejected, match="'r' is already in use"):
                async with asyncio.timeout(5):
                    await collect(engine.generate(PROMPT, LONG, "r"))
        finally:
            gate.release(1000)
        assert isinstance((await task)[-1], Finished)

    asyncio.run(main())


def test_one_request_more_than_may_run_and_wait_is_refused_with_both_limits(make_engine: MakeEngine) -> None:
    async def main() -> None:
        gate = threading.Semaphore(0)
        engine = make_engine(before_step=lambda plan: gate.acquire() and None, max_num_seqs=1, max_queued_requests=2)
        tasks = [asyncio.create_task(collect(engine.generate(PROMPT, LONG))) for _ in range(3)]
        await submitted()
        with pytest.raises(RequestRejected) as caught:
            await collect(engine.generate(PROMPT, LONG))
        assert (caught.value.code, caught.value.limit, caught.value.value) == (ErrorCode.QUEUE_FULL, 3, 4)
        assert "holds 3 requests: 1 may run (max_num_seqs 1) and 2 may wait (max_queued_requests 2)" in str(
            caught.value
        )
        gate.release(10_000)
        assert all(isinstance(events[-1], Finished) for events in await asyncio.gather(*tasks))

    asyncio.run(main())


def test_a_fatal_executor_error_fails_every_stream_once_and_turns_health_false(make_engine: MakeEngine) -> None:
    """S1-R14: after the panic of one worker, /health stayed at 200 and every later request failed."""

    async def main() -> None:
        gate = threading.Event()

        def die(plan: StepPlan) -> None:
            gate.wait()
            raise ExecutorFatalError("device lost")

        engine = make_engine(before_step=die)
        await engine.check_health()
        tasks = [asyncio.create_task(collect(engine.generate(PROMPT, LONG))) for _ in range(3)]
        await submitted()
        gate.set()
        for events in await asyncio.gather(*tasks):
            assert [type(e) for e in events if not isinstance(e, Scheduled)] == [Failed]
            assert events[-1].code is ErrorCode.ENGINE_DEAD  # type: ignore[union-attr]
        with pytest.raises(EngineError, match="ExecutorFatalError"):
            await engine.check_health()
        with pytest.raises(EngineError):
            await collect(engine.generate(PROMPT, LONG))

    asyncio.run(main())


def test_an_engine_that_hangs_in_a_step_is_unhealthy_until_the_step_ends_and_an_idle_one_never_is(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("engine.async_engine.StepClock", lambda: StepClock(lambda: now[0]))

    in_step, gate = threading.Event(), threading.Event()

    def hang(plan: StepPlan) -> None:
        in_step.set()
        gate.wait()

    async def main() -> None:
        engine = make_engine(before_step=hang, stall_timeout_s=20)
        task = asyncio.create_task(collect(engine.generate(PROMPT, LONG)))
        await until(in_step.is_set)
        now[0] += 20
        await engine.check_health()
        now[0] += 1
        with pytest.raises(EngineError, match=r"for 21 s \(stall_timeout_s is 20\)") as caught:
            await engine.check_health()
        assert caught.value.code is ErrorCode.ENGINE_DEAD
        gate.set()
        assert isinstance((await task)[-1], Finished)
        await until(lambda: engine._clock._began is None)
        now[0] += 1000
        await engine.check_health()

    asyncio.run(main())


def test_a_failed_step_fails_its_requests_and_the_engine_goes_on(make_engine: MakeEngine) -> None:
    async def main() -> None:
        faults = [RuntimeError("kernel fault")]

        def fail_once(plan: StepPlan) -> None:
            if faults:
                raise faults.pop()

        engine = make_engine(before_step=fail_once)
        assert isinstance((await collect(engine.generate(PROMPT, LONG)))[-1], Failed)
        assert isinstance((await collect(engine.generate(PROMPT, LONG)))[-1], Finished)
        await engine.check_health()

    asyncio.run(main())


def test_draining_finishes_what_is_live_and_refuses_what_is_new(make_engine: MakeEngine) -> None:
    async def main() -> None:
        gate = threading.Semaphore(0)
        engine = make_engine(before_step=lambda plan: gate.acquire() and None)
        task = asyncio.create_task(collect(engine.generate(PROMPT, LONG)))
        await submitted()
        drain = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        with pytest.raises(RequestRejected) as caught:
            await collect(engine.generate(PROMPT, LONG))
        assert caught.value.code is ErrorCode.DRAINING
        gate.release(1000)
        await drain
        assert isinstance((await task)[-1], Finished)

    asyncio.run(main())


def test_draining_waits_until_kv_is_in_the_lower_tiers() -> None:
    config = resolved_config()
    executor = FakeExecutor(
        config.num_kv_blocks, config.block_size, range(32), mover=partial(FakeMover, disk={}, held=True)
    )
    engine, mover = AsyncEngine(EngineCore(executor, config)), executor.mover
    assert mover is not None

    async def main() -> None:
        await collect(engine.generate(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True)))
        drain = asyncio.create_task(engine.drain())
        await until(lambda: mover.num_under_way > 0)
        assert not drain.done()
        await engine._between_steps(lambda: mover.release(100))
        await drain

    asyncio.run(main())
    engine.shutdown()


def test_shutting_down_fails_what_is_live_and_is_idempotent(make_engine: MakeEngine) -> None:
    async def main() -> None:
        gate = threading.Semaphore(0)
        engine = make_engine(before_step=lambda plan: gate.acquire() and None)
        task = asyncio.create_task(collect(engine.generate(PROMPT, LONG)))
        await submitted()
        gate.release(1)
        threading.Timer(0.05, gate.release, [1000]).start()
        await asyncio.to_thread(engine.shutdown)
        engine.shutdown()
        assert (await task)[-1].code is ErrorCode.ENGINE_DEAD  # type: ignore[union-attr]

    asyncio.run(main())


@pytest.mark.parametrize("overlap", [False, True])
def test_a_storm_of_clients_that_leave_at_random_moments_leaves_nothing_behind(
    make_engine: MakeEngine, overlap: bool
) -> None:
    async def main() -> None:
        engine = make_engine(max_num_batched_tokens=9, max_prefill_tokens=5, overlap=overlap)

        async def client(index: int) -> None:
            async with aclosing(engine.generate(tuple(range(1, 2 + index % 23)), LONG)) as stream:
                for _ in range(index % 17):
                    if isinstance(await anext(stream), Finished):
                        return

        await asyncio.gather(*(client(i) for i in range(200)))
        await until_idle(engine)
        assert isinstance((await collect(engine.generate(PROMPT, SamplingParams(max_tokens=1))))[-1], Finished)

    asyncio.run(main())


def test_two_engines_in_one_process_do_not_meet(make_engine: MakeEngine) -> None:
    async def main() -> None:
        engines = [make_engine(), make_engine()]
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        answers = await asyncio.gather(*(collect(e.generate(PROMPT, params, "same id")) for e in engines))
        assert answers[0] == answers[1]
        assert len(answers[0]) == 22

    asyncio.run(main())


def test_a_prompt_is_hashed_by_whoever_submits_it_and_no_step_waits_for_that(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32,768 tokens took the step thread 2.2 ms, in which every running stream waited, too."""
    hashed: list[str] = []

    def extend(chain: list[bytes], token_ids: list[int], num_blocks: int, *rest: object) -> None:
        if num_blocks > len(chain):
            hashed.append(threading.current_thread().name)
        extend_chain(chain, token_ids, num_blocks, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("engine.scheduling.request.extend_chain", extend)

    async def main() -> None:
        engine = make_engine()
        submitting = threading.current_thread().name
        for cached in (0, 8):
            events = await collect(engine.generate(PROMPT * 2, SamplingParams(max_tokens=1), "r"))
            assert events[0] == Scheduled("r", cached), "what was hashed there is found here"
        assert hashed == [submitting] * 2

    asyncio.run(main())


def test_a_burst_of_submissions_is_taken_in_by_parts_with_steps_in_between(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: however large the burst, all of it was taken in before the next step, and running streams waited."""
    monkeypatch.setattr("engine.async_engine.MAX_COMMANDS", 10)
    queued: list[int] = []
    stepping, burst = threading.Event(), threading.Event()

    def look(plan: StepPlan) -> None:
        if not stepping.is_set():
            stepping.set()
            assert burst.wait(30)
        queued.append(engine._core.load().num_waiting + engine._core.load().num_running)

    engine = make_engine(look, max_num_seqs=4)

    async def main() -> None:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        streams = [asyncio.create_task(collect(engine.generate(PROMPT, params, "first")))]
        await asyncio.to_thread(stepping.wait, 30)
        streams += [asyncio.create_task(collect(engine.generate(PROMPT, params, f"r{i}"))) for i in range(35)]
        await asyncio.sleep(0)  # each task runs up to its first wait, when its submission is queued
        burst.set()
        for events in await asyncio.gather(*streams):
            assert isinstance(events[-1], Finished)

    asyncio.run(main())
    assert queued[:5] == [1, 11, 21, 31, 36]


def test_an_engine_with_overlap_streams_to_the_last_event_and_then_rests(make_engine: MakeEngine) -> None:
    async def main() -> None:
        steps: list[StepPlan] = []
        engine = make_engine(before_step=steps.append, overlap=True)
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        for _ in range(2):
            async with asyncio.timeout(10):
                events = await collect(engine.generate(PROMPT, params, "r"))
            expected = answer_alone(PROMPT, max_tokens=6, ignore_eos=True)
            assert [e.token_id for e in events if isinstance(e, Token)] == expected
        assert len(steps) == 12

    asyncio.run(main())


# --- preparation: the prompt is still being made ---------------------------------------------------------------------


def run_within(seconds: float, main: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(main, seconds))


def test_a_request_runs_once_it_is_prepared_in_the_place_that_its_arrival_gave_it(make_engine: MakeEngine) -> None:
    """S5-R20: a request that was skipped while its image was decoded went to the end of the queue."""

    async def main() -> None:
        gate, ran, began = threading.Semaphore(0), [], threading.Event()

        def before_step(plan: StepPlan) -> None:
            began.set()
            gate.acquire()
            ran.extend(row.request_id for row in plan.rows)

        engine = make_engine(before_step=before_step, max_num_seqs=1)
        image: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        late = asyncio.create_task(collect(engine.generate(PROMPT, params, "late", prepared=image)))
        others = [asyncio.create_task(collect(engine.generate(PROMPT, params, name))) for name in ("first", "second")]
        try:
            await until(lambda: "second" in engine._streams and began.is_set())  # the first one runs
            image.set_result(None)
            await asyncio.sleep(0)
        finally:
            gate.release(100)
        await asyncio.gather(late, *others)
        assert ran == ["first"] * 2 + ["late"] * 2 + ["second"] * 2
        assert isinstance(late.result()[-1], Finished)

    run_within(20, main())


@pytest.mark.parametrize(
    ("error", "message"),
    [(ValueError("The image cannot be read."), "The image cannot be read."), (OSError(), "OSError")],
)
def test_a_preparation_that_raises_fails_its_request_with_what_it_said(
    make_engine: MakeEngine, error: Exception, message: str
) -> None:
    async def main() -> None:
        async def prepare() -> None:
            raise error

        engine = make_engine()
        events = await collect(engine.generate(PROMPT, LONG, "r", prepared=prepare()))
        assert events == [Failed("r", ErrorCode.PREPARATION_FAILED, message)]
        answer = await collect(engine.generate(PROMPT, SamplingParams(max_tokens=1), "r"))
        assert isinstance(answer[-1], Finished)
        await until_idle(engine)

    run_within(20, main())


def test_a_preparation_that_somebody_cancels_fails_its_request(make_engine: MakeEngine) -> None:
    """Otherwise it would wait for ever."""

    async def main() -> None:
        image: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        image.cancel()
        (event,) = await collect(make_engine().generate(PROMPT, LONG, "r", prepared=image))
        assert event == Failed("r", ErrorCode.PREPARATION_FAILED, "The preparation was cancelled.")

    run_within(20, main())


def test_leaving_early_cancels_the_preparation_and_aborts_the_request(make_engine: MakeEngine) -> None:
    async def main() -> None:
        started, cancelled = asyncio.Event(), asyncio.Event()

        async def prepare() -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        engine = make_engine()
        task = asyncio.create_task(collect(engine.generate(PROMPT, LONG, "r", prepared=prepare())))
        await started.wait()
        await until(lambda: engine.load().num_preparing == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await cancelled.wait()
        await until_idle(engine)
        assert engine.load().num_preparing == 0
        assert isinstance((await collect(engine.generate(PROMPT, SamplingParams(max_tokens=1))))[-1], Finished)

    run_within(20, main())


def test_the_preparation_of_a_refused_request_never_starts(make_engine: MakeEngine) -> None:
    async def main() -> None:
        started = []

        async def prepare() -> None:
            started.append(True)

        with pytest.raises(RequestRejected, match="no tokens"):
            await collect(make_engine().generate((), LONG, prepared=prepare()))
        await asyncio.sleep(0)
        assert not started

    run_within(20, main())


def test_a_late_preparation_does_not_reach_the_next_request_of_its_id(make_engine: MakeEngine) -> None:
    async def main() -> None:
        started, finish, finished = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def stubborn() -> None:
            started.set()
            while not finish.is_set():
                try:
                    await finish.wait()
                except asyncio.CancelledError:
                    continue  # ignores its cancellation
            finished.set()

        engine = make_engine()
        first = asyncio.create_task(collect(engine.generate(PROMPT, LONG, "r", prepared=stubborn())))
        await started.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await until(lambda: "r" not in engine._streams)
        image: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        second = asyncio.create_task(collect(engine.generate(PROMPT, LONG, "r", prepared=image)))
        await until(lambda: "r" in engine._streams)
        finish.set()
        await finished.wait()
        await asyncio.sleep(0)
        await collect(engine.generate(PROMPT, SamplingParams(max_tokens=1)))  # commands are served in order
        assert engine.load().num_preparing == 1
        image.set_result(None)
        assert isinstance((await second)[-1], Finished)

    run_within(20, main())


def test_draining_waits_for_what_is_being_prepared(make_engine: MakeEngine) -> None:
    async def main() -> None:
        engine = make_engine()
        image: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        late = asyncio.create_task(collect(engine.generate(PROMPT, LONG, "r", prepared=image)))
        await until(lambda: engine.load().num_preparing == 1)
        drain = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        assert not drain.done()
        image.set_result(None)
        await drain
        assert isinstance((await late)[-1], Finished)

    run_within(20, main())


def test_shutting_down_fails_what_is_being_prepared_and_cancels_the_preparation(make_engine: MakeEngine) -> None:
    async def main() -> None:
        engine = make_engine()
        image: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        late = asyncio.create_task(collect(engine.generate(PROMPT, LONG, "r", prepared=image)))
        await until(lambda: engine.load().num_preparing == 1)
        await asyncio.to_thread(engine.shutdown)
        assert (await late)[-1].code is ErrorCode.ENGINE_DEAD  # type: ignore[union-attr]
        assert image.cancelled()

    run_within(20, main())


# --- deadlines of an engine without work -----------------------------------------------------------------------------


def test_a_deadline_ends_a_request_although_the_engine_has_nothing_to_run(make_engine: MakeEngine) -> None:
    """Regression: the step thread slept until the next command,
    so a request whose prompt never came waited for ever."""

    async def main() -> None:
        engine = make_engine()
        image: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        (end,) = await collect(engine.generate(PROMPT, LONG, "r", timeout_s=0.02, prepared=image))
        assert isinstance(end, Failed)
        assert end.code is ErrorCode.DEADLINE_EXCEEDED
        assert image.cancelled(), "nobody waits for it any more"
        await until_idle(engine)

    run_within(20, main())


def test_the_deadline_of_an_ended_request_harms_nobody(make_engine: MakeEngine) -> None:
    async def main() -> None:
        engine = make_engine()
        params = SamplingParams(max_tokens=1)
        await collect(engine.generate(PROMPT, params, "r", timeout_s=0.01))
        image: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        late = asyncio.create_task(collect(engine.generate(PROMPT, params, "r", timeout_s=1000.0, prepared=image)))
        await until(lambda: engine._core.next_deadline is not None and len(engine._core._scheduler.deadlines) == 1)
        image.set_result(None)
        assert isinstance((await late)[-1], Finished)

    run_within(20, main())


def test_a_deadline_beyond_what_clocks_count_is_no_deadline(make_engine: MakeEngine) -> None:
    async def main() -> None:
        engine = make_engine()
        image: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        late = asyncio.create_task(collect(engine.generate(PROMPT, LONG, "r", timeout_s=1e300, prepared=image)))
        await until(lambda: engine.load().num_preparing == 1)
        image.set_result(None)
        assert isinstance((await late)[-1], Finished)
        await engine.check_health()

    run_within(20, main())


# --- the published load ----------------------------------------------------------------------------------------------


def test_the_published_load_says_who_waits_and_why(make_engine: MakeEngine) -> None:
    async def main() -> None:
        gate = threading.Semaphore(0)
        engine = make_engine(before_step=lambda plan: gate.acquire() and None, max_num_seqs=1)
        assert (engine.load().num_preparing, engine.load().wait_reason) == (0, None)
        image: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tasks = [asyncio.create_task(collect(engine.generate(PROMPT, LONG, "late", prepared=image)))]
        tasks += [asyncio.create_task(collect(engine.generate(PROMPT, LONG))) for _ in range(2)]
        try:
            await until(lambda: len(engine._streams) == 3)
            gate.release(2)
            await until(lambda: engine.load().num_steps == 2)
            load = engine.load()
            assert (load.num_running, load.num_waiting, load.num_preparing) == (1, 2, 1)
            assert (load.wait_reason, load.num_waiting_preempted) == ("seats", 0)
            assert load.num_reserved_blocks > 0
            assert (load.graph_hits, load.graph_misses) == ({}, {}), "this executor has none"
        finally:
            image.set_result(None)
            gate.release(10_000)
        await asyncio.gather(*tasks)
        await until_idle(engine)
        load = engine.load()
        assert (load.num_preparing, load.num_reserved_blocks, load.wait_reason) == (0, 0, None)

    run_within(60, main())


# --- the prefix cache -------------------------------------------------------------------------------------------------


def test_a_reset_makes_the_next_request_compute_its_prefix_again(make_engine: MakeEngine) -> None:
    async def main() -> None:
        engine = make_engine()

        async def num_cached() -> int:
            first, *_ = await collect(engine.generate(range(1, 17), SamplingParams(max_tokens=1)))
            assert isinstance(first, Scheduled)
            return first.cached_tokens

        assert await num_cached() == 0
        assert await num_cached() > 0
        assert await engine.reset_prefix_cache() > 0
        assert await engine.reset_prefix_cache() == 0
        assert await num_cached() == 0

    run_within(20, main())


def test_a_reset_of_a_dead_engine_raises_instead_of_hanging(make_engine: MakeEngine) -> None:
    async def main() -> None:
        engine = make_engine()
        engine.shutdown()
        with pytest.raises(EngineError) as caught:
            await engine.reset_prefix_cache()
        assert caught.value.code is ErrorCode.ENGINE_DEAD

    run_within(20, main())


# --- sinks: many requests of one reader ------------------------------------------------------------------------------


class Sink:
    """Keeps what each call brought. Belongs to the event loop that runs when it is made."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.items: list[list[Event]] = []
        self._fault = fault

    def receive(self, events: list[Event]) -> None:
        assert asyncio.get_running_loop() is self.loop
        self.items.append(events)
        if self._fault:
            raise self._fault

    def of(self, request_id: str) -> list[Event]:
        return [event for events in self.items for event in events if event.request_id == request_id]

    def ended(self, *request_ids: str) -> bool:
        return all(isinstance((self.of(name) or [None])[-1], Finished | Failed) for name in request_ids)


def test_a_sink_takes_a_steps_events_of_all_its_requests_in_one_call(make_engine: MakeEngine) -> None:
    async def main() -> None:
        gate = threading.Semaphore(0)
        plans: list[StepPlan] = []

        def before_step(plan: StepPlan) -> None:
            gate.acquire()
            plans.append(plan)

        engine, sink = make_engine(before_step), Sink()
        names = [f"r{i}" for i in range(5)]
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        for name in names:
            engine.submit(Submission(name, PROMPT, params), sink)
        gate.release(1000)
        await until(lambda: sink.ended(*names))
        assert len(sink.items) == len(plans)
        expected = answer_alone(PROMPT, max_tokens=20, ignore_eos=True)
        for name in names:
            first, *middle, last = sink.of(name)
            assert isinstance(first, Scheduled)
            assert isinstance(last, Finished)
            assert [event.token_id for event in middle if isinstance(event, Token)] == expected

    run_within(20, main())


def test_sinks_get_the_events_of_their_own_requests(make_engine: MakeEngine) -> None:
    async def main() -> None:
        engine, sinks = make_engine(), [Sink(), Sink()]
        for i in range(4):
            engine.submit(Submission(f"r{i}", PROMPT, LONG), sinks[i % 2])
        await until(lambda: sinks[0].ended("r0", "r2") and sinks[1].ended("r1", "r3"))
        assert {event.request_id for events in sinks[0].items for event in events} == {"r0", "r2"}
        assert {event.request_id for events in sinks[1].items for event in events} == {"r1", "r3"}

    run_within(20, main())


def test_a_sink_lives_on_the_event_loop_that_it_names(make_engine: MakeEngine) -> None:
    engine = make_engine()
    counts: list[int] = []

    def reader(index: int) -> None:
        async def main() -> None:
            sink = Sink()  # asserts at each call that it runs on its loop
            engine.submit(Submission(f"r{index}", PROMPT, LONG), sink)
            await until(lambda: sink.ended(f"r{index}"))
            counts.append(len(sink.of(f"r{index}")))

        run_within(20, main())

    threads = [threading.Thread(target=reader, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert counts == [1 + 200 + 1] * 3


def test_a_refused_submission_sends_its_sink_nothing_and_leaves_its_id_free(make_engine: MakeEngine) -> None:
    async def main() -> None:
        engine, sink = make_engine(), Sink()
        with pytest.raises(RequestRejected, match="no tokens"):
            engine.submit(Submission("r", (), LONG), sink)
        assert not sink.items
        engine.submit(Submission("r", PROMPT, SamplingParams(max_tokens=1)), sink)
        await until(lambda: sink.ended("r"))

    run_within(20, main())


def test_an_id_in_use_is_refused_whoever_uses_it(make_engine: MakeEngine) -> None:
    async def main() -> None:
        gate = threading.Semaphore(0)
        engine, sinks = make_engine(before_step=lambda plan: gate.acquire() and None), [Sink(), Sink()]
        engine.submit(Submission("r", PROMPT, LONG), sinks[0])
        with pytest.raises(RequestRejected, match="already in use"):
            engine.submit(Submission("r", PROMPT, LONG), sinks[1])
        gate.release(1000)
        await until(lambda: sinks[0].ended("r"))
        assert not sinks[1].items

    run_within(20, main())


def test_aborting_a_submission_ends_it_with_that_reason_and_frees_its_blocks(make_engine: MakeEngine) -> None:
    async def main() -> None:
        gate = threading.Semaphore(0)
        engine, sink = make_engine(before_step=lambda plan: gate.acquire() and None), Sink()
        for name in ("r", "other"):
            engine.submit(Submission(name, PROMPT, LONG), sink)
        gate.release(4)
        await until(lambda: len(sink.of("r")) > 2)
        engine.abort("r")
        gate.release(1000)
        await until(lambda: sink.ended("r", "other"))
        assert sink.of("r")[-1].reason is FinishReason.ABORT  # type: ignore[union-attr]
        assert sink.of("other")[-1].reason is FinishReason.LENGTH  # type: ignore[union-attr]
        await until_idle(engine)

    run_within(20, main())


def test_a_sink_that_raises_costs_the_others_of_its_loop_nothing(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        engine, broken, sound = make_engine(), Sink(ValueError("bug")), Sink()
        few = SamplingParams(max_tokens=3)  # each traceback takes its time
        for name, sink in (("a", broken), ("b", sound), ("c", broken), ("d", sound)):
            engine.submit(Submission(name, PROMPT, LONG if sink is sound else few), sink)
        await until(lambda: sound.ended("b", "d"))
        assert len(sound.of("b")) == len(sound.of("d")) == 1 + 200 + 1
        await engine.check_health()

    run_within(20, main())
    assert "a sink failed to take its events" in caplog.text


def test_a_sink_whose_loop_is_closed_costs_other_loops_nothing(make_engine: MakeEngine) -> None:
    gate = threading.Semaphore(0)
    engine = make_engine(before_step=lambda plan: gate.acquire() and None)

    async def leave() -> None:
        engine.submit(Submission("left", PROMPT, LONG), Sink())

    async def stay() -> None:
        sink = Sink()
        engine.submit(Submission("stays", PROMPT, LONG), sink)
        gate.release(1000)
        await until(lambda: sink.ended("stays"))
        await until_idle(engine)

    run_within(20, leave())
    run_within(20, stay())


def test_an_engine_that_ends_sends_every_sink_a_failure_for_each_of_its_requests(make_engine: MakeEngine) -> None:
    async def main() -> None:
        def die(plan: StepPlan) -> None:
            raise ExecutorFatalError("device lost")

        gate = threading.Event()
        engine, sinks = make_engine(before_step=lambda plan: gate.wait() and die(plan)), [Sink(), Sink()]
        for i in range(4):
            engine.submit(Submission(f"r{i}", PROMPT, LONG), sinks[i % 2])
        gate.set()
        await until(lambda: sinks[0].ended("r0", "r2") and sinks[1].ended("r1", "r3"))
        assert all(sinks[i % 2].of(f"r{i}")[-1].code is ErrorCode.ENGINE_DEAD for i in range(4))  # type: ignore[union-attr]
        with pytest.raises(EngineError, match="ExecutorFatalError"):
            engine.submit(Submission("late", PROMPT, LONG), sinks[0])
        assert not sinks[0].of("late")

    run_within(20, main())


def test_draining_waits_for_submissions_and_refuses_new_ones(make_engine: MakeEngine) -> None:
    async def main() -> None:
        gate = threading.Semaphore(0)
        engine, sink = make_engine(before_step=lambda plan: gate.acquire() and None), Sink()
        engine.submit(Submission("r", PROMPT, LONG), sink)
        drain = asyncio.ensure_future(engine.drain())
        await asyncio.sleep(0)
        with pytest.raises(RequestRejected) as caught:
            engine.submit(Submission("late", PROMPT, LONG), sink)
        assert caught.value.code is ErrorCode.DRAINING
        assert not drain.done()
        gate.release(1000)
        await drain
        await until(lambda: sink.ended("r"))

    run_within(20, main())
