"""Owns the contract of a GPU's copies of KV blocks: what is done in which queue, and what waits for what.
Never needs a device: a pretended one does the work beside the steps as late as it may."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.build.gpu import start_on_device
from engine.config import ConfigError, EngineConfig, KvTiersConfig
from engine.execution.gpu.executor import DeviceExecutor
from engine.execution.gpu.kv_blocks import (
    LOAD_GROUPS,
    STORE_GROUPS,
    DeviceBlockCopier,
    buffer_bytes,
    group_blocks,
)
from engine.host.memory import HostMemory
from engine.kv_tiers import BUSY, Tier
from engine.models.config import read_model_config
from engine.models.kv_cache import KVCache, bytes_per_block
from engine.step import StepPlan
from engine.tiers.mover import TierMover
from tests.support.fake_device import FakeDevice, write_model
from tests.support.kv_tiers import Ends, Gate, MemoryFiles, load, store
from tests.support.plans import chunk, decode, greedy_text

A, B = b"a" * 16, b"b" * 16
DTYPES = [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn]
GENERATOR = torch.Generator().manual_seed(12)


class LateQueue:
    """Work beside the steps, which is done when somebody waits for it, and not before."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._work: list[tuple[LateMark, Callable[[], None]]] = []
        """Each with the point of the steps that it comes after."""
        self.num_done = 0
        self.steps_marks: list[LateMark] = []
        self.arrival = Gate()
        """Holds who waits for the queue, but not the steps."""
        self.steps_take: Callable[[], None] = lambda: None
        """Called once for each mark of the steps that is made from now on, by who waits for it first."""

    def mark_steps(self) -> LateMark:
        self.steps_marks.append(LateMark(self, 0, self.steps_take))
        return self.steps_marks[-1]

    def run(self, work: Callable[[], None], after: Any) -> LateMark:
        assert after in self.steps_marks, "it would not wait for the steps"
        with self._lock:
            self._work.append((after, work))
            return LateMark(self, len(self._work))

    def hold_steps(self, mark: LateMark) -> None:
        self.do(mark.end)

    def do(self, end: int) -> None:
        """Do the work before the mark `end`, in order: one that waits for steps holds what is behind it."""
        with self._lock:
            while self.num_done < end:
                after, work = self._work[self.num_done]
                after.reach()
                work()
                self.num_done += 1


class LateMark:
    def __init__(self, queue: LateQueue, end: int, take: Callable[[], None] = lambda: None) -> None:
        self._queue, self.end, self._take = queue, end, take

    @property
    def is_past(self) -> bool:
        return self._queue.num_done >= self.end

    def wait(self) -> None:
        self._queue.arrival.pass_through()
        self.reach()
        self._queue.do(self.end)

    def reach(self) -> None:
        take, self._take = self._take, lambda: None
        take()


class LateDevice(FakeDevice):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.queue = LateQueue()
        self.pinned: list[int] = []
        self.unpinned = 0

    def side_queue(self) -> LateQueue:
        return self.queue

    def pin(self, memory: memoryview) -> Callable[[], None]:
        self.pinned.append(len(memory))

        def undo() -> None:
            self.unpinned += 1

        return undo


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


class Rig:
    """A mover over a cache of 40 blocks on a device that is late."""

    def __init__(
        self, directory: Path, dtype: torch.dtype = torch.float32, block_size: int = 16, heads: int = 2
    ) -> None:
        model, self.device = replace(read_model_config(directory), num_kv_heads=heads), LateDevice()
        self.cache = KVCache.allocate(model, 40, block_size, dtype)
        self.copier, self.files = DeviceBlockCopier(self.cache, self.device), MemoryFiles()
        assert self.copier.block_bytes == bytes_per_block(model, block_size, dtype)
        self.mover = TierMover(self.copier, host_blocks=40, files=self.files, pin=self.device.pin)
        self.ends = Ends(self.mover)

    def scramble(self) -> None:
        assert self.cache.blocks is not None
        content = torch.randint(0, 256, self.cache.blocks.shape, dtype=torch.uint8, generator=GENERATOR)
        self.cache.blocks.copy_(content)

    def bytes_of(self, block: int) -> torch.Tensor:
        assert self.cache.blocks is not None
        return self.cache.blocks[:, block].clone()


@pytest.fixture
def rig(directory: Path) -> Iterator[Rig]:
    made = Rig(directory)
    made.scramble()
    yield made
    made.device.queue.arrival.open()
    made.mover.shutdown()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 1])
def test_random_blocks_come_back_from_both_tiers_bit_for_bit(
    directory: Path, dtype: torch.dtype, block_size: int
) -> None:
    """A block of one token in 8 bits has 20 bytes in a tensor, which are not copied in words of eight."""
    rig = Rig(directory, dtype, block_size, heads=1)
    rig.scramble()
    want = {block: rig.bytes_of(block) for block in range(36)}
    names = {block: bytes([block]) * 16 for block in want}
    for tier in Tier:
        stores = [store(tier, name, block) for block, name in names.items() if block % 2 == (tier is Tier.DISK)]
        rig.mover.begin(stores)
        assert rig.ends.errors(*stores) == [""] * len(stores)
    rig.scramble()
    loads = [load(Tier.DISK if block % 2 else Tier.HOST, name, 39 - block) for block, name in names.items()]
    rig.mover.begin(loads)
    assert rig.ends.errors(*loads) == [""] * len(loads)
    for block, content in want.items():
        assert torch.equal(rig.bytes_of(39 - block), content)
    rig.mover.shutdown()


