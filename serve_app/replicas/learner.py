"""Learns what a model's engines serve: its limits, its kinds of inputs, its adapters.
Never takes an engine of another model for its own, and never rests on what one of earlier settings has said."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from grpc.aio import AioRpcError
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from engine.protocol import EngineError
from serve_app.engines import versions
from serve_app.engines.versions import EngineFacts

logger = logging.getLogger(__name__)

ANSWER_S = 10.0
PAUSE_S = 1.0
FAILURES = (RayError, AioRpcError, DeploymentUnavailableError, RequestCancelledError)
"""How a call to an engine fails that could not be started, or is gone."""


class Learner:
    """Asks one engine when its replica starts. In the middle of a roll-out that may be one of earlier settings; then it
    asks again as soon as there is one of its own. Must be used on a single event loop."""

    def __init__(self, engine: DeploymentHandle, take: Callable[[EngineFacts], Awaitable[None]]) -> None:
        """`take`: uses what an engine has said. It is called once more if that one had earlier settings."""
        self._engine = engine
        self._deployment = str(engine.deployment_name)
        self._take = take
        self._taking = asyncio.Lock()
        self._again: asyncio.Task[None] | None = None
        self._is_settled = False
        self.is_known = False
        """Whether an engine has said anything."""

    async def meet(self) -> None:
        """Return once an engine of this model has said what it serves. Serve starts one if there is none."""
        while not await self._learn(await self._ask()):
            pass  # the router offers calls to it no more

    async def _ask(self) -> EngineFacts:
        call = self._engine.facts.remote()
        try:
            facts: EngineFacts = await call
        except asyncio.CancelledError:
            with suppress(Exception):  # it may have ended meanwhile, and how is of no interest
                call.cancel()
            raise
        versions.tell(facts.replica_id, facts.version, self._deployment)
        return facts

    async def _learn(self, facts: EngineFacts) -> bool:
        """Take what an engine has said, if there is need of it; False if it is of another model."""
        if versions.is_foreign(facts.replica_id, self._deployment):
            return False
        async with self._taking:
            is_own = versions.is_own(facts.replica_id, self._deployment)
            if not self._is_settled and (is_own or not self.is_known):
                await self._take(facts)
                self.is_known, self._is_settled = True, is_own
        return True

    def look(self) -> None:
        """Learn again if that is needed, and there is an engine to learn from."""
        if self._needs_more() and (self._again is None or self._again.done()):
            self._again = asyncio.ensure_future(self._learn_again())

    def _needs_more(self) -> bool:
        return self.is_known and not self._is_settled and versions.has_own(self._deployment)

    async def _learn_again(self) -> None:
        while self._needs_more():
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self.meet()
            except (*FAILURES, EngineError, TimeoutError) as error:
                logger.warning("%s: a new engine has not said what it serves: %s", self._deployment, error)
            except ValueError as error:  # as at a start, where it would end the replica
                logger.error("%s: the settings do not fit what a new engine serves: %s", self._deployment, error)
                return
            if self._needs_more():
                await asyncio.sleep(PAUSE_S)
