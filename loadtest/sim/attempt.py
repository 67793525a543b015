"""Owns one call of a simulated request to one replica, like those that serve_app.channel.migration makes.
Never retries elsewhere after a failure; migration does that."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from engine.protocol import TERMINAL, EngineError, Event, Submission
from loadtest.sim.deployment import Deployment
from loadtest.sim.recording import Recording
from loadtest.sim.replica import Replica


class SimulatedAttempt:
    """Keeps events until they are taken. It wakes the reader only for the first and the last event: the recording has
    the time of each token, and a task switch for each would be most of the simulation's work."""

    def __init__(
        self, deployment: Deployment, submission: Submission, avoid: Sequence[str], recording: Recording
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._deployment = deployment
        self._submission = submission
        self._avoid = avoid
        self._recording = recording
        self._replica: Replica | None = None
        self._events: list[Event] = []
        self._failure: EngineError | None = None
        self._is_over = False
        self._num_taken = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def replica_id(self) -> str | None:
        return self._replica.name if self._replica else None

    async def take(self) -> list[Event]:
        """Return the next events. Raises EngineError when the replica is gone and all its events have been taken."""
        if self._replica is None:
            await self._place()
        while not self._is_due:
            self._waiter = self._loop.create_future()
            await self._waiter
            self._waiter = None
        if not self._events and self._failure is not None:
            raise self._failure
        events, self._events = self._events, []
        self._num_taken += len(events)
        return events

    @property
    def _is_due(self) -> bool:
        return self._is_over or self._failure is not None or bool(self._events and not self._num_taken)

    async def _place(self) -> None:
        name = self._submission.request_id
        self._replica = await self._deployment.place(name, self._submission, self._avoid)
        self._replica.submit(self._submission, self, self._recording.num_waiting_outside)

    def close(self, *, complete: bool = False) -> None:
        self._deployment.ended(self._submission.request_id)
        if self._replica is not None and not self._is_over and self._failure is None:
            self._replica.abort(self._submission.request_id)

    # --- called by the replica --------------------------------------------------------------------------------------

    def receive(self, event: Event, at_s: float) -> None:
        self._recording.note(event, at_s)
        self._events.append(event)
        self._is_over = self._is_over or isinstance(event, TERMINAL)
        if self._waiter is not None:
            self._wake()

    def fail(self, error: EngineError) -> None:
        self._failure = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and self._is_due and not self._waiter.done():
            self._waiter.set_result(None)
