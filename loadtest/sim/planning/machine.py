"""Owns the engine that a plan is for: its step times as kept or measured, what was measured, and what it can hold.
Never measures anything on this machine."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config import EngineConfig, SchedulerConfig
from engine.core.calibration import calibrate, shapes_for
from engine.scheduling.step_time import StepCosts, StepWork, chunk_work, decode_work, read_costs, work_of
from engine.step import StepPlan
from loadtest.sim.executor import TimedExecutor
from loadtest.sim.scenario import engine_config
from loadtest.sim.step_time import CALIBRATION, ON_GPU, LinearStep, gpu_steps, is_kept, measured

NO_LIMIT = 2**62
_SIZES = (
    *("max_num_seqs", "max_num_batched_tokens", "max_prefill_tokens"),
    *("max_model_len", "num_kv_blocks", "block_size"),
)
"""Settings of an engine that limit which steps were measured."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine with a model on it, as far as a step's time tells."""

    name: str
    """Where the step times come from."""
    costs: StepCosts
    deviation: float
    """Relative deviation of single steps from `costs`."""
    measured: StepWork
    """The most of each kind of work that a measured step had; beyond it, costs are extrapolated."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the engine that was measured; empty if they are not known."""
    shape: str | None = None
    """See engine.build.step_times.model_shape: that of the model that was measured, if the file says it."""
    model: str | None = None
    """The name of that model, if the file says it."""

    @property
    def is_gpu(self) -> bool:
        return self.settings.get("device", "cpu") not in ("cpu", "none")

    def prefill_tokens_per_s(self) -> float:
        """Return the rate of short prompts in large steps."""
        return 1 / max(self.costs.token_s(self.costs.knots[-1]), 1e-9)

    def halving_context(self) -> int:
        """Return the context at which attention costs as much as a token does otherwise, as an engine without targets
        would derive it from the model's shape; 0 if attention costs nothing."""
        attended_s = self.costs.attended_s
        return round(self.costs.token_s(self.costs.knots[-1]) / attended_s) if attended_s else 0

    def seconds_of(self, prompt: float, answer: float, rows: int) -> float:
        """Estimate the engine's time that a request takes beside `rows` others."""
        decode_s = self.costs.seconds(decode_work(rows, round(prompt + answer / 2))) / rows
        return prompt / self.prefill_tokens_per_s() + answer * decode_s


def read_machine(path: Path) -> Machine:
    """Read step times: a file that an engine keeps, a result of `benchmarks.engine.step_model` or `.step`, steps of a
    GPU, or a server's log with `step_trace`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no step times.
    """
    try:
        return _read(path)
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as wrong:  # of a damaged file
        raise ValueError(f"{path.name} holds no step times: {wrong!r}") from wrong


def _read(path: Path) -> Machine:
    document = json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else {}
    settings = _settings(document)
    if is_kept(document) or (isinstance(document, dict) and document.get("benchmark") == CALIBRATION):
        costs, deviation = read_costs(document["costs"]), float(document["deviation"])
        return Machine(path.name, costs, deviation, _of_calibration(costs, settings), settings, *_model(document))
    steps, error = measured(path)
    if isinstance(steps, LinearStep):
        costs = _calibrated(steps, settings)
        return Machine(path.name, costs, error, _of_cells(document.get("cells", [])), settings, *_model(document))
    works = [step.work for step in gpu_steps(document)] if document.get("benchmark") == ON_GPU else []
    return Machine(path.name, steps.costs, error, _most(works), settings)


def _settings(document: Any) -> dict[str, Any]:
    if not isinstance(document, dict):
        return {}
    if document.get("benchmark") == ON_GPU:
        return {"device": str(document.get("device", "cuda"))}
    found = document.get("config") or (document.get("of") or {}).get("settings") or {}
    return dict(found) if isinstance(found, dict) else {}


