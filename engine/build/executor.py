"""Owns the choice between a CPU's executor and a GPU's, and the one call that makes either.
Never reads a checkpoint: the builder of the device does, and only that one is imported."""

from __future__ import annotations

from pathlib import Path

from engine.config import EngineConfig, ResolvedConfig
from engine.execution.device import choose_device
from engine.execution.executor import TorchExecutor


def create_executor(model_dir: Path, config: EngineConfig, engines: int = 1) -> tuple[TorchExecutor, ResolvedConfig]:
    """Load the checkpoint of `model_dir` (only its config.json with load_format `dummy`) and make it ready to run.
    engines: that share this machine's memory.

    Raises:
        CheckpointError: the checkpoint is broken or not supported.
        ModelError: the draft model cannot be found or read.
        ConfigError: the config asks for more than the checkpoint, the device or the memory can give.
    """
    device, reason = choose_device(config)
    if device.capability is not None:
        from engine.build.gpu import create_on_device

        return create_on_device(model_dir, config, device, reason)
    from engine.build.cpu import start_on_cpu

    start = start_on_cpu(model_dir, config, (device, reason), engines)
    return start.build(), start.resolved


def check_executor(model_dir: Path, config: EngineConfig, engines: int = 1) -> ResolvedConfig:
    """Refuse what create_executor would before it reads a weight, and say what it would serve. On a GPU the number of
    KV blocks is measured later.

    Raises: as create_executor.
    """
    device, reason = choose_device(config)
    if device.capability is not None:
        from engine.build.gpu import start_on_device

        return start_on_device(model_dir, config, device, reason).resolved
    from engine.build.cpu import start_on_cpu

    start = start_on_cpu(model_dir, config, (device, reason), engines)
    start.claim.release()
    return start.resolved
