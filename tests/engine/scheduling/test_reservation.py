"""Contracts of what memory is kept for answers: by mode, by request, and by a ratio that follows what answers used.
Never says who loses memory; test_preemption does."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from engine.config import SchedulerConfig
from engine.protocol import SamplingParams, Submission
from engine.scheduling.request import create_request
from engine.scheduling.reservation import ReserveRatio, reserved_tokens
from tests.support.engines import RecordingCore, policy, prompt_only, resolved_config


def running_after_admission(scheduler: SchedulerConfig) -> int:
    """How many of eight requests of 8 prompt + 24 answer tokens run at once in 32 blocks of 4."""
    core = RecordingCore(
        num_kv_blocks=32,
        max_num_batched_tokens=64,
        max_prefill_tokens=64,
        enable_prefix_caching=False,
        scheduler=scheduler,
    )
    for i in range(8):
        core.send(f"r{i}", [i + 1] * 8, max_tokens=24, ignore_eos=True)
    for _ in range(4):
        core.keep(core.step())
    running = core.load().num_running
    core.run()
    assert all(len(core.tokens(f"r{i}")) == 24 for i in range(8))
    return running


def test_the_less_is_reserved_the_more_requests_run() -> None:
    full = running_after_admission(policy(reserve_mode="full", preempt_policy="none"))
    ratio = running_after_admission(policy(reserve_mode="ratio", ratio_init=0.3))
    prompt = running_after_admission(prompt_only())
    assert full == 4
    assert full < ratio < prompt == 8


def test_full_reservation_never_preempts() -> None:
    core = RecordingCore(num_kv_blocks=12, scheduler=policy(reserve_mode="full", preempt_policy="none"))
    for i in range(8):
        core.send(f"r{i}", [i + 1] * 8, max_tokens=24, ignore_eos=True)
    core.run()
    assert core.load().num_preemptions == 0


def test_what_a_request_was_promised_is_given_back_when_it_is_aborted() -> None:
    """I-15: promises that outlived their requests would add up until nobody is admitted any more."""
    core = RecordingCore(num_kv_blocks=32, scheduler=policy(reserve_mode="full", preempt_policy="none"))
    for i in range(10):
        core.send(f"a{i}", [1] * 8, max_tokens=24, ignore_eos=True)
        core.keep(core.step())
        core.keep(core.abort(f"a{i}"))
    for i in range(4):
        core.send(f"r{i}", [i + 2] * 8, max_tokens=24, ignore_eos=True)
    core.keep(core.step())
    assert core.load().num_running == 4


def test_a_lone_request_is_admitted_whatever_the_reservation_says() -> None:
    """S5-R11: its own reservation kept the only request out for ever."""
    ways: list[dict[str, Any]] = [{}, {"reserve_mode": "ratio"}, {"reserve_mode": "prompt", "watermark_blocks": 8}]
    for scheduler in (policy(**way) for way in ways):
        core = RecordingCore(num_kv_blocks=8, scheduler=scheduler)
        core.send("a", [1] * 20, max_tokens=13, ignore_eos=True)
        core.run()
        assert len(core.tokens("a")) == 13


def test_an_answer_is_clipped_once_for_admission() -> None:
    """S5-R1 clipped twice; S5-R12 reserved a whole answer for a request that had most of it."""
    core = RecordingCore(
        num_kv_blocks=20,
        max_num_batched_tokens=64,
        max_prefill_tokens=64,
        enable_prefix_caching=False,
        scheduler=policy(reserve_mode="ratio", reserve_clip=4),
    )
    for i in range(5):  # 2 blocks of prompt + 1 of clipped answer each, with all earlier ones counted in full
        core.send(f"r{i}", [i + 1] * 8, max_tokens=60, ignore_eos=True)
    core.keep(core.step())
    assert core.load().num_running == 5


def test_answers_that_are_admitted_in_one_step_are_each_reserved() -> None:
    """S5-R1: the sum was clipped a second time, so that the third request of a step cost no answer at all."""
    core = RecordingCore(
        num_kv_blocks=12,
        max_num_batched_tokens=64,
        max_prefill_tokens=64,
        enable_prefix_caching=False,
        scheduler=policy(reserve_mode="ratio", reserve_clip=4),
    )
    for i in range(6):  # the nth finds 12 - 2n blocks, and needs 2 for its prompt and n + 1 for all answers
        core.send(f"r{i}", [i + 1] * 8, max_tokens=20, ignore_eos=True)
    core.keep(core.step())
    assert core.load().num_running == 4


def test_a_preempted_request_reserves_what_is_left_of_its_answer() -> None:
    """S5-R12: it reserved the whole answer again, and waited for memory that it could never use."""
    submission = Submission("a", (1, 2, 3), SamplingParams(max_tokens=20))
    request = create_request(submission, resolved_config(), 0)
    request.token_ids += [5] * 15
    assert (reserved_tokens(request, 4096), reserved_tokens(request, 3)) == (5, 3)


# --- the ratio -------------------------------------------------------------------------------------------------------


def test_the_ratio_falls_with_every_decode_step_also_while_requests_wait() -> None:
    """S5-R2: decay that waited for an empty queue never came under load, and the queue never drained."""
    core = RecordingCore(max_num_seqs=1, scheduler=policy(ratio_decay_steps=10))
    for name in ("a", "b"):
        core.send(name, [1, 2], max_tokens=9, ignore_eos=True)
    seen = []
    for _ in range(5):
        core.keep(core.step())
        seen.append(core.load().reserve_ratio)
    assert seen[0] == 0.7, "a step without decode rows"
    assert all(a > b for a, b in pairwise(seen))


def test_the_ratio_snaps_back_to_its_least_value_after_a_preemption_left_it_below() -> None:
    """S5-R8."""
    ratio = ReserveRatio(SchedulerConfig())
    ratio.value = 0.05
    ratio.after_step(decoded=True, prefilled=False)
    assert ratio.value == 0.21


def test_an_idle_engine_starts_over_with_the_first_ratio() -> None:
    """S5-R9: the reset was not wired."""
    core = RecordingCore(scheduler=policy(ratio_decay_steps=10))
    core.send("a", [1, 2], max_tokens=9, ignore_eos=True)
    core.run()
    assert core.load().reserve_ratio == 0.7


def test_decay_on_decode_only_ignores_mixed_steps() -> None:
    for on, falls in (("decode_only", False), ("any_decode", True)):
        ratio = ReserveRatio(SchedulerConfig(ratio_decay_on=on))
        ratio.after_step(decoded=True, prefilled=True)
        assert (ratio.value < 0.7) is falls


def test_after_a_preemption_the_ratio_is_what_the_remaining_answers_used() -> None:
    core = RecordingCore(
        num_kv_blocks=9, enable_prefix_caching=False, max_num_batched_tokens=64, scheduler=prompt_only(retract_steps=3)
    )
    for name in ("a", "b"):
        core.send(name, [ord(name) % 31] * 8, max_tokens=20, ignore_eos=True)
    while not core.load().num_preemptions:
        core.keep(core.step())
    decoded = len(core.tokens("a")) - 1  # at the plan, before this step's token
    assert core.load().reserve_ratio == pytest.approx((decoded + 3 * 1) / (20 + 1))
