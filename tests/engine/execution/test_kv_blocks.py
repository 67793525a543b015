"""Owns the proof that KV which left a CPU's cache comes back bit for bit, and that nobody can tell from an answer.
Never judges what moves when: hand-made moves do here what a plan's would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build.executor import create_executor
from engine.config import EngineConfig
from engine.execution.executor import TorchExecutor
from engine.execution.kv_blocks import BYTES_AT_ONCE, CpuBlockCopier, load_batch
from engine.kv_tiers import Tier
from engine.models.config import read_model_config
from engine.models.description import ModelConfig
from engine.models.kv_cache import KVCache, bytes_per_block
from engine.protocol import TokenLogprobs
from engine.step import StepPlan
from engine.tiers.mover import TierMover
from tests.support.compiler import needs_compiler
from tests.support.kv_tiers import Ends, MemoryFiles, load, store
from tests.support.plans import chunk, decode, greedy
from tests.support.tiny_models import VOCAB, save_model

GENERATOR = torch.Generator().manual_seed(11)
TOKENS = torch.randint(0, VOCAB, (71,), generator=GENERATOR).tolist()
BLOCKS, OTHER_BLOCKS = (9, 3, 11, 0, 7, 12), (1, 2, 4, 5, 6, 8)
FULL = 4
"""Blocks of the prompt that are full; the rest of it is computed on top of them."""
ANSWER = 8
DTYPES = [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn]
WAYS = [
    (kernels, dtype, kept)
    for kernels in ("torch_cpu", "native")
    for dtype, kept in (("float32", "auto"), ("bfloat16", "auto"), ("float32", "int8"), ("bfloat16", "fp8_e4m3"))
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_model("llama", made)
    return made


@pytest.fixture(scope="module")
def model(directory: Path) -> ModelConfig:
    return read_model_config(directory)


def bytes_of(cache: KVCache, block: int) -> torch.Tensor:
    """Return a block's bytes as its tensors have them. # [bytes] uint8"""
    parts = [tensor[block].contiguous().view(torch.uint8).flatten() for pair in cache.layers for tensor in pair]
    return torch.cat(parts)


def scramble(cache: KVCache) -> None:
    """Fill all blocks with random bytes, among them NaNs and infinities of every type."""
    for tensor in (tensor for pair in cache.layers for tensor in pair):
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=GENERATOR))


# --- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 5])
def test_random_blocks_come_back_from_both_tiers_bit_for_bit(
    model: ModelConfig, dtype: torch.dtype, block_size: int
) -> None:
    cache, files = KVCache.allocate(model, 12, block_size, dtype), MemoryFiles()
    scramble(cache)
    copier = CpuBlockCopier(cache)
    assert copier.block_bytes == bytes_per_block(model, block_size, dtype)
    mover = TierMover(copier, host_blocks=4, files=files)
    ends, want = Ends(mover), {block: bytes_of(cache, block) for block in range(12)}
    names = {block: bytes([block]) * 16 for block in (7, 0, 11, 4)}
    stores = [store(tier, name, block) for tier in Tier for block, name in names.items()]
    mover.begin(stores)
    scramble(cache)
    after = {block: bytes_of(cache, block) for block in range(12)}
    assert ends.errors(*stores) == [""] * 8
    into = dict(zip((1, 2, 3, 5), names, strict=True))
    for tier in Tier:
        scramble(cache)
        untouched = {block: bytes_of(cache, block) for block in range(12) if block not in into}
        loads = [load(tier, names[block], there) for there, block in into.items()]
        mover.begin(loads)
        assert ends.errors(*loads) == [""] * 4
        for there, block in into.items():
            assert torch.equal(bytes_of(cache, there), want[block])
        for block, content in untouched.items():
            assert torch.equal(bytes_of(cache, block), content), "a neighbour was written to"
    assert not torch.equal(after[7], want[7])
    mover.shutdown()


