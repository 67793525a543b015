"""Implements EngineClient for an ingress replica, with Serve calls and the token channel. Long: each way a call fails.
Never decides what a failure means to an HTTP client; it turns Ray's failures into the engine's codes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from grpc.aio import AioRpcError
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from engine.protocol import (
    AdapterRef,
    EngineError,
    ErrorCode,
    Event,
    FinishReason,
    LoadSnapshot,
    RequestRejected,
    Submission,
)
from serve_app.channel.frames import MalformedFrame, decode_frame, unpack_times
from serve_app.channel.migration import Attempt, Migration
from serve_app.channel.token_receiver import TokenReceiver, TokenStream
from serve_app.engines import liveness, versions
from serve_app.engines.engine_call import EngineCall
from serve_app.engines.engine_client import StreamRecord
from serve_app.engines.engine_count import num_engines
from serve_app.metrics.activity import EngineActivity, FleetActivity, IngressActivity
from serve_app.metrics.exposition import Scrape
from serve_app.metrics.gather import gather
from serve_app.metrics.timing import FoundTiming, Timing
from serve_app.metrics.values import ReplicaSamples
from serve_app.settings.engine_names import ENGINE

T = TypeVar("T")

HEALTH_TIMEOUT_S = 5.0
MOST_BY_VALUE = 2 * 2**20
"""The most bytes of a prompt, its inputs, its grammar and its lists of tokens in a call by value: Serve's replicas take
messages of 4 MiB, including the rest of the call."""
_TOKEN_BYTES = 5
"""The most that a token id takes when it is pickled."""
LOOK_S = 0.1
"""How often a broken-off answer looks for an engine that may continue it."""
LOAD_TIMEOUT_S = 60.0
"""How long the engines may take to load an adapter."""
STOP_GRACE_S = 1.0
"""How long a stopped request may take to return its answer, for which one message is enough, before its call is
cancelled."""

# Tasks that wait for answers, kept here because an event loop does not keep its tasks alive.
_answers: set[asyncio.Task[None]] = set()


class HandleClient:
    """Streams requests from the engine replicas that the router picks, until `end` is called."""

    def __init__(
        self,
        engine: DeploymentHandle,
        ingress: DeploymentHandle,
        receiver: TokenReceiver,
        migration: Migration,
        num_waiting: Callable[[], int] = lambda: 0,
        *,
        may_sleep: bool = False,
        large: DeploymentHandle | None = None,
        deployment: str = ENGINE,
        model_id: str | None = None,
    ) -> None:
        """`ingress`: the handle of the deployment that this replica belongs to. `num_waiting`: how many requests wait
        at this replica's gate. `may_sleep`: having no engine replica is healthy, because a request starts one.
        `large`: a handle for calls that are too large for `engine`; None if `engine` takes any. `deployment`: the
        engines'. `model_id`: which of several models other ingress replicas are asked about; None if there is one."""
        self._engine = engine
        self._large = large or engine
        self._ingress = ingress
        self._receiver = receiver
        self._migration = migration
        self._num_waiting = num_waiting
        self._may_sleep = may_sleep
        self._deployment = deployment
        self._which = () if model_id is None else (model_id,)
        self._ended = False
        self._attempts: set[_HandleAttempt] = set()

    def stream(
        self, submission: Submission, *, session: str | None = None, record: StreamRecord | None = None
    ) -> AsyncGenerator[list[Event], None]:
        """Yield event batches until the terminal one. Closing or cancelling the generator aborts the request.

        Raises:
            RequestRejected: by the engine.
            EngineError: no engine replica can go on, or `end` was called.
        """
        record = record or StreamRecord()
        most = self._migration.max_migrations

        files: str | None = None  # those of the engine that began the answer

        def start(rest: Submission, avoid: tuple[str, ...]) -> Attempt:
            nonlocal files
            if not record.moves and versions.is_replaced(self._deployment):
                raise EngineError(ErrorCode.ENGINE_DEAD, "The model is being replaced: all engines have the new one.")
            if self._ended:
                raise _late()
            begin = partial(self._start, rest, session, avoid, record, may_move=len(record.moves) < most)
            has_begun = rest.num_answer_tokens or rest.sampling.prompt_logprobs != submission.sampling.prompt_logprobs
            if files is None and has_begun and avoid:
                begun_at = versions.version_of(avoid[-1], self._deployment)
                files = "" if begun_at is None else begun_at.files
            return _PatientAttempt(partial(self._may_go_on, files), partial(begin, files=files)) if files else begin()

        return self._migration.stream(submission, start, record)

    def _may_go_on(self, files: str) -> bool:
        """Whether to make the call that an engine with these files may take. Of a model that sleeps, it starts one."""
        nobody = self._may_sleep and not liveness.engines(self._deployment)
        return self._ended or nobody or versions.has_files(files, self._deployment)

    def serves(self, max_model_len: int) -> None:
        """Take the limit of a request's prompt and answer together, in tokens."""
        self._migration = replace(self._migration, max_model_len=max_model_len)

    def _start(
        self,
        submission: Submission,
        session: str | None,
        avoid: tuple[str, ...],
        record: StreamRecord,
        *,
        files: str = "",
        may_move: bool,
    ) -> Attempt:
        if self._ended:
            raise _late()
        address, num_waiting = self._receiver.address, self._num_waiting()
        stream = self._receiver.open(submission.request_id, may_move=may_move)
        call = EngineCall(submission, stream.stream_id, address, session, avoid, num_waiting, files)
        try:
            engine = self._engine if _num_bytes(submission) <= MOST_BY_VALUE else self._large
            return _HandleAttempt(engine, call, self._receiver, stream, self._attempts, record)
        except BaseException:
            self._receiver.close(stream)
            raise

    async def check_health(self) -> None:
        """Raise EngineError unless an engine replica answers that it can serve."""
        if self._may_sleep:
            return  # Serve counts the call as a request: a load balancer's probes would start an engine, or keep one
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await self._engine.check_health.remote()
        except (RayError, AioRpcError, RayServeException, TimeoutError) as error:
            raise EngineError(ErrorCode.ENGINE_DEAD, "No engine replica answers.") from error

    async def load(self) -> list[LoadSnapshot]:
        """Ask every engine replica for its load.

        Raises:
            EngineError: a replica did not answer.
        """
        return list(await self._ask_engines("load"))

    async def abort(self, name: str) -> bool:
        return any(await _broadcast(self._ingress, "abort", name))

    async def timing(self, name: str, tenant: str) -> Timing | None:
        answers, _ = await gather(self._ingress, "timing", FoundTiming, name, tenant)
        return next((answer.timing for answer in answers if answer.timing is not None), None)

    async def drain_all(self, draining: bool) -> None:
        await _broadcast(self._ingress, "set_draining", draining)

    async def reset_prefix_cache(self) -> list[int]:
        return list(await self._ask_engines("reset_prefix_cache"))

    async def adapters(self) -> list[AdapterRef]:
        """List the adapters of all engine replicas with this replica's settings. One that started late may only know
        those of the config.

        Raises:
            EngineError: a replica did not answer.
        """
        deployment = self._deployment
        if versions.wanted(deployment) is None:
            return [adapter for _, known in await self._ask_engines("adapters") for adapter in known]
        answers = await self._ask_engines("adapters") if versions.has_own(deployment) else []
        return [adapter for name, known in answers if versions.is_own(name, deployment) for adapter in known]

    async def load_adapter(self, name: str, path: str, before: AdapterRef | None) -> AdapterRef:
        if self._has_no_engine():
            await self._wake()
        # Engines get back what one of them knows, also those of earlier settings. After a restart, they may know less
        # than ingress replicas.
        answers = sorted(
            await self._ask_engines("adapters"), key=lambda one: not versions.is_own(one[0], self._deployment)
        )
        in_engines = next((known for _, adapters in answers for known in adapters if known.name == name), None)
        try:
            loaded = await _broadcast(self._engine, "load_adapter", name, path, timeout_s=LOAD_TIMEOUT_S)
            adapter = same_adapter(dict(loaded))
        except EngineError:
            await self._restore_engines(name, path, in_engines)
            raise
        try:
            await _broadcast(self._ingress, "set_adapter", name, adapter, *self._which)
        except EngineError:  # some may have been told, and would refuse to load it once more
            await self._restore_engines(name, path, in_engines)
            with suppress(EngineError):
                await _broadcast(self._ingress, "restore_adapter", adapter, before, *self._which)
            raise
        return adapter

    async def _restore_engines(self, name: str, path: str, before: AdapterRef | None) -> None:
        with suppress(EngineError):  # a replica that does not answer now loads what its requests need
            await _broadcast(self._engine, "restore_adapter", name, path, before)

    async def unload_adapter(self, name: str) -> None:
        await _broadcast(self._ingress, "set_adapter", name, None, *self._which)
        await self._ask_engines("unload_adapter", name)

    async def _wake(self) -> None:
        """Start an engine replica if there is none; a broadcast would not."""
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                await self._engine.check_health.remote()
        except (RayError, AioRpcError, RayServeException, TimeoutError) as error:
            raise EngineError(ErrorCode.ENGINE_DEAD, "No engine replica answers.") from error

    async def metrics(self) -> Scrape:
        (engines, no_engine), (ingresses, no_ingress) = await asyncio.gather(
            self._gather_engines("metrics", ReplicaSamples),
            gather(self._ingress, "metrics", ReplicaSamples, *self._which),
        )
        return Scrape(engines, ingresses, {"engine": no_engine, "ingress": no_ingress})

    async def activity(self, after: Mapping[str, int]) -> FleetActivity:
        (engines, no_engine), (ingresses, no_ingress) = await asyncio.gather(
            self._gather_engines("activity", EngineActivity, dict(after)),
            gather(self._ingress, "activity", IngressActivity, *self._which),
        )
        return FleetActivity(engines, ingresses, no_engine + no_ingress)

    async def _gather_engines(self, method: str, kind: type[T], *arguments: object) -> tuple[list[T], int]:
        # Without an engine there is none that does not answer, as a broadcast would say.
        return ([], 0) if self._has_no_engine() else await gather(self._engine, method, kind, *arguments)

    async def _ask_engines(self, method: str, *arguments: object) -> list[Any]:
        # Without an engine there is nobody to ask, which a broadcast takes for a failure.
        return [] if self._has_no_engine() else await _broadcast(self._engine, method, *arguments)

    def _has_no_engine(self) -> bool:
        """Whether there is none. Where there may be none, nothing known counts as none."""
        return num_engines(self._deployment) in ((0, None) if self._may_sleep else (0,))

    def end(self) -> None:
        """End every current and later stream with a DRAINING error, after the events that it already has."""
        self._ended = True
        for attempt in self._attempts:
            attempt.fail(_late())


