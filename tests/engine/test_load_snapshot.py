"""Contracts of the load snapshot: why the queue waits, how much memory is reserved, and how steps used graphs.
Dashboards and autoscaling read these numbers; a wrong one scales the wrong way."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.config import SchedulerConfig
from engine.scheduling.planner import DeferReason
from engine.step import StepPlan
from tests.support.engines import RecordingCore


def core_with(**overrides: object) -> RecordingCore:
    settings = {"scheduler": SchedulerConfig(), "enable_prefix_caching": False, "max_prefill_tokens": 16}
    return RecordingCore(**{**settings, **overrides})


def step(core: RecordingCore, count: int = 1) -> RecordingCore:
    for _ in range(count):
        core.keep(core.step())
    return core


def prompt_only(**settings: object) -> SchedulerConfig:
    return SchedulerConfig(reserve_mode="prompt", watermark_blocks=0, **settings)


# --- why the first in the queue waits --------------------------------------------------------------------------------


def waits_for_memory() -> RecordingCore:
    core = core_with(num_kv_blocks=10, scheduler=prompt_only())
    core.send("running", [1] * 16, max_tokens=8, ignore_eos=True)
    core.send("waits", [2] * 30, max_tokens=1)
    return step(core, 2)


def waits_for_a_seat() -> RecordingCore:
    core = core_with(max_num_seqs=1)
    core.send("running", [1] * 4, max_tokens=8, ignore_eos=True)
    core.send("waits", [2] * 4, max_tokens=1)
    return step(core, 2)


def waits_for_tokens() -> RecordingCore:
    core = core_with()
    core.send("fills the step", [1] * 16, max_tokens=8)
    core.send("waits", [2] * 4, max_tokens=1)
    return step(core)


def waits_for_tokens_with_a_span() -> RecordingCore:
    core = core_with()
    core.send("leaves six", [1] * 10, max_tokens=8)
    core.send("waits", [2] * 9, max_tokens=1, atomic_spans=((0, 8),))
    return step(core)


def waits_for_partial_prompts() -> RecordingCore:
    core = core_with(scheduler=SchedulerConfig(long_prefill_token_threshold=4))
    core.send("begun", [1] * 30, max_tokens=1)
    core.send("waits", [2] * 30, max_tokens=1)
    return step(core)


def waits_for_the_mode() -> RecordingCore:
    core = core_with(scheduler=SchedulerConfig(batch_mode="decode_first"))
    core.send("running", [1] * 4, max_tokens=8, ignore_eos=True)
    step(core)
    core.send("waits", [2] * 4, max_tokens=1)
    return step(core)


def waits_after_a_preemption() -> RecordingCore:
    """Preempt a request while the queue is empty, so that the victim itself is the first to wait."""
    core = core_with(num_kv_blocks=8, max_prefill_tokens=32, scheduler=prompt_only())
    for name in ("elder", "victim"):
        core.send(name, [1] * 8, max_tokens=20, ignore_eos=True)
    while not core.load().num_preemptions:
        step(core)
    assert core.waiting == ["victim"]
    return core


SCENARIOS: list[tuple[Callable[[], RecordingCore], DeferReason]] = [
    (waits_for_memory, DeferReason.MEMORY),
    (waits_for_a_seat, DeferReason.SEATS),
    (waits_for_tokens, DeferReason.TOKENS),
    (waits_for_tokens_with_a_span, DeferReason.TOKENS),
    (waits_for_partial_prompts, DeferReason.PARTIAL),
    (waits_for_the_mode, DeferReason.MODE),
    (waits_after_a_preemption, DeferReason.PREEMPTION),
]


@pytest.mark.parametrize(("scenario", "reason"), SCENARIOS, ids=[scenario.__name__ for scenario, _ in SCENARIOS])
def test_the_reason_why_the_queue_waits_is_that_of_its_first_request(
    scenario: Callable[[], RecordingCore], reason: DeferReason
) -> None:
    core = scenario()
    assert core.load().num_waiting == 1
    assert core.load().wait_reason == reason
    core.run()
    assert core.load().wait_reason is None, "nobody waits any more"


def test_every_reason_has_its_scenario() -> None:
    assert {reason for _, reason in SCENARIOS} == set(DeferReason)


@pytest.mark.parametrize("batch_mode", ["mixed", "decode_first"])
def test_after_a_preemption_that_is_the_reason_for_all_who_wait(batch_mode: str) -> None:
    """I-24: such a step admits nobody, whatever else would keep requests out."""
    core = core_with(num_kv_blocks=8, max_prefill_tokens=32, scheduler=prompt_only(batch_mode=batch_mode))
    for name in ("elder", "victim"):
        core.send(name, [1] * 8, max_tokens=20, ignore_eos=True)
    step(core, 2)
    core.send("waits", [2] * 30, max_tokens=1)
    while not core.load().num_preemptions:
        step(core)
    assert core.load().wait_reason == "preemption"


def test_nobody_waits_when_all_were_admitted() -> None:
    core = core_with()
    for i in range(3):
        core.send(f"r{i}", [i + 1] * 4, max_tokens=4, ignore_eos=True)
    step(core)
    assert (core.load().num_waiting, core.load().wait_reason) == (0, None)


def test_an_abort_of_whoever_waits_ends_the_reason_too() -> None:
    core = waits_for_a_seat()
    core.keep(core.abort("waits"))
    assert core.load().wait_reason is None


# --- who waits again -------------------------------------------------------------------------------------------------


def test_requests_that_wait_again_are_told_from_new_ones() -> None:
    core = waits_after_a_preemption()
    assert (core.load().num_waiting, core.load().num_waiting_preempted) == (1, 1)
    core.send("new", [1] * 4, max_tokens=1)
    assert (core.load().num_waiting, core.load().num_waiting_preempted) == (2, 1)
    core.run()
    assert (core.load().num_waiting, core.load().num_waiting_preempted) == (0, 0)


# --- memory that is spoken for ---------------------------------------------------------------------------------------


def test_reserved_blocks_are_the_share_of_running_answers_that_admission_keeps_free() -> None:
    core = core_with(scheduler=SchedulerConfig(reserve_mode="ratio", ratio_init=0.5, ratio_min=0.5))
    core.send("a", [1] * 8, max_tokens=33, ignore_eos=True)
    step(core)
    assert core.load().num_reserved_blocks == 9, "an answer that was admitted in this step counts in full: 33 of 4"
    step(core)
    assert core.load().num_reserved_blocks == 4, "half of the 32 tokens to come"
    step(core, 16)
    assert core.load().num_reserved_blocks == 2
    core.run()
    assert core.load().num_reserved_blocks == 0


def test_reserved_blocks_hold_the_rest_of_prompts_that_are_partly_computed() -> None:
    core = core_with(scheduler=prompt_only())
    core.send("a", [1] * 40, max_tokens=1)
    step(core)
    assert core.load().num_held_blocks == 4
    assert core.load().num_reserved_blocks == 6


def test_reserved_blocks_are_all_that_was_promised_when_reservation_is_full() -> None:
    core = core_with(scheduler=SchedulerConfig(reserve_mode="full", preempt_policy="none"))
    core.send("a", [1] * 8, max_tokens=17, ignore_eos=True)  # memory for 24 tokens is kept: 6 blocks
    step(core)
    assert (core.load().num_held_blocks, core.load().num_reserved_blocks) == (2, 4)
    for _ in range(15):
        step(core)
        assert core.load().num_held_blocks + core.load().num_reserved_blocks == 6
    core.keep(core.abort("a"))
    assert (core.load().num_held_blocks, core.load().num_reserved_blocks) == (0, 0)


# --- graphs ----------------------------------------------------------------------------------------------------------


def test_every_step_hits_a_graph_or_misses_for_a_reason() -> None:
    """I-31, S2-R1..R3: 398 of 398 mixed steps ran eager, and nothing said so. Decode steps replay the smallest size
    that holds them, and a step beyond the largest says so."""
    core = core_with(graph_sizes=[1, 2, 4], max_prefill_tokens=32)
    for i, length in enumerate((30, 20, 10, 5, 3, 2)):
        core.send(f"r{i}", [i + 1] * 4, max_tokens=length, ignore_eos=True)
    core.run()
    load = core.load()
    assert load.graph_hits == {"decode 1": 10, "decode 2": 10, "decode 4": 7}
    assert load.graph_misses == {"prefill rows": 1, "more than 4 rows": 2}
    assert sum(load.graph_hits.values()) + sum(load.graph_misses.values()) == load.num_steps


def test_a_step_with_prefill_rows_beside_decode_rows_is_no_decode_step() -> None:
    core = core_with(graph_sizes=[1, 2, 4])
    core.send("stream", [1, 2], max_tokens=6, ignore_eos=True)
    step(core)
    core.send("p", [3] * 20, max_tokens=1)
    step(core, 2)
    assert core.load().graph_misses == {"prefill rows": 3}
    step(core)
    assert core.load().graph_hits == {"decode 1": 1}


def test_graphs_are_counted_once_a_step_also_where_steps_fail_or_are_cut() -> None:
    def fail(plan: StepPlan) -> None:
        if plan.step_id == 2:
            raise RuntimeError("injected")

    core = core_with(graph_sizes=[8], before_step=fail, scheduler=SchedulerConfig(chunk_owner="engine"))
    for i in range(6):
        core.send(f"r{i}", [i + 1] * (20 + i), max_tokens=4, ignore_eos=True)
    core.run()
    load = core.load()
    assert sum(load.graph_hits.values()) + sum(load.graph_misses.values()) == load.num_steps
    assert load.num_steps == len({plan.step_id for plan in core.plans}) - 1, "a step that failed gave nothing to count"


def test_an_executor_without_graphs_counts_none() -> None:
    core = core_with()
    core.send("a", [1, 2], max_tokens=4)
    core.run()
    assert (core.load().graph_hits, core.load().graph_misses) == ({}, {})


def test_a_snapshot_does_not_change_when_the_engine_goes_on() -> None:
    core = core_with(graph_sizes=[1])
    core.send("a", [1, 2], max_tokens=5, ignore_eos=True)
    before = step(core, 2).load()
    core.run()
    assert before.graph_hits == {"decode 1": 1}
