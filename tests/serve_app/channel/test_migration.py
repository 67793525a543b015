"""Contracts of streams that move to another engine replica without the client noticing. Long: each place of a failure.
Never uses Ray or sockets: attempts are scripted, and answers are an engine's own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.async_engine import AsyncEngine
from engine.build.executor import create_executor
from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.protocol import (
    TERMINAL,
    EngineError,
    ErrorCode,
    Event,
    Failed,
    Finished,
    FinishReason,
    Pooled,
    PromptLogprobs,
    RequestRejected,
    SamplingParams,
    Scheduled,
    Submission,
    Token,
    Usage,
)
from loadtest.sim.virtual_loop import run
from serve_app.channel import migration
from serve_app.channel.migration import Attempt, Migration
from serve_app.engines.engine_client import StreamRecord
from tests.support.conditions import until
from tests.support.engines import RecordingCore
from tests.support.tiny_models import save_model
from tests.support.traffic import PARAMS, PROMPTS

pytestmark = pytest.mark.anyio

TIMEOUT_S = 20  # only ever reached by a failure
MAX_MODEL_LEN = 256
PROMPT = (1, 2, 3, 4, 5)
TEN = SamplingParams(temperature=1, seed=1, max_tokens=10, ignore_eos=True)
DEAD = EngineError(ErrorCode.ENGINE_DEAD, "gone")


@pytest.fixture(scope="module", autouse=True)
def no_backoff() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migration, "FIRST_BACKOFF_S", 0)
        yield


def undisturbed(submission: Submission) -> list[Event]:
    """Return what one replica answers, using an engine that has seen nothing before."""
    core = RecordingCore()
    core.send_params(
        submission.request_id, submission.prompt_token_ids, submission.sampling, pooling=submission.pooling
    )
    core.run()
    return core.events[submission.request_id]


def anonymous(events: Sequence[Event]) -> list[Event]:
    """Leave out the request id, which differs between attempts."""
    return [
        event._replace(request_id="") if isinstance(event, Token) else replace(event, request_id="") for event in events
    ]


@dataclass
class Script:
    """How an attempt goes: so many of the answer's events, in batches of these sizes, then what happens."""

    num_events: int | None = None
    """How many events come; None: all."""
    batches: tuple[int, ...] = (1,)
    end: Exception | None = None
    """What `take` then raises; None: it waits for ever."""
    as_event: bool = False
    """Whether the failure comes as a Failed event, in one batch with what came before."""
    replica_id: str | None = "replica"
    late_s: float = 0
    """How long the first `take` waits."""


@dataclass
class ScriptedAttempt:
    """An attempt that follows a script over an engine's own answer."""

    script: Script
    submission: Submission
    num_closed: int = 0
    num_taken: int = 0
    was_complete: bool = False
    _is_begun: bool = False
    _items: list[list[Event]] = field(default_factory=list)

    def __post_init__(self) -> None:
        answer = undisturbed(self.submission) if self.script.num_events != 0 else []
        events = answer[: self.script.num_events]
        ended = bool(events) and isinstance(events[-1], TERMINAL)
        sizes = itertools.cycle(self.script.batches)
        while events:
            size = next(sizes)
            self._items.append(events[:size])
            events = events[size:]
        if self.script.as_event and isinstance(self.script.end, EngineError) and not ended:
            failed = Failed(self.submission.request_id, self.script.end.code, self.script.end.message)
            self._items = [*self._items[:-1], [*(self._items[-1] if self._items else []), failed]]

    @property
    def replica_id(self) -> str | None:
        return self.script.replica_id

    async def take(self) -> list[Event]:
        assert not self.num_closed, "taken from after it was closed"
        if self.script.late_s and not self._is_begun:
            await asyncio.sleep(self.script.late_s)
        self._is_begun = True
        if self._items:
            self.num_taken += 1
            return self._items.pop(0)
        if self.script.end is None:
            await asyncio.Event().wait()
            raise AssertionError
        raise self.script.end

    def close(self, *, complete: bool = False) -> None:
        self.was_complete = complete
        self.num_closed += 1


