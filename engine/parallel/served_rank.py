"""Owns a rank with requests of its own in its process: it takes them from the leader, and tells what happens to them.
Never decides which rank has a request, and never outlives its leader."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from engine.async_engine import AsyncEngine
from engine.observer import StepFacts
from engine.parallel.group_ranks import GroupRanks
from engine.parallel.line import Line
from engine.parallel.rank_messages import Abort, Answer, Ask, Drain, End, Left, Opened, Stepped, Submit, Told
from engine.protocol import EngineError, ErrorCode, Event, Failed, FinishReason, Submission

logger = logging.getLogger(__name__)


class ServedRank:
    """Serves an engine over a line, on one event loop. It is the engine's observer, and the sink of all requests."""

    def __init__(self, engine: AsyncEngine, ranks: GroupRanks) -> None:
        self.loop = asyncio.get_running_loop()
        self.line: Line | None = None
        self._engine = engine
        self._ranks = ranks
        self._ends = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._getting_ready: dict[str, FinishReason | None] = {}  # request -> how it was aborted meanwhile
        self._none_gets_ready = asyncio.Event()
        self._none_gets_ready.set()
        engine.observe(self)

    async def run(self) -> None:
        """Return when the leader has ended this rank, or has itself ended."""
        self.receive([])  # from now on the leader counts what this rank has
        await self._ends.wait()
        await asyncio.to_thread(self._engine.shutdown)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- the line's thread --------------------------------------------------------------------------------------------

    def hear(self, message: Any) -> None:
        if isinstance(message, Opened):
            self._ranks.opened(message.round)
        elif isinstance(message, Left):
            self._ranks.lose(message.reason)
        else:
            self.loop.call_soon_threadsafe(self._take, message)

    def end(self, error: str | None) -> None:
        """The leader's line has ended. error: see Line; then the others must know why this rank ends."""
        if error is not None:
            self._ranks.leave(f"the line to the leader has failed: {error}")
        self.loop.call_soon_threadsafe(self._ends.set)

    # --- the step thread, as engine.observer.EngineObserver -----------------------------------------------------------

    def submitted(self, submission: Submission) -> None:
        """The leader has counted it."""

    def rejected(self, code: ErrorCode) -> None:
        """See submitted."""

    def stepped(self, facts: StepFacts, events: Sequence[Event]) -> None:
        if self.line is not None and (facts.computed or facts.preempted or events):
            self.line.send(Stepped(facts, events, time.monotonic() - facts.started))

    # --- the event loop -----------------------------------------------------------------------------------------------

    def receive(self, events: list[Event]) -> None:
        """See EventSink."""
        self._send(Told(events, self._engine.load()))

    def _send(self, message: Told | Answer | Stepped) -> None:
        assert self.line is not None
        self.line.send(message)

    def _take(self, message: Any) -> None:
        match message:
            case Submit(submission=submission):
                self._getting_ready[submission.request_id] = None  # now: the next message may abort it
                self._none_gets_ready.clear()
                self._begin(self._submit(submission))
            case Abort(request_id=request_id, reason=reason):
                if request_id in self._getting_ready:
                    self._getting_ready[request_id] = reason
                self._engine.abort(request_id, reason)
            case Ask(number=number, question=question, arguments=arguments):
                self._begin(self._answer(number, getattr(self._engine, question.value)(*arguments)))
            case Drain():
                self._begin(self._drain())
            case End():
                self._ends.set()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _submit(self, submission: Submission) -> None:
        """The leader has checked the request by its own limits, and promised its caller an end."""
        request_id = submission.request_id
        try:
            self._engine.submit(submission, self, await self._engine.make_ready(submission))
            if (reason := self._getting_ready[request_id]) is not None:
                self._engine.abort(request_id, reason)
        except EngineError as error:
            self._fail(Failed(request_id, error.code, error.message))
        except Exception as error:
            logger.exception("request %s could not be taken", request_id)
            message = f"The request could not be prepared: {type(error).__name__}."
            self._fail(Failed(request_id, ErrorCode.PREPARATION_FAILED, message))
        finally:
            del self._getting_ready[request_id]
            if not self._getting_ready:
                self._none_gets_ready.set()

    def _fail(self, failed: Failed) -> None:
        """End a request that the engine has not taken: for its caller, and for the leader's observer."""
        self._send(Stepped(StepFacts(time.monotonic()), [failed], 0.0))
        self.receive([failed])

    async def _drain(self) -> None:
        """An engine that drains refuses requests, also those that the leader accepted before."""
        await self._none_gets_ready.wait()
        await self._engine.drain()

    async def _answer(self, number: int, result: Coroutine[Any, Any, int | list[bytes]]) -> None:
        self._send(Answer(number, await result))
