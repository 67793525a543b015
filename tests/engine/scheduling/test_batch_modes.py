"""Contracts of which rows a step mixes: decode rows and chunks together, or one of them first with a bound.
Never counts tokens of a chunk; only what kinds of row a step has."""

from __future__ import annotations

from itertools import pairwise

from tests.support.engines import RecordingCore, policy
from tests.support.plan_rows import kinds


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
