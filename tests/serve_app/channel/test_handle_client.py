"""Contracts of the way from the ingress to the engine replicas. Long: each failure of Ray's, each way to leave.
Never starts Ray: the handle is scripted, or runs an engine of this process over a real channel."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    RequestCancelledError,
)

from engine.multimodal_inputs import SpanInput
from engine.protocol import (
    AdapterRef,
    EngineError,
    ErrorCode,
    Event,
    Finished,
    FinishReason,
    RequestRejected,
    SamplingParams,
    Submission,
    TimeCause,
    Token,
    Usage,
)
from serve_app.channel import handle_client, migration
from serve_app.channel.frames import Entry, Frame, Reply, decode_frame, encode_frame, pack, unpack
from serve_app.channel.handle_client import HandleClient
from serve_app.channel.migration import Migration
from serve_app.channel.token_receiver import TokenReceiver
from serve_app.channel.token_sender import TokenSender
from serve_app.engines import engine_count, liveness, versions
from serve_app.engines.engine_call import EngineCall
from serve_app.engines.engine_client import StreamRecord
from serve_app.engines.versions import EngineVersion
from tests.serve_app.channel.rig import LONG, Rig, rig, spied_aborts
from tests.support.conditions import until
from tests.support.engines import answer_alone

pytestmark = pytest.mark.anyio

PROMPT = (1, 2, 3, 4, 5)
EXPECTED = answer_alone(PROMPT, max_tokens=100, ignore_eos=True)
Answer = bytes | EngineError | BaseException
Method = Callable[[EngineCall], Awaitable[bytes | EngineError]]


@pytest.fixture(scope="module", autouse=True)
def no_backoff() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migration, "FIRST_BACKOFF_S", 0)
        yield


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_deployments", {})
    monkeypatch.setattr(liveness, "_deployments", {})


class Response:
    """What a call returns at once, as Serve's does: it is awaited for the result, and cancelled by its caller."""

    def __init__(self, work: Awaitable[bytes | EngineError], *, deaf: bool) -> None:
        self.task = asyncio.ensure_future(work)
        self.num_cancelled = 0
        self._deaf = deaf

    def __await__(self) -> Generator[Any, None, bytes | EngineError]:
        try:
            return (yield from asyncio.shield(self.task).__await__())
        except asyncio.CancelledError:
            if self.num_cancelled:
                raise RequestCancelledError("id") from None
            raise

    def cancel(self) -> None:
        self.num_cancelled += 1
        if not self._deaf:
            self.task.cancel()


class Handle:
    """A deployment whose replicas answer with these methods, one for each call;
    the last one serves all further calls."""

    def __init__(self, *methods: Method, deaf: bool = False) -> None:
        """`deaf`: cancelling a call does not reach its replica."""
        self.generate = self
        self.calls: list[EngineCall] = []
        self.responses: list[Response] = []
        self._methods = methods
        self._deaf = deaf

    def remote(self, call: EngineCall) -> Response:
        self.calls.append(call)
        method = self._methods[min(len(self.calls), len(self._methods)) - 1]
        self.responses.append(Response(method(call), deaf=self._deaf))
        return self.responses[-1]

    @property
    def num_cancelled(self) -> list[int]:
        return [response.num_cancelled for response in self.responses]

    async def end(self) -> None:
        for response in self.responses:
            response.task.cancel()
        await asyncio.gather(*(response.task for response in self.responses), return_exceptions=True)


def running(sender: TokenSender) -> Method:
    """Return a method that does what an engine replica does with a call."""

    async def generate(call: EngineCall) -> bytes | EngineError:
        try:
            return await sender.generate(call)
        except EngineError as error:
            return error

    return generate


def answering(answer: Answer) -> Method:
    async def generate(call: EngineCall) -> bytes | EngineError:
        if isinstance(answer, BaseException) and not isinstance(answer, EngineError):
            raise answer
        return answer

    return generate


async def never(call: EngineCall) -> bytes:
    await asyncio.Event().wait()
    raise AssertionError