class _PatientAttempt:
    """Makes its call once an engine may take it. Serve's router works on twice as many calls as it knows engines, and
    one that no engine may take would hold up all others there."""

    def __init__(self, may_begin: Callable[[], bool], begin: Callable[[], Attempt]) -> None:
        self._may_begin = may_begin
        self._begin = begin
        self._begun: Attempt | None = None

    @property
    def replica_id(self) -> str | None:
        return None if self._begun is None else self._begun.replica_id

    async def take(self) -> list[Event]:
        while self._begun is None:
            if self._may_begin():
                self._begun = self._begin()
            else:
                await asyncio.sleep(LOOK_S)
        return await self._begun.take()

    def close(self, *, complete: bool = False) -> None:
        if self._begun is not None:
            self._begun.close(complete=complete)


class _HandleAttempt:
    """One unary Serve call that stays open as long as the request lives; its tokens come through the channel."""

    def __init__(
        self,
        engine: DeploymentHandle,
        call: EngineCall,
        receiver: TokenReceiver,
        stream: TokenStream,
        live: set[_HandleAttempt],
        record: StreamRecord,
    ) -> None:
        self._receiver = receiver
        self._stream = stream
        self._live = live
        self._response: DeploymentResponse = engine.generate.remote(call)
        self._live.add(self)
        self._waiter = asyncio.ensure_future(_wait_for_answer(self._response, self._stream, record))
        _answers.add(self._waiter)
        self._waiter.add_done_callback(_answers.discard)

    @property
    def replica_id(self) -> str | None:
        return self._stream.replica_id

    async def take(self) -> list[Event]:
        return await self._stream.take()

    def fail(self, error: EngineError) -> None:
        """Raise the error in `take`, after the events that are already there."""
        self._stream.fail(error)

    def close(self, *, complete: bool = False) -> None:
        """End the call both by Serve and by the channel. A finished call is left to return its answer, and so is one
        that was stopped through the channel: Serve's cancellation gives no reason, and could arrive first."""
        if self not in self._live:
            return
        self._live.discard(self)
        is_informed = self._receiver.close(self._stream, FinishReason.STOP if complete else FinishReason.ABORT)
        if self._stream.finished:
            return
        if complete and is_informed:
            timer = asyncio.get_running_loop().call_later(STOP_GRACE_S, self._cancel)
            self._waiter.add_done_callback(lambda _: timer.cancel())
        else:
            self._cancel()

    def _cancel(self) -> None:
        self._waiter.cancel()
        self._response.cancel()


