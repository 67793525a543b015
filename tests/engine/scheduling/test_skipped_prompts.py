"""Contracts of prompts behind one that cannot use what a step has left: others use it, and the one that was passed is
not delayed.
It is passed because one prompt too many is partly computed, or because a span or an image of it does not fit."""

from __future__ import annotations

from itertools import pairwise

import pytest

from engine.config import SchedulerConfig
from engine.scheduling.planner import MAX_PASSED
from engine.scheduling.reservation import Admission
from engine.step import RowKind
from tests.support.engines import RecordingCore, answer_alone
from tests.support.plan_rows import chunks, chunks_of, num_prefill_tokens, steps_of


def core_of(*, max_num_seqs: int = 64, num_kv_blocks: int = 4000, **settings: object) -> RecordingCore:
    """Make a core whose steps have 64 tokens of prefill, of which one prompt gets sixteen."""
    scheduler = {"chunk_align": 1, "long_prefill_token_threshold": 16, **settings}
    return RecordingCore(
        max_model_len=2048,
        num_kv_blocks=num_kv_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64 + 2 * max_num_seqs,
        max_prefill_tokens=64,
        enable_prefix_caching=False,
        scheduler=SchedulerConfig(**scheduler),
    )


# --- one partial prompt too many -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["strict", "bypass"])
def test_short_prompts_behind_a_second_long_one_have_the_rest_of_the_step(order: str) -> None:
    """Regression: they waited until the first long prompt ended,
    for twenty steps with three quarters of their budget unused."""
    core = core_of(admission_order=order)
    core.send("long", [1] * 320, max_tokens=1)
    core.send("second", [2] * 320, max_tokens=1)
    for i in range(5):
        core.send(f"short{i}", [3] * 12, max_tokens=1)
    core.keep(core.step())
    assert chunks(core.plans[0]) == [("long", 16), *((f"short{i}", 12) for i in range(4))]
    core.keep(core.step())
    assert chunks(core.plans[1]) == [("long", 16), ("short4", 12)]
    assert core.load().wait_reason == "partial"
    core.run()
    assert all(core.tokens(f"short{i}") == answer_alone([3] * 12, max_tokens=1) for i in range(5))
    assert max(sum(row.kind is RowKind.MIDDLE for row in plan.rows) for plan in core.plans) == 1


def test_a_long_prompt_begins_as_soon_as_the_one_before_it_is_done_whoever_goes_past_it() -> None:
    """Short prompts that keep coming fill every step, and take nothing from it."""
    core = core_of()
    for name in ("first", "second", "third"):
        core.send(name, [1] * 160, max_tokens=1)
    for i in range(60):
        for j in range(5):
            core.send(f"short{i}.{j}", [j + 2] * 12, max_tokens=1)
        core.keep(core.step())
    assert [(steps_of(core, name)[0], steps_of(core, name)[-1]) for name in ("first", "second", "third")] == [
        (0, 9),
        (9, 18),
        (18, 27),
    ]


def test_among_those_that_pass_nobody_is_left_partly_computed() -> None:
    """A prompt of another priority would otherwise have got a partial place of its own,
    and the beginning of the next step."""
    core = core_of(max_partial_prefills=1)
    core.send("urgent", [1] * 40, priority=0, max_tokens=1)
    core.send("urgent too", [2] * 40, priority=0, max_tokens=1)
    core.send("low and long", [3] * 40, priority=1, max_tokens=1)
    core.send("low", [4] * 10, priority=1, max_tokens=1)
    core.keep(core.step())
    assert chunks(core.plans[0]) == [("urgent", 16), ("low", 10)]


def test_who_goes_past_a_long_prompt_takes_no_seat_from_it_once_it_is_its_turn() -> None:
    core = core_of(max_num_seqs=3)
    core.send("first", [1] * 60, max_tokens=1)
    core.send("second", [2] * 60, max_tokens=1)
    for i in range(30):
        core.send(f"short{i}", [3] * 4, max_tokens=12, ignore_eos=True)
    core.run()
    began = steps_of(core, "second")[0]
    assert steps_of(core, "first")[-1] < began <= steps_of(core, "first")[-1] + 12, "one answer later at most"
    later = [i for i in range(30) if steps_of(core, f"short{i}")[0] > steps_of(core, "first")[-1]]
    assert all(steps_of(core, f"short{i}")[0] >= began for i in later)


