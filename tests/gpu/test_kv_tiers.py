"""Owns tests of KV that leaves a GPU and comes back: to the bit, in the order of the steps, without a step that waits.
Never needs a checkpoint: weights are dummies of a real shape."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import engine.models
from engine.build.executor import create_executor
from engine.config import EngineConfig, KvTiersConfig
from engine.execution.device import Device
from engine.execution.gpu.executor import DeviceExecutor
from engine.execution.gpu.kv_blocks import DeviceBlockCopier
from engine.kv_tiers import Tier
from engine.models.config import read_model_config
from engine.models.kv_cache import KVCache
from engine.tiers.mover import TierMover
from tests.support.kv_tiers import Ends, MemoryFiles, load, store
from tests.support.plans import chunk, decode, run

pytestmark = pytest.mark.gpu

SHAPES = Path(engine.models.__file__).parent / "shapes"
NUM_BLOCKS, BLOCK_SIZE, MOVED = 96, 16, 32
"""MOVED blocks have room on their way to the host tier, and half of them on that to the disk, in every type."""
GENERATOR = torch.Generator().manual_seed(21)
DTYPES = [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn]


class Rig:
    """A mover over the blocks of a real shape."""

    def __init__(self, device: Device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device = device
        self.cache = KVCache.allocate(
            read_model_config(SHAPES / "qwen3-0.6b"), NUM_BLOCKS, BLOCK_SIZE, dtype, device.torch_device
        )
        assert self.cache.blocks is not None
        self.blocks, self.files = self.cache.blocks, MemoryFiles()
        self.copier = DeviceBlockCopier(self.cache, device)
        self.mover = TierMover(self.copier, host_blocks=NUM_BLOCKS, files=self.files, pin=device.pin)
        self.ends = Ends(self.mover)

    def scramble(self) -> None:
        content = torch.randint(0, 256, self.blocks.shape, dtype=torch.uint8, generator=GENERATOR)
        self.blocks.copy_(content)

    def keep_busy(self) -> None:
        """Queue some milliseconds of work of steps."""
        matrix = torch.ones(4096, 4096, device=self.device.torch_device, dtype=torch.bfloat16)
        for _ in range(20 if self.device.torch_device.type == "cuda" else 0):
            matrix = matrix @ matrix


@pytest.fixture
def rig(device: Device) -> Iterator[Rig]:
    made = Rig(device)
    made.scramble()
    yield made
    made.mover.shutdown()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_blocks_come_back_from_both_tiers_bit_for_bit(device: Device, dtype: torch.dtype) -> None:
    rig = Rig(device, dtype)
    rig.scramble()
    want, names = rig.blocks[:, :MOVED].cpu().clone(), [bytes([block]) * 16 for block in range(MOVED)]
    for tier in Tier:
        stores = [store(tier, name, block) for block, name in enumerate(names) if block % 2 == (tier is Tier.DISK)]
        rig.mover.begin(stores)
        assert rig.ends.errors(*stores) == [""] * len(stores)
    rig.scramble()
    untouched = rig.blocks[:, :-MOVED].cpu().clone()
    loads = [
        load(Tier.DISK if block % 2 else Tier.HOST, name, NUM_BLOCKS - 1 - block) for block, name in enumerate(names)
    ]
    rig.mover.begin(loads)
    assert rig.ends.errors(*loads) == [""] * MOVED
    assert torch.equal(rig.blocks[:, -MOVED:].flip(1).cpu(), want)
    assert torch.equal(rig.blocks[:, :-MOVED].cpu(), untouched)
    rig.mover.shutdown()


def test_a_store_has_what_was_there_between_the_steps_before_and_after_it(rig: Rig) -> None:
    for number in range(10):
        name = bytes([number]) * 16
        rig.keep_busy()
        rig.blocks[:, 3] = number + 1
        stored = store(Tier.HOST, name, 3)
        rig.mover.begin([stored])
        rig.blocks[:, 3] = 200
        loaded = load(Tier.HOST, name, 50 + number)
        rig.mover.begin([loaded])
        rig.keep_busy()
        rig.ends.of(stored, loaded)
    for number in range(10):
        assert rig.blocks[:, 50 + number].eq(number + 1).all()


def test_a_load_comes_after_the_steps_that_still_use_its_block(rig: Rig) -> None:
    """Its block may have been freed by a request whose last step is still running."""
    stored = store(Tier.HOST, b"a" * 16, 3)
    rig.mover.begin([stored])
    rig.ends.of(stored)
    rig.keep_busy()
    rig.blocks[:, 5] = 7
    loaded = load(Tier.HOST, b"a" * 16, 5)
    rig.mover.begin([loaded])
    assert rig.ends.errors(loaded) == [""]
    assert torch.equal(rig.blocks[:, 5], rig.blocks[:, 3])


def test_a_cancelled_load_writes_nothing_after_later_steps(rig: Rig) -> None:
    names = [bytes([block]) * 16 for block in range(MOVED)]
    stores = [store(Tier.HOST, name, block) for block, name in enumerate(names)]
    rig.mover.begin(stores)
    rig.ends.of(*stores)
    for _ in range(10):
        rig.keep_busy()
        loads = [load(Tier.HOST, name, 50 + block) for block, name in enumerate(names)]
        rig.mover.begin(loads)
        rig.mover.cancel([move.move_id for move in loads])
        rig.blocks[:, 50 : 50 + MOVED] = 9
    last = load(Tier.HOST, names[0], 49)
    rig.mover.begin([last])
    assert [result.move for result in rig.ends.of(last)] == [last]
    assert rig.blocks[:, 50 : 50 + MOVED].eq(9).all()


def test_the_host_tier_is_memory_that_the_device_copies_to_without_waiting(rig: Rig) -> None:
    row = torch.frombuffer(rig.mover._pool.view(NUM_BLOCKS - 1), dtype=torch.uint8)
    assert row.is_pinned() == (rig.device.torch_device.type == "cuda")


def test_a_prompt_that_was_moved_is_continued_as_one_that_stayed(device: Device) -> None:
    config = EngineConfig(
        load_format="dummy",
        device="cuda",
        max_model_len=2048,
        max_num_seqs=16,
        num_kv_blocks=400,
        max_num_batched_tokens=256,
        kv_tiers=KvTiersConfig(host_memory_gib=0.25),
    )
    executor, resolved = create_executor(SHAPES / "qwen3-0.6b", config)
    assert isinstance(executor, DeviceExecutor)
    mover = executor.capabilities.kv_mover
    assert mover is not None
    tokens = torch.randint(0, resolved.vocab_size, (150,), generator=GENERATOR).tolist()
    size, ends = resolved.block_size, Ends(mover)
    full = 128 // size
    blocks, others = tuple(range(20, 40)), tuple(range(60, 80))

    def answer(table: tuple[int, ...]) -> list[int]:
        found = list(run(executor, chunk("a", tokens, 128, 150, table))[0])
        while len(found) < 24:
            found += run(executor, decode("a", found[-1], 150 + len(found) - 1, table))[0]
        return found

    run(executor, chunk("a", tokens, 0, 128, blocks))
    stores = [store(Tier.HOST, bytes([block]) * 16, block) for block in blocks[:full]]
    mover.begin(stores)
    stayed = answer(blocks)
    for tensor in (tensor for pair in executor.model.cache.layers for tensor in pair):
        tensor[:100].zero_()
    loads = [load(Tier.HOST, bytes([block]) * 16, there) for block, there in zip(blocks[:full], others, strict=False)]
    mover.begin(loads)
    assert {result.error for result in ends.of(*stores, *loads)} == {""}
    assert answer(others) == stayed
    executor.shutdown()