class Replicas:
    """Starts an attempt for each script, in turn, and keeps what it was asked for."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.attempts: list[ScriptedAttempt] = []
        self.avoided: list[tuple[str, ...]] = []

    def start(self, submission: Submission, avoid: tuple[str, ...]) -> Attempt:
        assert all(attempt.num_closed for attempt in self.attempts), "two attempts at a time"
        self.avoided.append(avoid)
        self.attempts.append(ScriptedAttempt(self.scripts.pop(0) if self.scripts else Script(), submission))
        return self.attempts[-1]

    @property
    def submissions(self) -> list[Submission]:
        return [attempt.submission for attempt in self.attempts]


def moving(max_migrations: int = 3, timeout_s: float = TIMEOUT_S) -> Migration:
    return Migration(max_migrations, timeout_s, MAX_MODEL_LEN)


async def collect(stream: AsyncGenerator[list[Event], None], into: list[Event] | None = None) -> list[Event]:
    events = [] if into is None else into
    async with asyncio.timeout(TIMEOUT_S), aclosing(stream):
        async for item in stream:
            assert item, "an empty item"
            events += item
    return events


def asking(sampling: SamplingParams = TEN, prompt: tuple[int, ...] = PROMPT, **fields: Any) -> Submission:
    return Submission("r", prompt, sampling, **fields)


def failing(num_events: int, **options: Any) -> Script:
    return Script(num_events, end=options.pop("end", DEAD), **options)


# --- the client cannot tell ------------------------------------------------------------------------------------------

FAILURES = st.builds(
    Script,
    num_events=st.integers(0, 40),
    batches=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    end=st.sampled_from([DEAD, EngineError(ErrorCode.DRAINING, "draining")]),
    as_event=st.booleans(),
)


@settings(deadline=None, max_examples=50)
@given(PROMPTS, PARAMS, st.lists(FAILURES, min_size=1, max_size=4))
def test_an_answer_from_several_replicas_is_that_of_one(
    prompt: tuple[int, ...], params: SamplingParams, failures: list[Script]
) -> None:
    async def main() -> None:
        replicas = Replicas(*failures)
        events = await collect(moving(len(failures)).stream(asking(params, prompt), replicas.start))
        assert anonymous(events) == anonymous(undisturbed(asking(params, prompt)))
        assert [attempt.num_closed for attempt in replicas.attempts] == [1] * len(replicas.attempts)

    asyncio.run(main())


@pytest.mark.parametrize("as_event", [False, True], ids=["raised", "event"])
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(TEN, id="length"),
        pytest.param(replace(TEN, ignore_eos=False, max_tokens=100, stop_token_ids=tuple(range(0, 32, 6))), id="stop"),
        pytest.param(replace(TEN, stop_token_ids=tuple(range(12)), min_tokens=5), id="min_tokens"),
        pytest.param(replace(TEN, logprobs=3, prompt_logprobs=2), id="logprobs"),
        pytest.param(replace(TEN, max_tokens=0, prompt_logprobs=1), id="scoring"),
        pytest.param(replace(TEN, temperature=0), id="greedy"),
    ],
)
async def test_a_failure_after_any_event_changes_nothing(sampling: SamplingParams, as_event: bool) -> None:
    """Regression: tokens that came in one batch with the failure were counted as sent, but never were."""
    whole = undisturbed(asking(sampling))
    for cut in range(len(whole)):
        replicas = Replicas(failing(cut, batches=(3,), as_event=as_event))
        events = await collect(moving().stream(asking(sampling), replicas.start))
        assert anonymous(events) == anonymous(whole), f"cut after {cut} events"


async def test_an_answer_of_which_only_the_last_event_is_missing_asks_nobody_again() -> None:
    whole = undisturbed(asking())
    replicas = Replicas(failing(len(whole) - 1))
    assert anonymous(await collect(moving().stream(asking(), replicas.start))) == anonymous(whole)
    assert len(replicas.attempts) == 1
    assert isinstance(whole[-1], Finished)
    assert whole[-1].reason is FinishReason.LENGTH


async def test_a_seed_and_a_length_are_chosen_once_where_none_are_given() -> None:
    sampling = SamplingParams(temperature=1, ignore_eos=True)
    replicas = Replicas(failing(20), failing(40))
    events = await collect(moving().stream(asking(sampling), replicas.start))
    pinned = replicas.submissions[0].sampling
    assert pinned.max_tokens == MAX_MODEL_LEN - len(PROMPT)
    assert {submission.sampling.seed for submission in replicas.submissions} == {pinned.seed}
    assert anonymous(events) == anonymous(undisturbed(asking(pinned)))


async def test_two_answers_without_a_seed_differ() -> None:
    sampling = SamplingParams(temperature=1, max_tokens=30, ignore_eos=True)
    first, second = [await collect(moving().stream(asking(sampling), Replicas().start)) for _ in range(2)]
    assert first != second


async def test_the_prompts_log_probabilities_are_asked_for_until_they_have_come() -> None:
    replicas = Replicas(failing(1), failing(3))
    events = await collect(moving().stream(asking(replace(TEN, prompt_logprobs=2)), replicas.start))
    assert [submission.sampling.prompt_logprobs for submission in replicas.submissions] == [2, 2, None]
    assert sum(isinstance(event, PromptLogprobs) for event in events) == 1


async def test_a_vector_is_sent_once_wherever_its_replica_fails() -> None:
    submission = replace(asking(SamplingParams(max_tokens=0)), pooling="mean")
    whole = undisturbed(submission)
    assert [type(event) for event in whole] == [Scheduled, Pooled, Finished]
    for cut in range(len(whole)):
        events = await collect(moving().stream(submission, Replicas(failing(cut)).start))
        assert anonymous(events) == anonymous(whole), f"cut after {cut} events"


async def test_tokens_are_counted_once_and_cached_ones_are_those_of_the_first_replica() -> None:
    replicas = Replicas(failing(5), failing(4))
    events = await collect(moving().stream(asking(), replicas.start))
    assert events[0] == Scheduled("r", 0)
    assert isinstance(events[-1], Finished)
    assert events[-1].usage == Usage(len(PROMPT), 10, 0)
    assert [len(submission.prompt_token_ids) for submission in replicas.submissions] == [5, 9, 12]


# --- when to move ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_migrations", [0, 1, 3])
async def test_a_request_moves_as_often_as_it_may_and_then_fails_with_the_last_error(max_migrations: int) -> None:
    failures = [failing(2, end=EngineError(ErrorCode.ENGINE_DEAD, f"failure {i}")) for i in range(5)]
    replicas, got = Replicas(*failures), list[Event]()
    with pytest.raises(EngineError, match=f"failure {max_migrations}"):
        await collect(moving(max_migrations).stream(asking(), replicas.start), got)
    assert len(replicas.attempts) == max_migrations + 1
    assert anonymous(got) == anonymous(undisturbed(asking()))[: len(got)]


@pytest.mark.parametrize("as_event", [False, True], ids=["raised", "event"])
@pytest.mark.parametrize(
    "code", [ErrorCode.STEP_FAILED, ErrorCode.INVALID_PARAMETER, ErrorCode.DEADLINE_EXCEEDED, ErrorCode.QUEUE_FULL]
)
async def test_a_failure_of_the_request_itself_is_reported_and_not_repeated_elsewhere(
    code: ErrorCode, as_event: bool
) -> None:
    replicas = Replicas(failing(3, end=EngineError(code, "no"), as_event=as_event))
    got: list[Event] = []
    stream = moving().stream(asking(), replicas.start)
    if as_event:
        await collect(stream, got)
        assert got[-1] == Failed("r", code, "no")
    else:
        with pytest.raises(EngineError, match="no"):
            await collect(stream, got)
    assert [type(event) for event in got[:3]] == [Scheduled, Token, Token]
    assert [attempt.num_closed for attempt in replicas.attempts] == [1]


@pytest.mark.parametrize("code", [ErrorCode.QUEUE_FULL, ErrorCode.ADAPTER_UNAVAILABLE])
async def test_a_full_engine_refuses_a_new_request_and_not_one_that_was_accepted_before(code: ErrorCode) -> None:
    full = failing(0, end=RequestRejected(code, "full", limit=1, value=2))
    with pytest.raises(RequestRejected, match="full"):
        await collect(moving().stream(asking(), Replicas(full).start))
    replicas = Replicas(failing(3), full, full)
    events = await collect(moving().stream(asking(), replicas.start))
    assert anonymous(events) == anonymous(undisturbed(asking()))
    assert len(replicas.attempts) == 4


async def test_replicas_that_failed_are_kept_away_from() -> None:
    scripts = [failing(2, replica_id="a"), failing(0, replica_id=None), failing(2, replica_id="b")]
    replicas = Replicas(*scripts)
    await collect(moving().stream(asking(), replicas.start))
    assert replicas.avoided == [(), ("a",), ("a",), ("a", "b")]


async def test_each_attempt_has_an_id_of_its_own() -> None:
    """An engine refuses an id that is in use, and may still have to end the attempt before."""
    replicas = Replicas(failing(2), failing(2))
    await collect(moving().stream(asking(), replicas.start))
    assert len({submission.request_id for submission in replicas.submissions}) == 3


async def test_a_request_that_moves_stays_its_sessions() -> None:
    """The next engine keeps the KV for the conversation's next turn, too."""
    replicas = Replicas(failing(0), failing(2))
    await collect(moving().stream(asking(session="agent-7", tenant="ann", cache_salt="s"), replicas.start))
    told = [(submission.tenant, submission.cache_salt, submission.session) for submission in replicas.submissions]
    assert told == [("ann", "s", "agent-7")] * 3


