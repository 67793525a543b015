"""Implements the answers of an engine client for an engine in the same process.
Never moves a stream: if the engine fails, so do its streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from engine.async_engine import AsyncEngine
from engine.protocol import TERMINAL, Event, FinishReason, Submission
from serve_app.engines.engine_client import StreamRecord
from serve_app.engines.lone_engine import LoneEngine


class OwnEngine(LoneEngine):
    """Streams requests from the process's own engine, beside no other."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def stream(
        self, submission: Submission, *, session: str | None = None, record: StreamRecord | None = None
    ) -> AsyncGenerator[list[Event], None]:
        """See EngineClient.stream. All sessions are at the one engine."""
        record, is_over = record or StreamRecord(), False
        stream = self._engine.stream(submission)
        try:
            async for events in stream:
                last = events[-1]
                if isinstance(last, TERMINAL):
                    is_over, record.times = True, last.times
                yield events
        finally:
            if record.is_complete and not is_over:
                # Before the stream is closed, which would count it as an abort.
                self._engine.abort(submission.request_id, FinishReason.STOP)
            await stream.aclose()
