"""Owns the leader's end of a rank with requests of its own: they go there, and their events come back.
Never waits for the rank, and never leaves a stream without its end: one whose rank has gone fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from engine.parallel.line import Line
from engine.parallel.rank_messages import Abort, Drain, Drained, Rejected, Submit, Told
from engine.protocol import (
    TERMINAL,
    EngineError,
    ErrorCode,
    Event,
    Failed,
    FinishReason,
    LoadSnapshot,
    RequestRejected,
    Submission,
)


class RemoteEngine:
    """A rank's engine in another process, as far as callers of one need it. One event loop may use it: that of
    `stream`'s callers."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.line: Line | None = None
        self._streams: dict[str, asyncio.Queue[list[Event] | EngineError]] = {}
        self._loops: dict[str, asyncio.AbstractEventLoop] = {}
        self._load: LoadSnapshot | None = None
        self._gone: str | None = None
        self._drained = False

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def load(self) -> LoadSnapshot | None:
        """The load after the last step that one of its requests has events of; None: there was none."""
        return self._load

    async def stream(self, submission: Submission) -> AsyncGenerator[list[Event], None]:
        """See AsyncEngine.stream.

        Raises:
            RequestRejected: before the first item; nothing was enqueued.
            EngineError: before the first item: the ranks have ended.
        """
        name = submission.request_id
        self._check()
        if name in self._streams:
            raise RequestRejected(ErrorCode.INVALID_PARAMETER, f"request_id {name!r} is already in use.", "request_id")
        assert self.line is not None
        found: asyncio.Queue[list[Event] | EngineError] = asyncio.Queue()
        self._loops[name], self._streams[name] = asyncio.get_running_loop(), found
        self.line.send(Submit(submission))
        ended = False
        try:
            self._check()  # again: the rank may have gone just before its streams had this one
            while not ended:
                events = await found.get()
                ended = isinstance(events, EngineError) or isinstance(events[-1], TERMINAL)
                if isinstance(events, EngineError):
                    raise events
                yield events
        finally:
            if not ended:
                self.abort(name)
            self._streams.pop(name, None)
            self._loops.pop(name, None)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """See AsyncEngine.abort."""
        assert self.line is not None
        self.line.send(Abort(request_id, reason))

    async def drain(self) -> None:
        """See AsyncEngine.drain."""
        assert self.line is not None
        self.line.send(Drain())
        while not (self._drained or self._gone):  # noqa: ASYNC110  told by the line's thread
            await asyncio.sleep(0.02)

    def _check(self) -> None:
        if self._gone is not None:
            raise EngineError(ErrorCode.ENGINE_DEAD, self._gone)

    # --- the line's thread --------------------------------------------------------------------------------------------

    def hear(self, message: Any) -> None:
        match message:
            case Told(request_id=request_id, events=events, load=load):
                self._load = load
                self._give(request_id, list(events))
            case Rejected(request_id=request_id, error=error):
                self._give(request_id, error)
            case Drained():
                self._drained = True

    def lose(self, reason: str) -> None:
        """Fail all streams: the rank has gone. Any thread."""
        self._gone = self._gone or reason
        for request_id in list(self._streams):
            self._give(request_id, [Failed(request_id, ErrorCode.ENGINE_DEAD, reason)])

    def _give(self, request_id: str, events: list[Event] | EngineError) -> None:
        stream, loop = self._streams.get(request_id), self._loops.get(request_id)
        if stream is not None and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(stream.put_nowait, events)