@pytest.mark.parametrize(
    ("block_bytes", "count"), [(1, 8), (368_640, 8), (2 << 20, 2), (3 << 20, 1), (BYTES_AT_ONCE + 1, 1)]
)
def test_small_blocks_are_loaded_together_and_large_ones_alone(block_bytes: int, count: int) -> None:
    """Regression: one by one, the engine looked at its loads after each of the default model's blocks, and prompts took
    twice as long to load. A cancelled load waits for the copy under way, so large ones are not put together."""
    assert load_batch(block_bytes) == count


def test_a_copier_loads_as_many_blocks_at_once_as_its_blocks_sizes_allow(model: ModelConfig) -> None:
    cache = KVCache.allocate(model, 2, 16, torch.float32)
    assert CpuBlockCopier(cache).write_batch == 8
    large = torch.empty(2, 2, 3 << 20, dtype=torch.uint8)
    assert CpuBlockCopier(replace(cache, blocks=large)).write_batch == 1


def test_a_copier_gives_up_the_cache_when_it_ends(model: ModelConfig) -> None:
    cache = KVCache.allocate(model, 2, 16, torch.float32)
    copier, row = CpuBlockCopier(cache), memoryview(bytearray(bytes_per_block(model, 16, torch.float32)))
    copier.close()
    with pytest.raises(IndexError):
        copier.write([0], [row], None)
    assert not cache.layers[0][0].any()


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(
    params=[pytest.param(way, marks=needs_compiler) if way[0] == "native" else way for way in WAYS],
    ids=lambda way: "-".join(way),
)
def executor(request: pytest.FixtureRequest, directory: Path) -> Iterator[TorchExecutor]:
    kernels, dtype, kept = request.param
    config = EngineConfig(dtype=dtype, kernels=kernels, kv_cache_dtype=kept, num_kv_blocks=13, num_threads=1)
    made, _ = create_executor(directory, config)
    assert isinstance(made, TorchExecutor)
    yield made
    made.shutdown()


def answer(executor: TorchExecutor, blocks: tuple[int, ...]) -> list[tuple[int, TokenLogprobs]]:
    """Compute what follows the full blocks of the prompt, and decode greedily; return tokens with
    log-probabilities."""
    row: Any = chunk("a", TOKENS, 16 * FULL, len(TOKENS), blocks)
    found: list[tuple[int, TokenLogprobs]] = []
    for step in range(ANSWER):
        executor.launch(StepPlan(step, (row._replace(sampling=greedy(3)),)))
        output = executor.collect()
        ((token,),) = output.sampled
        found.append((token, output.logprobs[0][0]))
        row = decode("a", token, len(TOKENS) + step, blocks)
    executor.forget(["a"])
    return found


@pytest.mark.parametrize("tier", [*Tier])
def test_a_prompt_that_was_moved_is_continued_to_the_bit_as_one_that_stayed(
    executor: TorchExecutor, tier: Tier
) -> None:
    cache, files = executor.model.cache, MemoryFiles()
    mover = TierMover(CpuBlockCopier(cache), host_blocks=FULL, files=files)
    ends, names = Ends(mover), [bytes([number]) * 16 for number in range(FULL)]
    executor.launch(StepPlan(0, (chunk("a", TOKENS, 0, 16 * FULL, BLOCKS),)))
    executor.collect()
    stores = [store(tier, name, block) for name, block in zip(names, BLOCKS, strict=False)]
    mover.begin(stores)
    stayed = answer(executor, BLOCKS)
    assert ends.errors(*stores) == [""] * FULL
    scramble(cache)
    loads = [load(tier, name, block) for name, block in zip(names, OTHER_BLOCKS, strict=False)]
    mover.begin(loads)
    assert ends.errors(*loads) == [""] * FULL
    assert answer(executor, OTHER_BLOCKS) == stayed
    mover.shutdown()


def test_without_the_moves_the_answer_would_be_another(executor: TorchExecutor) -> None:
    """Otherwise the test above would say nothing."""
    executor.launch(StepPlan(0, (chunk("a", TOKENS, 0, 16 * FULL, BLOCKS),)))
    executor.collect()
    stayed = answer(executor, BLOCKS)
    for tensor in (tensor for pair in executor.model.cache.layers for tensor in pair):
        tensor.view(torch.uint8).fill_(1)
    assert answer(executor, OTHER_BLOCKS) != stayed