class Ingress:
    """A client of a rig's engine, and what it uses."""

    def __init__(self, engine: Rig, handle: Handle, max_migrations: int) -> None:
        self.engine = engine
        self.handle = handle
        self.receiver: TokenReceiver = engine.receiver()
        deployment: Any = handle
        moving = Migration(max_migrations, 20.0, 256)
        self.client = HandleClient(engine=deployment, ingress=deployment, receiver=self.receiver, migration=moving)

    def stream(self, request_id: str = "r", sampling: SamplingParams = LONG) -> AsyncGenerator[list[Event], None]:
        return self.client.stream(Submission(request_id, PROMPT, sampling))

    async def nothing_left(self) -> None:
        await until(lambda: not handle_client._answers)
        assert not self.receiver._streams
        assert not self.client._attempts
        await self.engine.idle()


@asynccontextmanager
async def ingress(
    *methods: Method, gated: bool = False, deaf: bool = False, max_migrations: int = 3
) -> AsyncIterator[Ingress]:
    """Make an ingress. `methods` answer the first calls, the engine all others.
    An exception that a task never reports is an error."""
    gc.freeze()  # what exists already is not looked at by the collection below, which would take seconds
    unsaid: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unsaid.append(context))
    async with rig(gated=gated) as engine:
        handle = Handle(*methods, running(engine.sender), deaf=deaf)
        try:
            yield Ingress(engine, handle, max_migrations)
        finally:
            engine.gate.open()
            await handle.end()
    gc.collect()
    assert not unsaid


async def collect(stream: AsyncGenerator[list[Event], None], into: list[Event] | None = None) -> list[Event]:
    events = [] if into is None else into
    async with aclosing(stream):
        async for item in stream:
            events += item
    return events


def tokens(events: list[Event]) -> list[int]:
    return [event.token_id for event in events if isinstance(event, Token)]


# --- answers and failures --------------------------------------------------------------------------------------------


async def test_an_answer_streams_to_its_end_and_its_call_is_not_cancelled() -> None:
    async with ingress() as at:
        events = await collect(at.stream())
        assert tokens(events) == EXPECTED
        assert isinstance(events[-1], Finished)
        await until(lambda: at.handle.responses[0].task.done())
        assert at.handle.num_cancelled == [0]
        await at.nothing_left()


async def test_an_answer_of_which_the_channel_brings_nothing_is_that_of_the_call() -> None:
    events: list[Event] = [Token("r", 7), Finished("r", FinishReason.LENGTH, Usage(5, 1, 0))]

    async def generate(call: EngineCall) -> bytes:
        return encode_frame(Frame("e", [Entry(call.stream_id, 0, [pack(event) for event in events])]))

    async with ingress(generate) as at:
        assert await collect(at.stream()) == events
        await at.nothing_left()


async def test_a_call_carries_the_session_and_the_replicas_to_keep_away_from() -> None:
    async with ingress(gated=True) as at:
        stream = at.client.stream(Submission("r", PROMPT, LONG), session="alice")
        task = asyncio.ensure_future(collect(stream))
        await at.engine.submitted(1)
        at.engine.gate.let(3)
        await until(lambda: any(attempt.replica_id for attempt in at.client._attempts))
        at.handle.responses[0].task.cancel()
        await until(lambda: len(at.handle.calls) == 2)
        at.engine.gate.open()
        assert tokens(await task) == EXPECTED
        assert [(call.session, call.avoid) for call in at.handle.calls] == [("alice", ()), ("alice", ("replica-1",))]


async def broken_off(at: Ingress) -> asyncio.Task[list[Event]]:
    """Return an answer's reader after its first token came and its engine, `replica-1` with files of its own, died."""
    versions.tell("replica-1", EngineVersion("m", "s", "files"))
    begun = asyncio.Event()

    async def read() -> list[Event]:
        events: list[Event] = []
        async for batch in at.stream():
            events += batch
            if tokens(events):
                begun.set()
        return events

    task = asyncio.ensure_future(read())
    await at.engine.submitted(1)
    at.engine.gate.let(3)
    await begun.wait()
    at.handle.responses[0].task.cancel()
    return task


