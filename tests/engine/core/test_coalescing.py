"""Contracts of prefill_fill_ratio: prefill waits until there is enough of it, and never longer than its bounds.
Steps are 10 ms of a clock that is turned by hand."""

from __future__ import annotations

import pytest

from engine.config import SchedulerConfig
from tests.support.engines import RecordingCore, answer_alone
from tests.support.plan_rows import chunks_of, kinds, steps_of


def gathering(**settings: object) -> RecordingCore:
    """Start a stream that decodes; half of a step of 16 prefill tokens must be queued before prefill runs."""
    core = RecordingCore(
        tick_ms=10,
        max_num_batched_tokens=24,
        max_prefill_tokens=16,
        enable_prefix_caching=False,
        scheduler=SchedulerConfig(**{"prefill_fill_ratio": 0.5, "chunk_align": 1, **settings}),
    )
    core.send("stream", [1, 2], max_tokens=60, ignore_eos=True)
    core.keep(core.step())
    return core


def steps(core: RecordingCore, count: int) -> list[str]:
    """Return the rows of the next steps."""
    before = len(core.plans)
    for _ in range(count):
        core.keep(core.step())
    return [kinds(plan) for plan in core.plans[before:]]


@pytest.mark.parametrize("mode", ["mixed", "prefill_first"])
def test_prefill_is_held_while_others_decode_until_the_queue_fills_the_ratio(mode: str) -> None:
    core = gathering(batch_mode=mode)
    core.send("a", [1] * 4, max_tokens=1)
    assert steps(core, 3) == ["d"] * 3
    assert core.load().wait_reason == "mode"
    core.send("b", [2] * 3, max_tokens=1)
    assert steps(core, 3) == ["d"] * 3, "7 tokens of 8"
    core.send("c", [3], max_tokens=1)
    assert steps(core, 2) == (["dppp", "d"] if mode == "mixed" else ["ppp", "d"])
    assert core.load().wait_reason is None


def test_without_the_ratio_prefill_waits_for_nobody() -> None:
    core = gathering(prefill_fill_ratio=0.0)
    core.send("a", [1] * 4, max_tokens=1)
    assert steps(core, 1) == ["dp"]


def test_a_new_prompt_is_held_no_longer_than_its_bound_also_while_others_keep_coming() -> None:
    core = gathering(prefill_fill_ratio=1.0, coalesce_waiting_ms=50)
    core.send("a", [1] * 2, max_tokens=1)
    seen = []
    for i in range(6):
        seen += steps(core, 1)
        if i == 3:
            core.send("b", [2] * 2, max_tokens=1)
    assert seen == ["d", "d", "d", "d", "dpp", "d"], "50 ms after the first of them"


def test_the_rest_of_a_begun_prompt_is_held_no_longer_than_its_own_bound() -> None:
    core = gathering(coalesce_waiting_ms=500, coalesce_partial_ms=30)
    core.send("a", [1] * 20, max_tokens=1)
    assert steps(core, 6) == ["dp", "d", "d", "dp", "d", "d"]
    assert chunks_of(core, "a") == [16, 4]
    assert core.tokens("a") == answer_alone([1] * 20, max_tokens=1)


def test_new_prompts_fill_the_step_that_the_rest_of_a_begun_one_waits_for() -> None:
    core = gathering(coalesce_waiting_ms=500, coalesce_partial_ms=100)
    core.send("a", [1] * 20, max_tokens=1)
    steps(core, 2)
    core.send("b", [2] * 4, max_tokens=1)
    assert steps(core, 1) == ["dpp"]
    assert steps_of(core, "a")[-1] == steps_of(core, "b")[0]


def test_a_waiting_prompt_that_is_due_releases_a_begun_one_too() -> None:
    core = gathering(prefill_fill_ratio=1.0, coalesce_waiting_ms=40, coalesce_partial_ms=5000)
    core.send("a", [1] * 20, max_tokens=1)
    steps(core, 1)
    core.send("b", [2] * 4, max_tokens=1)
    assert steps(core, 4) == ["d", "d", "d", "dpp"]


def test_nothing_is_held_when_nobody_decodes() -> None:
    core = RecordingCore(scheduler=SchedulerConfig(prefill_fill_ratio=1.0))
    core.send("a", [1] * 2, max_tokens=3, ignore_eos=True)
    assert steps(core, 1) == ["p"]
    core.run()
    core.send("b", [1] * 2, max_tokens=3, ignore_eos=True)
    assert steps(core, 1) == ["p"]


def test_scored_prompts_with_steps_of_their_own_gather_like_others() -> None:
    core = gathering(prompt_logprobs_step="dedicated", coalesce_waiting_ms=50)
    core.send("a", [1] * 4, max_tokens=1, prompt_logprobs=0)
    assert steps(core, 6) == ["d", "d", "d", "d", "p", "d"]


def test_gathering_changes_no_answer() -> None:
    core = gathering(prefill_fill_ratio=1.0, coalesce_waiting_ms=70, coalesce_partial_ms=30)
    prompts = {f"r{i}": [(i + j) % 31 + 1 for j in range(3 + 7 * i % 25)] for i in range(9)}
    for name, prompt in prompts.items():
        core.send(name, prompt, max_tokens=5, ignore_eos=True)
        steps(core, 2)
    core.run()
    for name, prompt in prompts.items():
        assert core.tokens(name) == answer_alone(prompt, max_tokens=5, ignore_eos=True)