def _model(document: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the shape and the name of the model that was measured, as far as the file has them."""
    shape, name = (document.get("of") or {}).get("shape"), document.get("model")
    return shape if isinstance(shape, str) else None, name if isinstance(name, str) else None


def _sizes_of(settings: Mapping[str, Any]) -> dict[str, int]:
    return {name: int(settings[name]) for name in _SIZES if name in settings}


def _of_calibration(costs: StepCosts, settings: Mapping[str, Any]) -> StepWork:
    """Return the most work of the steps that an engine with these settings measures at its start."""
    if not set(_SIZES) <= settings.keys():
        return StepWork(costs.knots[-1], *[NO_LIMIT] * 5)
    works = []
    for shape in shapes_for(engine_config(**_sizes_of(settings))):
        work = decode_work(shape.num_decodes, shape.context)
        works.append(work.plus(chunk_work(shape.context, shape.chunk, last=True)) if shape.chunk else work)
    return _most(works)


def _of_cells(cells: Iterable[Mapping[str, Any]]) -> StepWork:
    """Return the most work of the cells of `benchmarks.engine.step`."""
    works = []
    for cell in cells:
        size, context = int(cell["size"]), int(cell["context"])
        decodes = cell["step"] == "decode"
        works.append(decode_work(size, context) if decodes else chunk_work(context, size, last=True))
    return _most(works)


def _most(works: list[StepWork]) -> StepWork:
    return StepWork(*map(max, zip(*works, strict=True))) if works else StepWork(*[NO_LIMIT] * 6)


def _calibrated(steps: LinearStep, settings: Mapping[str, Any]) -> StepCosts:
    """Let a simulated engine measure the linear model, as an engine measures its machine."""
    config = engine_config(**_sizes_of(settings))
    executor = TimedExecutor(steps, defaultdict(lambda: NO_LIMIT))
    return calibrate(executor, config, clock=lambda: executor.seconds).costs


@dataclass(frozen=True, slots=True)
class Engine:
    """What a plan leaves as it is: what an engine can hold, and the settings that are not searched."""

    kv_tokens: int
    """Tokens that the KV cache holds."""
    max_model_len: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    max_queued_requests: int = 1024
    max_prefill_tokens: int | None = None
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        if self.kv_tokens < self.block_size:
            raise ValueError(f"a KV cache of {self.kv_tokens} tokens does not hold a block of {self.block_size}")

    @property
    def longest(self) -> int:
        """Limit of prompt and answer together, in tokens."""
        return min(self.max_model_len, self.kv_tokens)


def engine_of(machine: Machine, config: EngineConfig, *, kv_tokens: int | None, max_model_len: int | None) -> Engine:
    """Combine what a config says with what is known of the engine that was measured.

    Raises:
        ValueError: neither says how many tokens the KV cache holds, or how long a request may be.
    """
    known = machine.settings
    block_size = config.block_size
    if kv_tokens is None and {"num_kv_blocks", "block_size"} <= known.keys():
        kv_tokens = int(known["num_kv_blocks"]) * int(known["block_size"])
    longest = max_model_len or config.max_model_len or known.get("max_model_len") or kv_tokens
    if kv_tokens is None or longest is None:
        raise ValueError(f"{machine.name} does not say how many tokens the KV cache holds: give it by --kv-tokens")
    return Engine(
        kv_tokens,
        int(longest),
        block_size,
        config.enable_prefix_caching,
        config.max_queued_requests,
        config.max_prefill_tokens,
        config.scheduler,
    )


def kv_bytes_a_token(shape: Mapping[str, Any], kv_cache_dtype: str = "auto") -> int:
    """Return the bytes of a token's keys and values in all layers, from a model's config.json.

    Raises:
        ValueError: the file does not say them.
    """
    text: dict[str, Any] = {**shape, **shape.get("text_config", {})}
    try:
        heads = int(text.get("num_key_value_heads") or text["num_attention_heads"])
        size = int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])
        kinds = text.get("layer_types") or ["full_attention"] * int(text["num_hidden_layers"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"the model's config.json does not say the size of its KV cache: {error!r}") from error
    width = 2 if kv_cache_dtype == "auto" else 1
    num_layers: int = sum(kind != "linear_attention" for kind in kinds)
    return 2 * width * heads * size * num_layers


@dataclass(slots=True)
class WatchedSteps:
    """Step times of a machine, `slowness` times as long as its costs say. They note how much is extrapolated."""

    machine: Machine
    slowness: float = 1.0
    total_s: float = 0.0
    beyond_s: float = 0.0
    """Time of steps with more of some work than any measured step had."""

    def seconds(self, plan: StepPlan) -> float:
        work = work_of(plan)
        seconds = self.slowness * self.machine.costs.seconds(work)
        self.total_s += seconds
        if any(part > most for part, most in zip(work, self.machine.measured, strict=True)):
            self.beyond_s += seconds
        return max(seconds, 1e-9)
