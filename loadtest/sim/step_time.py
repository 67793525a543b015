"""Owns the duration of a simulated step: a constant, a linear model of the work in the step, or the engine's own model.
Never measures: models are fitted to times that `benchmarks.engine` measured or a server logged."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from engine.scheduling.step_time import (
    Measured,
    StepCosts,
    StepWork,
    chunk_work,
    decode_work,
    fit_costs,
    read_costs,
    relative_errors,
)
from engine.scheduling.step_time import work_of as costed_work
from engine.step import RowKind, StepPlan

MEASURED = Path(__file__).parents[1] / "results" / "engine_step_vectors.json"
"""Step times of the studies' machine: two cores without a matrix unit, like most machines."""
BENCHMARK = "engine_step"
"""The name of the benchmark in such a file."""
CALIBRATION = "step_model"
"""The name of the benchmark in a file with the engine's own model, as benchmarks.engine.step_model fitted it."""
ON_GPU = "first_hour"
"""The name of the benchmark in a file with steps of a GPU, as tests.gpu.hour.report put them together."""
GPU_MODEL, GPU_LAYERS, GPU_CONTEXT, GPU_DECODES_BESIDE = "llama-3.1-8b", 32, 1024, 63
"""What that file is of: the model whose steps count, its layers, the cached tokens of its decode rows, and the decode
rows beside a chunk. Its weights are in bfloat16."""
GPU_KNOTS = (1, 64, 256)
"""More tokens are bound by arithmetic, in proportion: with another knot, nothing would tell it from attention."""
ATTENTION_CONTEXT = 3072
"""Context at which a token's attention costs as much as its matrix products. It follows from the shape of SmolLM2-135M,
as the engine derives `chunk_halving_context`. It is not fitted, since the measured steps have only one context."""

_TRACED = re.compile(r"\bstep=\d+ decode=(\d+) prefill_requests=\d+ prefill_tokens=(\d+) .*\bus=(\d+)")


class StepTime(Protocol):
    def seconds(self, plan: StepPlan) -> float:
        """Return the duration of the step; more than 0."""
        ...


@dataclass(frozen=True, slots=True)
class ConstantStep:
    """Every step takes the same time, whatever it computes: for queueing theory."""

    step_s: float

    def seconds(self, plan: StepPlan) -> float:
        return self.step_s


@dataclass(frozen=True, slots=True)
class LinearStep:
    """A step takes step_s + decode_row_s for each decode row + token_s for each prefill token. Each token of a row adds
    another token_s for every `attention_context` tokens that it attends to."""

    step_s: float
    token_s: float
    decode_row_s: float
    attention_context: int = ATTENTION_CONTEXT

    def seconds(self, plan: StepPlan) -> float:
        decodes, tokens, attended = work_of(plan)
        work = tokens + attended / self.attention_context
        return self.step_s + self.decode_row_s * decodes + self.token_s * work

    def faster(self, times: float) -> LinearStep:
        """Return the step times of a machine that is faster by this factor. There is no such machine, and everything
        simulated with it says so."""
        return LinearStep(self.step_s / times, self.token_s / times, self.decode_row_s / times, self.attention_context)

    @property
    def prefill_tokens_per_s(self) -> float:
        """The prefill rate for short prompts in large steps."""
        return 1 / self.token_s


@dataclass(frozen=True, slots=True)
class CalibratedStep:
    """A step takes what the engine's own model of this machine says, and `scale` times that."""

    costs: StepCosts
    scale: float = 1.0

    def seconds(self, plan: StepPlan) -> float:
        return self.scale * self.costs.seconds(costed_work(plan))

    def faster(self, times: float) -> CalibratedStep:
        """See LinearStep.faster."""
        return CalibratedStep(self.costs, self.scale / times)

    @property
    def prefill_tokens_per_s(self) -> float:
        """The prefill rate for short prompts in large steps."""
        (x0, x1), (y0, y1) = self.costs.knots[-2:], self.costs.curve_s[-2:]
        return (x1 - x0) / max(self.scale * (y1 - y0), 1e-9)


def work_of(plan: StepPlan) -> tuple[int, int, float]:
    """Count decode rows and prefill tokens, and sum up the context that each token attends to."""
    decodes, tokens, attended = 0, 0, 0.0
    for row in plan.rows:
        count = len(row.token_ids)
        attended += count * (row.start + count / 2)
        if row.kind is RowKind.DECODE:
            decodes += 1
        else:
            tokens += count
    return decodes, tokens, attended


def fit(cells: Sequence[dict[str, Any]], kernels: str = "native") -> tuple[LinearStep, float]:
    """Fit the model to the measured medians of one kind of kernels, by least squares over relative errors.

    Returns:
        The model, and its largest relative error.
    """
    own = [cell for cell in cells if cell["kernels"] == kernels]
    return _solve([_features(cell) for cell in own], [cell["ms_p50"] / 1000 for cell in own])


