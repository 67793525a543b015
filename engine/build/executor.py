"""Owns the choice between the executors for a CPU and for a GPU, and the call that makes either.
Never reads a checkpoint: the device's own start does, and only the chosen start is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from engine.config import ConfigError, EngineConfig, ResolvedConfig
from engine.execution.device import choose_device
from engine.execution.executor import ModelExecutor
from engine.parallel.processes import RankLauncher


class Start(Protocol):
    """An engine that is ready to start on a device: everything is checked and chosen, but no weight has been read."""

    @property
    def resolved(self) -> ResolvedConfig:
        """The config that is served. Only `build` finds the number of KV blocks on a GPU, and whether ranks on other
        machines have room for as many."""

    def build(self) -> tuple[ModelExecutor, ResolvedConfig]: ...

    def release(self) -> None:
        """Give up what was reserved, if the engine is not going to be built."""


def create_executor(
    model_dir: Path, config: EngineConfig, engines: int = 1, launcher: RankLauncher | None = None
) -> tuple[ModelExecutor, ResolvedConfig]:
    """Load the checkpoint in `model_dir` (with load_format `dummy`, only its config.json) and make it ready to run.
    engines: how many share this machine's memory. launcher: starts the engine's other ranks, if it has several;
    None: as children of this process.

    Raises:
        CheckpointError: the checkpoint is broken or not supported.
        ModelError: the draft model cannot be found or read.
        ConfigError: the config asks for more than the checkpoint, the device or the memory can give; or for ranks with
            requests of their own, which are engines: engine.build.engine.build_engine starts them.
    """
    if (size := config.expert_parallel_size) > 1:
        raise ConfigError(
            f"expert_parallel_size is {size}, but an executor is of one rank: let build_engine start the engine."
        )
    return _start(model_dir, config, engines, launcher).build()


def check_executor(
    model_dir: Path, config: EngineConfig, engines: int = 1, launcher: RankLauncher | None = None
) -> ResolvedConfig:
    """Run all checks that create_executor makes before it reads a weight, and return the config that it would serve.
    launcher: says which ranks are on this machine; it starts none.

    Raises: as create_executor.
    """
    start = _start(model_dir, config, engines, launcher)
    start.release()
    return start.resolved


def _start(model_dir: Path, config: EngineConfig, engines: int, launcher: RankLauncher | None = None) -> Start:
    device, reason = choose_device(config)
    if device.capability is not None:
        from engine.build.gpu import start_on_device

        return start_on_device(model_dir, config, device, reason, launcher)
    from engine.build.cpu import start_on_cpu

    return start_on_cpu(model_dir, config, (device, reason), engines, launcher)