# --- time ------------------------------------------------------------------------------------------------------------


async def test_a_deadline_shrinks_by_the_time_that_has_passed_and_a_wait_for_the_first_run_ends_with_it() -> None:
    loop = asyncio.get_running_loop()
    real, passed = loop.time, [0.0]
    loop.time = lambda: real() + passed[0]  # type: ignore[method-assign]
    replicas = Replicas(failing(0), failing(1), failing(3))
    start = _passing(replicas, passed, 40.0)
    async for _ in moving(timeout_s=1e6).stream(asking(timeout_s=1000.0, queue_timeout_s=100.0), start):
        pass
    first, second, third, fourth = replicas.submissions
    assert (first.timeout_s, first.queue_timeout_s) == (1000.0, 100.0)
    assert second.timeout_s == pytest.approx(960, abs=5)
    assert second.queue_timeout_s == pytest.approx(60, abs=5), "it has not run yet"
    assert third.timeout_s == pytest.approx(920, abs=5)
    assert third.queue_timeout_s is None
    assert fourth.timeout_s == pytest.approx(880, abs=5)


def _passing(
    replicas: Replicas, passed: list[float], seconds: float
) -> Callable[[Submission, tuple[str, ...]], Attempt]:
    """Make each attempt take so long, on a clock turned by hand."""

    def start(submission: Submission, avoid: tuple[str, ...]) -> Attempt:
        attempt = replicas.start(submission, avoid)
        passed[0] += seconds
        return attempt

    return start


