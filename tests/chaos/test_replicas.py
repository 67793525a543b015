"""Owns the promise that a stream outlives its engine replica: killed, or killed with all others.
Never checks how streams move, only that clients cannot tell."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from loadtest.server import Server
from tests.chaos.support import (
    ENGINE,
    INGRESS,
    check_undisturbed,
    completions,
    kill,
    live,
    loads,
    replicas,
    undisturbed,
)
from tests.support.streams import Crowd, begun

pytestmark = [pytest.mark.anyio, pytest.mark.server, pytest.mark.chaos]

KILL_INTERVAL_S = 2.0
NUM_TOKENS = 100


async def kill_some(server: Server, crowd: Crowd, rng: random.Random) -> int:
    """Kill a random engine now and then while streams run, but never the last one; return how many were killed."""
    num_killed = 0
    while crowd.num_live:
        pids = replicas(server, ENGINE)
        if len(pids) > 1:
            kill(rng.choice(pids))
            num_killed += 1
        await asyncio.sleep(KILL_INTERVAL_S * rng.uniform(0.5, 1.5))
    return num_killed


@pytest.mark.parametrize("count", [40, 200])
async def test_streams_go_on_unchanged_while_engines_are_killed_at_random(server: Server, count: int) -> None:
    bodies = completions(count, NUM_TOKENS)
    crowd = Crowd(server.url, bodies)
    crowd.start()
    await crowd.until(begun)
    assert crowd.num_live == count
    num_killed = await kill_some(server, crowd, random.Random(count))
    check_undisturbed(await crowd.finish(), await undisturbed(bodies))
    print(f"{count} streams, {num_killed} engines killed")
    assert num_killed >= 2


async def test_streams_go_on_unchanged_when_every_engine_is_killed_at_once(server: Server) -> None:
    bodies = completions(60, NUM_TOKENS)
    crowd = Crowd(server.url, bodies)
    crowd.start()
    await crowd.until(begun)
    for pid in replicas(server, ENGINE):
        kill(pid)
    check_undisturbed(await crowd.finish(), await undisturbed(bodies))


async def test_a_killed_ingress_breaks_its_own_streams_and_engines_free_what_they_held(server: Server) -> None:
    # Streams last 25 s, so that they still run when a busy machine comes to look: with 10 s they had ended.
    bodies = completions(40, 250)
    crowd = Crowd(server.url, bodies)
    crowd.start()
    await crowd.until(begun)
    assert live(await loads(server)) == len(bodies)
    kill(replicas(server, INGRESS)[0])
    begin = time.monotonic()
    async with asyncio.timeout(20):
        while not (lost := crowd.num_broken) or live(await loads(server)) != len(bodies) - lost:
            await asyncio.sleep(0.02)
    print(f"{lost} streams broke; engines had freed them after {time.monotonic() - begin:.2f} s")
    assert crowd.num_live == len(bodies) - lost, "the others run on"
    expected = await undisturbed(bodies)
    for stream, answer in zip(await crowd.finish(), expected, strict=True):
        if stream.broken:
            assert not stream.done
            assert answer[0].startswith(stream.text)
        else:
            check_undisturbed([stream], [answer])
    assert crowd.num_broken == lost