def test_a_store_reads_its_block_before_later_work_of_the_steps(rig: Rig) -> None:
    """It crosses the bus later: what is copied then must have been gathered in the steps' own queue."""
    want = rig.bytes_of(3)
    rig.mover.begin([store(Tier.HOST, A, 3)])
    assert rig.device.queue.num_done == 0, "nothing has crossed the bus"
    rig.scramble()
    loaded = load(Tier.HOST, A, 5)
    rig.mover.begin([loaded])
    assert [result.error for result in rig.ends.of(loaded)] == ["", ""]
    assert torch.equal(rig.bytes_of(5), want)


def test_a_cancelled_load_that_is_queued_is_done_before_later_work_of_the_steps(rig: Rig) -> None:
    """The block's next owner writes to it in the steps' queue, after the load."""
    stored = store(Tier.HOST, A, 3)
    rig.mover.begin([stored])
    rig.ends.of(stored)
    rig.device.queue.arrival.close()
    given_up = load(Tier.HOST, A, 5)
    rig.mover.begin([given_up])
    rig.device.queue.arrival.wait_for_caller()
    rig.mover.cancel([given_up.move_id])
    assert rig.cache.blocks is not None
    rig.cache.blocks[:, 5] = 9
    rig.device.queue.arrival.open()
    later = load(Tier.HOST, A, 6)
    rig.mover.begin([later])
    assert [result.move for result in rig.ends.of(later)] == [later]
    assert rig.cache.blocks[:, 5].eq(9).all()
    assert torch.equal(rig.bytes_of(6), rig.bytes_of(3))


def test_stores_beyond_the_buffers_are_busy_until_a_buffer_has_left(rig: Rig) -> None:
    room = STORE_GROUPS * rig.copier.write_batch
    rig.device.queue.arrival.close()  # the writer's threads would wait, too
    assert rig.copier.room() == room
    blocks = [number % 40 for number in range(room + 1)]
    rows = [memoryview(bytearray(rig.copier.block_bytes)) for _ in blocks]
    landing = rig.copier.read(blocks[:room], rows[:room])
    assert rig.copier.room() == 0
    refused = store(Tier.HOST, A, 3)
    rig.mover.begin([refused])
    assert [result.error for result in rig.mover.take_results()] == [BUSY]
    rig.device.queue.arrival.open()
    landing.wait()
    assert rig.copier.room() == room
    assert all(row == rig.bytes_of(block).numpy().tobytes() for row, block in zip(rows[:room], blocks, strict=False))


def test_blocks_are_gathered_together_and_cross_the_bus_beside_each_other(rig: Rig) -> None:
    before = len(rig.device.uploaded)
    rig.mover.begin([store(Tier.HOST, bytes([number]) * 16, number) for number in range(8)])
    assert rig.device.uploaded[before:] == [8], "one operation gathers all, by one list of blocks"


def test_a_load_waits_for_the_steps_that_were_launched(rig: Rig) -> None:
    """LateQueue refuses work that waits for none of the steps' marks; the mark must be of this very call."""
    stored = store(Tier.HOST, A, 3)
    rig.mover.begin([stored])
    rig.ends.of(stored)
    marks = len(rig.device.queue.steps_marks)
    loaded = load(Tier.HOST, A, 5)
    rig.mover.begin([loaded])
    assert len(rig.device.queue.steps_marks) == marks + 1
    assert rig.ends.errors(loaded) == [""]


@pytest.mark.parametrize("store_beside", [False, True])
def test_the_time_of_a_load_has_no_wait_for_the_steps_before_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, store_beside: bool
) -> None:
    """Else a load beside long steps, of a block or two, would seem to take longer than computing them, and no further
    one would be made for minutes. A store that was queued meanwhile waits for later steps, and the load behind it does,
    too."""
    clock, copy = [0.0], rig.copier._blocks.index_copy_

    def take(seconds: float, work: Callable[..., object] = lambda: None) -> Callable[..., None]:
        def done(*given: Any) -> None:
            clock[0] += seconds
            work(*given)

        return done

    for module in ("engine.tiers.loads", "engine.execution.gpu.kv_blocks"):
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    rig.files.files[A] = rig.bytes_of(3).numpy().tobytes()
    rig.device.queue.steps_take = take(5.0)
    rig.files.reading.close()
    loaded = load(Tier.DISK, A, 5)
    rig.mover.begin([loaded])
    rig.files.reading.wait_for_caller()
    later = [store(Tier.HOST, B, 4)] if store_beside else []
    rig.mover.begin(later)
    monkeypatch.setattr(rig.copier, "_blocks", SimpleNamespace(index_copy_=take(0.25, copy)))
    rig.files.reading.open()
    result = rig.ends.of(loaded)[-1]
    assert (result.error, clock) == ("", [10.25 if store_beside else 5.25])
    assert result.seconds == 0.25
    assert torch.equal(rig.bytes_of(5), rig.bytes_of(3))


