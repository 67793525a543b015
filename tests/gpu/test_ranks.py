"""Owns tests of one engine over two GPUs: texts and logits are those of one, and a lost rank ends every wait.
Never runs on fewer than two cards: NCCL joins no two ranks on one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.models
from engine.build.executor import create_executor
from engine.config import EngineConfig, ResolvedConfig
from engine.execution.device import Device
from engine.execution.gpu.executor import DeviceExecutor
from engine.parallel.processes import Child
from engine.step import ExecutorFatalError
from tests.gpu.test_engine import BLOCKS, TOKENS, near, serve
from tests.support.plans import chunk, decode, forced_logits, run

pytestmark = pytest.mark.gpu

SHAPES = Path(engine.models.__file__).parent / "shapes"
RANKS = 2


@pytest.fixture
def made(device: Device) -> Iterator[list[DeviceExecutor]]:
    """Collect the executors that a test makes, and end them and their ranks."""
    if (count := torch.cuda.device_count()) < RANKS:
        pytest.skip(f"{RANKS} ranks need a GPU each, and torch sees {count}")
    pytest.importorskip("msgspec", reason="ranks are told their steps in its messages")
    executors: list[DeviceExecutor] = []
    yield executors
    for executor in executors:
        executor.shutdown()


def make(made: list[DeviceExecutor], ranks: int, **settings: Any) -> tuple[DeviceExecutor, ResolvedConfig]:
    plain: dict[str, Any] = {"load_format": "dummy", "device": "cuda", "max_model_len": 2048, "max_num_seqs": 16}
    plain |= {"num_kv_blocks": 400, "max_num_batched_tokens": 256, "num_speculative_tokens": 0}
    config = EngineConfig(**plain | settings, tensor_parallel_size=ranks)
    executor, resolved = create_executor(SHAPES / "qwen3-0.6b", config)
    assert isinstance(executor, DeviceExecutor)
    made.append(executor)
    return executor, resolved


@pytest.mark.parametrize("graphs", ["none", "all"])
def test_two_gpus_give_the_logits_of_one(made: list[DeviceExecutor], graphs: str) -> None:
    found = [
        forced_logits(make(made, ranks, cuda_graphs=graphs)[0], TOKENS[:250], BLOCKS, 17).double()
        for ranks in (1, RANKS)
    ]
    assert near(found[1], found[0])


@pytest.mark.parametrize(("attention", "graphs"), [("torch", "none"), ("triton", "all")])
def test_a_step_in_flight_changes_no_text_on_two_gpus(made: list[DeviceExecutor], attention: str, graphs: str) -> None:
    """In float32, as on one GPU: a different order of summation must not decide a near tie."""
    if attention == "triton":
        pytest.importorskip("triton", reason="Triton cannot be imported")
    texts = []
    for ranks, overlap in ((1, False), (RANKS, False), (RANKS, True)):
        settings: dict[str, Any] = {"attention": attention, "cuda_graphs": graphs, "overlap": overlap}
        texts.append(serve(*make(made, ranks, dtype="float32", **settings), seed=1, count=20)[0])
    assert texts[0] == texts[1] == texts[2]


def test_blocks_fill_the_least_of_both_memories(made: list[DeviceExecutor]) -> None:
    one = make(made, 1, num_kv_blocks=None, gpu_memory_utilization=0.5)[1].num_kv_blocks
    made.pop().shutdown()
    several = make(made, RANKS, num_kv_blocks=None, gpu_memory_utilization=0.5)[1].num_kv_blocks
    assert several > one, "each has half of every block"


def hold_memory(rank: int, share: float) -> object:
    """Take a share of a rank's card, until what is returned is gone."""
    size = torch.cuda.get_device_properties(rank).total_memory
    return torch.empty(int(share * size), dtype=torch.uint8, device=torch.device("cuda", rank))


def test_blocks_are_those_of_the_card_with_the_least_room(made: list[DeviceExecutor]) -> None:
    settings: dict[str, Any] = {"num_kv_blocks": None, "gpu_memory_utilization": 0.5, "cuda_graphs": "none"}
    equal = make(made, RANKS, **settings)[1]
    made.pop().shutdown()
    held = hold_memory(1, 0.1)
    less = make(made, RANKS, **settings)[1]
    del held
    assert less.num_kv_blocks < equal.num_kv_blocks
    assert "on the rank with the least room" in less.reasons["num_kv_blocks"]


def decode_all(executor: DeviceExecutor) -> None:
    for place in range(20, len(TOKENS)):
        run(executor, decode("a", TOKENS[place], place, BLOCKS))


def test_a_killed_rank_ends_the_wait_for_the_device(made: list[DeviceExecutor]) -> None:
    executor, _ = make(made, RANKS)
    run(executor, chunk("a", TOKENS[:20], 0, 20, BLOCKS))
    ranks = executor.capabilities.ranks
    from engine.parallel.ranks import Ranks  # not before: a machine for tests may have no package for messages

    assert isinstance(ranks, Ranks)
    (process,) = ranks.processes
    assert isinstance(process, Child)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ExecutorFatalError, match="Rank 1"):
        decode_all(executor)
