"""Owns the choice between a CPU's executor and a GPU's, and the one call that makes either.
Never reads a checkpoint: the start on the device does, and only that one is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from engine.config import EngineConfig, ResolvedConfig
from engine.execution.device import choose_device
from engine.execution.executor import ModelExecutor


class Start(Protocol):
    """An engine that may start on some device: all is checked and chosen, and no weight is read."""

    @property
    def resolved(self) -> ResolvedConfig:
        """On a GPU the number of KV blocks is measured by `build`."""

    def build(self) -> tuple[ModelExecutor, ResolvedConfig]: ...

    def release(self) -> None:
        """Give up what is held for an engine that is not built."""


def create_executor(model_dir: Path, config: EngineConfig, engines: int = 1) -> tuple[ModelExecutor, ResolvedConfig]:
    """Load the checkpoint of `model_dir` (only its config.json with load_format `dummy`) and make it ready to run.
    engines: that share this machine's memory.

    Raises:
        CheckpointError: the checkpoint is broken or not supported.
        ModelError: the draft model cannot be found or read.
        ConfigError: the config asks for more than the checkpoint, the device or the memory can give.
    """
    return _start(model_dir, config, engines).build()


def check_executor(model_dir: Path, config: EngineConfig, engines: int = 1) -> ResolvedConfig:
    """Refuse what create_executor would before it reads a weight, and say what it would serve.

    Raises: as create_executor.
    """
    start = _start(model_dir, config, engines)
    start.release()
    return start.resolved


def _start(model_dir: Path, config: EngineConfig, engines: int) -> Start:
    device, reason = choose_device(config)
    if device.capability is not None:
        from engine.build.gpu import start_on_device

        return start_on_device(model_dir, config, device, reason)
    from engine.build.cpu import start_on_cpu

    return start_on_cpu(model_dir, config, (device, reason), engines)
