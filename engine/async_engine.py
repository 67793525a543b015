"""Owns the thread that steps an engine, and the streams that carry its events to callers. Long, because every way in
and out is here. Never runs a step on an event loop, and never touches the core outside its thread."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, Protocol, TypeVar

from engine.adapter_cache import AdapterCache
from engine.compilation import Compilation
from engine.config import ResolvedConfig
from engine.core.core import EngineCore
from engine.core.step_clock import StepClock
from engine.kv_tiers import Tier
from engine.lockstep.lockstep import Lockstep, UnevenRanksError
from engine.lockstep.ranks import RankGoneError, Ranks
from engine.observer import EngineObserver, StepFacts
from engine.protocol import (
    TERMINAL,
    EngineError,
    ErrorCode,
    Event,
    Failed,
    FinishReason,
    LoadSnapshot,
    RequestRejected,
    SamplingParams,
    Submission,
    TimeCause,
)
from engine.scheduling.request import create_request
from engine.step import RanksEndedError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

MAX_COMMANDS = 512
"""Maximum submissions and aborts between two steps, milliseconds of work, so that a burst does not delay streams."""

MAX_WAIT_S = 3600.0
"""Upper bound for a wait: a deadline may be any number of seconds, but some platforms limit a queue's timeout."""
MAX_FLUSH_S = 10.0
"""How long a drained engine waits for its stores."""
LATE_TIMES, STALLED_TIMES = 4.0, 10.0
"""A step that takes this many times as long as the slowest recent one is late, or has stalled. If a step is wrongly
judged late, a prompt is computed again at another engine; if it is wrongly judged stalled, the engine is restarted."""


class EventSink(Protocol):
    """Takes the events of the requests that were submitted with it."""

    loop: asyncio.AbstractEventLoop
    """The event loop on which `receive` runs."""

    def receive(self, events: list[Event]) -> None:
        """Take a step's events for this sink. Called once a step, however many of the sink's requests have events."""
        ...


@dataclass(slots=True, eq=False)
class _Stream:
    """The sink of one request, whose reader waits for events."""

    loop: asyncio.AbstractEventLoop
    pending: list[Event] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    def receive(self, events: list[Event]) -> None:
        self.pending += events
        self.ready.set()


