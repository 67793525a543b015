"""Owns the measurement of an executor's step times: steps of given shapes, run before any request is served.
Never touches a request or the prefix cache: its rows use blocks that nobody holds, and are forgotten."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from engine.config import ResolvedConfig
from engine.multimodal_inputs import EncodeJob, digest_of
from engine.scheduling.step_time import (
    Measured,
    StepCosts,
    fit_costs,
    knots_up_to,
    relative_errors,
    work_of,
)
from engine.step import Executor, RowKind, RowSampling, ScheduledRequest, StateUse, StepPlan

GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
SHORT_CONTEXT, LONG_CONTEXT = 32, 2048
"""Contexts of measured rows. What a token of context costs follows from the two; the longer one may be cut."""
ROUNDS = 3
"""Most measurements of each shape. The median counts."""
MOST_S = 6.0
"""No round of measurements begins after so many seconds, but the first."""
LARGEST_TILE = 128
"""Number of tokens. Of more, a part of a tile is a small share."""
LARGEST_INPUT = 256
"""Tokens of the largest input that is measured."""
CHECKED = 6
"""Shapes that show whether costs from an earlier start still hold."""
MOST_CHANGE, MOST_SLOWER = 1.4, 2.0
"""They do not if the ratios of measured to predicted times differ by more from each other, or from 1."""
ENOUGH_S = 0.2
"""A shape that was measured for so long is not measured again: the longer a step, the less its time varies."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A step of decode rows and at most one chunk, all after `context` tokens, and of one input that is encoded."""

    num_decodes: int
    chunk: int
    context: int
    input_side: int = 0
    """Tokens of each side of the input, a square; 0 for none."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, with those before them."""
        return self.num_decodes * (self.context + 1) + bool(self.chunk) * (self.context + self.chunk)

    def plan(self, config: ResolvedConfig, *, has_state: bool) -> StepPlan:
        """Return a step of this shape. Its rows share no block, and it may run any number of times."""
        block_size = config.block_size
        rows = []
        kinds = [(RowKind.DECODE, 1)] * self.num_decodes + [(RowKind.LAST, self.chunk)] * bool(self.chunk)
        blocks = 0
        for number, (kind, count) in enumerate(kinds):
            needed = -(-(self.context + count) // block_size)
            table = tuple(range(blocks, blocks + needed))
            blocks += needed
            ids = tuple((number + place) % 2 for place in range(count))
            state = StateUse(number) if has_state else None
            name = f"calibration {number}"
            rows.append(ScheduledRequest(name, kind, self.context, ids, table, GREEDY, state=state))
        if not self.input_side:
            return StepPlan(0, tuple(rows))
        grid = (1, self.input_side, self.input_side)
        data = bytes(config.inputs[0].num_bytes(grid))
        job = EncodeJob(digest_of("calibration", grid, data), grid, data)
        return StepPlan(0, tuple(rows), dropped=(job.digest,), encodes=(job,))


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fitted costs, and how well they fit."""

    costs: StepCosts
    deviation: float
    """Relative deviation of single measurements from the fitted costs, as a root mean square."""
    steps: tuple[Measured, ...]
    """The median of each shape."""


def calibrate(
    executor: Executor, config: ResolvedConfig, *, clock: Callable[[], float] = time.perf_counter
) -> Calibration:
    """Measure steps of all sizes that this engine may plan, and fit their costs. Takes some seconds.

    Raises:
        ValueError: the engine's limits leave too few sizes to measure.
    """
    has_state = executor.capabilities.recurrent_state
    shapes = list(shapes_for(config))
    plans = {shape: shape.plan(config, has_state=has_state) for shape in shapes}
    times: dict[Shape, list[float]] = defaultdict(list)
    order = random.Random(0)
    for shape in _unready(shapes, config):
        run_timed(executor, plans[shape], clock)
    began = clock()
    for number in range(ROUNDS):
        if number and clock() - began > MOST_S:
            break
        order.shuffle(shapes)  # a machine that becomes slower meanwhile shows in all sizes alike
        for shape in shapes:
            if sum(times[shape]) >= ENOUGH_S:
                continue
            times[shape].append(run_timed(executor, plans[shape], clock))
    _forget(executor, list(plans.values()), clock)
    works = {shape: work_of(plan) for shape, plan in plans.items()}
    medians = tuple(Measured(works[shape], statistics.median(found)) for shape, found in times.items())
    most = max(work.tokens for work in works.values())
    costs = fit_costs(medians, knots_up_to(most), executor.capabilities.sizes)
    single = [Measured(works[shape], seconds) for shape, found in times.items() for seconds in found]
    errors = relative_errors(costs, single)
    return Calibration(costs, (sum(error**2 for error in errors) / len(errors)) ** 0.5, medians)


def _unready(shapes: Sequence[Shape], config: ResolvedConfig) -> list[Shape]:
    """Return the shapes whose first run says nothing. On a GPU it may compile kernels. On a CPU it only touches memory
    for the first time, and the shape with the most blocks touches that of all."""
    return [max(shapes, key=lambda shape: shape.num_tokens)] if config.device == "cpu" else list(shapes)


def check_costs(
    executor: Executor, config: ResolvedConfig, costs: StepCosts, *, clock: Callable[[], float] = time.perf_counter
) -> float | None:
    """Return what `costs` must be multiplied by for steps as they run now, from a few of them; None if no factor does,
    so that they must be measured again. Takes a fraction of the time of `calibrate`."""
    has_state = executor.capabilities.recurrent_state
    shapes = list(shapes_for(config))
    plans = [shape.plan(config, has_state=has_state) for shape in _spread(shapes, CHECKED)]
    ratios = []
    for plan in plans:
        predicted = costs.seconds(work_of(plan))
        times = [run_timed(executor, plan, clock) for _ in range(1 + ROUNDS)][1:]  # the first touches memory
        ratios.append(statistics.median(times) / predicted if predicted else math.inf)
    _forget(executor, plans, clock)
    scale = statistics.median(ratios)
    same = all(scale / MOST_CHANGE <= ratio <= scale * MOST_CHANGE for ratio in ratios)
    return scale if same and 1 / MOST_SLOWER <= scale <= MOST_SLOWER else None


def _forget(executor: Executor, plans: Sequence[StepPlan], clock: Callable[[], float]) -> None:
    """Let the executor forget the rows of these steps, and the inputs that they encoded."""
    if dropped := tuple(digest for plan in plans for digest in plan.dropped):
        run_timed(executor, replace(plans[0], dropped=dropped, encodes=()), clock)
    executor.forget(sorted({row.request_id for plan in plans for row in plan.rows}))


def _spread(shapes: Sequence[Shape], count: int) -> list[Shape]:
    """Return `count` of the shapes, evenly from the smallest to half of the largest steps: those take longest."""
    plain = [shape for shape in shapes if not shape.input_side]
    by_size = sorted(plain, key=lambda shape: (shape.num_decodes + shape.chunk, shape.context))
    return [by_size[number * (len(by_size) - 1) // (2 * count)] for number in range(count)]


def shapes_for(config: ResolvedConfig) -> Iterator[Shape]:
    """Yield the shapes to measure: decode rows and chunks of every size at two contexts, and both together."""
    most_decodes = min(config.max_num_seqs, config.max_num_batched_tokens)
    most_chunk = min(config.max_prefill_tokens, config.max_num_batched_tokens, config.max_model_len - 1)
    decodes, chunks = (dict.fromkeys(min(one, most) for one in _sizes(most)) for most in (most_decodes, most_chunk))
    asked = [Shape(count, 0, context) for context in (SHORT_CONTEXT, LONG_CONTEXT) for count in decodes]
    asked += [Shape(0, count, context) for context in (SHORT_CONTEXT, LONG_CONTEXT) for count in chunks]
    asked += [Shape(few, count, SHORT_CONTEXT) for few in (4, 16) for count in (32, 128, most_chunk // 2) if count > 0]
    asked += [Shape(1, 0, SHORT_CONTEXT, side) for side in _input_sides(config)]
    found = (_fitting(shape, config) for shape in asked)
    yield from dict.fromkeys(shape for shape in found if shape is not None)


def _input_sides(config: ResolvedConfig) -> Iterator[int]:
    """Yield sides of inputs to encode, in tokens, as large as the model takes and this engine keeps."""
    if config.inputs:
        most = min(config.inputs[0].max_tokens, config.encoder_cache_tokens, LARGEST_INPUT)
        yield from dict.fromkeys(side for side in (math.isqrt(most) // 2, math.isqrt(most)) if side)


def _sizes(most: int) -> Iterator[int]:
    """Yield sizes at the knots, and small ones between two: what a part of a tile costs only shows there."""
    knots = knots_up_to(max(most, 9))
    yield from knots
    yield from (low + (high - low) * 3 // 5 for low, high in pairwise(knots) if high <= LARGEST_TILE)


def _fitting(shape: Shape, config: ResolvedConfig) -> Shape | None:
    """Return the shape with a context cut to what the model and the KV cache can hold; None if they hold none of it."""
    num_rows = shape.num_decodes + bool(shape.chunk)
    if num_rows > config.max_num_seqs or shape.num_decodes + shape.chunk > config.max_num_batched_tokens:
        return None
    room = min(config.max_model_len, config.num_kv_blocks // num_rows * config.block_size)
    context = min(shape.context, room - max(shape.chunk, 1))
    return replace(shape, context=context) if context > 0 else None


def run_timed(executor: Executor, plan: StepPlan, clock: Callable[[], float] = time.perf_counter) -> float:
    """Run a step, and return its seconds."""
    started = clock()
    executor.launch(plan)
    executor.collect()
    return clock() - started
