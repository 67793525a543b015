"""Owns the promise that streams outlive any rank of an engine that has several: the leader, and one that follows.
Never uses bfloat16: there the neighbours in a batch change the last bits, and so a text may change without any
fault."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from loadtest.server import Server
from tests.chaos.support import ENGINE, check_undisturbed, command_of, completions, kill, loads, replicas
from tests.support.serve_process import members_of, serve_run
from tests.support.streams import Crowd, read_all

pytestmark = [pytest.mark.anyio, pytest.mark.chaos]

RANKS, STREAMS, NUM_TOKENS = 2, 50, 60


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    engine = {
        "tensor_parallel_size": RANKS,
        "dtype": "float32",
        "max_num_seqs": STREAMS,
        "max_model_len": 512,
        "kv_cache_memory_gib": 0.2,
    }
    with serve_run({"engine": engine, "engine_replicas": 2}) as started:
        yield started


def leaders(server: Server) -> list[int]:
    return replicas(server, ENGINE)


def followers(server: Server) -> list[int]:
    return [pid for pid in members_of(server.process.pid) if "ray::Follower" in command_of(pid)]


async def until_both_answer(server: Server) -> None:
    async with asyncio.timeout(180):
        while len(await loads(server)) < 2 or len(followers(server)) != 2 * (RANKS - 1):
            await asyncio.sleep(0.2)


async def test_streams_are_those_of_an_undisturbed_run_whichever_rank_is_killed(server: Server) -> None:
    bodies = completions(STREAMS, NUM_TOKENS)
    await until_both_answer(server)
    undisturbed = [stream.answer for stream in await read_all(server.url, bodies)]
    for victims in (followers, leaders):
        await until_both_answer(server)
        crowd = Crowd(server.url, bodies)
        crowd.start()
        await crowd.until(lambda stream: stream.num_frames > 5)
        kill(victims(server)[0])
        check_undisturbed(await crowd.finish(), undisturbed)


async def test_no_rank_outlives_its_leader(server: Server) -> None:
    await until_both_answer(server)
    before = followers(server)
    for pid in leaders(server):
        kill(pid)
    async with asyncio.timeout(60):
        while set(before) & set(followers(server)):
            await asyncio.sleep(0.2)


async def test_an_idle_engine_whose_follower_has_died_is_replaced(server: Server) -> None:
    await until_both_answer(server)
    before = set(leaders(server))
    kill(followers(server)[0])
    async with asyncio.timeout(120):
        while len(before & set(leaders(server))) == len(before):
            await asyncio.sleep(0.2)
    await until_both_answer(server)
