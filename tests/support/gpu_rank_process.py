"""Runs a follower with a pretended GPU in a process of its own: `-m tests.support.gpu_rank_process`.
Never decides what it computes: its environment says only whether there is Triton."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import torch

from engine.parallel.processes import Child
from tests.support.fake_device import FakeDevice
from tests.support.fake_flash import FakeFlash

TABLE = "STAND_IN_TRITON_TABLE"
"""The environment variable that names Triton's table."""
MEMORY = "STAND_IN_MEMORY"
"""The one with the device's memory."""
NO_TABLE = "kernels.triton.absent"


class StandInLauncher:
    """An engine.parallel.processes.RankLauncher of such processes."""

    remote_host: str | None = None

    def __init__(self, table: str = NO_TABLE, mebibytes: tuple[float, ...] = ()) -> None:
        """mebibytes: of each device: free ones, and all; none: as little as a FakeDevice has."""
        self.ranks: list[Child] = []
        self._environment = {TABLE: table, MEMORY: json.dumps(mebibytes)}

    def start(self, rank: int, specification: bytes) -> Child:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | self._environment
        command = [sys.executable, "-m", "tests.support.gpu_rank_process"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        assert process.stdin is not None
        process.stdin.write(len(specification).to_bytes(8, "big") + specification)
        process.stdin.flush()
        self.ranks.append(Child(rank, process))
        return self.ranks[-1]


def main() -> None:
    """Read what to load from standard input, as engine.build.follower does."""
    argparse.ArgumentParser(prog="python -m tests.support.gpu_rank_process", description=main.__doc__).parse_args()
    import engine.build.follower
    import engine.build.gpu_follower
    import kernels.choice
    import kernels.flash.packages

    flash: Any = FakeFlash(any_dtype=True)
    sys.modules["vllm_flash_attn"] = flash
    kernels.flash.packages.DTYPES = (torch.float32, torch.bfloat16)
    kernels.choice.TRITON_TABLE = os.environ[TABLE]
    memory = json.loads(os.environ[MEMORY])
    device = FakeDevice(free=memory[:1], total=memory[1]) if memory else FakeDevice()
    engine.build.gpu_follower.choose_device = lambda config: (device, "a stand-in")
    engine.build.follower.main()


if __name__ == "__main__":
    main()
