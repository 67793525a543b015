"""Owns tests of what must not change a text on a GPU: captured steps, a step in flight, chunks, other requests' ends.
Never needs a checkpoint: weights are dummies of real shapes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.models
from engine.build.executor import create_executor
from engine.config import ConfigError, EngineConfig, ResolvedConfig, SpeculativeConfig
from engine.core.core import EngineCore
from engine.execution.device import Device
from engine.execution.gpu.executor import DeviceExecutor
from engine.observer import Verified
from engine.protocol import Event, Failed, LoadSnapshot, SamplingParams, Submission, Token
from engine.scheduling.request import create_request
from engine.step import GraphUse
from kernels.choice import ATTENTION, FLASH, TRITON
from kernels.flash.packages import PACKAGES
from tests.support.distances import is_within
from tests.support.plans import forced_logits, forced_steps

pytestmark = pytest.mark.gpu

SHAPES = Path(engine.models.__file__).parent / "shapes"
VOCAB = 151936
TOKENS = torch.randint(0, VOCAB, (700,), generator=torch.Generator().manual_seed(5)).tolist()
BLOCKS = tuple(range(60, 10, -1))
BFLOAT16_ERROR = 3e-2
"""Relative error of logits after 28 layers, by norm."""
FEW_TOKENS = 24
"""So few that most tokens of a text have occurred in it before, and that some drafts are right by chance."""
CANCELS = 1000
"""Cancellations at arbitrary moments; a run on a stand-in has fewer."""
PROMPTS = (1, 15, 16, 17, 100, 127, 128, 129, 250)
"""Prompt lengths: the first decode rows after them are at the edges of blocks and splits."""
FLASH_BLOCKS = sorted({max(16, package.block_multiple) for package in PACKAGES})


BLOCKS_OF = {FLASH: FLASH_BLOCKS, TRITON: [16, 64]}


@pytest.fixture(params=[(name, size) for name in ATTENTION for size in BLOCKS_OF.get(name, [16])])
def attention(request: pytest.FixtureRequest, device: Device) -> dict[str, Any]:
    """Return a backend's settings. Each FlashAttention package gets a block size that it takes."""
    name, block_size = request.param
    return {"attention": name, "block_size": block_size, "num_kv_blocks": max(64, 6400 // block_size)}


def make(directory: Path | None = None, **settings: Any) -> tuple[DeviceExecutor, ResolvedConfig]:
    plain = {"load_format": "dummy", "device": "cuda", "max_model_len": 2048, "max_num_seqs": 16, "num_kv_blocks": 400}
    config = EngineConfig(**plain | {"max_num_batched_tokens": 256, "num_speculative_tokens": 0} | settings)
    try:
        executor, resolved = create_executor(directory or SHAPES / "qwen3-0.6b", config)
    except ConfigError as error:
        if "cannot run" in str(error) or "cannot be captured" in str(error):
            pytest.skip(str(error))
        raise
    assert isinstance(executor, DeviceExecutor)
    return executor, resolved


@pytest.fixture
def made() -> Iterator[list[DeviceExecutor]]:
    """Collect the executors that a test makes, and free their memory at its end."""
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


def near(one: torch.Tensor, other: torch.Tensor, tolerance: float = BFLOAT16_ERROR) -> bool:
    """Return whether two tensors agree, by norm. NaN agrees with nothing."""
    return is_within(float((one - other).norm() / other.norm()), tolerance)


def test_captured_steps_give_the_logits_of_plain_ones(made: list[DeviceExecutor], attention: dict[str, Any]) -> None:
    captured = logits(made, 17, **attention, cuda_graphs="all")
    assert near(captured, logits(made, 17, **attention, cuda_graphs="none"))


def test_decode_rows_of_known_tokens_have_the_same_logits_in_every_captured_size(
    made: list[DeviceExecutor], attention: dict[str, Any]
) -> None:
    """Sequences end one after another, so that other sizes take over, each with and without padding."""
    sequences = [TOKENS[number : 2 * number + begin + 1] for number, begin in enumerate(PROMPTS)]
    width = -(-max(map(len, sequences)) // attention["block_size"])
    tables = [tuple(range(number, width * len(PROMPTS), len(PROMPTS))) for number in range(len(PROMPTS))]
    steps = []
    for graphs in ("all", "none"):
        executor, _ = make(**attention | {"num_kv_blocks": width * len(PROMPTS)}, cuda_graphs=graphs)
        made.append(executor)
        steps.append(forced_steps(executor, sequences, tables, PROMPTS))
    mixed = [f"mixed {size}x8" for size in (64, 64, 64, 64, 128, 128, 128, 192, 256)]
    names = [*mixed, *(f"decode {rows}" for rows in (16, 8, 8, 8, 8, 4, 4, 2, 1))]
    assert [use for _, use in steps[0]] == [GraphUse(True, name) for name in names]
    for (got, _), (want, none) in zip(*steps, strict=True):
        assert none is None
        for row, (one, other) in enumerate(zip(got.double(), want.double(), strict=True)):
            assert near(one, other), f"row {row}"


def test_chunks_of_any_size_give_the_same_logits(made: list[DeviceExecutor], attention: dict[str, Any]) -> None:
    found = [logits(made, size, **attention) for size in (None, 1, 16, 63, 65)]
    for one, other in pairwise(found):
        assert near(one, other)


def test_backends_give_the_logits_of_the_reference(made: list[DeviceExecutor], attention: dict[str, Any]) -> None:
    want = logits(made, 64, attention="torch", dtype="float32")
    assert near(logits(made, 64, **attention), want, 2 * BFLOAT16_ERROR)


def serve(
    executor: DeviceExecutor,
    resolved: ResolvedConfig,
    seed: int,
    count: int,
    cancels: int = 0,
    verified: list[Verified] | None = None,
) -> tuple[dict[str, list[int]], LoadSnapshot]:
    """Serve random requests; return tokens by request, and the engine's load. With each of the first `cancels`
    requests, one of the latest is aborted, wherever it is. verified: gets the drafts of all steps."""
    core, draw, found = EngineCore(executor, resolved), random.Random(seed), dict[str, list[int]]()

    def keep(events: list[Event]) -> None:
        for event in events:
            assert not isinstance(event, Failed), event
            if isinstance(event, Token):
                found.setdefault(event.request_id, []).append(event.token_id)

    def step() -> None:
        keep(core.step())
        if verified is not None:
            verified.extend(core.last_step.verified)

    live: list[str] = []
    for number in range(count):
        prompt = tuple(draw.choices(range(resolved.vocab_size), k=draw.choice([1, 15, 16, 17, 100, 400])))
        options = {"temperature": draw.choice([0.0, 0.0, 1.0]), "seed": number, "top_p": draw.choice([1.0, 0.9])}
        sampling = SamplingParams(max_tokens=draw.randint(1, 20), ignore_eos=True, **options)
        keep(core.submit(create_request(Submission(f"r{number}", prompt, sampling), resolved, number)))
        live.append(f"r{number}")
        for _ in range(draw.choice([0, 0, 1, 4])):
            step()
        if number < cancels:
            keep(core.abort(live.pop(draw.randrange(max(0, len(live) - 16), len(live)))))
    while core.has_work:
        step()
    load = core.load()
    assert load.num_held_blocks == 0
    return found, load


@pytest.mark.parametrize(("attention", "graphs"), [("torch", "none"), ("triton", "none"), ("triton", "all")])
def test_a_step_in_flight_changes_no_text(
    made: list[DeviceExecutor], device: Device, attention: str, graphs: str
) -> None:
    """Runs in float32: steps hold different rows, and a different order of summation must not decide a near tie."""
    texts = []
    for overlap in (False, True):
        executor, resolved = make(dtype="float32", attention=attention, cuda_graphs=graphs, overlap=overlap)
        made.append(executor)
        text, load = serve(executor, resolved, seed=1, count=40)
        texts.append(text)
        # In float32 a device may work so long on a prefill that a capture of it would hide nothing: it is left out.
        assert [why for why in load.graph_misses if not why.endswith("tokens")] == []
        assert any(name.startswith("decode") for name in load.graph_hits) == (graphs == "all")
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("attention", "graphs"), [("torch", "none"), ("triton", "none"), ("triton", "all")])
def test_drafts_beside_a_step_in_flight_change_no_text(
    made: list[DeviceExecutor], device: Device, attention: str, graphs: str, tmp_path: Path
) -> None:
    """Runs in float32, as the test above. Drafts are looked up wherever a token occurred before: among all tokens of
    the shape, hardly one would in a random text."""
    config = json.loads((SHAPES / "qwen3-0.6b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": FEW_TOKENS}))
    verified: list[Verified] = []
    eager = SpeculativeConfig(method="suffix", min_match=1, adaptive=False)
    drafted: dict[str, Any] = {"overlap": True, "speculative": eager, "num_speculative_tokens": 3}
    texts = []
    for settings in ({}, drafted):
        executor, resolved = make(tmp_path, dtype="float32", attention=attention, cuda_graphs=graphs, **settings)
        made.append(executor)
        texts.append(serve(executor, resolved, seed=4, count=40, verified=verified)[0])
    assert texts[0] == texts[1]
    num_accepted = sum(one.num_accepted for one in verified)
    num_drafted = sum(one.num_drafted for one in verified)
    assert num_drafted > num_accepted > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_thousand_cancels_at_any_moment_leave_nothing_behind(
    made: list[DeviceExecutor], device: Device, overlap: bool
) -> None:
    executor, resolved = make(overlap=overlap)
    made.append(executor)
    serve(executor, resolved, seed=2, count=CANCELS // 10, cancels=CANCELS // 20)
    held = torch.cuda.memory_reserved()
    serve(executor, resolved, seed=3, count=CANCELS + CANCELS // 5, cancels=CANCELS)
    assert (executor._answers.newest, executor._flying, list(executor._launched)) == ({}, {}, [])
    assert torch.cuda.memory_reserved() <= held + 2**26, "64 MiB: pieces that the allocator keeps, and no request's"


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
