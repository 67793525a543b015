"""Owns the way from an ingress replica to an engine replica: a Ray Serve handle, as an EngineClient.
Never decides what a failure means to an HTTP client; it turns Ray's failures into the engine's codes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from engine.protocol import TERMINAL, EngineError, ErrorCode, Event, LoadSnapshot, RequestRejected, Submission

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 5.0

_Response = AsyncGenerator[list[Event] | EngineError, None]


class HandleClient:
    """Streams requests to whichever engine replica Ray Serve picks, and can be drained."""

    def __init__(self, engine: DeploymentHandle) -> None:
        self._engine = engine
        self._stream = engine.options(stream=True, method_name="stream")
        self._draining = False
        self._expired = False
        self._num_live = 0
        self._idle = asyncio.Event()
        self._waits: dict[str, asyncio.Timeout] = {}  # request id -> its wait for the next item

    async def stream(self, submission: Submission) -> AsyncGenerator[list[Event], None]:
        """Yield event batches until the terminal one. Closing or cancelling it aborts the request in the engine.

        Raises:
            RequestRejected: by the engine, or because this client is draining.
            EngineError: the engine replica is gone, or the drain's time is up.
        """
        if self._draining:
            raise RequestRejected(ErrorCode.DRAINING, "The server is shutting down and takes no new requests.")
        self._num_live += 1
        response = self._stream.remote(submission)
        try:
            while True:
                events = await self._next(submission.request_id, response)
                yield events
                if isinstance(events[-1], TERMINAL):
                    return
        finally:
            response.cancel()  # idempotent; leaving the loop alone would not stop the engine
            self._num_live -= 1
            if not self._num_live:
                self._idle.set()

    async def _next(self, request_id: str, response: _Response) -> list[Event]:
        if self._expired:
            raise _late()
        try:
            async with asyncio.timeout(None) as self._waits[request_id]:
                return _unwrap(await anext(response))
        except StopAsyncIteration:
            raise EngineError(ErrorCode.STEP_FAILED, "The engine's stream ended without a result.") from None
        except BackPressureError as error:
            raise RequestRejected(ErrorCode.QUEUE_FULL, "Every engine replica is full.") from error
        except (RayError, DeploymentUnavailableError) as error:
            logger.warning("engine replica lost: %r", error)
            raise EngineError(ErrorCode.ENGINE_DEAD, "The engine replica went away.") from error
        except TimeoutError:
            raise _late() from None
        finally:
            self._waits.pop(request_id, None)

    async def check_health(self) -> None:
        """Raise EngineError unless an engine replica answers that it can serve."""
        if self._draining:
            raise EngineError(ErrorCode.DRAINING, "The server is shutting down.")
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await self._engine.check_health.remote()
        except (RayError, DeploymentUnavailableError, TimeoutError) as error:
            raise EngineError(ErrorCode.ENGINE_DEAD, "No engine replica answers.") from error

    async def load(self) -> list[LoadSnapshot]:
        """The load of every engine replica.

        Raises:
            EngineError: a replica did not answer.
        """
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                loads: list[LoadSnapshot] = await self._engine.broadcast("load").results_async()
                return loads
        except (RayError, TimeoutError) as error:
            raise EngineError(ErrorCode.ENGINE_DEAD, "An engine replica does not answer.") from error

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests, let live ones finish for `timeout_s`, then end the rest with an error each.

        Returns:
            How many had to be ended.
        """
        self._draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._num_live:
                    self._idle.clear()
                    await self._idle.wait()
        self._expired = True
        for wait in self._waits.values():
            wait.reschedule(asyncio.get_running_loop().time())
        return self._num_live


def _late() -> EngineError:
    return EngineError(ErrorCode.DRAINING, "The server is shutting down; the answer is incomplete.")


def _unwrap(item: list[Event] | EngineError) -> list[Event]:
    if isinstance(item, EngineError):
        raise item
    return item
