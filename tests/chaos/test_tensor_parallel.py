"""Owns the promise that streams outlive any rank of an engine that has several: the leader, and one that follows.
Never uses bfloat16: there the neighbours in a batch change the last bits, and so a text may change without any
fault."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from loadtest.server import Server
from tests.chaos.several_ranks import (
    ENGINES,
    RANKS,
    check_streams_outlive_any_rank,
    followers,
    leaders,
    until_all_answer,
)
from tests.chaos.support import completions, kill
from tests.support.serve_process import serve_run

pytestmark = [pytest.mark.anyio, pytest.mark.chaos]

STREAMS, NUM_TOKENS = 50, 60


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    engine = {
        "tensor_parallel_size": RANKS,
        "dtype": "float32",
        "max_num_seqs": STREAMS,
        "max_model_len": 512,
        "kv_cache_memory_gib": 0.2,
    }
    with serve_run({"engine": engine, "engine_replicas": ENGINES}) as started:
        yield started


async def test_streams_are_those_of_an_undisturbed_run_whichever_rank_is_killed(server: Server) -> None:
    await check_streams_outlive_any_rank(server, completions(STREAMS, NUM_TOKENS), 5)


async def test_no_rank_outlives_its_leader(server: Server) -> None:
    await until_all_answer(server)
    before = followers(server)
    for pid in leaders(server):
        kill(pid)
    async with asyncio.timeout(60):
        while set(before) & set(followers(server)):
            await asyncio.sleep(0.2)


async def test_an_idle_engine_whose_follower_has_died_is_replaced(server: Server) -> None:
    await until_all_answer(server)
    before = set(leaders(server))
    kill(followers(server)[0])
    async with asyncio.timeout(120):
        while len(before & set(leaders(server))) == len(before):
            await asyncio.sleep(0.2)
    await until_all_answer(server)