async def test_a_deadline_that_has_passed_is_still_a_valid_one() -> None:
    replicas = Replicas(failing(2))
    await collect(moving().stream(asking(timeout_s=1e-9), replicas.start))
    assert replicas.submissions[1].timeout_s == 0.001


@pytest.mark.parametrize("is_complete", [True, False])
async def test_the_last_attempt_learns_whether_its_reader_has_all_it_wants(is_complete: bool) -> None:
    replicas = Replicas(Script(num_events=2, end=DEAD), Script())
    record = StreamRecord()
    async with aclosing(moving().stream(asking(), replicas.start, record)) as stream:
        async for _ in stream:
            if len(replicas.attempts) == 2:
                record.is_complete = is_complete
                break
    assert [attempt.was_complete for attempt in replicas.attempts] == [False, is_complete]
    assert [(move.code, move.replica_id) for move in record.moves] == [(ErrorCode.ENGINE_DEAD, "replica")]


SILENT = Script(0)
SLOW_FAILURE = failing(0, late_s=25)


@pytest.mark.parametrize(
    ("max_migrations", "others", "most_s"),
    [(1, SILENT, 60), (3, SILENT, 60), (8, SILENT, 60), (1, SLOW_FAILURE, 25), (3, SLOW_FAILURE, 60)],
    ids=["1 silent", "3 silent", "8 silent", "1 slow", "3 slow"],
)
def test_a_stream_looks_for_an_engine_no_longer_than_the_timeout_however_often_it_may_move(
    max_migrations: int, others: Script, most_s: float
) -> None:
    """Serve holds a call while no replica is there. Regression: each move had the whole timeout, so a stream waited for
    `max_migrations` times as long as the setting says."""
    replicas = Replicas(failing(3), *[others] * 8)

    async def main() -> float:
        with pytest.raises(EngineError) as caught:
            async for _ in moving(max_migrations, timeout_s=60).stream(asking(), replicas.start):
                pass
        assert caught.value.code is ErrorCode.ENGINE_DEAD
        return asyncio.get_running_loop().time()

    assert run(main()) == most_s
    assert [attempt.num_closed for attempt in replicas.attempts] == [1] * len(replicas.attempts)


