"""Owns a rank with requests of its own in its process: it takes them from the leader, and tells what happens to them.
Never decides which rank has a request, and never outlives its leader."""

from __future__ import annotations

import asyncio
from typing import Any

from engine.async_engine import AsyncEngine
from engine.parallel.group_ranks import GroupRanks
from engine.parallel.line import Line
from engine.parallel.rank_messages import Abort, Drain, Drained, End, Left, Opened, Rejected, Submit, Told
from engine.protocol import EngineError, Submission


class ServedRank:
    """Serves an engine over a line, on one event loop."""

    def __init__(self, engine: AsyncEngine, ranks: GroupRanks) -> None:
        self._engine = engine
        self._ranks = ranks
        self._ends = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self.line: Line | None = None

    async def run(self) -> None:
        """Return when the leader has ended this rank, or has itself ended."""
        await self._ends.wait()
        await asyncio.to_thread(self._engine.shutdown)
        await asyncio.gather(*self._tasks)  # their last events

    # --- the line's thread --------------------------------------------------------------------------------------------

    def hear(self, message: Any) -> None:
        if isinstance(message, Opened):
            self._ranks.opened(message.round)
        elif isinstance(message, Left):
            self._ranks.lose(message.reason)
        else:
            self._loop.call_soon_threadsafe(self._take, message)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._ends.set)

    # --- the event loop -----------------------------------------------------------------------------------------------

    def _take(self, message: Any) -> None:
        match message:
            case Submit(submission=submission):
                self._begin(self._serve(submission))
            case Abort(request_id=request_id, reason=reason):
                self._engine.abort(request_id, reason)
            case Drain():
                self._begin(self._drain())
            case End():
                self._ends.set()

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, submission: Submission) -> None:
        assert self.line is not None
        try:
            async for events in self._engine.stream(submission):
                self.line.send(Told(submission.request_id, events, self._engine.load()))
        except EngineError as error:
            self.line.send(Rejected(submission.request_id, error))

    async def _drain(self) -> None:
        assert self.line is not None
        await self._engine.drain()
        self.line.send(Drained())
