"""Regression tests of the specification's defects (section 2) that no other file has; the docstrings name them.
Never lists the defects: tests/engine/test_specification.py says for each
which test, here or elsewhere, rules it out."""

from __future__ import annotations

import re
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch.inputs import build_inputs
from engine.build.executor import create_executor
from engine.config import EngineConfig, SchedulerConfig
from engine.protocol import SamplingParams
from engine.step import RowKind, StepPlan
from tests.support.engines import RecordingCore, answer_alone
from tests.support.invariants import CheckedCore
from tests.support.plan_rows import chunks_of, kinds, num_prefill_tokens, rows_of
from tests.support.plans import forced_logits, forced_logits_together
from tests.support.tiny_models import save_model

TIGHT = SchedulerConfig(reserve_mode="prompt", watermark_blocks=0, chunk_align=1)
"""Admits whatever prompt fits now, so that memory runs out later."""
FULL = SchedulerConfig(reserve_mode="full", preempt_policy="none", chunk_align=1)
LOOPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": True},
    "drafts": {"num_speculative_tokens": 3, "max_num_batched_tokens": 64},
}


def crowd(core: RecordingCore, count: int = 6, max_tokens: int = 20) -> dict[str, list[int]]:
    """Run requests to their ends that together outgrow a pool of a dozen blocks, with prompts of 1 to 14 tokens."""
    prompts = {f"r{i}": [i + 1] * (1 + 5 * i % 14) for i in range(count)}
    for name, prompt in prompts.items():
        core.send(name, prompt, max_tokens=max_tokens, ignore_eos=True)
    return prompts


