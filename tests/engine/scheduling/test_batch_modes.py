"""Contracts of which rows a step mixes: decode rows and chunks together, or one of them first with a bound.
Never counts tokens of a chunk; only what kinds of row a step has."""

from __future__ import annotations

from itertools import pairwise

from engine.step import RowKind, StepPlan
from tests.support.engines import RecordingCore, policy
from tests.support.plan_rows import chunks, chunks_of, kinds


def traffic(core: RecordingCore) -> None:
    """Two streams that decode, then prompts that keep coming."""
    for name in ("a", "b"):
        core.send(name, [1, 2], max_tokens=30, ignore_eos=True)
    core.keep(core.step())
    for i in range(6):
        core.send(f"p{i}", [i + 1] * 20, max_tokens=1)
    core.run()


def test_mixed_steps_carry_every_decode_row_and_a_chunk() -> None:
    core = RecordingCore(max_num_batched_tokens=12, max_prefill_tokens=8, scheduler=policy())
    traffic(core)
    assert all(kinds(plan).startswith("dd") for plan in core.plans[1:20])
    assert any("p" in kinds(plan) for plan in core.plans[1:])


def test_prefill_first_steps_are_pure_and_decoding_waits_no_longer_than_its_bound() -> None:
    """S5-R14: under steady arrivals decoding waited for ever."""
    core = RecordingCore(
        tick_ms=10,
        max_num_batched_tokens=12,
        max_prefill_tokens=8,
        scheduler=policy(batch_mode="prefill_first", decode_starve_ms=30),
    )
    traffic(core)
    seen = [kinds(plan) for plan in core.plans[1:]]
    assert not any("d" in kind and "p" in kind for kind in seen)
    runs = "".join("d" if "d" in kind else "p" for kind in seen).split("d")
    assert max(len(run) for run in runs) == 3, "three steps of 10 ms, then a decode step is due"


def test_decode_first_holds_prompts_back_and_no_longer_than_its_bound() -> None:
    """S1-R9: with somebody always about to finish, prompts waited for ever."""
    core = RecordingCore(
        tick_ms=10,
        max_num_batched_tokens=12,
        max_prefill_tokens=8,
        scheduler=policy(batch_mode="decode_first", prefill_starve_ms=50),
    )
    traffic(core)
    prefills = [i for i, plan in enumerate(core.plans[1:]) if "p" in kinds(plan)]
    assert 4 <= prefills[0] <= 6, "the first prompt waits while others decode, and for 50 ms"
    assert all(b - a <= 6 for a, b in pairwise(prefills) if b < 28)


def test_a_request_about_to_finish_has_the_step_to_itself() -> None:
    core = RecordingCore(max_num_batched_tokens=12, max_prefill_tokens=8, scheduler=policy(decode_finish_tokens=3))
    core.send("a", [1, 2], max_tokens=6, ignore_eos=True)
    core.keep(core.step())
    core.send("p", [3] * 40, max_tokens=1)
    core.run()
    assert [kinds(plan) for plan in core.plans[1:6]] == ["dp", "dp", "d", "d", "d"]


# --- chunks ahead of decode rows in a mixed step ---------------------------------------------------------------------


def decodes(plan: StepPlan) -> dict[str, int]:
    """Return the decode rows with the number of their tokens."""
    return {row.request_id: len(row.token_ids) for row in plan.rows if row.kind is RowKind.DECODE}


def streams(core: RecordingCore, *names: str) -> None:
    """Let requests with short prompts begin to decode together."""
    for name in names:
        core.send(name, [1, 2], max_tokens=60, ignore_eos=True)
    core.keep(core.step())


def test_chunks_ahead_take_the_budget_and_rows_that_do_not_fit_run_in_turn() -> None:
    """S2-R14: the same rows at the end were dropped from every step."""
    core = RecordingCore(
        max_num_batched_tokens=12,
        max_prefill_tokens=11,
        scheduler=policy(batch_mode="mixed_prefill_first", decode_starve_ms=1000),
    )
    streams(core, "a", "b", "c")
    core.send("long", [3] * 60, max_tokens=1)
    for _ in range(7):
        core.keep(core.step())
    assert chunks_of(core, "long") == [11, 11, 11, 11, 11, 5]
    assert [list(decodes(plan)) for plan in core.plans[1:]] == [
        *(["a"], ["b"], ["c"], ["a"], ["b"]),
        ["a", "b", "c"],  # the last chunk leaves 7 tokens
        ["a", "b", "c"],
    ]
    assert [kinds(plan) for plan in core.plans[5:]] == ["dp", "dddp", "ddd"], "decode rows come first in a plan"


def test_without_room_for_all_a_row_behind_chunks_waits_no_longer_than_its_bound() -> None:
    """S4-R15, S5-R14: chunks that fill every step would keep decode rows waiting for as long as prompts arrive."""
    core = RecordingCore(
        tick_ms=10,
        num_kv_blocks=200,
        max_num_batched_tokens=12,
        scheduler=policy(batch_mode="mixed_prefill_first", decode_starve_ms=30),
    )
    streams(core, "a", "b")
    core.send("long", [3] * 200, max_tokens=1)
    for _ in range(16):
        core.keep(core.step())
    assert all(chunks(plan) for plan in core.plans), "no step goes without a chunk"
    assert max(plan.num_tokens for plan in core.plans) == 12
    for name in ("a", "b"):
        ran = [number for number, plan in enumerate(core.plans) if name in decodes(plan)]
        assert len(ran) >= 4
        assert max(after - before for before, after in pairwise([0, *ran])) <= 4, "30 ms are over after four steps"


def test_a_bound_of_nothing_makes_chunks_ahead_the_same_as_mixed_steps() -> None:
    def steps(batch_mode: str) -> list[tuple[object, object]]:
        core = RecordingCore(
            max_num_batched_tokens=12, scheduler=policy(batch_mode=batch_mode, decode_starve_ms=0), num_kv_blocks=200
        )
        traffic(core)
        return [(decodes(plan), chunks(plan)) for plan in core.plans]

    assert steps("mixed_prefill_first") == steps("mixed")


def test_drafts_give_way_before_a_decode_row_waits_for_chunks() -> None:
    core = RecordingCore(
        max_num_seqs=3,
        max_num_batched_tokens=13,
        max_prefill_tokens=9,
        num_speculative_tokens=3,
        scheduler=policy(batch_mode="mixed_prefill_first", decode_starve_ms=1000),
    )
    streams(core, "a", "b")
    core.keep(core.step())
    core.send("long", [3] * 40, max_tokens=1)
    core.keep(core.step())
    assert decodes(core.plans[1]) == {"a": 4, "b": 4}, "three drafts each, where nothing else runs"
    assert (decodes(core.plans[2]), chunks(core.plans[2])) == ({"a": 3, "b": 1}, [("long", 9)])