async def _wait_for_answer(response: DeploymentResponse, stream: TokenStream, record: StreamRecord) -> None:
    """Wait for the call's end, and pass on what the channel has not brought, or why there is no answer."""
    try:
        answer: bytes | EngineError = await response
        if isinstance(answer, EngineError):
            stream.fail(answer)
        elif not stream.ended:
            stream.complete(decode_frame(answer).entries[0])
        elif record.is_complete and record.times is None:  # the reader left before the engine's last event
            record.times = unpack_times(decode_frame(answer).entries[0].times)
    except BackPressureError:
        stream.fail(RequestRejected(ErrorCode.QUEUE_FULL, "Every engine replica is full."))
    except RequestCancelledError:
        stream.fail(EngineError(ErrorCode.ENGINE_DEAD, "The call to the engine replica was cancelled."))
    except (RayError, AioRpcError, RayServeException, MalformedFrame) as error:
        stream.fail(EngineError(ErrorCode.ENGINE_DEAD, f"The engine replica went away: {type(error).__name__}."))
    finally:  # whatever else ended the call; otherwise its reader would wait forever
        stream.fail(EngineError(ErrorCode.ENGINE_DEAD, "The call to the engine replica ended without an answer."))


def _num_bytes(submission: Submission) -> int:
    """Estimate the size of what may be large, without pickling it."""
    sampling = submission.sampling
    num_tokens = len(submission.prompt_token_ids) + len(sampling.allowed_token_ids or ())
    num_tokens += sum(map(len, sampling.bad_words))
    inputs = sum(len(given.data) for given in submission.inputs)
    return inputs + _TOKEN_BYTES * num_tokens + len(sampling.grammar or "")


