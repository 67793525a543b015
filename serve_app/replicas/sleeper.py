"""Wakes a model that has no engine, once for all requests that wait for it.
Never waits longer than the model's `wake_timeout_s`, and never puts another model to sleep: `room_maker` does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable

from engine.protocol import ErrorCode, RequestRejected
from serve_app.engines.engine_count import num_engines
from serve_app.errors.api_error import ApiError, cannot_wake
from serve_app.replicas.learner import FAILURES, Learner

logger = logging.getLogger(__name__)

START_S = 120.0
"""How long an ingress replica waits for first engines when it starts."""


class EngineSleeper:
    """Implements Sleeper with the handle of a model's engines: Serve starts one for a call that waits there."""

    def __init__(
        self,
        learner: Learner,
        deployment: str,
        model_id: str,
        timeout_s: float,
        make_room: Callable[[], Coroutine[None, None, None]] | None,
    ) -> None:
        """`learner`: calls an engine, and takes what the first one serves. `deployment`: the engines'. `make_room`:
        runs beside the wait, and is cancelled at its end; None for a model that never sleeps, whose engine has only
        failed or not started yet."""
        self._learner = learner
        self._deployment = deployment
        self._model_id = model_id
        self._timeout_s = timeout_s
        self._make_room = make_room
        self._waking: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    @property
    def is_known(self) -> bool:
        return self._learner.is_known

    async def wake(self) -> None:
        """Return once there is an engine.

        Raises:
            ApiError: 503, there is none in time.
            RequestRejected: `end` was called.
        """
        if self.is_known and num_engines(self._deployment):
            return
        if self._waking is None or self._waking.done():
            self._waking = asyncio.ensure_future(self._wake())
            self._waking.add_done_callback(_retrieve)
        ended = asyncio.ensure_future(self._ended.wait())
        try:  # a client that leaves does not end the wait of the others
            await asyncio.wait((self._waking, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if not self._waking.done():
            raise RequestRejected(
                ErrorCode.DRAINING, "This replica of the server is draining; this request did not run."
            )
        await self._waking

    def end(self) -> None:
        """End all waits, now and later."""
        self._ended.set()

    async def _wake(self) -> None:
        logger.info("%s is woken", self._model_id)
        rescue = None if self._make_room is None else asyncio.ensure_future(self._make_room())
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._learner.meet()
        except TimeoutError:
            raise cannot_wake(self._model_id, self._timeout_s) from None
        except FAILURES as error:
            logger.warning("%s could not be woken: %s", self._model_id, error)
            why = "its engine could not be started, as the server's log says"
            raise cannot_wake(self._model_id, self._timeout_s, why) from error
        finally:
            if rescue is not None:
                rescue.cancel()


async def meet_in_time(sleepers: Iterable[EngineSleeper]) -> None:
    """Wait for the first engines of models that do not sleep, but no longer than START_S for one that cannot start:
    the others are served meanwhile, and a request for it waits, and then gets a 503 that says so.

    Raises:
        Exception: an engine has started that the settings do not fit.
    """
    tasks = [asyncio.ensure_future(one.wake()) for one in sleepers]
    for task in tasks:
        task.add_done_callback(_retrieve)
    done, _ = await asyncio.wait(tasks, timeout=START_S) if tasks else (set(), set())
    for task in done:
        if (error := task.exception()) is not None and not isinstance(error, ApiError):
            raise error


def _retrieve(task: asyncio.Task[None]) -> None:
    """Look at the error of a wait that nobody waits for any more; asyncio would report it as forgotten."""
    if not task.cancelled() and isinstance(error := task.exception(), Exception) and not isinstance(error, ApiError):
        logger.error("a model could not be woken", exc_info=error)
