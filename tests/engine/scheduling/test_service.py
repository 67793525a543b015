"""What service counts against a tenant's share: predicted seconds, and shares that are equal in them."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from engine.config import ConfigError, EngineConfig, SchedulerConfig, Targets
from engine.scheduling.service import CountedTokens, PredictedSeconds
from engine.scheduling.step_prediction import StepTimeModel
from engine.scheduling.step_time import StepCosts, StepWork, chunk_work
from engine.step import RowKind
from tests.support.engines import RecordingCore, TimedCore, policy

COSTS = StepCosts((1, 8, 64, 512), (0.010, 0.012, 0.030, 0.200), 0.0002, 1e-6, 4e-7)
STEEP = StepCosts((1, 8, 64, 512), (0.010, 0.012, 0.030, 0.200), 0.0002, 1e-6, 4e-6)
"""A context of a few hundred tokens costs as much as a token itself."""
CHUNK = 128


def predicted(costs: StepCosts = COSTS, scale: float = 1.0) -> PredictedSeconds:
    return PredictedSeconds(StepTimeModel(costs, deviation=0.0, scale=scale), CHUNK)


def core_with(**overrides: Any) -> TimedCore:
    settings = {
        "max_model_len": 4096,
        "num_kv_blocks": 2000,
        "max_num_batched_tokens": CHUNK,
        "max_prefill_tokens": CHUNK,
        "enable_prefix_caching": False,
        "scheduler": policy(chunk_halving_context=0, priority_age_ms=1e9),
        "targets": Targets(tpot_ms=1e6),
    }
    return TimedCore(STEEP, **{**settings, **overrides})


# --- the unit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [0, 1, 100, 4000])
@pytest.mark.parametrize("count", [1, 4])
def test_a_decode_row_counts_what_the_step_would_be_shorter_without_it(context: int, count: int) -> None:
    rest = StepWork(100 - count, 20, 5000, 5000)
    pairs = sum(range(context + 1, context + count + 1))
    row = StepWork(count, count, context + count, pairs)
    service = predicted(scale=3.0)
    service.begin(100)
    added = 3.0 * (COSTS.seconds(rest.plus(row)) - COSTS.seconds(rest))
    assert service.answer(context, context + count, decoded=True) == pytest.approx(added)


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, CHUNK), (0, 1000), (CHUNK, 1000), (77, 78), (900, 2000)])
def test_a_prompt_counts_its_chunks_beside_full_steps_however_it_is_cut(start: int, end: int) -> None:
    total = 0.0
    for begin in range(start, end, CHUNK):
        chunk = chunk_work(begin, min(CHUNK, end - begin), last=False)
        total += COSTS.seconds(chunk.plus(StepWork(64))) - COSTS.seconds(StepWork(64))
    assert predicted().prompt(start, end) == pytest.approx(total)


def test_what_is_cached_counts_nothing() -> None:
    for service in (predicted(), CountedTokens(2.0)):
        assert service.prompt(300, 300) == 0


def test_the_token_after_a_prompt_counts_as_sampled_only() -> None:
    assert predicted().answer(0, 500, decoded=False) == COSTS.sample_s
    assert CountedTokens(2.0).answer(0, 500, decoded=False) == 2.0


def test_a_row_counts_by_the_size_of_its_own_step_and_by_the_present_speed() -> None:
    model = StepTimeModel(COSTS, deviation=0.0)
    service = PredictedSeconds(model, CHUNK)
    counts = []
    for num_tokens in (4, 30, 300):
        service.begin(num_tokens)
        counts.append(service.answer(0, 1, decoded=True))
    assert counts == pytest.approx([slope + 0.0002 + 1.4e-6 for slope in (0.002 / 7, 0.018 / 56, 0.170 / 448)])
    for _ in range(300):
        model.observe(StepWork(100), 2 * COSTS.seconds(StepWork(100)))
    service.begin(300)
    assert service.answer(0, 1, decoded=True) > 1.5 * counts[-1]


# --- shares -----------------------------------------------------------------------------------------------------------


def spent(core: TimedCore, until: str) -> dict[str, float]:
    """Run until a request begins; return the seconds that each tenant's rows added to their steps. A request's name
    begins with its tenant."""
    seconds: Counter[str] = Counter()
    service = predicted(STEEP)
    while core.has_work:
        core.keep(core.step())
        plan = core.plans[-1]
        if any(row.request_id == until for row in plan.rows):
            break
        service.begin(plan.num_tokens)
        for row in plan.rows:
            tenant, end = row.request_id.rstrip("0123456789"), row.start + len(row.token_ids)
            if row.kind is RowKind.DECODE:
                seconds[tenant] += service.answer(row.start, end, decoded=True)
            else:
                seconds[tenant] += service.prompt(row.start, end)
    return dict(seconds)


def send(core: RecordingCore, tenant: str, count: int, length: int, answer: int = 1) -> None:
    for number in range(count):
        prompt = [random.Random(number).randrange(1, 30) for _ in range(length)]
        core.send(f"{tenant}{number}", prompt, tenant=tenant, max_tokens=answer, ignore_eos=True)


def test_long_contexts_and_short_ones_get_equal_predicted_time() -> None:
    """By tokens, the tenant with long prompts would get twice as much: each of its tokens attends to far more."""
    core = core_with(max_num_seqs=1)
    send(core, "long", 8, 1000)
    send(core, "short", 400, 100)
    seconds = spent(core, until="long6")
    one_s = predicted(STEEP).prompt(0, 1000)
    assert seconds["long"] == pytest.approx(6 * one_s)
    assert seconds["short"] == pytest.approx(seconds["long"], abs=1.1 * one_s)
    assert one_s > 2 * 10 * predicted(STEEP).prompt(0, 100)


def test_answers_after_long_contexts_and_short_ones_get_equal_predicted_time() -> None:
    core = core_with(max_num_seqs=1)
    send(core, "long", 8, 600, answer=60)
    send(core, "short", 120, 20, answer=60)
    seconds = spent(core, until="long6")
    assert seconds["short"] == pytest.approx(seconds["long"], rel=0.25)


def test_a_tenant_with_costly_requests_waits_for_no_more_than_its_share() -> None:
    """Others send short ones without an end. Each long one begins once they had as much time as the one before it."""
    core = core_with(max_num_seqs=1)
    send(core, "long", 4, 1000)
    send(core, "short", 600, 50)
    core.run()
    order = list(dict.fromkeys(row.request_id for plan in core.plans for row in plan.rows))
    places = [order.index(f"long{number}") for number in range(4)]
    apart = [after - before for before, after in pairwise(places)]
    price = predicted(STEEP).prompt(0, 1000) / predicted(STEEP).prompt(0, 50)
    assert all(abs(count - price) < 0.3 * price for count in apart), (apart, price)


def test_without_predictions_tokens_count() -> None:
    core = RecordingCore(
        max_num_seqs=1, max_model_len=512, num_kv_blocks=200, enable_prefix_caching=False, scheduler=SchedulerConfig()
    )
    send(core, "long", 4, 198)
    send(core, "short", 60, 18)
    core.run()
    order = list(dict.fromkeys(row.request_id for plan in core.plans for row in plan.rows))
    assert [order.index(f"long{number}") for number in range(3)] == [0, 11, 22], "200 and 20 with their answers"


def test_a_weight_of_answer_tokens_is_refused_beside_targets() -> None:
    with pytest.raises(ConfigError, match=r"answer_token_weight is 3, but .*ttft_ms is 500"):
        EngineConfig(targets=Targets(ttft_ms=500), scheduler=SchedulerConfig(answer_token_weight=3.0))
