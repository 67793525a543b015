"""Contracts of preemption: who loses its memory, what it goes on with, and what the step that takes it does besides.
Never reads memory directly; plans and events show it."""

from __future__ import annotations

import pytest

from engine.config import SchedulerConfig
from engine.protocol import Scheduled
from engine.scheduling.request import Request
from engine.step import RowKind, StepPlan
from tests.support.engines import RecordingCore, answer_alone, prompt_only
from tests.support.plan_rows import chunks_of


def preempted(core: RecordingCore) -> set[str]:
    """Requests whose prompt was computed from the beginning, or a cached prefix, more than once."""
    lasts = [row.request_id for plan in core.plans for row in plan.rows if row.kind is RowKind.LAST]
    return {name for name in lasts if lasts.count(name) > 1}


def tight(scheduler: SchedulerConfig, prompts: dict[str, int], max_tokens: int = 20) -> RecordingCore:
    core = RecordingCore(
        num_kv_blocks=12,
        max_num_batched_tokens=64,
        max_prefill_tokens=64,
        scheduler=scheduler,
        enable_prefix_caching=False,
    )
    for i, (name, length) in enumerate(prompts.items()):
        core.send(name, [i + 1] * length, max_tokens=max_tokens, ignore_eos=True)
    core.run()
    for i, (name, length) in enumerate(prompts.items()):
        assert core.tokens(name) == answer_alone([i + 1] * length, max_tokens=max_tokens, ignore_eos=True)
        scheduled = [event for event in core.events[name] if isinstance(event, Scheduled)]
        assert len(scheduled) == 1, "a preemption does not schedule twice"
    return core


@pytest.mark.parametrize("how", ["lifo", "retract"])
@pytest.mark.parametrize("requeue", ["arrival", "front", "back"])
def test_whoever_is_preempted_goes_on_with_the_same_tokens(how: str, requeue: str) -> None:
    """S4-R9, R10: the prefill target of a preempted request is prompt and answer so far, not the prompt."""
    core = tight(prompt_only(preempt_policy=how, requeue=requeue), {"a": 8, "b": 8, "c": 8, "d": 8})
    assert core.load().num_preemptions > 0


def test_the_oldest_request_is_never_preempted() -> None:
    for how in ("lifo", "retract"):
        assert "a" not in preempted(tight(prompt_only(preempt_policy=how), {"a": 12, "b": 4, "c": 4, "d": 4}))


def test_retract_takes_the_shortest_answer_and_then_the_longest_prompt() -> None:
    core = RecordingCore(
        num_kv_blocks=12,
        max_num_batched_tokens=64,
        max_prefill_tokens=64,
        scheduler=prompt_only(),
        enable_prefix_caching=False,
    )
    for i, (name, length) in enumerate({"elder": 8, "short prompt": 8, "long prompt": 12}.items()):
        core.send(name, [i + 1] * length, max_tokens=20, ignore_eos=True)
    while not core.load().num_preemptions:
        core.keep(core.step())
    assert core.waiting == ["long prompt"]


def test_retract_takes_the_shorter_answer_whatever_the_prompts() -> None:
    """I-18: whoever is furthest has most to compute again."""
    core = RecordingCore(num_kv_blocks=12, scheduler=prompt_only(), enable_prefix_caching=False)
    core.send("elder", [1] * 8, max_tokens=20, ignore_eos=True)
    core.send("further", [2] * 12, max_tokens=20, ignore_eos=True)
    for _ in range(3):
        core.keep(core.step())
    core.send("latest", [3] * 4, max_tokens=20, ignore_eos=True)
    while not core.load().num_preemptions:
        core.keep(core.step())
    assert core.waiting == ["latest"]


@pytest.mark.parametrize(
    ("settings", "queue"),
    [
        ({}, ["victim", "waits"]),
        ({"requeue": "front"}, ["victim", "waits"]),
        ({"requeue": "back"}, ["waits", "victim"]),
    ],
)
def test_a_step_that_preempts_admits_nobody_and_the_victim_keeps_its_place(
    settings: dict[str, object], queue: list[str]
) -> None:
    """I-24, S5-R13: a newcomer would take what the victim gave up for others, and old work would wait behind it."""
    core = RecordingCore(num_kv_blocks=12, scheduler=prompt_only(**settings), enable_prefix_caching=False)
    core.send("elder", [1] * 8, max_tokens=30, ignore_eos=True)
    core.send("victim", [2] * 16, max_tokens=30, ignore_eos=True)
    while core.load().num_held_blocks < 10:
        core.keep(core.step())
    core.send("waits", [3] * 16, max_tokens=1)
    while not core.load().num_preemptions:
        core.keep(core.step())
    assert [row.request_id for row in core.plans[-1].rows] == ["elder"]
    assert core.waiting == queue


