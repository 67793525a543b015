"""Owns one simulation from its first request to its last.
Never keeps anything between two simulations; each has a clock, a world and random numbers of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from loadtest.sim.routers import PowerOfTwo, Router
from loadtest.sim.scalers import Scaler
from loadtest.sim.scenario import Scenario
from loadtest.sim.summary import figures
from loadtest.sim.virtual_loop import run
from loadtest.sim.world import World
from loadtest.tally import Figures
from loadtest.timeline import Timeline

Happening = Callable[[World], Awaitable[None]]
"""What befalls a deployment while it serves: a failure, a drain, an upgrade."""


def simulate(
    scenario: Scenario,
    router: Callable[[], Router] | None = None,
    scaler: Callable[[Callable[[], float]], Scaler] | None = None,
    happening: Happening | None = None,
    on_answer: Callable[[Timeline], None] = lambda answer: None,
    send: Callable[[World], Awaitable[None]] = World.send_all,
) -> tuple[Figures, World]:
    """Simulate it to the end of the last request. The router and the scaler are made anew; `scaler` is given the clock.
    `send` is done when all that it sends has ended.

    Returns:
        The figures of the scenario's jobs (see summary), and what is left of the world. Only `on_answer` sees single
        requests.

    Raises:
        Exception: what the router, the scaler, `happening` or `send` raised.
    """
    chosen = router or (lambda: PowerOfTwo(scenario.seed))
    return run(_simulate(scenario, chosen, scaler, happening, on_answer, send))


async def _simulate(
    scenario: Scenario,
    router: Callable[[], Router],
    scaler: Callable[[Callable[[], float]], Scaler] | None,
    happening: Happening | None,
    on_answer: Callable[[Timeline], None],
    send: Callable[[World], Awaitable[None]],
) -> tuple[Figures, World]:
    world = World(scenario, router(), on_answer)
    world.deployment.scale(scenario.replicas, warm=True)
    cost = asyncio.create_task(world.count_cost())
    others = [asyncio.create_task(world.scale(scaler(world.loop.time)))] if scaler else []
    if world.router.stats_period_s is not None:
        others.append(asyncio.create_task(world.tell_router(world.router.stats_period_s)))
    event = asyncio.ensure_future(happening(world)) if happening else None
    await send(world)
    await asyncio.gather(cost, *([event] if event else []))
    for task in others:
        task.cancel()
    for ended in await asyncio.gather(*others, return_exceptions=True):
        if isinstance(ended, Exception):  # and not that it was cancelled: what ran without it is no result
            raise ended
    return figures(world), world