def test_a_stream_may_wait_as_long_again_once_another_engine_had_begun() -> None:
    replicas = Replicas(failing(3), failing(3, late_s=40), Script(late_s=40))

    async def main() -> tuple[list[Event], float]:
        stream = moving(timeout_s=60).stream(asking(), replicas.start)
        events = [event async for batch in stream for event in batch]
        return events, asyncio.get_running_loop().time()

    events, waited_s = run(main())
    assert anonymous(events) == anonymous(undisturbed(asking()))
    assert waited_s == 80


async def test_the_wait_for_a_first_replica_and_the_gaps_within_an_answer_have_no_limit_of_their_own() -> None:
    replicas = Replicas(Script(0))
    task = asyncio.ensure_future(collect(moving(timeout_s=0.001).stream(asking(), replicas.start)))
    replicas_later = Replicas(failing(2), Script(3))
    later = asyncio.ensure_future(collect(moving(timeout_s=0.001).stream(asking(), replicas_later.start)))
    await asyncio.wait([task, later], timeout=0.1)
    assert not task.done()
    assert len(replicas_later.attempts) >= 2
    for waiting in (task, later):
        waiting.cancel()
    await asyncio.gather(task, later, return_exceptions=True)


def moved_at(replicas: Replicas, max_migrations: int) -> list[float]:
    """Run an answer in simulated time, and return when it moved."""
    record = StreamRecord()

    async def main() -> None:
        await collect(moving(max_migrations, timeout_s=100.0).stream(asking(), replicas.start, record))

    run(main())
    return [move.at for move in record.moves]


def test_a_stream_that_moves_often_pauses_no_longer_than_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "FIRST_BACKOFF_S", 0.05)
    assert moved_at(Replicas(*[failing(2)] * 8), 8) == pytest.approx([0.05 * number for number in range(8)])


@pytest.mark.parametrize("as_event", [False, True])
def test_pauses_double_up_to_a_limit_while_nobody_answers(as_event: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "FIRST_BACKOFF_S", 0.05)
    monkeypatch.setattr(migration, "LONGEST_BACKOFF_S", 0.4)
    moved = moved_at(Replicas(*[failing(0, as_event=as_event)] * 8), 8)
    pauses = [then - before for before, then in itertools.pairwise(moved)]
    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.4, 0.4, 0.4])


# --- readers that leave ----------------------------------------------------------------------------------------------


async def test_a_stream_that_is_closed_before_its_first_event_asks_nobody() -> None:
    replicas = Replicas()
    await moving().stream(asking(), replicas.start).aclose()
    assert not replicas.attempts


@pytest.mark.parametrize("num_items", [1, 2, 5])
async def test_closing_a_stream_closes_its_attempt_once(num_items: int) -> None:
    replicas = Replicas(failing(3))
    stream = moving().stream(asking(), replicas.start)
    for _ in range(num_items):
        await anext(stream)
    await stream.aclose()
    assert [attempt.num_closed for attempt in replicas.attempts] == [1] * len(replicas.attempts)
    assert len(replicas.attempts) == (2 if num_items == 5 else 1)