async def test_an_answer_continues_only_where_the_files_are_those_that_began_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Serve's router gets no call that it can place nowhere: others would wait there for it."""
    looked = 0

    def has_files(files: str, deployment: str) -> bool:
        nonlocal looked
        looked += 1
        return looked > 2

    monkeypatch.setattr(versions, "has_files", has_files)
    monkeypatch.setattr(handle_client, "LOOK_S", 0)
    async with ingress(gated=True) as at:
        task = await broken_off(at)
        await until(lambda: len(at.handle.calls) == 2)
        assert looked == 3
        at.engine.gate.open()
        assert tokens(await task) == EXPECTED
        assert [call.files for call in at.handle.calls] == ["", "files"]


def test_files_are_there_while_an_engine_that_is_known_has_told_them() -> None:
    versions.tell("a", EngineVersion("m", "s", "files"))
    assert not versions.has_files("files")
    liveness.set_engines(frozenset({"a", "untold"}))
    assert versions.has_files("files")
    assert not versions.has_files("others")


async def test_a_request_without_a_token_yet_may_go_to_an_engine_with_other_files() -> None:
    versions.tell("replica-1", EngineVersion("m", "s", "files"))
    async with ingress(gated=True) as at:
        task = asyncio.ensure_future(collect(at.stream()))
        await at.engine.submitted(1)
        at.handle.responses[0].task.cancel()
        await until(lambda: len(at.handle.calls) == 2)
        at.engine.gate.open()
        assert tokens(await task) == EXPECTED
        assert [call.files for call in at.handle.calls] == ["", ""]


async def test_a_stop_ends_an_answer_that_looks_for_an_engine_to_go_on() -> None:
    async with ingress(gated=True) as at:
        task = await broken_off(at)
        await until(lambda: not at.client._attempts)
        at.client.end()
        with pytest.raises(EngineError, match="is stopping"):
            await task


async def test_a_load_that_is_refused_gives_engines_of_earlier_settings_their_adapter_back() -> None:
    restored: list[AdapterRef | None] = []
    before = AdapterRef("a", "/a", "01")

    def broadcast(method: str, *arguments: Any) -> Any:
        async def results_async() -> list[Any]:
            if method == "load_adapter":
                raise EngineError(ErrorCode.ENGINE_DEAD, "no answer")
            restored.extend(arguments[2:])
            return [("old", [before])]

        return SimpleNamespace(results_async=results_async)

    handle: Any = SimpleNamespace(broadcast=broadcast)
    none: Any = None
    client = HandleClient(engine=handle, ingress=none, receiver=none, migration=none)
    versions.want(EngineVersion("m", "2"))
    versions.tell("old", EngineVersion("m", "1"))
    with pytest.raises(EngineError):
        await client.load_adapter("a", "/a", None)
    assert restored == [before]


async def test_a_load_of_which_an_ingress_replica_was_not_told_is_undone_everywhere_and_can_be_repeated() -> None:
    """Regression: those that were told refused to load it once more, and others never knew it."""
    before, loaded = AdapterRef("a", "/before", "01"), AdapterRef("a", "/a", "02")
    told: list[tuple[str, AdapterRef | None]] = []

    def broadcast(method: str, *arguments: Any) -> Any:
        async def results_async() -> list[Any]:
            told.append((method, arguments[-1] if arguments else None))
            if method == "set_adapter" and len(told) == 3:
                raise TimeoutError
            return {"adapters": [("replica", [before])], "load_adapter": [("replica", loaded)]}.get(method, [])

        return SimpleNamespace(results_async=results_async)

    handle: Any = SimpleNamespace(broadcast=broadcast)
    none: Any = None
    client = HandleClient(engine=handle, ingress=handle, receiver=none, migration=none)
    with pytest.raises(EngineError, match="A replica does not answer"):
        await client.load_adapter("a", "/a", before)
    assert told[2:] == [("set_adapter", loaded), ("restore_adapter", before), ("restore_adapter", before)]