def test_an_answer_that_is_computed_again_in_chunks_samples_after_the_last_one_only() -> None:
    """S4-R10: a chunk that ended between prompt and answer was taken for the last, and sampled without its KV."""
    core = RecordingCore(
        num_kv_blocks=16,
        max_num_batched_tokens=14,
        max_prefill_tokens=12,
        scheduler=prompt_only(),
        enable_prefix_caching=False,
    )
    for i, name in enumerate(("elder", "victim")):
        core.send(name, [i + 1] * 10, max_tokens=40, ignore_eos=True)
    core.run()
    again = chunks_of(core, "victim")[-3:]
    assert again[:2] == [12, 12], "the first ends behind the prompt of 10, and inside the answer"
    for i, name in enumerate(("elder", "victim")):
        assert core.tokens(name) == answer_alone([i + 1] * 10, max_tokens=40, ignore_eos=True)


def test_younger_answers_never_take_the_last_block_from_the_oldest_prompt() -> None:
    """I-21: while answers grew into the memory that its prompt was admitted on, the oldest request stood still."""
    core = RecordingCore(
        num_kv_blocks=20,
        max_num_batched_tokens=64,
        max_prefill_tokens=8,
        scheduler=prompt_only(long_prefill_token_threshold=4, max_partial_prefills=0),
        enable_prefix_caching=False,
    )
    core.send("elder", [1] * 60, max_tokens=1)
    for i in range(3):
        core.send(f"r{i}", [i + 2] * 4, max_tokens=40, ignore_eos=True)
    core.run()
    steps = [i for i, plan in enumerate(core.plans) if any(row.request_id == "elder" for row in plan.rows)]
    assert steps == list(range(15))


def test_a_victim_has_no_row_in_the_step_that_takes_its_memory() -> None:
    """S5-R6, R7: the requester was its own victim, and victims kept rows that were built before."""
    core = tight(prompt_only(), {"a": 8, "b": 8, "c": 8, "d": 8})  # the executor verifies every slot that a row reads
    assert core.load().num_preemptions > 0
    for plan in core.plans:
        blocks = [block for row in plan.rows for block in row.block_ids]
        assert len(blocks) == len(set(blocks)), "without a prefix cache no block is in two rows"


def test_a_failed_step_after_a_preemption_leaks_nothing() -> None:
    def fail(plan: StepPlan) -> None:
        if plan.step_id in (12, 13, 14):
            raise RuntimeError("injected")

    core = RecordingCore(num_kv_blocks=12, scheduler=prompt_only(), before_step=fail, max_num_batched_tokens=64)
    for i in range(6):
        core.send(f"r{i}", [i + 1] * 8, max_tokens=20, ignore_eos=True)
    core.run()
    assert core.load().num_held_blocks == 0


def test_a_plan_that_preempts_many_looks_at_each_row_no_oftener_than_one_that_preempts_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All rows were counted again for each victim, and the blocks of all victims before it: 16 of 512 took 8 ms."""
    looked = 0
    real = Request.num_decode_tokens.fget  # type: ignore[attr-defined]

    def counting(self: Request) -> int:
        nonlocal looked
        looked += 1
        return int(real(self))

    monkeypatch.setattr(Request, "num_decode_tokens", property(counting))
    counts = []
    for num_kv_blocks in (2 * 64 + 60, 2 * 64):
        core = RecordingCore(
            num_kv_blocks=num_kv_blocks,
            max_num_seqs=64,
            max_num_batched_tokens=1024,
            max_prefill_tokens=512,
            enable_prefix_caching=False,
            scheduler=prompt_only(),
        )
        for i in range(64):
            core.send(f"r{i}", [i % 31 + 1] * 8, max_tokens=9, ignore_eos=True)
        core.keep(core.step())
        looked = 0
        core._scheduler.plan(core.now)
        counts.append(looked)
    assert len(core._scheduler.plan(core.now).preempted) == 22, "each yields two blocks and wants none: 64 / 3"
    assert counts[1] - counts[0] <= 2 * 22
