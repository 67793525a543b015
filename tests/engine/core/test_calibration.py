"""The measurement of step times at start: what it hands to the executor, and what it makes of the times."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import pytest

from engine.build.engine import FAKE_IMAGES
from engine.core.calibration import ROUNDS, calibrate, check_costs, shapes_for
from engine.fake.encoder import FakeEncoder
from engine.scheduling.step_time import StepCosts, chunk_work, decode_work, work_of
from engine.step import Capabilities, PaddedSizes, StepOutput, StepPlan
from tests.support.engines import resolved_config

COSTS = StepCosts((1, 8, 64, 512), (0.010, 0.012, 0.030, 0.200), 0.0002, 1e-6, 4e-7)
LARGE = {"max_model_len": 8192, "block_size": 16, "num_kv_blocks": 6000, "max_num_seqs": 64}
BUDGETS = {"max_num_batched_tokens": 512, "max_prefill_tokens": 512}


class ClockedExecutor:
    """Each step moves the clock by what its costs say, and by `noise` more or less."""

    def __init__(self, costs: StepCosts, *, noise: float = 0.0, recurrent_state: bool = False) -> None:
        self._costs, self._noise, self._draw = costs, noise, random.Random(0)
        self.capabilities = Capabilities(recurrent_state=recurrent_state, sizes=costs.sizes)
        self.now, self.plans, self.forgotten = 0.0, list[StepPlan](), list[str]()

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.now += self._costs.seconds(work_of(plan)) * self._draw.uniform(1 - self._noise, 1 + self._noise)

    def collect(self) -> StepOutput:
        return StepOutput(0, tuple((1,) for _ in self.plans[-1].rows))

    def forget(self, request_ids: Sequence[str]) -> None:
        self.forgotten += request_ids

    def shutdown(self) -> None:
        pass


def test_a_calibration_finds_what_steps_cost() -> None:
    executor = ClockedExecutor(COSTS)
    found = calibrate(executor, resolved_config(**LARGE, **BUDGETS), clock=lambda: executor.now)
    assert found.deviation < 0.02
    for step in found.steps:
        assert found.costs.seconds(step.work) == pytest.approx(step.seconds, rel=0.05)


def test_a_calibration_knows_what_steps_are_padded_to() -> None:
    """On a GPU two decode rows beside a chunk of one token take as long as 64 tokens, and three alone as four."""
    padded = replace(COSTS, sizes=PaddedSizes((1, 2, 4, 8, 16, 24, 32, 64), (64, 128, 256, 512)))
    executor = ClockedExecutor(padded)
    found = calibrate(executor, resolved_config(**LARGE, **BUDGETS), clock=lambda: executor.now)
    assert found.deviation < 0.02
    for work in (
        decode_work(2, 100).plus(chunk_work(50, 1, last=True)),
        decode_work(3, 100),
        chunk_work(0, 65, last=False),
    ):
        assert found.costs.seconds(work) == pytest.approx(padded.seconds(work), rel=0.05)


def test_its_deviation_is_that_of_single_steps_and_not_of_their_medians() -> None:
    executor = ClockedExecutor(COSTS, noise=0.3)
    found = calibrate(executor, resolved_config(**LARGE, **BUDGETS), clock=lambda: executor.now)
    assert 0.08 < found.deviation < 0.3


def test_no_shape_is_measured_before_it_has_run_once() -> None:
    """The first step of a shape may compile kernels, which later steps do not."""
    config = resolved_config(**LARGE, **BUDGETS)
    executor = ClockedExecutor(COSTS)
    calibrate(executor, config, clock=lambda: executor.now)
    num_shapes = len(list(shapes_for(config)))
    first, rest = executor.plans[:num_shapes], executor.plans[num_shapes:]
    assert {work_of(plan) for plan in first} == {work_of(plan) for plan in rest}
    times = Counter((work_of(plan), plan.rows[0].kind) for plan in rest)
    assert set(times.values()) <= set(range(1, ROUNDS + 1))


def test_on_a_cpu_only_the_shape_with_the_most_memory_runs_beforehand() -> None:
    """Its blocks are those of all others, and nothing is compiled for a shape."""
    config = resolved_config(**LARGE, **BUDGETS, device="cpu")
    executor = ClockedExecutor(StepCosts((1, 512), (1.0, 1.0)))
    calibrate(executor, config, clock=lambda: executor.now)
    assert len(executor.plans) == 1 + len(list(shapes_for(config)))
    blocks = {block for plan in executor.plans for row in plan.rows for block in row.block_ids}
    assert blocks == {block for row in executor.plans[0].rows for block in row.block_ids}


def test_a_calibration_measures_again_only_while_it_has_time() -> None:
    """Short steps vary most, and cost least."""
    config = resolved_config(**LARGE, **BUDGETS)
    num_shapes = len(list(shapes_for(config)))
    quick, slow = (ClockedExecutor(StepCosts((1, 512), (0.001, y))) for y in (0.002, 0.5))
    for executor in (quick, slow):
        calibrate(executor, config, clock=lambda executor=executor: executor.now)
    assert len(quick.plans) == (1 + ROUNDS) * num_shapes
    again = Counter(work_of(plan).tokens for plan in slow.plans)
    assert again[512] < again[1]
    heavy = ClockedExecutor(StepCosts((1, 512), (1.0, 1.0)))
    calibrate(heavy, config, clock=lambda: heavy.now)
    assert len(heavy.plans) == 2 * num_shapes


@pytest.mark.parametrize(
    ("now", "scale"),
    [
        (COSTS, 1.0),
        (StepCosts(COSTS.knots, tuple(1.5 * y for y in COSTS.curve_s), 0.0003, 1.5e-6, 6e-7), 1.5),
        (StepCosts(COSTS.knots, tuple(3 * y for y in COSTS.curve_s), 0.0006, 3e-6, 1.2e-6), None),
        (StepCosts((1, 512), (0.001, 0.2), 0.0002, 1e-6, 4e-7), None),
    ],
    ids=["the same", "slower", "much slower", "of another kind"],
)
def test_kept_costs_are_used_while_steps_take_what_they_say_but_for_a_factor(
    now: StepCosts, scale: float | None
) -> None:
    executor, config = ClockedExecutor(now), resolved_config(**LARGE, **BUDGETS)
    found = check_costs(executor, config, COSTS, clock=lambda: executor.now)
    assert found == (None if scale is None else pytest.approx(scale, rel=0.1))
    assert len(executor.plans) < len(list(shapes_for(config)))
    assert set(executor.forgotten) == {row.request_id for plan in executor.plans for row in plan.rows}


def test_the_executor_forgets_the_rows_of_a_calibration() -> None:
    executor = ClockedExecutor(COSTS)
    calibrate(executor, resolved_config(**LARGE, **BUDGETS), clock=lambda: executor.now)
    assert set(executor.forgotten) == {row.request_id for plan in executor.plans for row in plan.rows}


@pytest.mark.parametrize("seed", range(40))
def test_no_step_is_larger_than_the_engines_limits(seed: int) -> None:
    draw = random.Random(seed)
    config = resolved_config(
        max_model_len=draw.choice((16, 64, 256, 8192)),
        block_size=draw.choice((1, 4, 16)),
        num_kv_blocks=draw.choice((16, 64, 1000)),
        max_num_seqs=draw.choice((1, 2, 8, 64, 300)),
        max_num_batched_tokens=draw.choice((300, 512, 2048)),
        max_prefill_tokens=draw.choice((1, 8, 64, 300)),
    )
    shapes = list(shapes_for(config))
    assert len(shapes) == len(set(shapes))
    for shape in shapes:
        plan = shape.plan(config, has_state=True)
        blocks = [block for row in plan.rows for block in row.block_ids]
        assert len(blocks) == len(set(blocks))
        assert set(blocks) <= set(range(config.num_kv_blocks))
        assert 1 <= len(plan.rows) <= config.max_num_seqs
        assert plan.num_tokens <= config.max_num_batched_tokens
        for row in plan.rows:
            assert 0 < row.start < row.end <= config.max_model_len
            assert len(row.block_ids) * config.block_size >= row.end
            assert row.state is not None
        assert len({row.state.slot for row in plan.rows if row.state}) == len(plan.rows)


def test_encoding_is_measured_where_the_model_takes_inputs_and_leaves_nothing_behind() -> None:
    config = resolved_config(**LARGE, **BUDGETS, inputs=(FAKE_IMAGES,), encoder_cache_tokens=100)
    costs = replace(COSTS, encoded_s=0.0005)
    executor = ClockedExecutor(costs)
    found = calibrate(executor, config, clock=lambda: executor.now)
    assert found.costs.encoded_s == pytest.approx(0.0005, rel=0.05)
    encoded = {job.digest for plan in executor.plans for job in plan.encodes}
    assert len(encoded) == 2, "of two sizes"
    assert max(prod(job.grid) for plan in executor.plans for job in plan.encodes) <= 100
    assert encoded <= set(executor.plans[-1].dropped)
    assert not executor.plans[-1].encodes
    with_fake_encoder = FakeEncoder()
    for plan in executor.plans:
        with_fake_encoder.prepare(plan)
    assert not with_fake_encoder.encoded
    text_only = ClockedExecutor(costs)
    calibrate(text_only, resolved_config(**LARGE, **BUDGETS), clock=lambda: text_only.now)
    assert not any(plan.encodes or plan.dropped for plan in text_only.plans)


def test_an_engine_with_one_size_of_step_cannot_be_calibrated() -> None:
    config = resolved_config(max_num_seqs=1, max_prefill_tokens=1, max_num_batched_tokens=1)
    executor = ClockedExecutor(COSTS)
    with pytest.raises(ValueError, match="too few for a curve"):
        calibrate(executor, config, clock=lambda: executor.now)