async def test_a_new_request_is_refused_while_all_engines_have_another_model_and_a_running_one_looks_on() -> None:
    async with ingress(gated=True) as at:
        task = asyncio.ensure_future(collect(at.stream()))
        await at.engine.submitted(1)
        at.engine.gate.let(3)
        versions.set_replaced(True)
        with pytest.raises(EngineError, match="The model is being replaced") as caught:
            await collect(at.stream("new"))
        assert (caught.value.code, len(at.handle.calls)) == (ErrorCode.ENGINE_DEAD, 1)
        at.handle.responses[0].task.cancel()
        await until(lambda: len(at.handle.calls) == 2)
        at.engine.gate.open()
        assert tokens(await task) == EXPECTED


async def test_only_engines_of_the_own_settings_are_asked_for_adapters() -> None:
    ours, earlier = AdapterRef("a", "/a", "01"), AdapterRef("a", "/a", "02")

    async def results_async() -> list[tuple[str, list[AdapterRef]]]:
        return [("new", [ours]), ("old", [earlier])]

    handle: Any = SimpleNamespace(broadcast=lambda method: SimpleNamespace(results_async=results_async))
    none: Any = None
    client = HandleClient(engine=handle, ingress=none, receiver=none, migration=none)
    assert await client.adapters() == [ours, earlier], "a process without settings of its own takes any"
    versions.want(EngineVersion("m", "2"))
    for name, number in (("old", "1"), ("new", "2")):
        versions.tell(name, EngineVersion("m", number))
    liveness.set_engines(frozenset({"old"}))
    assert await client.adapters() == []
    liveness.set_engines(frozenset({"old", "new"}))
    assert await client.adapters() == [ours]


LOST = [
    pytest.param(ActorDiedError(), id="the replica died"),
    pytest.param(RayTaskError("generate", "traceback", ValueError("bug")), id="the replica raised"),
    pytest.param(DeploymentUnavailableError(DeploymentID("engine", "app")), id="the deployment failed"),
    pytest.param(RequestCancelledError("id"), id="Serve cancelled the call"),
    pytest.param(EngineError(ErrorCode.ENGINE_DEAD, "gone"), id="the engine is dead"),
    pytest.param(RequestRejected(ErrorCode.DRAINING, "draining"), id="the engine drains"),
    pytest.param(b"\xc1", id="the answer is no frame"),
    pytest.param(encode_frame(Frame("e", [Entry(0, 0, [5])])), id="the answer is not whole"),
    pytest.param(asyncio.CancelledError(), id="somebody else cancelled the call"),
]


@pytest.mark.parametrize("answer", LOST)
async def test_a_replica_that_is_lost_is_replaced_by_another(answer: Answer) -> None:
    async with ingress(answering(answer)) as at:
        events = await collect(at.stream())
        assert isinstance(events[-1], Finished)
        assert len(at.handle.calls) == 2
        await at.nothing_left()


@pytest.mark.parametrize("answer", LOST)
async def test_a_request_that_may_not_move_fails_with_an_engine_error(answer: Answer) -> None:
    async with ingress(answering(answer), max_migrations=0) as at:
        with pytest.raises(EngineError) as caught:
            await collect(at.stream())
        assert caught.value.code in (ErrorCode.ENGINE_DEAD, ErrorCode.DRAINING)
        await at.nothing_left()