@pytest.mark.parametrize("order", ["strict", "bypass"])
def test_a_step_looks_past_no_more_than_its_bound(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(admission_order=order)
    for i in range(3 * MAX_PASSED):
        core.send(f"long{i}", [1] * 40, max_tokens=1)
    core.send("short", [2] * 4, max_tokens=1)
    tested = 0
    real = Admission.fits

    def counting(self: Admission, request: object, shared_blocks: int, *, alone: bool) -> bool:
        nonlocal tested
        tested += 1
        return real(self, request, shared_blocks, alone=alone)  # type: ignore[arg-type]

    monkeypatch.setattr(Admission, "fits", counting)
    core.keep(core.step())
    assert tested == 1 + MAX_PASSED
    assert chunks(core.plans[0]) == [("long0", 16)]


def test_in_a_strict_queue_nobody_goes_past_a_long_prompt_for_which_there_is_no_memory() -> None:
    core = core_of(num_kv_blocks=100)
    core.send("first", [1] * 320, max_tokens=1)
    core.send("second", [2] * 320, max_tokens=1)
    core.send("short", [3] * 4, max_tokens=1)
    core.keep(core.step())
    assert chunks(core.plans[0]) == [("first", 16)]
    assert core.load().wait_reason == "memory"


# --- what cannot be cut ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["strict", "bypass"])
def test_what_fits_goes_around_a_span_that_does_not(order: str) -> None:
    """Regression: twenty prompts waited behind a span, and what the step had left was unused."""
    core = core_of(admission_order=order, long_prefill_token_threshold=0)
    core.send("text", [1] * 40, max_tokens=1)
    core.send("image", [2] * 60, max_tokens=1, atomic_spans=((0, 50),))
    for i in range(2):
        core.send(f"short{i}", [3] * 10, max_tokens=1)
    core.run()
    assert [chunks(plan) for plan in core.plans[:2]] == [
        [("text", 40), ("short0", 10), ("short1", 10)],
        [("image", 60)],
    ]
    assert core.tokens("image") == answer_alone([2] * 60, max_tokens=1)


def test_what_goes_around_a_span_is_taken_whole_so_that_the_next_step_begins_with_the_span() -> None:
    core = core_of(long_prefill_token_threshold=0, max_partial_prefills=0)
    core.send("text", [1] * 40, max_tokens=1)
    core.send("image", [2] * 60, max_tokens=1, atomic_spans=((0, 60),))
    core.send("long", [3] * 500, max_tokens=1)
    core.send("short", [4] * 10, max_tokens=1)
    core.run()
    assert [chunks(plan) for plan in core.plans[:2]] == [
        [("text", 40), ("short", 10)],
        [("image", 60), ("long", 4)],
    ]


@pytest.mark.parametrize("order", ["strict", "bypass"])
@pytest.mark.parametrize("how", ["defer", "extend"])
def test_a_span_of_the_greatest_length_is_in_the_first_step_that_no_begun_prompt_shares(order: str, how: str) -> None:
    """S2-R12: whatever fits goes around it, in a flood that never ends, and none of it delays the span by a step."""
    core = core_of(admission_order=order, atomic_policy=how, long_prefill_token_threshold=0)
    longest = core.config.max_atomic_span
    core.send("begun", [1] * 300, max_tokens=1)
    core.keep(core.step())
    core.send("image", [2] * (longest + 5), max_tokens=1, atomic_spans=((0, longest),))
    for i in range(40):
        for j, length in enumerate((10, 3, 90, 7)):
            core.send(f"other{i}.{j}", [j + 3] * length, max_tokens=3, ignore_eos=True)
        core.keep(core.step())
    assert steps_of(core, "image")[0] <= steps_of(core, "begun")[-1] + 1


def test_others_go_around_a_chunk_that_depends_on_its_request_alone_too() -> None:
    core = core_of(chunk_boundary="request_local", max_partial_prefills=0, long_prefill_token_threshold=0)
    core.send("first", [1] * 40, max_tokens=1)
    core.send("second", [2] * 60, max_tokens=1)
    core.send("short", [3] * 20, max_tokens=1)
    core.run()
    assert [chunks(plan) for plan in core.plans] == [[("first", 40), ("short", 20)], [("second", 60)]]


def test_a_scored_prompt_that_waits_for_a_step_without_decode_rows_lets_others_pass_and_has_the_next() -> None:
    core = core_of(prompt_logprobs_step="dedicated")
    core.send("stream", [1] * 4, max_tokens=60, ignore_eos=True)
    core.keep(core.step())
    core.send("long", [2] * 40, max_tokens=1)
    core.send("scored", [3] * 10, max_tokens=1, prompt_logprobs=0)
    core.send("short", [4] * 10, max_tokens=1)
    core.run()
    assert chunks(core.plans[1]) == [("long", 16), ("short", 10)]
    assert steps_of(core, "scored")[0] == steps_of(core, "long")[-1] + 1
    assert core.tokens("scored") == answer_alone([3] * 10, max_tokens=1)


def test_what_is_left_of_a_step_is_not_searched_for_when_less_than_a_block_is() -> None:
    core = core_of(long_prefill_token_threshold=0, chunk_align=4)
    core.send("first", [1] * 62, max_tokens=1)
    core.send("second", [2] * 30, max_tokens=1)
    core.send("tiny", [3] * 2, max_tokens=1)
    core.run()
    assert [chunks(plan) for plan in core.plans] == [[("first", 62)], [("second", 30), ("tiny", 2)]]


def test_budget_is_used_as_far_as_prompts_are_there_to_use_it() -> None:
    core = core_of()
    core.send("long", [1] * 320, max_tokens=1)
    core.send("second", [2] * 320, max_tokens=1)
    for i in range(80):
        core.send(f"short{i}", [3] * 12, max_tokens=1)
    core.run()
    totals = [num_prefill_tokens(plan) for plan in core.plans]
    assert set(totals[:19]) == {64}
    assert max(b - a for a, b in pairwise(steps_of(core, "long"))) == 1
    assert chunks_of(core, "second") == [16] * 20