@pytest.mark.parametrize("scripts", [[Script(0)], [Script(4)], [failing(2), Script(0)], [failing(2), Script(2)]])
async def test_cancelling_whoever_waits_closes_the_attempt_once(scripts: list[Script]) -> None:
    replicas, got = Replicas(*scripts), list[Event]()
    task = asyncio.ensure_future(collect(moving().stream(asking(), replicas.start), got))
    total = sum(script.num_events or 0 for script in scripts) - (len(scripts) - 1 if scripts[-1].num_events else 0)
    await until(lambda: len(got) >= total and len(replicas.attempts) >= len(scripts))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [attempt.num_closed for attempt in replicas.attempts] == [1] * len(scripts)


async def test_cancelling_between_two_attempts_starts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "FIRST_BACKOFF_S", 1000)
    replicas = Replicas(failing(2))
    task = asyncio.ensure_future(collect(moving().stream(asking(), replicas.start)))
    await until(lambda: replicas.attempts and replicas.attempts[0].num_closed)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [attempt.num_closed for attempt in replicas.attempts] == [1]


# --- a model ---------------------------------------------------------------------------------------------------------


class EngineAttempt:
    """A call of a real engine that fails after so many events."""

    replica_id = "replica"

    def __init__(self, engine: AsyncEngine, submission: Submission, num_events: int | None) -> None:
        self._left = num_events
        self._stream = engine.stream(submission)
        self._queued: list[Event] = []
        self.closed: asyncio.Future[None] | None = None

    async def take(self) -> list[Event]:
        if self._left == 0:
            raise DEAD
        events = (self._queued or await anext(self._stream))[: self._left]
        if self._left is not None:
            self._left -= len(events)
        return events

    def close(self, *, complete: bool = False) -> None:
        self.closed = asyncio.ensure_future(self._stream.aclose())


@pytest.fixture(scope="module")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    directory = tmp_path_factory.mktemp("llama")
    save_model("llama", directory)
    config = EngineConfig(dtype="float32", num_kv_blocks=64, max_num_seqs=4, max_num_batched_tokens=16, num_threads=1)
    executor, resolved = create_executor(directory, config)
    engine = AsyncEngine(EngineCore(executor, resolved))
    yield engine
    engine.shutdown()


async def _answer(engine: AsyncEngine, sampling: SamplingParams, cuts: list[int]) -> tuple[list[int], Event]:
    attempts: list[EngineAttempt] = []

    def start(submission: Submission, avoid: tuple[str, ...]) -> Attempt:
        attempts.append(EngineAttempt(engine, submission, cuts.pop(0) if cuts else None))
        return attempts[-1]

    prompt = tuple(range(3, 40))
    events = await collect(Migration(3, TIMEOUT_S, 256).stream(Submission("r", prompt, sampling), start))
    await asyncio.gather(*(attempt.closed for attempt in attempts if attempt.closed))
    assert isinstance(events[-1], TERMINAL)
    return [event.token_id for event in events if isinstance(event, Token)], events[-1]


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), id="greedy"),
        pytest.param(SamplingParams(temperature=1, seed=11, max_tokens=12, ignore_eos=True), id="seeded"),
        pytest.param(SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=5, max_tokens=12), id="filtered"),
    ],
)
async def test_a_models_answer_is_the_same_wherever_its_replica_fails(
    tiny_engine: AsyncEngine, sampling: SamplingParams
) -> None:
    tokens, end = await _answer(tiny_engine, sampling, [])
    assert isinstance(end, Finished)
    for cut in range(len(tokens) + 2):
        moved, moved_end = await _answer(tiny_engine, sampling, [cut])
        assert moved == tokens, f"cut after {cut} events"
        assert isinstance(moved_end, Finished)
        assert moved_end.reason is end.reason
        assert moved_end.usage.completion_tokens == end.usage.completion_tokens
