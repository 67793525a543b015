"""Owns the results of a simulation: the figures and the report of its load, and the figures of the deployment.
Never sums up answers itself: it uses the tally and the report of real loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from loadtest.plan import Plan, Point
from loadtest.report import Document, Generator, RunEvents, document_of
from loadtest.sim.world import POINT, World
from loadtest.tally import Figures

_NOBODY = Generator(workers=0, cpu_percent=0.0, max_cpu_percent=0.0, max_lag_ms=0.0)
"""The generator of a simulated load, which takes no time and is never late."""
NOTE = "Simulated: no server was asked, and no time of one was measured"


def figures(world: World) -> Figures:
    """Return the figures of the load, by the names of its report, and those of the deployment."""
    return world.tally.figures(POINT) | deployment_figures(world)


def deployment_figures(world: World) -> Figures:
    """Return the figures that a client of a real server would not see. Replica-hours cover the time in which requests
    arrived."""
    deployment = world.deployment
    replicas = [*deployment.gone, *deployment.running.values()]
    return {
        "cached_tokens": world.num_cached_tokens,
        "cached_share": world.num_cached_tokens / max(world.num_prompt_tokens, 1),
        "moves": world.num_moves,
        "replica_hours": world.replica_seconds / 3600,
        "replicas_most": max(size for _, size in deployment.sizes),
        "steps": sum(replica.num_steps for replica in replicas),
        "computed_tokens": sum(replica.num_computed_tokens for replica in replicas),
        "preemptions": sum(replica.num_preemptions for replica in replicas),
        "simulated_s": world.loop.time(),
    }


def report(world: World, name: str, settings: Mapping[str, Any], plan: Plan | None = None) -> Document:
    """Return the document of a load (loadtest/README.md), with `deployment` added. `settings` are the other choices of
    the run; `plan` is what was sent, if not the scenario's jobs."""
    plan = plan or Plan((Point(POINT, (), world.duration_s),))
    plan = dataclasses.replace(plan, notes=(*plan.notes, NOTE))
    settings = {"scenario": name, "url": "simulated engines", **settings}
    document = document_of(plan, world.tally, _NOBODY, RunEvents(happened=world.happened), settings)
    return document | {"deployment": deployment_figures(world)}
