"""Contracts of where a prompt's chunks end, and of how many prompts are partly computed at a time.
Never asks what the tokens are; only how many there are in which step."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import SchedulerConfig
from engine.step import RowKind
from tests.support.engines import RecordingCore, policy
from tests.support.plan_rows import chunks_of, kinds


def test_a_chunk_inside_its_prompt_ends_at_a_block_boundary() -> None:
    core = RecordingCore(max_num_batched_tokens=10, max_prefill_tokens=10, scheduler=SchedulerConfig())
    core.send("a", range(1, 31), max_tokens=1)
    core.run()
    assert chunks_of(core, "a") == [8, 8, 8, 6]


def test_alignment_never_starves_a_prompt_whose_room_is_smaller_than_a_block() -> None:
    """Beside eight decode rows the step has two tokens left: rounding them down to none would never end the prompt."""
    core = RecordingCore(
        max_num_batched_tokens=10, max_prefill_tokens=10, max_num_seqs=9, num_kv_blocks=200, scheduler=SchedulerConfig()
    )
    for i in range(8):
        core.send(f"d{i}", [i + 1], max_tokens=40, ignore_eos=True)
    core.keep(core.step())
    core.send("long", [5] * 20, max_tokens=1)
    for _ in range(15):
        core.keep(core.step())
    assert core.tokens("long")


def test_the_threshold_caps_one_prompt_and_leaves_room_for_the_next() -> None:
    core = RecordingCore(
        max_num_batched_tokens=32,
        max_prefill_tokens=32,
        scheduler=policy(long_prefill_token_threshold=8, max_partial_prefills=2),
    )
    core.send("long", [1] * 24, max_tokens=1)
    core.send("short", [2] * 6, max_tokens=1)
    core.keep(core.step())
    assert [len(row.token_ids) for row in core.plans[0].rows] == [8, 6]


def test_with_one_partial_prefill_a_second_long_prompt_waits_but_a_short_one_fills_the_step() -> None:
    """S5-R17: the tail chunk ran alone although a shorter request fitted beside it."""
    core = RecordingCore(max_num_batched_tokens=32, max_prefill_tokens=16, scheduler=policy(), num_kv_blocks=100)
    core.send("first", [1] * 20, max_tokens=1)
    core.send("short", [2] * 5, max_tokens=1)
    core.send("long", [3] * 40, max_tokens=1)
    core.run()
    second = [(row.request_id, len(row.token_ids)) for row in core.plans[1].rows]
    assert second == [("first", 4), ("short", 5), ("long", 7)]
    partial = [{r.request_id for r in plan.rows if r.kind is RowKind.MIDDLE} for plan in core.plans]
    assert max(len(names) for names in partial) == 1


def halving(context: int, **settings: Any) -> SchedulerConfig:
    return policy(chunk_halving_context=context, chunk_align=1, **settings)


def test_chunks_shrink_with_their_context_so_that_late_ones_take_no_longer() -> None:
    """At a context of 1,250 tokens a step of 256 took 577 ms where the first took 412, and running streams with it."""
    core = RecordingCore(max_num_batched_tokens=32, max_prefill_tokens=32, num_kv_blocks=200, scheduler=halving(32))
    core.send("long", [1] * 96, max_tokens=1)
    core.run()
    assert chunks_of(core, "long") == [32, 16, 12, 11, 9, 9, 7]
    starts = [row.start for plan in core.plans for row in plan.rows]
    assert all(count * (1 + start / 32) <= 32 for start, count in zip(starts, chunks_of(core, "long"), strict=False))


def test_what_a_late_chunk_costs_is_not_given_to_the_next_prompt() -> None:
    """Sixteen tokens at a context of 32 cost as much as 32 at none: what is left is nothing, and not sixteen tokens."""
    core = RecordingCore(max_num_batched_tokens=32, max_prefill_tokens=32, num_kv_blocks=200, scheduler=halving(32))
    core.send("long", [1] * 52, max_tokens=1)
    core.send("short", [2] * 6, max_tokens=1)
    core.run()
    by_step = [[(row.request_id, len(row.token_ids)) for row in plan.rows] for plan in core.plans]
    assert by_step[:3] == [[("long", 32)], [("long", 16)], [("long", 4), ("short", 6)]]


@pytest.mark.parametrize("settings", [{}, {"chunk_boundary": "request_local", "max_partial_prefills": 0}])
def test_a_prompt_goes_on_by_a_block_however_long_its_context(settings: dict[str, Any]) -> None:
    core = RecordingCore(
        max_num_batched_tokens=16, max_prefill_tokens=8, num_kv_blocks=200, scheduler=halving(1, **settings)
    )
    core.send("long", [1] * 40, max_tokens=1)
    core.run()
    assert set(chunks_of(core, "long")[1:]) == {4}


@pytest.mark.parametrize("neighbours", [0, 3])
def test_request_local_chunks_that_shrink_depend_on_the_request_alone(neighbours: int) -> None:
    core = RecordingCore(
        max_num_batched_tokens=40,
        max_prefill_tokens=32,
        num_kv_blocks=200,
        scheduler=halving(32, chunk_boundary="request_local", max_partial_prefills=0),
        enable_prefix_caching=False,
    )
    for i in range(neighbours):
        core.send(f"n{i}", [i + 1] * (7 + 9 * i), max_tokens=30, ignore_eos=True)
    core.keep(core.step())
    core.send("a", [9] * 80, max_tokens=1)
    core.run()
    assert chunks_of(core, "a") == [32, 16, 12, 11, 9]


@pytest.mark.parametrize("neighbours", [0, 3])
def test_request_local_chunks_depend_on_the_request_alone(neighbours: int) -> None:
    """S1-B18: [80] at 32 gives 32, 32, 16 whoever else is there."""
    local = policy(chunk_boundary="request_local", max_partial_prefills=0)
    core = RecordingCore(
        max_num_batched_tokens=40,
        max_prefill_tokens=32,
        num_kv_blocks=200,
        scheduler=local,
        enable_prefix_caching=False,
    )
    for i in range(neighbours):
        core.send(f"n{i}", [i + 1] * (7 + 9 * i), max_tokens=30, ignore_eos=True)
    core.keep(core.step())
    core.send("a", [9] * 80, max_tokens=1)
    core.run()
    assert chunks_of(core, "a") == [32, 32, 16]


def test_a_request_local_chunk_fits_beside_as_many_decode_rows_as_there_are_seats() -> None:
    """S1-B18: a chunk as long as the whole step would wait until nobody decodes any more."""
    local = policy(chunk_boundary="request_local", max_partial_prefills=0)
    core = RecordingCore(max_num_seqs=4, max_num_batched_tokens=12, max_prefill_tokens=12, scheduler=local)
    core.send("stream", [1, 2], max_tokens=40, ignore_eos=True)
    core.keep(core.step())
    core.send("long", [3] * 24, max_tokens=1)
    core.run()
    assert chunks_of(core, "long") == [8, 8, 8]
    assert [kinds(plan) for plan in core.plans[1:4]] == ["dp"] * 3


@pytest.mark.parametrize(("most", "at_a_time"), [(1, 1), (2, 2), (0, 4)])
def test_no_more_prompts_are_partly_computed_than_the_setting_says(most: int, at_a_time: int) -> None:
    """S5-R3: eight prompts that shared the budget each got an eighth of it, and none got on."""
    capped = policy(long_prefill_token_threshold=4, max_partial_prefills=most)
    core = RecordingCore(max_num_batched_tokens=64, max_prefill_tokens=64, num_kv_blocks=200, scheduler=capped)
    for i in range(4):
        core.send(f"r{i}", [i + 1] * 40, max_tokens=1)
    core.run()
    assert max(sum(row.kind is RowKind.MIDDLE for row in plan.rows) for plan in core.plans) == at_a_time


def test_a_prompt_that_is_partly_computed_has_a_seat() -> None:
    """S4-R1: a hundred partial prompts at max_num_seqs 4 made a step of a hundred rows."""
    capped = policy(long_prefill_token_threshold=4, max_partial_prefills=0)
    core = RecordingCore(
        max_num_seqs=4, max_num_batched_tokens=64, max_prefill_tokens=64, num_kv_blocks=2000, scheduler=capped
    )
    for i in range(100):
        core.send(f"r{i}", [i % 31 + 1] * 20, max_tokens=2, ignore_eos=True)
    core.run()
    assert max(len(plan.rows) for plan in core.plans) == 4