async def test_a_refusal_is_passed_on_as_the_engine_gave_it() -> None:
    refusal = RequestRejected(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long", "prompt", 256, 300)
    async with ingress(answering(refusal)) as at:
        with pytest.raises(RequestRejected) as caught:
            await collect(at.stream())
        assert caught.value is refusal
        assert len(at.handle.calls) == 1
        await at.nothing_left()


async def test_back_pressure_refuses_a_new_request_at_once() -> None:
    async with ingress(answering(BackPressureError(5, 5))) as at:
        with pytest.raises(RequestRejected) as caught:
            await collect(at.stream())
        assert caught.value.code is ErrorCode.QUEUE_FULL
        assert len(at.handle.calls) == 1
        await at.nothing_left()


async def test_back_pressure_does_not_end_a_stream_that_has_begun() -> None:
    async with ingress(answering(ActorDiedError()), answering(BackPressureError(5, 5))) as at:
        assert tokens(await collect(at.stream())) == EXPECTED
        assert len(at.handle.calls) == 3


async def test_a_replica_that_is_lost_in_mid_stream_costs_no_token_and_repeats_none() -> None:
    async with ingress(gated=True) as at:
        got: list[Event] = []
        task = asyncio.ensure_future(collect(at.stream(), got))
        await at.engine.submitted(1)
        for call in range(3):
            at.engine.gate.let(7)
            await until(lambda: len(at.engine.gate.plans) >= 7)
            await until(lambda: tokens(got))
            at.handle.responses[call].task.cancel()
            await until(lambda: len(at.handle.calls) == call + 2)  # noqa: B023  awaited here
        at.engine.gate.open()
        await task
        assert tokens(got) == EXPECTED
        assert isinstance(got[-1], Finished)
        assert got[-1].usage == Usage(len(PROMPT), 100, 0)
        await at.nothing_left()


# --- readers that leave ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deaf", [False, True], ids=["Serve cancels", "Serve does not"])
@pytest.mark.parametrize("num_steps", [0, 4], ids=["before the first event", "in mid-stream"])
async def test_cancelling_a_reader_ends_its_request_by_either_way_alone(num_steps: int, deaf: bool) -> None:
    async with ingress(gated=True, deaf=deaf) as at:
        got: list[Event] = []
        aborted = spied_aborts(at.engine)
        task = asyncio.ensure_future(collect(at.stream(), got))
        await at.engine.submitted(1)
        at.engine.gate.let(num_steps)
        await until(lambda: len(tokens(got)) == num_steps)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert at.handle.num_cancelled == [1]
        await until(lambda: aborted == {"r"})
        at.engine.gate.open()
        await until(lambda: at.handle.responses[0].task.done())
        assert len(at.engine.gate.plans) < 100, "the engine kept computing for a reader that had left"
        await at.nothing_left()


async def test_the_channel_also_tells_the_engine_that_a_reader_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ingress(gated=True, deaf=True) as at:
        aborted: list[Reply] = []
        monkeypatch.setattr(at.receiver, "_reply", lambda peer, reply: aborted.append(reply))
        stream = at.stream()
        first = asyncio.ensure_future(anext(stream))
        await at.engine.submitted(1)
        at.engine.gate.let(1)
        await first
        await stream.aclose()
        await stream.aclose()
        assert aborted == [Reply([at.handle.calls[0].stream_id])]
        assert at.handle.num_cancelled == [1]


async def has_all_it_wants(at: Ingress) -> StreamRecord:
    """Read two tokens, of a prefill and a decode step, and stop the stream as complete."""
    record = StreamRecord()
    stream = at.client.stream(Submission("r", PROMPT, LONG), record=record)
    first = asyncio.ensure_future(anext(stream))
    await at.engine.submitted(1)
    at.engine.gate.let(2)
    events = list(await first)
    while sum(isinstance(event, Token) for event in events) < 2:
        events += await anext(stream)
    record.is_complete = True
    await stream.aclose()
    return record


async def test_a_reader_that_has_all_it_wants_stops_its_request_and_the_call_returns_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Serve's cancellation may arrive before the channel's message, and would turn this into an abort."""
    async with ingress(gated=True) as at:
        abort, stopped = at.engine.engine.abort, asyncio.Event()
        monkeypatch.setattr(at.engine.engine, "abort", lambda *word: (abort(*word), stopped.set()))
        record = await has_all_it_wants(at)
        await stopped.wait()  # this engine makes a hundred steps before the message arrives
        at.engine.gate.open()
        answer = await at.handle.responses[0].task
        assert isinstance(answer, bytes)
        last = unpack("r", decode_frame(answer).entries[0].events)[-1]
        assert isinstance(last, Finished)
        assert last.reason is FinishReason.STOP
        assert last.usage.completion_tokens < 100
        await at.nothing_left()
        assert at.handle.num_cancelled == [0]
        assert at.receiver._counts.completions == 0, "nobody waited for what it returned"
        assert record.times is not None, "but where its time went is still of use"
        assert record.times.seconds.keys() >= {TimeCause.PREFILL, TimeCause.DECODE}


@pytest.mark.parametrize("is_taken", [True, False])
async def test_a_stop_that_never_arrives_is_a_cancelled_call(is_taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle_client, "STOP_GRACE_S", 0.01 if is_taken else 1000)
    async with ingress(gated=True) as at:
        monkeypatch.setattr(at.receiver, "_reply", lambda peer, reply: is_taken)
        await has_all_it_wants(at)
        await until(lambda: at.handle.num_cancelled == [1])
        at.engine.gate.open()
        await at.nothing_left()


async def test_closing_an_attempt_again_does_nothing() -> None:
    async with ingress(never) as at:
        task = asyncio.ensure_future(collect(at.stream()))
        await until(lambda: at.client._attempts)
        (attempt,) = at.client._attempts
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert attempt.replica_id is None
        attempt.close()
        assert not at.client._attempts
        await at.nothing_left()


async def test_a_storm_of_readers_that_leave_at_random_moments_leaves_nothing_behind() -> None:
    async with ingress() as at:

        async def read(index: int) -> None:
            async with aclosing(at.stream(f"r{index}")) as stream:
                for _ in range(index % 7):
                    if isinstance((await anext(stream))[-1], Finished):
                        return

        await asyncio.gather(*(read(i) for i in range(60)))
        await at.nothing_left()
        assert tokens(await collect(at.stream("last"))) == EXPECTED


# --- the end ---------------------------------------------------------------------------------------------------------


async def test_streams_that_are_ended_give_what_they_have_and_then_say_why() -> None:
    async with ingress(gated=True) as at:
        got: list[list[Event]] = [[], []]
        tasks = [asyncio.ensure_future(collect(at.stream(f"r{i}"), got[i])) for i in range(2)]
        await at.engine.submitted(2)
        at.engine.gate.let(5)
        await until(lambda: all(len(tokens(events)) >= 3 for events in got))
        at.client.end()
        for task in tasks:
            with pytest.raises(EngineError, match="is stopping") as caught:
                await task
            assert caught.value.code is ErrorCode.DRAINING
        assert [tokens(events) for events in got] == [EXPECTED[: len(tokens(events))] for events in got]
        assert len(at.handle.calls) == 2, "no replica was asked to continue"
        at.engine.gate.open()
        await at.nothing_left()


async def test_a_stream_that_comes_after_the_end_never_reaches_an_engine() -> None:
    async with ingress() as at:
        at.client.end()
        with pytest.raises(EngineError) as caught:
            await collect(at.stream())
        assert caught.value.code is ErrorCode.DRAINING
        assert not at.handle.calls
        await at.nothing_left()


async def test_a_stream_that_looks_for_a_replica_at_the_end_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "FIRST_BACKOFF_S", 0.05)
    async with ingress(answering(ActorDiedError())) as at:
        task = asyncio.ensure_future(collect(at.stream()))
        await until(lambda: at.handle.calls and not at.client._attempts)
        at.client.end()
        with pytest.raises(EngineError, match="is stopping"):
            await task
        assert len(at.handle.calls) == 1
        await at.nothing_left()


# --- a deployment without an engine ----------------------------------------------------------------------------------


class Asleep:
    """A deployment that has no replica: what is asked of it waits for one to start."""

    def __init__(self) -> None:
        self.check_health = self
        self.num_asked = 0

    async def remote(self) -> None:
        self.num_asked += 1
        await asyncio.Event().wait()


def sleeping(monkeypatch: pytest.MonkeyPatch, *, may_sleep: bool) -> tuple[HandleClient, Asleep]:
    monkeypatch.setattr(engine_count, "_known", {"Engine": 0})
    monkeypatch.setattr(handle_client, "HEALTH_TIMEOUT_S", 0.05)
    nobody: Any = Asleep()
    unused: Any = None
    return HandleClient(nobody, unused, unused, unused, may_sleep=may_sleep), nobody


async def test_a_deployment_that_may_scale_to_zero_is_healthy_there_and_probes_do_not_wake_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, nobody = sleeping(monkeypatch, may_sleep=True)
    await client.check_health()
    assert await client.load() == []
    assert await client.reset_prefix_cache() == []
    assert nobody.num_asked == 0


async def test_any_other_deployment_without_engines_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    client, nobody = sleeping(monkeypatch, may_sleep=False)
    with pytest.raises(EngineError, match="No engine replica answers") as caught:
        await client.check_health()
    assert caught.value.code is ErrorCode.ENGINE_DEAD
    assert nobody.num_asked == 1


class Unavailable:
    """A handle by which nobody can be reached, as between the replicas of two versions."""

    def __init__(self, error: Exception) -> None:
        self.check_health, self._error = self, error

    def broadcast(self, *_: object) -> Unavailable:
        return self

    async def results_async(self) -> None:
        raise self._error

    remote = results_async


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.drain_all(True),
        lambda client: client.abort("x"),
        lambda client: client.load(),
        lambda client: client.reset_prefix_cache(),
        lambda client: client.load_adapter("a", "/x", None),
        lambda client: client.unload_adapter("a"),
        lambda client: client.check_health(),
        lambda client: client._wake(),
    ],
)
@pytest.mark.parametrize("error", [DeploymentUnavailableError(DeploymentID("Engine", "app")), RayServeException("x")])
async def test_what_is_asked_of_nobody_is_answered_that_no_replica_answers(
    ask: Callable[[HandleClient], Awaitable[None]], error: Exception
) -> None:
    """Administrators got a 500 with a traceback."""
    unavailable: Any = Unavailable(error)
    unused: Any = None
    with pytest.raises(EngineError, match="replica") as caught:
        await ask(HandleClient(unavailable, unavailable, unused, unused))
    assert caught.value.code is ErrorCode.ENGINE_DEAD


# --- calls that are too large to go by value -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "submission",
    [
        Submission("r", tuple(range(100_000, 600_000)), LONG),
        Submission("r", PROMPT, replace(LONG, grammar="x" * 2_500_000)),
        Submission("r", PROMPT, LONG, inputs=(SpanInput.of("image", 0, (1, 1, 1), bytes(2_500_000)),)),
        Submission("r", PROMPT, replace(LONG, bad_words=tuple((number,) * 1000 for number in range(500)))),
        Submission("r", (1,) * 200_000, replace(LONG, allowed_token_ids=tuple(range(2**18)))),
    ],
    ids=["prompt", "grammar", "image", "bad words", "prompt and allowed tokens"],
)
async def test_a_call_that_serve_may_not_take_by_value_goes_by_reference(submission: Submission) -> None:
    """Serve refuses a call above 4 MiB, which four engines in turn were said to have died of."""
    async with rig() as engine:
        small, large = Handle(running(engine.sender)), Handle(running(engine.sender))
        handles: tuple[Any, Any] = (small, large)
        receiver = engine.receiver()
        client = HandleClient(handles[0], handles[0], receiver, Migration(0, 20.0, 256), large=handles[1])
        for given in (Submission("r", PROMPT, LONG), submission):
            client._start(given, None, (), StreamRecord(), may_move=False).close()
        assert [len(handle.calls) for handle in (small, large)] == [1, 1]
        await small.end()
        await large.end()
