"""Contracts of prompts that are computed whole (`enable_chunked_prefill: false`): in one step, or not yet.
Never asks what the tokens are; only how many there are in which step."""

from __future__ import annotations

from typing import Any

from engine.step import ExecutorOutOfMemoryError, RowKind, StepPlan
from tests.support.engines import RecordingCore, policy, prompt_only
from tests.support.plan_rows import chunks, chunks_of, kinds, prefill_rows, steps_of

WHOLE = {"enable_chunked_prefill": False}


def core_with(**options: Any) -> RecordingCore:
    """Return a core in which the longest prompt has 32 tokens, beside eight decode rows."""
    return RecordingCore(
        **{
            "max_model_len": 33,
            "max_num_batched_tokens": 40,
            "max_prefill_tokens": 40,
            "num_kv_blocks": 100,
            "scheduler": policy(**WHOLE),
            **options,
        }
    )


def test_a_prompt_is_computed_whole_or_waits_and_only_whole_ones_overtake_it() -> None:
    core = core_with()
    for i, length in enumerate((20, 30, 12, 20)):
        core.send(f"p{i}", [i + 1] * length, max_tokens=1)
    core.run()
    assert [chunks(plan) for plan in core.plans] == [[("p0", 20), ("p2", 12)], [("p1", 30)], [("p3", 20)]]


def test_the_longest_prompt_runs_in_the_next_step_beside_full_seats_and_endless_short_prompts() -> None:
    """S2-R12: whole prompts would overtake it for ever if it had to wait until nobody decodes."""
    core = core_with()
    for i in range(7):
        core.send(f"d{i}", [i + 1], max_tokens=32, ignore_eos=True)
    core.keep(core.step())
    core.send("ahead", [8] * 20, max_tokens=1)
    core.send("longest", [9] * 32, max_tokens=1)
    for i in range(3):
        core.send(f"short {i}", [i + 10] * 4, max_tokens=1)
        core.keep(core.step())
    assert chunks_of(core, "longest") == [32]
    assert [kinds(plan) for plan in core.plans[1:3]] == ["dddddddp"] * 2
    assert steps_of(core, "longest") == [2]


def test_a_preempted_request_is_computed_whole_again_with_its_answer() -> None:
    core = core_with(num_kv_blocks=10, enable_prefix_caching=False, scheduler=prompt_only(**WHOLE))
    for name, token in (("a", 1), ("b", 2)):
        core.send(name, [token] * 12, max_tokens=20, ignore_eos=True)
    core.run()
    assert core.load().num_preemptions > 0
    again = [row for row in prefill_rows(core.plans) if row.start == 0 and len(row.token_ids) > 12]
    assert again
    assert {row.kind for row in prefill_rows(core.plans)} == {RowKind.LAST}


def test_what_the_prefix_cache_has_takes_no_room_in_the_step() -> None:
    core = core_with()
    core.send("first", [1] * 20, max_tokens=1)
    core.run()
    core.send("again", [1] * 20 + [2] * 6, max_tokens=1)
    core.send("other", [3] * 32, max_tokens=1)
    core.run()
    assert [chunks(plan) for plan in core.plans] == [[("first", 20)], [("again", 6), ("other", 32)]]


def test_a_prompt_is_retried_whole_after_a_shortage_and_a_halved_limit_never_starves_it() -> None:
    def run_out(plan: StepPlan) -> None:
        if len(core.plans) == 1:
            raise ExecutorOutOfMemoryError("injected")

    core = core_with(before_step=run_out)
    core.send("other", [1] * 8, max_tokens=1)
    core.send("longest", [2] * 32, max_tokens=1)
    core.run()
    assert {row.kind for row in prefill_rows(core.plans)} == {RowKind.LAST}
    assert [chunks(plan) for plan in core.plans] == [
        [("other", 8), ("longest", 32)],
        [("other", 8)],  # the limit is 20 now
        [("longest", 32)],
    ]
    assert core.finished("longest").usage.prompt_tokens == 32


def test_a_span_is_whole_with_its_prompt() -> None:
    core = core_with()
    core.send("p", [1] * 20, max_tokens=1)
    core.send("span", [2] * 30, max_tokens=1, atomic_spans=((2, 28),))
    core.run()
    assert [chunks(plan) for plan in core.plans] == [[("p", 20)], [("span", 30)]]
