"""Notices that Serve stops this replica (a redeployment, a scale-down, a node that is drained), and ends its streams.
Never refuses a request before then: proxies may still send some to a replica that leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

LOOK_S = 1.0


def is_stopping() -> bool:
    """Whether Serve stops the replica of this process. Serve tells user code only when no request is left, and kills
    the process if some are, so this reads the note that Serve's replica makes for itself."""
    from ray._private.worker import global_worker

    return bool(global_worker.actors[global_worker.actor_id]._replica_impl._shutting_down)


async def end_at_stop(
    timeout_s: float, end: Callable[[], Awaitable[object]], stopping: Callable[[], bool] = is_stopping
) -> None:
    """Wait until Serve stops this replica, let its requests run for `timeout_s`, and then call `end`."""
    while not stopping():  # noqa: ASYNC110  a flag of Serve's, and no event
        await asyncio.sleep(LOOK_S)
    await asyncio.sleep(timeout_s)
    await end()
