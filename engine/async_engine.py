"""Owns the thread that steps an engine, and the streams that carry its events to asyncio callers.
Never runs a step on an event loop, and never touches the core outside its thread."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from engine.config import ResolvedConfig
from engine.core import EngineCore
from engine.protocol import (
    TERMINAL,
    EngineError,
    ErrorCode,
    Event,
    Failed,
    LoadSnapshot,
    RequestRejected,
    SamplingParams,
    Submission,
)
from engine.request import create_request

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Stream:
    """Events of one request on their way to the loop that reads them."""

    loop: asyncio.AbstractEventLoop
    pending: list[Event] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class AsyncEngine:
    """An engine as a library: `async for event in engine.generate(token_ids, SamplingParams(...))`.

    Callers may use several event loops; each gets one wake-up a step, however many of its streams have news.
    """

    def __init__(self, core: EngineCore) -> None:
        self.config: ResolvedConfig = core.config
        self._core = core
        self._commands: queue.SimpleQueue[Callable[[], list[Event]]] = queue.SimpleQueue()
        # A stream stays here until its terminal event, also when its reader has left: its id is taken until then.
        self._streams: dict[str, _Stream] = {}
        self._tickets = itertools.count()
        self._load = core.load()
        self._fault: str | None = None
        self._draining = False
        self._stopping = False
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
    ) -> AsyncGenerator[Event, None]:
        """Yield a request's events one by one: Scheduled, Token*, then exactly one of Finished or Failed.

        Leaving the loop early aborts the request once the generator is closed.

        Raises:
            RequestRejected: before the first event, with the limit in the message.
        """
        request_id = request_id or uuid.uuid4().hex
        submission = Submission(request_id, tuple(prompt_token_ids), sampling, timeout_s, queue_timeout_s)
        stream = self.stream(submission)
        try:
            async for events in stream:
                for event in events:
                    yield event
        finally:
            await stream.aclose()

    async def stream(self, submission: Submission) -> AsyncGenerator[list[Event], None]:
        """Yield everything queued since the last item: the first events at once, later ones coalesced while the
        reader is busy. Closing or cancelling it aborts the request by the next step.

        Raises:
            RequestRejected: before the first item; nothing was enqueued.
        """
        stream = self._open(submission)
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

    def _open(self, submission: Submission) -> _Stream:
        self._check_open(submission)
        request = create_request(submission, self.config, next(self._tickets))
        stream = self._streams[submission.request_id] = _Stream(asyncio.get_running_loop())
        self._commands.put(lambda: self._core.submit(request))
        self._check_alive()  # again: the thread may have failed its last streams just before this one was added
        return stream

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
        most = self.config.max_num_seqs + self.config.max_queued_requests
        if len(self._streams) >= most:
            raise RequestRejected(
                ErrorCode.QUEUE_FULL,
                f"The engine already holds {len(self._streams)} requests: {self.config.max_num_seqs} may run "
                f"(max_num_seqs) and {self.config.max_queued_requests} may wait (max_queued_requests).",
                limit=most,
                value=len(self._streams) + 1,
            )

    def abort(self, request_id: str) -> None:
        """End a request in any state by the next step; idempotent, from any thread, never blocks."""
        self._commands.put(lambda: self._core.abort(request_id))

    def load(self) -> LoadSnapshot:
        """The load after the last step."""
        return self._load

    async def check_health(self) -> None:
        """Return if the engine can serve.

        Raises:
            EngineError: the engine can serve nothing any more.
        """
        self._check_alive()

    async def drain(self) -> None:
        """Refuse new requests and return when the last live one has ended."""
        self._draining = True
        while self._streams:  # noqa: ASYNC110  emptied by the step thread
            await asyncio.sleep(0.02)

    def shutdown(self) -> None:
        """Fail what is live, stop the thread after the current step, and free the executor. Idempotent."""
        self._stopping = True
        self._commands.put(list)
        self._thread.join()

    # --- the step thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        message = "The engine was shut down."
        try:
            while not self._stopping:
                events = self._run_commands()
                events += self._core.step()
                self._publish(events)
        except Exception as error:  # a bug or a fatal executor error: nobody may wait for ever on a dead thread
            logger.exception("engine thread died")
            message = f"The engine stopped working: {type(error).__name__}."
        self._end(message)

    def _run_commands(self) -> list[Event]:
        """Submits and aborts that arrived since the last step; blocks while there is nothing else to do."""
        events: list[Event] = []
        if not self._core.has_work:
            events += self._commands.get()()
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return events
            events += command()

    def _publish(self, events: Sequence[Event]) -> None:
        self._load = self._core.load()
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Event]]] = defaultdict(list)
        for event in events:
            if stream := self._streams.get(event.request_id):
                by_loop[stream.loop].append((stream, event))
            if isinstance(event, TERMINAL):
                self._streams.pop(event.request_id, None)
        for loop, deliveries in by_loop.items():
            self._wake(loop, deliveries)

    @staticmethod
    def _wake(loop: asyncio.AbstractEventLoop, deliveries: list[tuple[_Stream, Event]]) -> None:
        try:
            loop.call_soon_threadsafe(_deliver, deliveries)
        except RuntimeError:  # the loop was closed under its streams: nobody is left to read them
            logger.warning("event loop closed with %d events undelivered", len(deliveries))

    def _end(self, message: str) -> None:
        """Fail every stream without asking the core, whose state may be what broke."""
        self._fault = message
        try:
            self._publish([Failed(request_id, ErrorCode.ENGINE_DEAD, message) for request_id in list(self._streams)])
        finally:
            self._core.shutdown()


def _deliver(deliveries: list[tuple[_Stream, Event]]) -> None:
    for stream, event in deliveries:
        stream.pending.append(event)
        stream.ready.set()
