"""Owns what must not change a text on a GPU: captured steps, a step in flight, chunks, and the ends of other requests.
Never needs a checkpoint: weights are dummies of real shapes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.models
from engine.config import ConfigError, EngineConfig, ResolvedConfig
from engine.core import EngineCore
from engine.device import Device
from engine.device_executor import DeviceExecutor
from engine.executor import create_executor
from engine.protocol import Event, Failed, SamplingParams, Submission, Token
from engine.request import create_request
from kernels.choice import ATTENTION
from tests.support.plans import forced_logits

pytestmark = pytest.mark.gpu

SHAPES = Path(engine.models.__file__).parent / "shapes"
VOCAB = 151936
TOKENS = torch.randint(0, VOCAB, (700,), generator=torch.Generator().manual_seed(5)).tolist()
BLOCKS = tuple(range(60, 10, -1))
BFLOAT16_ERROR = 3e-2
"""Of logits after 28 layers, by norm."""


@pytest.fixture(params=ATTENTION)
def attention(request: pytest.FixtureRequest, device: Device) -> str:
    return str(request.param)


def make(**settings: Any) -> tuple[DeviceExecutor, ResolvedConfig]:
    plain = {"load_format": "dummy", "device": "cuda", "max_model_len": 2048, "max_num_seqs": 16, "num_kv_blocks": 400}
    config = EngineConfig(**plain | {"max_num_batched_tokens": 256, "num_speculative_tokens": 0} | settings)
    try:
        executor, resolved = create_executor(SHAPES / "qwen3-0.6b", config)
    except ConfigError as error:
        if "cannot run" in str(error) or "cannot be captured" in str(error):
            pytest.skip(str(error))
        raise
    assert isinstance(executor, DeviceExecutor)
    return executor, resolved


@pytest.fixture
def made() -> Iterator[list[DeviceExecutor]]:
    """What a test makes: at its end the memory is given back."""
    executors: list[DeviceExecutor] = []
    yield executors
    for executor in executors:
        executor.shutdown()
    executors.clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def logits(made: list[DeviceExecutor], chunk_size: int | None = None, **settings: Any) -> torch.Tensor:
    executor, _ = make(**settings)
    made.append(executor)
    return forced_logits(executor, TOKENS[:250], BLOCKS, chunk_size).double()


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_captured_steps_give_the_logits_of_plain_ones(made: list[DeviceExecutor], attention: str) -> None:
    captured = logits(made, 17, attention=attention, cuda_graphs="all")
    assert distance(captured, logits(made, 17, attention=attention, cuda_graphs="none")) < BFLOAT16_ERROR


def test_chunks_of_any_size_give_the_same_logits(made: list[DeviceExecutor], attention: str) -> None:
    found = [logits(made, size, attention=attention) for size in (None, 1, 16, 63, 65)]
    for one, other in pairwise(found):
        assert distance(one, other) < BFLOAT16_ERROR


def test_backends_give_the_logits_of_the_reference(made: list[DeviceExecutor], attention: str) -> None:
    want = logits(made, 64, attention="torch", dtype="float32")
    assert distance(logits(made, 64, attention=attention), want) < 2 * BFLOAT16_ERROR


def serve(executor: DeviceExecutor, resolved: ResolvedConfig, seed: int, count: int, cancels: int = 0) -> Any:
    """Tokens by request; with each of the first `cancels`, one of the latest is ended, wherever it is."""
    core, draw, found = EngineCore(executor, resolved), random.Random(seed), dict[str, list[int]]()

    def keep(events: list[Event]) -> None:
        for event in events:
            assert not isinstance(event, Failed), event
            if isinstance(event, Token):
                found.setdefault(event.request_id, []).append(event.token_id)

    live: list[str] = []
    for number in range(count):
        prompt = tuple(draw.choices(range(VOCAB), k=draw.choice([1, 15, 16, 17, 100, 400])))
        options = {"temperature": draw.choice([0.0, 0.0, 1.0]), "seed": number, "top_p": draw.choice([1.0, 0.9])}
        sampling = SamplingParams(max_tokens=draw.randint(1, 20), ignore_eos=True, **options)
        keep(core.submit(create_request(Submission(f"r{number}", prompt, sampling), resolved, number)))
        live.append(f"r{number}")
        for _ in range(draw.choice([0, 0, 1, 4])):
            keep(core.step())
        if number < cancels:
            keep(core.abort(live.pop(draw.randrange(max(0, len(live) - 16), len(live)))))
    while core.has_work:
        keep(core.step())
    assert core.load().num_held_blocks == 0
    return found


def test_a_step_in_flight_changes_no_text(made: list[DeviceExecutor], device: Device) -> None:
    """In float32: steps hold other rows, and what is summed in another order must not tip an even choice."""
    texts = []
    for overlap in (False, True):
        executor, resolved = make(dtype="float32", attention="torch", overlap=overlap)
        made.append(executor)
        texts.append(serve(executor, resolved, seed=1, count=40))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_thousand_cancels_at_any_moment_leave_nothing_behind(
    made: list[DeviceExecutor], device: Device, overlap: bool
) -> None:
    executor, resolved = make(overlap=overlap)
    made.append(executor)
    serve(executor, resolved, seed=2, count=100, cancels=50)
    free, _ = device.memory()
    serve(executor, resolved, seed=3, count=1200, cancels=1000)
    assert (executor._newest, executor._flying, list(executor._launched)) == ({}, {}, [])
    assert device.memory()[0] >= free - 2**26, "64 MiB: pieces that the allocator keeps, and no request's"


def test_blocks_fill_what_is_asked_for_and_the_largest_step_still_fits(
    made: list[DeviceExecutor], device: Device
) -> None:
    free, total = device.memory()
    share = (total - free + 0.5 * free) / total
    executor, resolved = make(num_kv_blocks=None, gpu_memory_utilization=share)
    made.append(executor)
    serve(executor, resolved, seed=4, count=40)
    left, _ = device.memory()
    assert left >= (1 - share) * total - 2**28
