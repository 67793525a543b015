"""How fast prompts advance at present: predictions beside decode rows against what steps then take."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.config import Targets
from engine.protocol import PrefillCosts, num_pairs
from engine.scheduling.prefill_rate import DecodeRows, prefill_costs
from engine.scheduling.step_prediction import Prediction
from engine.scheduling.step_time import StepCosts, StepWork, decode_work
from tests.support.engines import RecordingCore, TimedCore, policy

COSTS = StepCosts((1, 8, 64, 512), (0.010, 0.012, 0.030, 0.200), 0.0002, 1e-6, 4e-7)
LARGE = {
    "max_model_len": 8192,
    "num_kv_blocks": 4000,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "max_prefill_tokens": 512,
}
PROMPT = tuple(range(1, 30)) * 200


def core_with(tpot_ms: float | None = 50, ttft_ms: float | None = None, **overrides: Any) -> TimedCore:
    targets = Targets(tpot_ms=tpot_ms, ttft_ms=ttft_ms)
    return TimedCore(COSTS, scheduler=policy(chunk_halving_context=0), targets=targets, **{**LARGE, **overrides})


def streams(core: RecordingCore, count: int) -> None:
    for number in range(count):
        core.send(f"stream {number}", PROMPT[number : number + 20], max_tokens=400, ignore_eos=True)
    while any(len(core.tokens(f"stream {number}")) < 2 for number in range(count)):
        core.keep(core.step())


def send(core: RecordingCore, lengths: list[int]) -> None:
    for number, length in enumerate(lengths):
        core.send(f"r{number}", PROMPT[number : number + length], max_tokens=1)


def seconds_until_prefilled(core: RecordingCore) -> float:
    begun = core.now
    while core.load().num_queued_tokens:
        core.keep(core.step())
    return core.now - begun


def queued_s(core: RecordingCore) -> float:
    predicted = core.load().queued_prefill_s
    assert predicted is not None
    return predicted


def decode_rows(core: RecordingCore) -> DecodeRows:
    rate = core._scheduler._prefill_rate
    assert rate is not None
    return rate._decodes


@pytest.mark.parametrize("num_streams", [0, 1, 8, 24])
@pytest.mark.parametrize("lengths", [[4000], [500] * 6, [100, 3000, 20, 1500]])
@pytest.mark.parametrize("tpot_ms", [50, 400, None])
def test_queued_seconds_are_what_prompts_take_beside_the_present_streams(
    num_streams: int, lengths: list[int], tpot_ms: float | None
) -> None:
    core = core_with(tpot_ms, ttft_ms=None if tpot_ms else 1000, enable_prefix_caching=False)
    streams(core, num_streams)
    send(core, lengths)
    predicted = queued_s(core)
    assert predicted == pytest.approx(seconds_until_prefilled(core), rel=0.15)
    assert queued_s(core) == 0


def test_queued_seconds_shrink_as_a_prompt_is_computed() -> None:
    core = core_with()
    streams(core, 4)
    send(core, [4000])
    whole, begun = queued_s(core), core.now
    for _ in range(10):
        core.keep(core.step())
    assert queued_s(core) == pytest.approx(whole - (core.now - begun), rel=0.1)
    core.keep(core.abort("r0"))
    assert queued_s(core) == 0


def test_more_streams_and_a_slower_machine_make_a_prompt_token_cost_more() -> None:
    def at(num_streams: int, scale: float = 1.0) -> PrefillCosts:
        return prefill_costs(Prediction(COSTS, scale), decode_work(num_streams, 200), 0.05, 512)

    assert at(0).token_s < at(8).token_s < at(16).token_s
    assert at(8, scale=2.0).token_s > 2 * at(8).token_s, "what streams leave of the target shrinks, too"


def test_without_a_target_between_tokens_prefill_takes_whole_steps() -> None:
    costs = prefill_costs(Prediction(COSTS), decode_work(8, 200), math.inf, 504)
    step_s = COSTS.seconds(decode_work(8, 200).plus(StepWork(504, 0, 504, num_pairs(0, 504))))
    assert costs.seconds(0, 504) == pytest.approx(step_s)


def test_blocks_that_are_cached_do_not_count() -> None:
    core = core_with()
    core.send("before", PROMPT[:3200], max_tokens=1)
    core.run()
    streams(core, 1)
    core.send("again", PROMPT[:3200], max_tokens=1)
    load = core.load()
    assert load.num_queued_tokens == 3200
    assert load.prefill_costs is not None
    assert 0 < queued_s(core) <= load.prefill_costs.seconds(3200 - 16, 3200) * (1 + 1e-9)


def test_a_prompt_on_a_long_prefix_costs_more_than_its_tokens() -> None:
    costs = PrefillCosts(token_s=0.001, pair_s=1e-6)
    assert costs.seconds(0, 3) == pytest.approx(0.003 + 6e-6)
    assert costs.seconds(1000, 1003) == pytest.approx(0.003 + (1001 + 1002 + 1003) * 1e-6)
    assert costs.seconds(0, 500) + costs.seconds(500, 1000) == pytest.approx(costs.seconds(0, 1000))


def test_rows_that_decode_are_told_from_prompts_and_follow_the_number_of_requests() -> None:
    core = core_with(enable_prefix_caching=False)
    streams(core, 3)
    send(core, [2000])
    core.keep(core.step())
    contexts = [len(row.token_ids) + row.start for row in core.plans[-1].rows[:3]]
    rows = decode_rows(core)
    assert rows.work(3) == (3, 3, sum(contexts), sum(contexts), 0, 0)
    assert rows.work(6) == rows.work(3).plus(rows.work(3))
    assert rows.work(0) == StepWork(0)
    assert DecodeRows().work(2) == decode_work(2, 0)


def test_a_step_without_decode_rows_does_not_change_what_is_known_of_them() -> None:
    core = core_with(enable_prefix_caching=False)
    streams(core, 2)
    before = decode_rows(core).work(2)
    for number in range(2):
        core.keep(core.abort(f"stream {number}"))
    send(core, [900])
    core.keep(core.step())
    assert decode_rows(core).work(2) == before


def test_costs_follow_the_machine_and_the_number_of_streams() -> None:
    core = core_with(enable_prefix_caching=False)
    streams(core, 2)
    before = core.load().prefill_costs
    core._noise = lambda: 2.0
    for _ in range(100):
        core.keep(core.step())
    slow = core.load().prefill_costs
    core.keep(core.abort("stream 0"))
    fewer = core.load().prefill_costs
    assert before is not None
    assert slow is not None
    assert fewer is not None
    assert slow.token_s > 1.2 * before.token_s
    assert fewer.token_s < slow.token_s


def test_without_predictions_nothing_is_said_about_time() -> None:
    core = RecordingCore(**LARGE)
    core.send("r", PROMPT[:100], max_tokens=1)
    load = core.load()
    assert (load.queued_prefill_s, load.prefill_costs) == (None, None)