class AsyncEngine:
    """An engine as a library: `async for event in engine.generate(token_ids, SamplingParams(...))`.

    Callers may use several event loops; each is woken once a step, however many of its sinks have events.
    """

    def __init__(self, core: EngineCore, ranks: Ranks | None = None) -> None:
        """`ranks`: the engine is one of these, whose steps all have the same shape. They end together, when one is shut
        down, fails or does not arrive. None: it is alone."""
        self.config: ResolvedConfig = core.config
        self._core = core
        self._commands: queue.SimpleQueue[Callable[[], list[Event]]] = queue.SimpleQueue()
        # A stream stays here until its terminal event, even if its reader has left: until then its id is in use.
        self._streams: dict[str, EventSink] = {}
        self._arrivals = itertools.count()
        self._load = core.load()
        self._is_storing = False  # after the last step
        self._observer: EngineObserver | None = None
        self._fault: str | None = None
        self._clock = StepClock()
        self._draining = False
        self._stopping = False
        self._compilation = Compilation(core.grammars, core.config)
        self.adapters = AdapterCache(core.adapters, core.config.max_loras)
        core.on_move(lambda: self._commands.put(list))
        self._lockstep: Lockstep | None = None
        if ranks is not None:
            # What ranks need not have in common: their memory and threads, and why they have them.
            own = replace(core.config, num_kv_blocks=0, device="", num_threads=0, reasons={})
            self._lockstep = Lockstep(ranks, own)
            self._lockstep.on_due(lambda: self._commands.put(list))
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)
        self._thread.start()

    # --- callers' side: any event loop ------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str | None = None,
        *,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        priority: int = 0,
        tenant: str = "",
        pooling: Literal["mean", "last"] | None = None,
        prepared: Awaitable[None] | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Yield a request's events one by one: Scheduled, Token*, then exactly one of Finished or Failed.

        Leaving the loop early aborts the request once the generator is closed. Options are those of Submission, and
        `prepared` that of `stream`.

        Raises:
            RequestRejected: before the first event, with the limit in the message.
        """
        request_id = request_id or uuid.uuid4().hex
        submission = Submission(
            request_id, tuple(prompt_token_ids), sampling, timeout_s, queue_timeout_s, priority, tenant, pooling=pooling
        )
        stream = self.stream(submission, prepared)
        try:
            async for events in stream:
                for event in events:
                    yield event
        finally:
            await stream.aclose()

    async def stream(
        self, submission: Submission, prepared: Awaitable[None] | None = None
    ) -> AsyncGenerator[list[Event], None]:
        """Yield everything queued since the last item: the first events at once, later ones coalesced while the
        reader is busy. Closing or cancelling it aborts the request by the next step.

        `prepared` is awaited while the request keeps its place in the queue, and the request runs only afterwards: part
        of the prompt's content, such as an image, is still being made. If `prepared` raises, the request fails; if the
        request ends first, `prepared` is cancelled.

        Raises:
            RequestRejected: before the first item; nothing was enqueued.
        """
        spent = await self.make_ready(submission)
        preparation = None if prepared is None else asyncio.ensure_future(prepared)
        stream = _Stream(asyncio.get_running_loop())
        try:
            self._open(submission, stream, prepared=preparation is None, spent=spent)
        except EngineError:
            if preparation is not None:
                preparation.cancel()
            raise
        if preparation is not None:
            preparation.add_done_callback(lambda done: self._end_preparation(submission.request_id, stream, done))
        try:
            while True:
                await stream.ready.wait()
                stream.ready.clear()
                events, stream.pending = stream.pending, []
                yield events
                if isinstance(events[-1], TERMINAL):
                    return
        finally:
            if self._streams.get(submission.request_id) is stream:  # no terminal event yet
                self.abort(submission.request_id)
            if preparation is not None:
                preparation.cancel()

    def _end_preparation(self, request_id: str, stream: _Stream, done: asyncio.Future[None]) -> None:
        """Let the request run, or fail it if its preparation failed."""
        error = None if done.cancelled() else done.exception()
        if self._streams.get(request_id) is not stream:  # the request has ended, and another may have its id
            return
        if done.cancelled() or error is not None:
            message = str(error or "The preparation was cancelled.") or type(error).__name__
            self._commands.put(lambda: self._core.fail(request_id, message))
        else:
            self._commands.put(lambda: self._core.prepared(request_id))

    async def make_ready(self, submission: Submission) -> dict[TimeCause, float]:
        """Prepare the grammar and the adapter of a request, if it has them. Must be awaited before `submit`, so that no
        step waits for them.

        Returns:
            The seconds that it took, by cause, for `submit`.

        Raises:
            RequestRejected: one of them cannot be used, or the grammar is not compiled within `grammar_timeout_s`.
        """
        spent: dict[TimeCause, float] = {}
        try:
            if (grammar := submission.sampling.grammar) is not None:
                begun = time.monotonic()
                await self._compilation.compile(grammar)
                spent[TimeCause.GRAMMAR] = time.monotonic() - begun
            if submission.adapter is not None:  # last: until `submit` holds it, it may have to make room for another
                begun = time.monotonic()
                await self.adapters.have(submission.adapter)
                spent[TimeCause.ADAPTER] = time.monotonic() - begun
        except RequestRejected as error:
            self._tell_rejected(error)
            raise
        return spent

    def _tell_rejected(self, error: RequestRejected) -> None:
        if self._observer is not None:
            self._observer.rejected(error.code)

    def submit(self, submission: Submission, sink: EventSink, spent: Mapping[TimeCause, float] | None = None) -> None:
        """Enqueue a request and send its events to `sink`, up to the terminal one; `abort` ends it earlier. If it has a
        grammar or an adapter, await `make_ready` first; `spent` is what that returned.

        Raises:
            RequestRejected: nothing was enqueued.
        """
        self._open(submission, sink, prepared=True, spent=spent or {})

    def _open(
        self, submission: Submission, sink: EventSink, *, prepared: bool, spent: Mapping[TimeCause, float]
    ) -> None:
        handed_over = time.monotonic()
        try:
            self._check_open(submission)
            request = create_request(submission, self.config, next(self._arrivals))
            if submission.adapter is not None:
                self.adapters.hold(submission.adapter, submission.request_id)
        except RequestRejected as error:
            self._tell_rejected(error)
            raise
        if self._observer is not None:
            self._observer.submitted(submission)
        self._streams[submission.request_id] = sink
        self._hand_over(
            submission, partial(self._core.submit, request, prepared=prepared, handed_over=handed_over, spent=spent)
        )
        self._check_alive()  # again: the thread may have died and failed its streams just before this one was added

    def _hand_over(self, submission: Submission, submit: Callable[[], list[Event]]) -> None:
        """Give an accepted request to the step thread."""
        self._commands.put(submit)

    @property
    def _num_ranks(self) -> int:
        """How many ranks take the requests of this engine, each with limits of its own."""
        return 1

    def _check_alive(self) -> None:
        if self._fault:
            raise EngineError(ErrorCode.ENGINE_DEAD, self._fault)

    def _check_open(self, submission: Submission) -> None:
        self._check_alive()
        if self._draining:
            raise RequestRejected(ErrorCode.DRAINING, "The engine is draining and takes no new requests.")
        if submission.request_id in self._streams:
            raise RequestRejected(
                ErrorCode.INVALID_PARAMETER, f"request_id {submission.request_id!r} is already in use.", "request_id"
            )
        ranks, seats, queue = self._num_ranks, self.config.max_num_seqs, self.config.max_queued_requests
        if len(self._streams) >= (most := ranks * (seats + queue)):
            each = f" for each of {ranks} ranks" if ranks > 1 else ""
            raise RequestRejected(
                ErrorCode.QUEUE_FULL,
                f"The engine already holds {len(self._streams)} requests: {ranks * seats} may run (max_num_seqs "
                f"{seats}{each}) and {ranks * queue} may wait (max_queued_requests {queue}{each}).",
                limit=most,
                value=len(self._streams) + 1,
            )

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request in any state by the next step; idempotent, from any thread, never blocks.

        `reason` is STOP if the caller has all that it wants, rather than having gone away.
        """
        self._commands.put(lambda: self._core.abort(request_id, reason))

    def load(self) -> LoadSnapshot:
        """The load after the last step."""
        return self._load

    def observe(self, observer: EngineObserver) -> None:
        """Report all requests to `observer` from now on."""
        self._observer = observer

    async def cached_digests(self, limit: int) -> list[bytes]:
        """Up to `limit` digests of the blocks in the prefix cache, as of the end of the running step.

        Raises:
            EngineError: the engine can no longer serve.
        """
        return await self._between_steps(lambda: self._core.cached_digests(limit))

    async def tier_digests(self, limit: int) -> dict[Tier, list[bytes]]:
        """Up to `limit` digests of blocks in each lower tier that are in no nearer one, heads of prefixes first, as of
        the end of the running step.

        Raises:
            EngineError: the engine can no longer serve.
        """
        return await self._between_steps(lambda: self._core.tier_digests(limit))

    async def reset_prefix_cache(self) -> int:
        """Drop the cached prefixes that no live request holds, and all that lower tiers have, after the running step;
        return the number of blocks.

        Raises:
            EngineError: the engine can no longer serve.
        """
        return await self._between_steps(self._core.reset_prefix_cache)

    async def _between_steps(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the step thread, which alone may touch the core, and return its result."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Result] = loop.create_future()

        def run() -> list[Event]:
            result = work()
            with suppress(RuntimeError):  # the loop was closed, so nobody waits
                loop.call_soon_threadsafe(answer.set_result, result)
            return []

        self._commands.put(run)
        while not answer.done():  # polled, because a dead thread never answers
            self._check_alive()
            await asyncio.wait([answer], timeout=0.1)
        return answer.result()

    async def check_health(self) -> None:
        """Return if the engine can serve.

        Raises:
            EngineError: the engine can no longer serve, or has stalled.
        """
        self._check_alive()
        ranks = self._core.ranks
        if ranks is not None and (lost := ranks.why_lost()) is not None:
            raise EngineError(ErrorCode.ENGINE_DEAD, f"The engine can run no further step: {lost}.")
        if self.has_stalled:
            limit, stood = self.config.stall_timeout_s, self._clock.stood_s
            text = f"The engine has not finished a step for {stood:.0f} s (stall_timeout_s is {limit:g})."
            raise EngineError(ErrorCode.ENGINE_DEAD, text)

    @property
    def has_stalled(self) -> bool:
        """Whether the step loop has stood still for `stall_timeout_s` and for much longer than any recent step took."""
        return self._clock.stands(self.config.stall_timeout_s, STALLED_TIMES)

    def is_late(self, patience_s: float) -> bool:
        """Whether a step has taken `patience_s` and several times as long as the slowest recent one, so that it may
        never return. With a model that takes images, a step is late only when it has stalled: an encoder's step is as
        long as its largest image needs, and there may have been none before."""
        if self.config.inputs:
            return self.has_stalled
        return self._clock.stands(patience_s, LATE_TIMES)

    async def drain(self) -> None:
        """Refuse new requests and return when the last live one has ended, and its KV is in the lower tiers, so that
        whoever serves its next turn finds it there. A tier that takes long for it is not waited for. In lockstep,
        return when all ranks have drained: until then the others need this one."""
        self._draining = True
        while self._streams:  # noqa: ASYNC110  emptied by the step thread
            await asyncio.sleep(0.02)
        await self._drain_ranks()
        until = time.monotonic() + MAX_FLUSH_S
        while self._is_storing and time.monotonic() < until:  # noqa: ASYNC110  likewise
            await asyncio.sleep(0.02)

    async def _drain_ranks(self) -> None:
        if (lockstep := self._lockstep) is None:
            return

        def drain() -> list[Event]:
            lockstep.drain()
            return []

        self._commands.put(drain)
        while not (lockstep.have_all_drained or self._fault):  # noqa: ASYNC110  told to the step thread
            await asyncio.sleep(0.02)

    def shutdown(self) -> None:
        """Fail what is live, stop the thread after the current step, and free the executor. Idempotent."""
        self._stopping = True
        self._commands.put(list)
        self._compilation.shutdown()
        self.adapters.shutdown()
        self._has_ended.wait()  # a join that Ctrl-C interrupts leaves the thread marked as ended, though it still runs
        self._thread.join()

    # --- the step thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._end(self._run_steps())
        finally:
            self._has_ended.set()

    def _run_steps(self) -> str:
        """Run steps until the engine stops, and return why it did."""
        message = "The engine was shut down."
        try:
            while not self._stopping:
                events = self._run_commands()
                events += self._step()
                self._tell_observer(self._core.last_step, events)
                self._publish(events)
        except (RankGoneError, UnevenRanksError, RanksEndedError) as error:
            logger.warning("%s", error)
            message = str(error)
        except BaseException as error:  # a bug or a fatal executor error: no caller may wait for ever on a dead thread
            logger.exception("engine thread died")
            message = f"The engine stopped working: {type(error).__name__}."
        return message

    def _step(self) -> list[Event]:
        if self._lockstep is None:
            return self._core.step()
        return self._core.step(self._lockstep.agree(self._core.propose()))

    @property
    def _has_work(self) -> bool:
        return self._core.has_work or (self._lockstep is not None and self._lockstep.is_due)

    def _run_commands(self) -> list[Event]:
        """Run the submissions and aborts that arrived since the last step. Blocks while there is no other work.

        A deadline ends the wait, since a request whose prompt is still being prepared may have one but is no work yet.
        """
        events: list[Event] = []
        if not self._has_work:
            self._clock.rest()
            with suppress(queue.Empty):
                events += self._commands.get(timeout=self._longest_wait())()
        self._clock.come_round()
        for _ in range(MAX_COMMANDS):
            try:
                events += self._commands.get_nowait()()
            except queue.Empty:
                break
        return events

    def _longest_wait(self) -> float | None:
        """Return the seconds to the next deadline; None if there is none."""
        deadline = self._core.next_deadline
        return None if deadline is None else min(max(deadline - time.monotonic(), 0.0), MAX_WAIT_S)

    def _tell_observer(self, facts: StepFacts, events: Sequence[Event]) -> None:
        if self._observer is None:
            return
        try:
            self._observer.stepped(facts, events)
        except Exception:  # a failing observer must not end the engine
            logger.exception("the observer failed")

    def _publish(self, events: Sequence[Event]) -> None:
        self._load = self._core.load()
        self._is_storing = self._core.is_storing
        self._hand_out(events)

    def _hand_out(self, events: Sequence[Event]) -> None:
        """Give events to the sinks of their requests."""
        by_sink: dict[EventSink, list[Event]] = defaultdict(list)
        for event in events:
            if sink := self._streams.get(event.request_id):
                by_sink[sink].append(event)
            if isinstance(event, TERMINAL):
                self._streams.pop(event.request_id, None)
                self.adapters.let_go(event.request_id)
        by_loop: dict[asyncio.AbstractEventLoop, _Deliveries] = defaultdict(list)
        for sink, news in by_sink.items():
            by_loop[sink.loop].append((sink, news))
        for loop, deliveries in by_loop.items():
            self._wake(loop, deliveries)

    @staticmethod
    def _wake(loop: asyncio.AbstractEventLoop, deliveries: _Deliveries) -> None:
        try:
            loop.call_soon_threadsafe(_deliver, deliveries)
        except RuntimeError:  # the loop was closed under its streams, so nobody reads them any more
            logger.warning("event loop closed with events for %d sinks undelivered", len(deliveries))

    def _end(self, message: str) -> None:
        """Fail every stream without asking the core, whose state may be what broke."""
        self._fault = message
        events = [Failed(request_id, ErrorCode.ENGINE_DEAD, message) for request_id in list(self._streams)]
        self._tell_observer(StepFacts(time.monotonic()), events)
        try:
            self._publish(events)
        finally:
            if self._lockstep is not None:
                self._lockstep.leave(message)
            self._core.shutdown()


_Deliveries = list[tuple[EventSink, list[Event]]]


def _deliver(deliveries: _Deliveries) -> None:
    for sink, events in deliveries:
        try:
            sink.receive(events)
        except Exception:  # a failing sink must not cost the other sinks their events
            logger.exception("a sink failed to take its events")
