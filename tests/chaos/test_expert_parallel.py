"""Owns the promise that streams outlive any rank of an engine whose ranks share a mixture's experts.
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
from tests.support.tiny_models import edit_config, save_model, save_tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.chaos]

RANKS, STREAMS, NUM_TOKENS = 2, 30, 150
NAME = "mixture"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("mixture")
    save_model("qwen3_moe", directory)
    edit_config(directory, max_position_embeddings=1024)
    save_tokenizer(directory)
    engine = {
        "expert_parallel_size": RANKS,
        "dtype": "float32",
        "max_num_seqs": STREAMS,
        "max_model_len": 512,
        "num_kv_blocks": 2000,
    }
    with serve_run(
        {"model": str(directory), "served_model_name": NAME, "engine": engine, "engine_replicas": 2}
    ) as started:
        yield started


def others(server: Server) -> list[int]:
    """Return the ranks that do not lead."""
    return [pid for pid in members_of(server.process.pid) if "ray::Follower" in command_of(pid)]


def leaders(server: Server) -> list[int]:
    return replicas(server, ENGINE)


async def until_both_answer(server: Server) -> None:
    async with asyncio.timeout(180):
        while len(await loads(server)) < 2 or len(others(server)) != 2 * (RANKS - 1):
            await asyncio.sleep(0.2)


async def test_streams_are_those_of_an_undisturbed_run_whichever_rank_is_killed(server: Server) -> None:
    bodies = [body | {"model": NAME} for body in completions(STREAMS, NUM_TOKENS)]
    await until_both_answer(server)
    undisturbed = [stream.answer for stream in await read_all(server.url, bodies)]
    for victims in (others, leaders):
        await until_both_answer(server)
        crowd = Crowd(server.url, bodies)
        crowd.start()
        await crowd.until(lambda stream: stream.num_frames > 3)
        kill(victims(server)[0])
        check_undisturbed(await crowd.finish(), undisturbed)
