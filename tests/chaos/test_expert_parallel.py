"""Owns the promise that streams outlive any rank of an engine whose ranks share a mixture's experts.
Never uses bfloat16: there the neighbours in a batch change the last bits, and so a text may change without any
fault."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loadtest.server import Server
from tests.chaos.several_ranks import ENGINES, RANKS, check_streams_outlive_any_rank
from tests.chaos.support import completions
from tests.support.serve_process import serve_run
from tests.support.tiny_models import edit_config, save_model, save_tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.chaos]

STREAMS, NUM_TOKENS = 30, 150
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
        {"model": str(directory), "served_model_name": NAME, "engine": engine, "engine_replicas": ENGINES}
    ) as started:
        yield started


async def test_streams_are_those_of_an_undisturbed_run_whichever_rank_is_killed(server: Server) -> None:
    bodies = [body | {"model": NAME} for body in completions(STREAMS, NUM_TOKENS)]
    await check_streams_outlive_any_rank(server, bodies, 3)
