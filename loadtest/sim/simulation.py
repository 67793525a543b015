"""Owns one simulation from its first request to its last.
Never keeps anything between two simulations: each has its own clock, world and random numbers."""

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
"""Something that happens to a deployment while it serves: a failure, a drain, an upgrade."""


def simulate(
    scenario: Scenario,
    router: Callable[[], Router] | None = None,
    scaler: Callable[[Callable[[], float]], Scaler] | None = None,
    happening: Happening | None = None,
    on_answer: Callable[[Timeline], None] = lambda answer: None,
    send: Callable[[World], Awaitable[None]] = World.send_all,
) -> tuple[Figures, World]:
    """Simulate a scenario until its last request has ended. The router and the scaler are created for it; `scaler` is
    given the clock. `send` returns when all its requests have ended.

    Returns:
        The figures of the scenario's jobs (see summary), and the world at the end. Only `on_answer` sees single
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
        if isinstance(ended, Exception):  # not a cancellation: without this task the result would be invalid
            raise ended
    return figures(world), world
