"""Makes room for a model that is woken while resources are short: the one that was not used for longest goes to sleep.
Never touches a model with running requests: its engines say so, and the autoscaler looks once more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from grpc.aio import AioRpcError
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from serve_app.admission.gate import Gate
from serve_app.engines.engine_count import num_engines
from serve_app.replicas.cluster import Cluster

logger = logging.getLogger(__name__)

LOOK_S = 0.5
PATIENCE = 6
"""How many looks in a row must find no room. A replica that has just got its place takes the resources, but has no
process for a second or two, and would else seem to find none."""
ASLEEP_S = 30.0
"""How long a model may take to go to sleep before another is looked for."""
GONE_LOOKS = 10
"""How many looks its processes may take to end after that, and the new one to begin."""
ANSWER_S = 3.0
_FAILURES = (RayError, AioRpcError, DeploymentUnavailableError, RequestCancelledError, TimeoutError)


@dataclass(frozen=True, slots=True)
class Sleepy:
    """A model that may sleep."""

    engine: DeploymentHandle
    needs: Mapping[str, float]
    """The resources of one of its engines, by Ray's names."""
    gate: Gate

    @property
    def deployment(self) -> str:
        return str(self.engine.deployment_name)


class RoomMaker:
    def __init__(self, models: Sequence[Sleepy], cluster: Cluster) -> None:
        self._models = {model.deployment: model for model in models}
        self._cluster = cluster
        self._one_at_a_time = asyncio.Lock()

    async def make_room(self, deployment: str) -> None:
        """Run until cancelled: whenever an engine of `deployment` finds no place, put another model to sleep."""
        woken, num_short, awake = self._models[deployment], 0, self._awake()
        while True:
            await asyncio.sleep(LOOK_S)
            short = await self._shortage(woken)
            before, awake = awake, self._awake()
            num_short = num_short + 1 if short else 0
            if before - awake:  # perhaps for another ingress replica: what it frees is free in a moment
                num_short = -GONE_LOOKS
            if num_short >= PATIENCE:
                async with self._one_at_a_time:
                    if short := await self._shortage(woken):  # another's may have been enough for both
                        await self._put_one_to_sleep(woken, short)
                num_short, awake = 0, self._awake()

    def _awake(self) -> set[str]:
        return {name for name in self._models if num_engines(name)}

    async def _shortage(self, woken: Sleepy) -> frozenset[str]:
        """Look once. Ray's tables may be out of reach for a moment, which must not end the search for room."""
        try:
            return await self._cluster.shortage(woken.deployment, woken.needs)
        except Exception:
            logger.warning("Ray does not say whether %s waits for a place", woken.deployment, exc_info=True)
            return frozenset()

    async def _put_one_to_sleep(self, woken: Sleepy, short: frozenset[str]) -> None:
        others = [
            model
            for model in self._models.values()
            if model is not woken and num_engines(model.deployment) and not model.gate.snapshot().num_live
        ]
        useful = [model for model in others if any(model.needs.get(kind) for kind in short)]
        idle = await asyncio.gather(*(_idle_s(model.engine) for model in useful))
        chosen = longest_idle(zip(useful, idle, strict=True))
        if chosen is None:
            return
        logger.info("%s goes to sleep for %s, which lacks %s", chosen.deployment, woken.deployment, ", ".join(short))
        if await _ask_to_sleep(chosen.engine):
            await _until_asleep(chosen.deployment)
            await self._until_placed(woken)

    async def _until_placed(self, woken: Sleepy) -> None:
        for _ in range(GONE_LOOKS):
            if not await self._shortage(woken):
                return
            await asyncio.sleep(LOOK_S)


def longest_idle(models: Iterable[tuple[Sleepy, float | None]]) -> Sleepy | None:
    """Choose the model that was not used for longest; None if there is none. Those with None are in use."""
    idle = [(seconds, model) for model, seconds in models if seconds is not None]
    return max(idle, key=lambda found: found[0])[1] if idle else None


async def _idle_s(engine: DeploymentHandle) -> float | None:
    """Return the seconds since the engines' last request; None if one has a request, or does not answer."""
    try:
        async with asyncio.timeout(ANSWER_S):
            answers = await engine.broadcast("idle_s").results_async()
    except _FAILURES:
        return None
    return None if None in answers or not answers else min(answers)


async def _ask_to_sleep(engine: DeploymentHandle) -> bool:
    try:
        async with asyncio.timeout(ANSWER_S):
            return all(await engine.broadcast("sleep_if_idle").results_async())
    except _FAILURES:
        return False


async def _until_asleep(deployment: str) -> None:
    """Wait until there is no engine, which frees its resources within a moment."""
    try:
        async with asyncio.timeout(ASLEEP_S):
            while num_engines(deployment):  # noqa: ASYNC110 - another thread sets the number
                await asyncio.sleep(LOOK_S / 5)
    except TimeoutError:
        logger.info("%s has not gone to sleep: it is used again", deployment)