# --- what a row is, and what a step holds ----------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
def test_nobody_decodes_before_a_last_chunk_whatever_its_cursors_say(loop: str) -> None:
    """S2-R13: a request at (0, 0) counted as complete, and was decoded without a prompt. Here all cursors of a request
    are 0 when it is new and when it was preempted, and a cached prompt leaves only one token to compute."""
    core = RecordingCore(num_kv_blocks=12, max_num_seqs=6, scheduler=TIGHT, **LOOPS[loop])
    prompts = crowd(core)
    core.run()
    again = next(name for name, prompt in prompts.items() if len(prompt) > 8)
    core.send("cached", prompts[again], max_tokens=3, ignore_eos=True)
    core.run()
    assert core.load().num_preemptions > 0
    for name in [*prompts, "cached"]:
        life = "".join(row.kind.value[0] for row in rows_of(core, name))  # m(iddle), l(ast), d(ecode)
        assert re.fullmatch("(m*ld*)+", life), f"{name}: {life}"
    for name, prompt in prompts.items():
        assert core.tokens(name) == answer_alone(prompt, max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize("batch_mode", ["mixed", "prefill_first", "decode_first"])
@pytest.mark.parametrize(
    "settings",
    [
        {"chunk_owner": "engine"},
        {"chunk_owner": "scheduler", "max_partial_prefills": 0, "long_prefill_token_threshold": 4},
        {"chunk_boundary": "request_local", "max_partial_prefills": 0},
    ],
    ids=["engine", "threshold", "local"],
)
def test_seats_are_never_exceeded_in_any_mode(batch_mode: str, settings: dict[str, Any]) -> None:
    """S2-R15: the chunked path ignored max_batch_size."""
    scheduler = SchedulerConfig(batch_mode=batch_mode, decode_starve_ms=30, prefill_starve_ms=30, **settings)
    core = RecordingCore(
        max_num_seqs=3, max_num_batched_tokens=24, max_prefill_tokens=16, num_kv_blocks=200, scheduler=scheduler
    )
    for i in range(14):
        core.send(f"r{i}", [i + 1] * (1 + 7 * i % 30), max_tokens=1 + i % 5, ignore_eos=True)
    while core.has_work:
        core.keep(core.step())
        assert core.load().num_running <= 3
    assert max(len(plan.rows) for plan in core.plans) == 3


def test_a_begun_prompt_is_no_decode_row_while_prefill_is_held_back() -> None:
    """S4-R13: the decode loop picked partial prompts when prefill was vetoed, and shifted every draft by a row."""
    core = RecordingCore(
        num_speculative_tokens=3,
        max_num_batched_tokens=48,
        max_prefill_tokens=8,
        num_kv_blocks=100,
        scheduler=SchedulerConfig(chunk_align=1, decode_finish_tokens=6),
    )
    streams = {"first": [1, 2], "second": [3, 4, 5]}
    for name, prompt in streams.items():
        core.send(name, prompt, max_tokens=14 + len(prompt), ignore_eos=True)
    core.keep(core.step())
    core.send("begun", [6] * 60, max_tokens=4, ignore_eos=True)
    core.run()
    begun = [i for i, row in enumerate(core.plans) if any(r.request_id == "begun" for r in row.rows)]
    vetoed = [plan for plan in core.plans[begun[0] : begun[-1]] if "p" not in kinds(plan)]
    assert vetoed, "prefill was held back while the prompt was partly computed"
    assert all(row.request_id in streams for plan in vetoed for row in plan.rows)
    for name, prompt in streams.items():
        assert core.tokens(name) == answer_alone(prompt, max_tokens=14 + len(prompt), ignore_eos=True)


def test_the_tail_of_a_prompt_and_the_next_one_fill_the_step() -> None:
    """S5-R17, I-25, in the specification's numbers: a request was refused because the whole of it did not fit."""
    core = RecordingCore(
        max_model_len=16_384,
        block_size=16,
        num_kv_blocks=2_000,
        max_num_batched_tokens=16_384,
        max_prefill_tokens=8_192,
        scheduler=SchedulerConfig(),
    )
    core.send("tail", [1] * (8_192 + 2_816), max_tokens=1)
    core.send("next", [2] * 13_000, max_tokens=1)
    core.run()
    assert [num_prefill_tokens(plan) for plan in core.plans] == [8_192, 8_192, 7_624]
    assert [(row.request_id, len(row.token_ids)) for row in core.plans[1].rows] == [("tail", 2_816), ("next", 5_376)]


def test_a_request_is_admitted_while_a_step_is_in_flight() -> None:
    """S5-R4: a helper reported 0 seats for as long as the device was busy, and nobody was admitted."""
    core = RecordingCore(overlap=True)
    core.send("stream", [1, 2], max_tokens=30, ignore_eos=True)
    for i in range(5):
        core.keep(core.step())
        assert core._in_flight is not None
        core.send(f"r{i}", [i + 3] * 4, max_tokens=30, ignore_eos=True)
        core.keep(core.step())
        assert core.plans[-1].rows[-1].request_id == f"r{i}"


# --- a plan is a copy, and making one is free ------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
def test_what_happens_to_a_request_later_does_not_change_a_plan_that_was_launched(loop: str) -> None:
    """S4-R2: batches held the live lists of their requests, which then grew or were preempted while the batch ran."""
    launched: list[StepPlan] = []
    core = RecordingCore(
        num_kv_blocks=12, scheduler=TIGHT, before_step=lambda plan: launched.append(deepcopy(plan)), **LOOPS[loop]
    )
    crowd(core)
    core.run()
    assert core.load().num_preemptions > 0
    assert core.plans == launched
    for row in (row for plan in core.plans for row in plan.rows):
        assert (type(row.token_ids), type(row.block_ids)) == (tuple, tuple)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("mode", ["mixed", "prefill_first", "decode_first"])
def test_a_dry_run_is_what_the_step_then_carries_and_changes_nothing(mode: str, loop: str) -> None:
    """S4-R6, I-32: a predicted shape differed from the step's own, and made ranks run dummies that were too large."""
    scheduler = replace(TIGHT, batch_mode=mode, decode_starve_ms=30, prefill_starve_ms=30)
    core = RecordingCore(num_kv_blocks=12, max_prefill_tokens=6, scheduler=scheduler, **LOOPS[loop])
    crowd(core)
    while core.has_work:
        before = core.load()
        dry = core._scheduler.plan(core.now + core._tick_s)
        assert core.load() == before
        count = len(core.plans)
        core.keep(core.step())
        shape = [(row.request.request_id, row.kind, row.start, row.num_tokens) for row in dry.rows]
        real = [(r.request_id, r.kind, r.start, len(r.token_ids)) for plan in core.plans[count:] for r in plan.rows]
        assert shape == real
        assert sum(tokens for *_, tokens in shape) <= core.config.max_num_batched_tokens
    assert core.load().num_preemptions > 0


# --- prefixes that are shared ----------------------------------------------------------------------------------------


def test_as_many_requests_as_there_are_seats_share_a_prefix_as_long_as_the_context() -> None:
    """S1-R13: each request lists the same blocks, and metadata that was sized by the blocks of the pool overflowed."""
    prefix = [1, 2, 3, 4] * 60
    core = RecordingCore(num_kv_blocks=76, max_num_seqs=8, max_num_batched_tokens=64, scheduler=FULL)
    core.send("prefix", prefix, max_tokens=1)
    core.run()
    for i in range(8):  # 60 blocks together, and 2 each
        core.send(f"r{i}", [*prefix, i + 5], max_tokens=8, ignore_eos=True)
    core.run()
    together = [plan for plan in core.plans if kinds(plan) == "d" * 8]
    assert len(together) == 7
    inputs = build_inputs(together[-1], core.config.block_size)
    assert inputs.rows.block_tables.shape == (8, 62), "496 entries, of a pool of 76"
    assert inputs.rows.block_tables.unique().numel() == 76
    assert len(set(inputs.slots.tolist())) == 8
    for i in range(8):
        assert core.tokens(f"r{i}") == answer_alone([*prefix, i + 5], max_tokens=8, ignore_eos=True)


def test_a_hit_leaves_the_prefix_cached_for_the_next_and_nobody_writes_into_it() -> None:
    """S4-R12: claiming a hit went through the allocation of a fresh block, which wiped its hash. And the last token of
    a prompt that was cached whole was computed again into the shared block."""
    prompt = list(range(1, 17))
    core = RecordingCore(scheduler=FULL)
    core.send("first", prompt, max_tokens=1)
    core.run()
    shared = set(rows_of(core, "first")[0].block_ids)
    count = len(core.plans)
    for i in range(4):  # one after another, two of them side by side
        for name in (f"whole {i}", f"longer {i}"):
            core.send(name, prompt if name.startswith("whole") else [*prompt, i + 17], max_tokens=6, ignore_eos=True)
        core.run()
        cached = [core.finished(f"{name} {i}").usage.cached_tokens for name in ("whole", "longer")]
        assert cached == [12, 16]
    for row in (row for plan in core.plans[count:] for row in plan.rows):
        assert not shared & set(row.block_ids[row.start // 4 :]), "written"
        assert len(shared & set(row.block_ids)) == (3 if row.request_id.startswith("whole") else 4)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("length", [15, 16, 17])
def test_a_prompt_in_one_chunk_after_a_hit_keeps_its_last_token(length: int, loop: str) -> None:
    """S4-R16: the placeholders that drafts and late results need were missing, and the prompt's last token was
    overwritten in their place."""
    prompt = list(range(1, length + 1))
    core = RecordingCore(**LOOPS[loop])
    for name in ("first", "again", "once more"):
        core.send(name, prompt, max_tokens=6, ignore_eos=True)
        core.run()
    for name in ("again", "once more"):
        chunk, *_ = rows_of(core, name)
        assert (chunk.kind, chunk.token_ids) == (RowKind.LAST, tuple(prompt[chunk.start :]))
        assert chunk.start == core.finished(name).usage.cached_tokens == (length - 1) // 4 * 4
        assert core.tokens(name) == answer_alone(prompt, max_tokens=6, ignore_eos=True)


def test_growth_evicts_only_the_blocks_that_it_takes() -> None:
    """S5-R23: every growth that failed evicted twice, ahead of need, and the prefix cache was gone under load."""
    core = RecordingCore(num_kv_blocks=14, max_num_batched_tokens=64, max_prefill_tokens=64, scheduler=TIGHT)
    core.send("old", range(1, 17), max_tokens=1)
    core.run()
    for i in range(3):
        core.send(f"r{i}", [i + 20] * 8, max_tokens=24, ignore_eos=True)
    evicted = 0
    while core.has_work:
        cached, running = set(core._blocks._block_of), core.load().num_running
        preemptions = core.load().num_preemptions
        core.keep(core.step())
        gone = cached - set(core._blocks._block_of)
        evicted += len(gone)
        ended = core.load().num_running < running and core.load().num_preemptions == preemptions
        assert not gone or ended or not core._blocks._free, "evicted, and then not taken"
    assert core.load().num_preemptions > 0
    assert evicted > 0
    again = [row.start for i in range(3) for row in rows_of(core, f"r{i}") if row.kind is RowKind.LAST and row.start]
    assert again, "a victim goes on from what is still cached of it"


# --- memory that runs out --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elder", ["answer", "prompt"])
@pytest.mark.parametrize("policy", ["lifo", "retract"])
def test_an_answer_and_a_begun_prompt_that_hold_all_memory_both_get_to_their_ends(elder: str, policy: str) -> None:
    """S5-R24, I-20: only answers may be preempted, so a lone answer and a partial prompt waited for each other."""
    core = CheckedCore(
        num_kv_blocks=8,
        enable_prefix_caching=False,
        scheduler=replace(TIGHT, preempt_policy=policy, long_prefill_token_threshold=2, max_partial_prefills=0),
    )
    params = SamplingParams(temperature=0.0, max_tokens=21, ignore_eos=True)
    sends = {"answer": ((1, 2), params), "prompt": ((3,) * 24, replace(params, max_tokens=1))}
    for name in sorted(sends, key=lambda name: name != elder):
        core.accept(name, *sends[name])
    held_all = False
    while not core.load().num_preemptions:
        core.checked_step()
        held_all = held_all or not core._blocks.num_available
    core.finish()
    assert held_all
    firsts = Counter(row.request_id for plan in core.plans for row in plan.rows if row.start == 0)
    assert firsts[elder] == 1, "the elder is never computed twice"
    assert firsts["prompt" if elder == "answer" else "answer"] > 1


@pytest.mark.parametrize("how", ["lifo", "retract"])
@pytest.mark.parametrize(("requeue", "most_lives"), [("arrival", 5), ("front", 6), ("back", 7)])
def test_a_storm_of_preemptions_ends_and_computes_nothing_over_and_over(
    requeue: str, most_lives: int, how: str
) -> None:
    """S5-R13, I-24: whoever was preempted went to the back of the queue, and was preempted again when it returned."""
    core = RecordingCore(
        num_kv_blocks=16,
        max_num_seqs=8,
        enable_prefix_caching=False,
        scheduler=replace(TIGHT, preempt_policy=how, requeue=requeue),
    )
    prompts = crowd(core, count=16, max_tokens=40)
    core.run()
    lives = Counter(row.request_id for plan in core.plans for row in plan.rows if row.kind is RowKind.LAST)
    once = sum(len(prompt) + 39 for prompt in prompts.values())
    assert core.load().num_preemptions > 20, "a storm"
    assert max(lives.values()) <= most_lives
    assert sum(plan.num_tokens for plan in core.plans) <= 2.1 * once


def goodput(scheduler: SchedulerConfig, max_tokens: int) -> tuple[float, float]:
    """Return answer tokens per step and per computed token: thirty long prompts at once, in a pool of three, each
    answered with thirty tokens."""
    core = RecordingCore(
        block_size=2,
        num_kv_blocks=170,
        max_num_batched_tokens=16,
        max_prefill_tokens=8,
        enable_prefix_caching=False,
        reply=[7] * 30,
        scheduler=scheduler,
    )
    for i in range(30):
        core.send(f"r{i}", [i + 1] * (100 + 7 * i % 20), max_tokens=max_tokens)
    core.run()
    answered = sum(len(core.tokens(f"r{i}")) for i in range(30))
    return answered / len(core.plans), answered / sum(plan.num_tokens for plan in core.plans)


@pytest.mark.parametrize("max_tokens", [31, 60])
def test_under_long_prompts_and_short_answers_ratio_yields_what_full_does(max_tokens: int) -> None:
    """S5-R25: an overloaded engine chunked and preempted in turn, and computed the same again and again."""
    full = goodput(FULL, max_tokens)
    ratio = goodput(SchedulerConfig(chunk_align=1), max_tokens)
    assert ratio[0] >= 0.9 * full[0]
    assert ratio[1] >= 0.9 * full[1]


@pytest.mark.parametrize("policy", ["lifo", "retract"])
def test_a_begun_prompt_is_no_victim_while_an_answer_can_be(policy: str) -> None:
    """S5-R25, I-18: the prompt is the youngest and has no answer to lose.
    As a victim it would be begun again for ever."""
    core = RecordingCore(
        num_kv_blocks=11,
        enable_prefix_caching=False,
        scheduler=replace(TIGHT, preempt_policy=policy, long_prefill_token_threshold=2, max_partial_prefills=0),
    )
    core.send("elder", [1, 2], max_tokens=21, ignore_eos=True)
    core.send("answer", [3, 4], max_tokens=21, ignore_eos=True)
    core.send("prompt", [5] * 24, max_tokens=1)
    while not core.load().num_preemptions:
        core.keep(core.step())
    assert not core.tokens("prompt"), "it is partly computed"
    assert core.waiting == ["answer"]
    core.run()
    assert chunks_of(core, "prompt") == [2] * 12


# --- nobody waits for long prompts, nor they for others --------------------------------------------------------------


def test_a_short_prompt_and_a_long_one_hold_each_other_up_no_longer_than_a_step() -> None:
    """S4-R15: a prompt of 600,000 tokens held one of 91 back for a minute, and the opposite policy starved the long
    one. Both waits are bounded where long_prefill_token_threshold leaves each step room for others."""
    core = RecordingCore(
        max_model_len=512,
        num_kv_blocks=400,
        max_num_batched_tokens=24,
        max_prefill_tokens=16,
        scheduler=SchedulerConfig(long_prefill_token_threshold=8),
    )
    core.send("long", [1] * 400, max_tokens=1)
    core.keep(core.step())
    for i in range(49):
        core.send(f"short {i}", [i % 30 + 2] * 6, max_tokens=1, ignore_eos=True)
        core.keep(core.step())
        assert core.tokens(f"short {i}"), "in the step after it came"
    assert chunks_of(core, "long") == [8] * 50


# --- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_as_many_as_their_tokens_and_as_a_block_holds_are_not_mixed_up(size: int, tmp_path: Path) -> None:
    """S2-R9: inputs were cut along the axis whose size equals the sequence's, which may be another axis too."""
    save_model("llama", tmp_path)
    config = EngineConfig(dtype="float32", num_kv_blocks=4 * size, block_size=size)
    executor, _ = create_executor(tmp_path, config)
    sequences = [[7 * row + i + 1 for i in range(2 * size)] for row in range(size)]
    tables = [(2 * row, 2 * row + 1) for row in range(size)]
    together = forced_logits_together(executor, sequences, tables, chunk_size=size)
    for tokens, table, got in zip(sequences, tables, together, strict=True):
        torch.testing.assert_close(got, forced_logits(executor, tokens, table), atol=2e-4, rtol=1e-4)
    executor.shutdown()