def same_adapter(answers: Mapping[str, AdapterRef | EngineError]) -> AdapterRef:
    """Return the adapter that all engine replicas have loaded. `answers`: by replica.

    Raises:
        EngineError: a replica has refused it, or they have loaded different files.
    """
    refused = {name: answer for name, answer in answers.items() if isinstance(answer, EngineError)}
    if refused:
        first = next(iter(refused.values()))
        if len(refused) == len(answers):
            raise first
        if withdrawn := [answer for answer in refused.values() if answer.code is ErrorCode.ADAPTER_WITHDRAWN]:
            raise withdrawn[0]  # other replicas had loaded it before that
        text = f"The engine replicas {', '.join(refused)} of {len(answers)} refuse it, so it was not loaded: {first}"
        raise RequestRejected(ErrorCode.INVALID_PARAMETER, text, "lora_path")
    loaded = [answer for answer in answers.values() if isinstance(answer, AdapterRef)]
    if len({adapter.digest for adapter in loaded}) > 1:
        text = f"lora_path holds different files on the machines of {', '.join(answers)}, so it was not loaded."
        raise RequestRejected(ErrorCode.INVALID_PARAMETER, text, "lora_path")
    return loaded[0]


async def _broadcast(
    handle: DeploymentHandle, method: str, *arguments: object, timeout_s: float = HEALTH_TIMEOUT_S
) -> list[Any]:
    """Call a method of every running replica, and return the answers.

    Raises:
        EngineError: a replica did not answer, or none runs.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return list(await handle.broadcast(method, *arguments).results_async())
    except (RayError, AioRpcError, RayServeException, TimeoutError) as error:
        raise EngineError(ErrorCode.ENGINE_DEAD, "A replica does not answer.") from error


def _late() -> EngineError:
    return EngineError(ErrorCode.DRAINING, "This replica of the server is stopping; the answer is incomplete.")
