"""Owns how long a simulated step takes: a constant, or a linear model of what the step computes.
Never measures; the linear model is fitted to times that `benchmarks.engine.step` measured, or that a server logged."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from engine.step import RowKind, StepPlan

MEASURED = Path(__file__).parents[1] / "results" / "engine_step_vectors.json"
"""The studies' machine: two cores without a matrix unit, which is what most have."""
BENCHMARK = "engine_step"
"""What such a file calls itself."""
ATTENTION_CONTEXT = 3072
"""Context at which attention costs a token as much as the matrix products, from the shape of SmolLM2-135M, as the
engine itself derives it (`chunk_halving_context`). The measured steps have one context only, so this is not fitted."""

_TRACED = re.compile(r"\bstep=\d+ decode=(\d+) prefill_requests=\d+ prefill_tokens=(\d+) .*\bus=(\d+)")


class StepTime(Protocol):
    def seconds(self, plan: StepPlan) -> float:
        """How long the step takes; more than 0."""
        ...


@dataclass(frozen=True, slots=True)
class ConstantStep:
    """Every step takes the same time, whatever it computes: for queueing theory."""

    step_s: float

    def seconds(self, plan: StepPlan) -> float:
        return self.step_s


@dataclass(frozen=True, slots=True)
class LinearStep:
    """step_s + decode_row_s for each decode row + token_s for each prefill token, and for each token of a row another
    token_s for every `attention_context` tokens that it attends to."""

    step_s: float
    token_s: float
    decode_row_s: float
    attention_context: int = ATTENTION_CONTEXT

    def seconds(self, plan: StepPlan) -> float:
        decodes, tokens, attended = work_of(plan)
        work = tokens + attended / self.attention_context
        return self.step_s + self.decode_row_s * decodes + self.token_s * work

    def faster(self, times: float) -> LinearStep:
        """The steps of a machine that does all of it in a fraction of the time. There is no such machine: whatever is
        simulated with it says so."""
        return LinearStep(self.step_s / times, self.token_s / times, self.decode_row_s / times, self.attention_context)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of short prompts, in large steps."""
        return 1 / self.token_s


def work_of(plan: StepPlan) -> tuple[int, int, float]:
    """Decode rows, prefill tokens, and the sum over all tokens of the context that they attend to."""
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
    """Least squares over the relative errors of the measured medians of one kind of kernels.

    Returns:
        The model, and the largest error of a cell as a share of what was measured.
    """
    found = [cell for cell in cells if cell["kernels"] == kernels]
    return _solve([_features(cell) for cell in found], [cell["ms_p50"] / 1000 for cell in found])


def fit_trace(lines: Iterable[str], least: int = 10) -> tuple[LinearStep, float]:
    """As `fit`, over the means of the steps that a server with `step_trace` logged, by what they computed; what
    occurred less than `least` times is left out. What a step attended to is not in the log, and counts as nothing."""
    steps: dict[tuple[int, int], list[float]] = defaultdict(list)
    for line in lines:
        if found := _TRACED.search(line):
            decodes, tokens, micros = map(int, found.groups())
            steps[decodes, tokens].append(micros / 1e6)
    kept = {of: seconds for of, seconds in steps.items() if len(seconds) >= least}
    features = [(1.0, float(tokens), float(decodes)) for decodes, tokens in kept]
    return _solve(features, [float(np.mean(seconds)) for seconds in kept.values()])


def _solve(features: Sequence[tuple[float, float, float]], seconds: Sequence[float]) -> tuple[LinearStep, float]:
    """Least squares over relative errors.

    Raises:
        ValueError: there are too few steps, or no positive factors make them.
    """
    rows, measured = np.array(features).reshape(-1, 3), np.array(seconds)
    if np.linalg.matrix_rank(rows) < rows.shape[1]:
        raise ValueError(f"{len(rows)} kinds of steps were measured, which do not fix {rows.shape[1]} factors")
    factors, *_ = np.linalg.lstsq(rows / measured[:, None], np.ones(len(rows)), rcond=None)
    if min(factors) <= 0:
        raise ValueError(f"measured steps do not fit: a factor of {factors} is not positive")
    step_s, token_s, decode_row_s = (float(factor) for factor in factors)
    return LinearStep(step_s, token_s, decode_row_s), float(np.abs(rows @ factors / measured - 1).max())


def _features(cell: dict[str, Any]) -> tuple[float, float, float]:
    """(1, prefill work, decode rows) of a cell: `size` decode rows, or one prompt's chunk of `size` tokens."""
    size, context = cell["size"], cell["context"]
    if cell["step"] == "decode":
        return 1.0, size * context / ATTENTION_CONTEXT, float(size)
    return 1.0, size + size * (context + size / 2) / ATTENTION_CONTEXT, 0.0


def measured(path: Path = MEASURED) -> tuple[LinearStep, float]:
    """The model of the steps in a result of `benchmarks.engine.step` (.json) or in a server's log with `step_trace`.

    Returns:
        The model, and its largest error.

    Raises:
        OSError, ValueError: no such file, or one that holds no such thing.
    """
    if path.suffix != ".json":
        with path.open(errors="replace") as log:
            return fit_trace(log)
    document = json.loads(path.read_text())
    benchmark = document.get("benchmark") if isinstance(document, dict) else None
    if benchmark != BENCHMARK or not document.get("cells"):  # other benchmarks have cells of their own kinds
        raise ValueError(f"{path} is no result of benchmarks.engine.step with cells: its benchmark is {benchmark}")
    return fit(document["cells"])
