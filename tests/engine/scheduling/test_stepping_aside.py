"""Contracts of long prompts that step aside for short ones once they are begun, and of the bound on that.
Never asks what the tokens are; only how many there are in which step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from tests.support.engines import RecordingCore, policy
from tests.support.plan_rows import chunks, chunks_of, steps_of


def core_with(**settings: Any) -> RecordingCore:
    """Return a core with steps of 16 tokens and blocks of 4, in which prompts with 20 tokens left step aside."""
    return RecordingCore(
        tick_ms=10,
        max_model_len=512,
        num_kv_blocks=600,
        max_num_seqs=12,
        max_num_batched_tokens=32,
        max_prefill_tokens=16,
        enable_prefix_caching=False,
        scheduler=policy(**{"long_prefill_defer_tokens": 20, "long_prefill_defer_ms": 1000, **settings}),
    )


def begin_long(core: RecordingCore, length: int = 100) -> None:
    core.send("long", [1] * length, max_tokens=1)
    core.keep(core.step())


def test_a_begun_long_prompt_takes_what_short_ones_leave() -> None:
    core = core_with()
    begin_long(core, 69)
    core.send("short", [2] * 6, max_tokens=1)
    core.keep(core.step())
    core.send("two", [3] * 16, max_tokens=1)
    core.run()
    assert [chunks(plan) for plan in core.plans] == [
        [("long", 16)],
        [("short", 6), ("long", 10)],
        [("two", 16)],
        [("long", 16)],
        [("long", 16)],
        [("long", 11)],
    ]


def test_without_the_setting_a_short_prompt_waits_for_a_begun_one() -> None:
    core = core_with(long_prefill_defer_tokens=0)
    begin_long(core, 40)
    core.send("short", [2] * 6, max_tokens=1)
    core.run()
    assert [chunks(plan) for plan in core.plans] == [[("long", 16)], [("long", 16)], [("long", 8), ("short", 6)]]


def test_with_less_left_than_the_setting_says_a_prompt_goes_first() -> None:
    core = core_with()
    begin_long(core, 35)
    core.send("short", [2] * 6, max_tokens=1)
    core.run()
    assert [chunks(plan) for plan in core.plans] == [[("long", 16)], [("long", 16)], [("long", 3), ("short", 6)]]


def flooded(core: RecordingCore, size: int, steps: int = 24) -> None:
    """Begin a long prompt, and let a short one of `size` tokens come before each step."""
    begin_long(core, 400)
    for number in range(steps):
        core.send(f"short {number}", [number % 30 + 2] * size, max_tokens=1)
        core.keep(core.step())


def test_a_long_prompt_that_gets_nothing_goes_first_when_its_time_is_over() -> None:
    """S4-R15: the opposite policy starved the long prompt."""
    core = core_with(long_prefill_defer_ms=40)
    flooded(core, 16)
    turns = steps_of(core, "long")
    assert set(chunks_of(core, "long")) == {16}
    assert max(after - before for before, after in pairwise(turns)) <= 5, "40 ms are over after five steps"
    assert len(turns) >= 5


def test_a_little_in_every_step_is_no_turn() -> None:
    """A wait that is counted from the last chunk never ends where short prompts leave a block in every step, and a long
    prompt would take a hundred steps instead of a few."""
    core = core_with(long_prefill_defer_ms=40)
    flooded(core, 12)
    assert set(chunks_of(core, "long")) == {4, 16}
    turns = [plan.step_id for plan in core.plans if ("long", 16) in chunks(plan)]
    assert max(after - before for before, after in pairwise(turns)) <= 5


def test_no_more_prompts_are_begun_beside_a_long_one_than_may_be_partly_computed() -> None:
    one = core_with(max_partial_prefills=1)
    begin_long(one)
    one.send("medium", [2] * 18, max_tokens=1)
    one.send("short", [3] * 6, max_tokens=1)
    one.keep(one.step())
    assert chunks(one.plans[1]) == [("short", 6), ("long", 10)], "a medium one would be cut"
    several = core_with(max_partial_prefills=0)
    begin_long(several)
    several.send("medium", [2] * 18, max_tokens=1)
    several.keep(several.step())
    several.keep(several.step())
    assert [chunks(plan) for plan in several.plans[1:]] == [[("medium", 16)], [("medium", 2), ("long", 14)]]


def test_a_short_prompt_passes_a_second_long_one_too_and_that_one_is_begun_in_its_turn() -> None:
    core = core_with(max_partial_prefills=0, long_prefill_token_threshold=8)
    core.send("long", [1] * 40, max_tokens=1)
    core.keep(core.step())
    core.send("second", [2] * 40, max_tokens=1)
    core.send("short", [3] * 6, max_tokens=1)
    core.keep(core.step())
    core.keep(core.step())
    assert [chunks(plan) for plan in core.plans] == [
        [("long", 8)],
        [("short", 6), ("long", 8)],
        [("long", 8), ("second", 8)],
    ]


def test_a_long_prompt_steps_aside_for_nobody_of_less_urgent_priority() -> None:
    core = core_with()
    begin_long(core)
    core.send("later", [2] * 6, max_tokens=1, priority=1)
    core.keep(core.step())
    core.send("as urgent", [3] * 6, max_tokens=1)
    core.keep(core.step())
    assert [chunks(plan) for plan in core.plans[1:]] == [[("long", 16)], [("as urgent", 6), ("long", 10)]]


def test_prompts_that_step_aside_for_each_other_all_progress() -> None:
    core = core_with(max_partial_prefills=0, long_prefill_token_threshold=16, long_prefill_defer_ms=30)
    for name in range(3):
        core.send(f"long {name}", [name + 1] * 120, max_tokens=1)
        core.keep(core.step())
    for number in range(60):
        core.send(f"short {number}", [number % 26 + 5] * 8, max_tokens=1)
        core.keep(core.step())
    turns = [[plan.step_id for plan in core.plans if (f"long {name}", 16) in chunks(plan)] for name in range(3)]
    assert all(turns)
    core.run()
    assert [sum(chunks_of(core, f"long {name}")) for name in range(3)] == [120] * 3