def fit_trace(lines: Iterable[str], least: int = 10) -> tuple[LinearStep, float]:
    """Fit the model to the steps that a server with `step_trace` logged. Steps with the same work are averaged; work
    that occurred fewer than `least` times is left out. The log does not have the context, so attention counts as
    nothing."""
    steps: dict[tuple[int, int], list[float]] = defaultdict(list)
    for line in lines:
        if found := _TRACED.search(line):
            decodes, tokens, micros = map(int, found.groups())
            steps[decodes, tokens].append(micros / 1e6)
    kept = {work: seconds for work, seconds in steps.items() if len(seconds) >= least}
    features = [(1.0, float(tokens), float(decodes)) for decodes, tokens in kept]
    return _solve(features, [float(np.mean(seconds)) for seconds in kept.values()])


def _solve(features: Sequence[tuple[float, float, float]], seconds: Sequence[float]) -> tuple[LinearStep, float]:
    """Solve for the factors by least squares over relative errors.

    Raises:
        ValueError: there are too few steps, or the factors would not be positive.
    """
    rows, measured = np.array(features).reshape(-1, 3), np.array(seconds)
    if np.linalg.matrix_rank(rows) < rows.shape[1]:
        raise ValueError(f"{len(rows)} kinds of steps were measured, too few to determine {rows.shape[1]} factors")
    factors, *_ = np.linalg.lstsq(rows / measured[:, None], np.ones(len(rows)), rcond=None)
    if min(factors) <= 0:
        raise ValueError(f"measured steps do not fit: a factor of {factors} is not positive")
    step_s, token_s, decode_row_s = (float(factor) for factor in factors)
    return LinearStep(step_s, token_s, decode_row_s), float(np.abs(rows @ factors / measured - 1).max())


def _features(cell: dict[str, Any]) -> tuple[float, float, float]:
    """Return (1, prefill work, decode rows) of a cell: `size` decode rows, or one prompt's chunk of `size` tokens."""
    size, context = cell["size"], cell["context"]
    if cell["step"] == "decode":
        return 1.0, size * context / ATTENTION_CONTEXT, float(size)
    return 1.0, size + size * (context + size / 2) / ATTENTION_CONTEXT, 0.0


def fit_gpu(document: dict[str, Any]) -> tuple[CalibratedStep, float]:
    """Fit the engine's own model to the measured steps of a GPU. Decode steps were measured with one context alone:
    what a longer one adds is taken from attention's own times, layer by layer.

    Returns:
        The model, and its largest relative error.

    Raises:
        ValueError: there are too few steps of the model.
    """
    steps = gpu_steps(document)
    costs = fit_costs(steps, GPU_KNOTS)
    return CalibratedStep(costs), max(map(abs, relative_errors(costs, steps)))


def gpu_steps(document: dict[str, Any]) -> list[Measured]:
    """Return the steps to which `fit_gpu` fits."""
    alone = {
        (cell["cell"], cell["size"]): cell["device_ms"] / 1000
        for cell in document["cells"]
        if cell["model"] == GPU_MODEL and "device_ms" in cell
    }
    works = {name: _gpu_work(*name) for name in alone}
    steps = [Measured(work, alone[name]) for name, work in works.items() if work is not None]
    attention = {cell["shape"]: cell["us"] / 1e6 for cell in document["attention"] if cell["by"] == "triton"}
    for shape, seconds in attention.items():
        if (found := re.fullmatch(r"decode (\d+) x (\d+)", shape)) is None:
            continue
        rows, context = map(int, found.groups())
        short, step = attention.get(f"decode {rows} x {GPU_CONTEXT}"), alone.get(("decode", rows))
        if context != GPU_CONTEXT and short is not None and step is not None:
            steps.append(Measured(decode_work(rows, context), step + GPU_LAYERS * (seconds - short)))
    return steps


def _gpu_work(kind: str, size: int) -> StepWork | None:
    """Return what a cell's step computes; None: it is no single step."""
    if kind == "decode":
        return decode_work(size, GPU_CONTEXT)
    if kind in ("prefill", "prefill_only"):
        return chunk_work(0, size, last=True)
    if kind == "mixed":
        decodes = decode_work(GPU_DECODES_BESIDE, GPU_CONTEXT)
        return decodes.plus(chunk_work(0, size - GPU_DECODES_BESIDE, last=True))
    return None


def measured(path: Path = MEASURED) -> tuple[LinearStep | CalibratedStep, float]:
    """Fit the model to a result of `benchmarks.engine.step` (.json), to a server's log with `step_trace`, or to steps
    of a GPU; or take the engine's own model from the file in which it keeps it, or from a result of
    `benchmarks.engine.step_model`.

    Returns:
        The model, and its largest error; of the engine's own model the relative deviation.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no measured steps.
    """
    if path.suffix != ".json":
        with path.open(errors="replace") as log:
            return fit_trace(log)
    document = json.loads(path.read_text())
    benchmark = document.get("benchmark") if isinstance(document, dict) else None
    if benchmark == CALIBRATION or is_kept(document):
        return CalibratedStep(read_costs(document["costs"])), float(document["deviation"])
    if benchmark == ON_GPU:
        return fit_gpu(document)
    if benchmark != BENCHMARK or not document.get("cells"):  # other benchmarks have cells of their own kinds
        raise ValueError(f"{path} is not a result of benchmarks.engine.step with cells: its benchmark is {benchmark}")
    return fit(document["cells"])


def is_kept(document: Any) -> bool:
    """Whether this is what an engine keeps of its step times (engine.build.step_times)."""
    return isinstance(document, dict) and "benchmark" not in document and {"costs", "deviation"} <= document.keys()