def test_a_copier_takes_the_memory_that_it_was_said_to(rig: Rig) -> None:
    copier = rig.copier
    buffers = [*copier._unused, *(copier._coming.get() for _ in range(LOAD_GROUPS))]
    assert sum(buffer.nbytes for buffer in buffers) == buffer_bytes(copier.block_bytes)
    assert group_blocks(100 * 2**20) == 1
    assert buffer_bytes(100 * 2**20) == (STORE_GROUPS + LOAD_GROUPS) * 100 * 2**20
    for buffer in buffers[STORE_GROUPS:]:
        copier._coming.put(buffer)


# --- with an executor ------------------------------------------------------------------------------------------------

TOKENS = torch.randint(0, 256, (40,), generator=GENERATOR).tolist()
BLOCKS, OTHER_BLOCKS = (9, 3, 11, 0), (1, 2, 4, 5)


def start(directory: Path, tiers: KvTiersConfig, device: FakeDevice, **settings: Any) -> Any:
    plain = {"load_format": "dummy", "dtype": "float32", "num_kv_blocks": 20, "num_threads": 1, "attention": "torch"}
    config = EngineConfig(**plain | {"max_num_seqs": 4, "max_num_batched_tokens": 48} | settings, kv_tiers=tiers)
    return start_on_device(directory, config, device, "a test")


def test_a_prompt_that_was_moved_is_continued_as_one_that_stayed(directory: Path) -> None:
    device = LateDevice(free=(100.0,), total=200.0)
    executor, resolved = start(directory, KvTiersConfig(host_memory_gib=0.01), device).build()
    assert isinstance(executor, DeviceExecutor)
    mover = executor.capabilities.kv_mover
    assert mover is not None
    assert device.pinned == [mover.host_blocks * mover.block_bytes]
    assert resolved.reasons["kv_tiers"].startswith(f"asked for; {mover.host_blocks} blocks in 0.01 GiB")
    want = greedy_text(executor, TOKENS, BLOCKS, 8)
    stores = [store(Tier.HOST, bytes([block]) * 16, block) for block in BLOCKS[:2]]
    mover.begin(stores)
    executor.launch(StepPlan(0, (chunk("b", TOKENS[::-1], 0, 40, BLOCKS),)))  # which overwrites them
    executor.collect()
    loads = [
        load(Tier.HOST, bytes([block]) * 16, there) for block, there in zip(BLOCKS[:2], OTHER_BLOCKS[:2], strict=True)
    ]
    mover.begin(loads)
    ends = Ends(mover)
    assert {result.error for result in ends.of(*stores, *loads)} == {""}
    executor.launch(StepPlan(1, (chunk("c", TOKENS, 32, 40, OTHER_BLOCKS),)))
    ((token,),) = executor.collect().sampled
    got = [token]
    while len(got) < 8:
        executor.launch(StepPlan(2, (decode("c", got[-1], 40 + len(got) - 1, OTHER_BLOCKS),)))
        got += executor.collect().sampled[0]
    assert got == want
    executor.shutdown()
    assert device.unpinned == 1


def test_buffers_leave_less_memory_for_kv_blocks(directory: Path) -> None:
    settings: dict[str, Any] = {"num_kv_blocks": None, "gpu_memory_utilization": 0.75}
    found = {}
    for host in (0.0, 0.001):
        device = FakeDevice(free=(90.0,), total=100.0)
        executor, resolved = start(directory, KvTiersConfig(host_memory_gib=host), device, **settings).build()
        found[host] = resolved
        size = executor.model.cache.blocks.numel() // executor.model.cache.blocks.shape[1]
        executor.shutdown()
    less = found[0.0].num_kv_blocks - found[0.001].num_kv_blocks
    assert less == -(-buffer_bytes(size) // size)
    assert "buffers for kv_tiers" in found[0.001].reasons["num_kv_blocks"]


def test_a_host_tier_that_does_not_fit_is_refused_and_one_that_does_is_claimed(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gib = 2**30
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("engine.host.shares.host_memory", lambda: HostMemory(2 * gib, 2 * gib, "a test's file"))
    with pytest.raises(
        ConfigError, match=r"kv_tiers.host_memory_gib is 2, which takes 2.00 GiB .* only 1.90 GiB is left:"
    ):
        start(directory, KvTiersConfig(host_memory_gib=2.0), FakeDevice())
    first = start(directory, KvTiersConfig(host_memory_gib=1.0), FakeDevice())
    with pytest.raises(ConfigError, match=r"only 0.90 GiB is left: .* are promised to engines"):
        start(directory, KvTiersConfig(host_memory_gib=1.0), FakeDevice())
    first.release()
    executor, _ = start(directory, KvTiersConfig(host_memory_gib=1.0), FakeDevice()).build()
    executor.shutdown()
    start(directory, KvTiersConfig(host_memory_gib=1.0), FakeDevice()).release()
