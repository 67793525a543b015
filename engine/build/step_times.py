"""Owns the step time model at the start of an engine: measured on this machine, or kept by an earlier start.
Never fails a start for a file: one that cannot be read or written is said in the log, and steps are measured."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.checkpoints.model_cache import cache_root
from engine.config import ConfigError, EngineConfig, ResolvedConfig
from engine.core.calibration import calibrate, check_costs
from engine.scheduling.step_prediction import StepTimeModel
from engine.scheduling.step_time import StepCosts, read_costs
from engine.step import Executor

logger = logging.getLogger(__name__)

_FORMAT = 3
_SETTINGS = (
    *("dtype", "kernels", "num_threads", "device", "kv_cache_dtype", "block_size", "max_model_len", "max_num_seqs"),
    *("max_num_batched_tokens", "max_prefill_tokens", "num_kv_blocks", "max_loras", "encoder_cache_tokens"),
)
"""What a step's time depends on besides the machine and the model's shape, and what limits the measured steps."""
MOST_DEVIATION = 0.25
"""Costs are not kept if measured steps deviate more from them: the machine was busy with something else."""


def measured_step_times(
    executor: Executor,
    model_dir: Path,
    config: EngineConfig,
    served: ResolvedConfig,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> StepTimeModel:
    """Return the model for an engine that is ready to run steps. Measures some seconds, unless an earlier start of the
    same model on the same machine with the same settings has kept its costs and a few steps still take what they say.
    What steps are padded to may differ from start to start, as it follows from measured launches.

    Raises:
        ConfigError: the engine's limits leave too few sizes of steps to measure.
    """
    path = cache_root() / "step_times" / f"{_key(model_dir, config, served)}.json"
    kept = _read(path)
    if kept is not None:
        costs, deviation, has_identity = kept
        same = costs.sizes == executor.capabilities.sizes
        scale = check_costs(executor, served, costs, clock=clock) if same else None
        if scale is not None:
            logger.info("step times: kept in %s, and %.2f times that now", path, scale)
            if not has_identity:  # an earlier release kept it
                _keep(path, costs, deviation, identity(model_dir, served))
            return StepTimeModel(costs, deviation=deviation, scale=scale)
        logger.info("step times: steps no longer take what %s says" if same else "step times: %s pads otherwise", path)
    began = clock()
    try:
        found = calibrate(executor, served, clock=clock)
    except ValueError as error:
        raise ConfigError(f"targets need measured step times, but {error}; raise max_num_batched_tokens.") from error
    logger.info(
        "step times: %d shapes measured in %.1f s, with a deviation of %.1f %%",
        *(len(found.steps), clock() - began, 100 * found.deviation),
    )
    if found.deviation <= MOST_DEVIATION:
        _keep(path, found.costs, found.deviation, identity(model_dir, served))
    return StepTimeModel(found.costs, deviation=found.deviation)


def fake_step_times(config: EngineConfig) -> StepTimeModel:
    """Return the model of the fake executor, whose steps take what its settings say."""
    fake = config.fake
    curve = tuple((fake.step_delay_ms + fake.token_delay_ms * tokens) / 1000 for tokens in (1, 2))
    return StepTimeModel(StepCosts((1, 2), curve), deviation=0.0)


def kept_step_times(model_dir: Path) -> Path | None:
    """Return the newest file of step times that an engine has kept of this model on this machine; None: there is none.
    Does not ask for the GPU, which would have to be started: a file of another one on this machine counts, too."""
    shape, processor = model_shape(model_dir), _processor()
    found: list[tuple[float, Path]] = []
    for path in (cache_root() / "step_times").glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            of = json.loads(path.read_text(encoding="utf-8"))["of"]
            if (of["shape"], of["processor"]) == (shape, processor):
                found.append((path.stat().st_mtime, path))
    return max(found)[1] if found else None


def identity(model_dir: Path, served: ResolvedConfig) -> dict[str, Any]:
    """Return what step times are of, besides what was asked of the kernels: machine, model's shape, and settings."""
    settings = {name: getattr(served, name) for name in _SETTINGS}
    gpu = _gpu(served.device)
    return {"processor": _processor(), "gpu": gpu, "shape": model_shape(model_dir), "settings": settings}


def _key(model_dir: Path, config: EngineConfig, served: ResolvedConfig) -> str:
    """Hash what step times depend on: the machine, the model's shape and the settings."""
    asked: tuple[Any, ...] = (served.quantize, config.activations, config.attention, config.cuda_graphs)
    if config.tensor_parallel_size > 1:
        asked = (*asked, config.tensor_parallel_size)
    document = [_FORMAT, *identity(model_dir, served).values(), *asked]
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()[:32]


def model_shape(model_dir: Path) -> str:
    """Return the digest by which models are told apart whose steps take different times: that of config.json."""
    return hashlib.sha256((model_dir / "config.json").read_bytes()).hexdigest()


def _processor() -> str:
    """Return the processor's name as Linux gives it; empty elsewhere."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "CPU part")):
                return line.partition(":")[2].strip()
    return ""


def _gpu(device: str) -> str:
    """Return the GPU's name; empty for a CPU, and where nothing of CUDA runs."""
    import torch

    return torch.cuda.get_device_name() if device != "cpu" and torch.cuda.is_initialized() else ""  # type: ignore[no-untyped-call]


def _read(path: Path) -> tuple[StepCosts, float, bool] | None:
    """Return costs, their deviation, and whether the file says what they are of."""
    try:
        document: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return read_costs(document["costs"]), float(document["deviation"]), "of" in document
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("step times: %s cannot be used: %s: %s", path, type(error).__name__, error)
        return None


def _keep(path: Path, costs: StepCosts, deviation: float, of: Mapping[str, Any]) -> None:
    """Write the file whole or not at all: several engines may start at once. `of` is for people and for `chunkserve
    plan`; the engine itself goes by the file's name."""
    aside = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"costs": costs.document(), "deviation": deviation, "of": of}
        aside.write_text(json.dumps(document) + "\n", encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        logger.warning("step times: %s cannot be written, so the next start measures again: %s", path, error)
