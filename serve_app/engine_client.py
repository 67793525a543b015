"""Owns what the HTTP side needs of an engine: one stream of events a request, its health, and the served model's facts.
Never says how the engine is reached: in the same process, through Ray, or scripted by a test."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from engine.protocol import Event, LoadSnapshot, Submission


class EngineClient(Protocol):
    def stream(self, submission: Submission) -> AsyncGenerator[list[Event], None]:
        """Yield everything queued since the last item, the first as soon as there is one.

        Closing the generator, or cancelling the task that waits on it, aborts the request.

        Raises:
            RequestRejected: at the first item at the latest.
            EngineError: the engine cannot go on.
        """
        ...

    async def check_health(self) -> None:
        """Raise EngineError when requests cannot be served."""
        ...

    async def load(self) -> list[LoadSnapshot]:
        """Each engine's load after its last step."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    id: str
    max_model_len: int
    """Longest prompt + answer that is accepted, in tokens."""
    created: int
    """Unix time in seconds."""
    owned_by: str = "chunkserve"
