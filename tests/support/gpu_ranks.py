"""Runs an engine of several ranks with pretended GPUs: the followers are threads, each with a device of its own.
Never shows what NCCL or CUDA do: gloo sums at once, and a replay does the captured work again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build.gpu import start_on_device
from engine.config import EngineConfig
from engine.execution.device import Device
from engine.execution.gpu.executor import DeviceExecutor
from engine.parallel.processes import RankLauncher
from engine.step import ScheduledRequest, StepOutput, StepPlan
from tests.support.fake_device import FakeDevice
from tests.support.fake_flash import FakeFlash
from tests.support.thread_launcher import ThreadLauncher

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "num_kv_blocks": 20,
    "num_threads": 1,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 24,
    "num_speculative_tokens": 0,
}


def pretend_gpus(patch: pytest.MonkeyPatch, make: Callable[[int], Device] = lambda rank: FakeDevice()) -> None:
    """Let followers of this process find a GPU each, and FlashAttention take float32. make: a follower's device."""
    found = iter(range(1, 1000))
    patch.setattr("engine.build.gpu_follower.choose_device", lambda config: (make(next(found)), "a test"))
    flash: Any = FakeFlash(any_dtype=True)
    patch.setitem(sys.modules, "vllm_flash_attn", flash)
    patch.setattr("kernels.flash.packages.DTYPES", (torch.float32, torch.bfloat16))


class GpuRanks:
    """An executor over several devices, whose followers are threads."""

    def __init__(
        self,
        ranks: int,
        model: Path,
        device: Device | None = None,
        launcher: RankLauncher | None = None,
        **settings: Any,
    ) -> None:
        """device: the leader's. launcher: None: threads."""
        self.launcher = ThreadLauncher()
        config = EngineConfig(**SETTINGS | settings, tensor_parallel_size=ranks)
        start = start_on_device(model, config, device or FakeDevice(), "a test", launcher or self.launcher)
        self.executor, self.resolved = start.build()

    def step(self, *rows: ScheduledRequest, **plan: Any) -> StepOutput:
        self.executor.launch(StepPlan(0, rows, **plan))
        return self.executor.collect()


@contextmanager
def gpu_ranks(ranks: int, model: Path, device: Device | None = None, **settings: Any) -> Iterator[GpuRanks]:
    """End the engine after the body, and check that all followers have ended in order."""
    made = GpuRanks(ranks, model, device, **settings)
    assert isinstance(made.executor, DeviceExecutor)
    try:
        yield made
    finally:
        made.executor.shutdown()
    ends = [rank.poll() for rank in made.launcher.ranks]
    assert ends == [f"rank {rank} ended in order" for rank in range(1, ranks)]
