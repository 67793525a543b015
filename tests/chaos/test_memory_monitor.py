"""Owns what Ray's memory monitor does to a server: whose process it ends first when a node runs out of memory.
Never fills memory: a threshold of nothing is exceeded whenever the monitor looks, which it does once a minute here."""

from __future__ import annotations

import asyncio

import pytest

from tests.chaos.support import ENGINE, INGRESS, check_undisturbed, command_of, completions, fake, replicas, undisturbed
from tests.support.serve_process import members_of, serve_run
from tests.support.streams import Crowd, begun

pytestmark = [pytest.mark.anyio, pytest.mark.chaos]

LOOKS_EVERY_S = 60
ALWAYS_EXCEEDED = {
    "RAY_memory_usage_threshold": "0",
    "RAY_memory_monitor_refresh_ms": str(1000 * LOOKS_EVERY_S),
}
NUM_TOKENS = 20


def controllers(session: int) -> list[int]:
    return [pid for pid in members_of(session) if "ray::ServeController" in command_of(pid)]


async def test_the_memory_monitor_takes_one_process_at_a_time_and_first_the_one_that_no_stream_needs() -> None:
    """By its own choice Ray ends as many processes as free the missing memory, all at once: controller, proxies, every
    replica."""
    with serve_run(fake(step_delay_ms=1000, engine_replicas=2, ingress_replicas=2), env=ALWAYS_EXCEEDED) as server:
        session = server.process.pid
        before, serving = controllers(session), {*replicas(server, ENGINE), *replicas(server, INGRESS)}
        assert (len(before), len(serving)) == (1, 4)
        bodies = completions(16, NUM_TOKENS)
        crowds = []
        async with asyncio.timeout(LOOKS_EVERY_S + 20):
            while controllers(session) == before:
                crowd = Crowd(server.url, bodies)
                crowd.start()
                await crowd.until(begun)
                crowds.append(crowd)
                await asyncio.sleep(2)
        ran_on = crowds[-1].num_live
        expected = await undisturbed(bodies)
        for crowd in crowds:
            check_undisturbed(await crowd.finish(), expected)
        assert ran_on, "they ran when the monitor struck"
        assert {*replicas(server, ENGINE), *replicas(server, INGRESS)} == serving
