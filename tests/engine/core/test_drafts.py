"""Contracts of drafted tokens: several are verified in one row, and the answer does not show it.
The specification's I-30 and I-35, and the accounting defects of S4-R14, S5-R7 and S5-R15."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from engine.config import ConfigError, EngineConfig, ResolvedConfig, SchedulerConfig, max_drafting_tokens
from engine.core.core import EngineCore
from engine.fake.executor import FakeExecutor
from engine.protocol import FinishReason
from engine.step import RowKind, StepOutput
from tests.support.drafting import (
    check_bad_fails_alone,
    decode_rows,
    no_logit_for_bad,
    no_room_beyond_thirty,
    row_through_a_retry,
)
from tests.support.engines import EOS, RecordingCore, answer_alone, resolved_config

PROMPT = list(range(1, 20))
FOUND: dict[str, Any] = {
    "max_model_len": 128,
    "num_kv_blocks": 64,
    "vocab_size": 32,
    "eos_token_ids": (),
    "dtype": "none",
    "device": "none",
    "kernels": "fake",
    "num_threads": 1,
}


def drafting(k: int = 3, **overrides: Any) -> RecordingCore:
    return RecordingCore(num_speculative_tokens=k, **{"max_num_batched_tokens": 64, **overrides})


def watch_results(core: RecordingCore) -> list[StepOutput]:
    outputs: list[StepOutput] = []
    collect = core._executor.collect

    def watched() -> StepOutput:
        outputs.append(collect())
        return outputs[-1]

    core._executor.collect = watched  # type: ignore[method-assign]
    return outputs


def check_nothing_is_left(core: RecordingCore) -> None:
    load = core.load()
    assert (load.num_running, load.num_waiting, load.num_held_blocks, load.num_queued_tokens) == (0, 0, 0, 0)
    assert core._scheduler._promised == 0


# --- the same answer, in fewer steps ---------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_and_ends_are_those_of_the_plain_loop(k: int, temperature: float) -> None:
    plain, core = RecordingCore(max_num_batched_tokens=80), drafting(k, max_num_batched_tokens=80)
    for engine in (plain, core):
        for i in range(9):
            engine.send(f"r{i}", PROMPT[: 2 + 2 * i], max_tokens=3 * i + 1, temperature=temperature, seed=i)
        engine.run()
    for i in range(9):
        assert core.tokens(f"r{i}") == plain.tokens(f"r{i}")
        assert core.finished(f"r{i}") == plain.finished(f"r{i}"), "also usage, also what was cached"
    check_nothing_is_left(core)


def test_accepted_drafts_save_steps_and_rejected_ones_are_computed_again() -> None:
    core = drafting(3)
    core.send("a", PROMPT, max_tokens=60, ignore_eos=True)
    core.run()
    assert core.tokens("a") == answer_alone(PROMPT, max_tokens=60, ignore_eos=True)
    rows = decode_rows(core)
    assert len(rows) < 40, "a quarter of the drafts is wrong: 2.7 tokens a step are expected"
    overwritten = [before.end - after.start for before, after in pairwise(rows)]
    assert min(overwritten) == 0, "some rows were accepted whole"
    assert max(overwritten) == 3, "of some rows no draft was: the next row overwrites the KV of all three"


def test_without_drafts_an_executor_that_could_propose_them_gets_rows_of_one_token() -> None:
    core = RecordingCore()
    core._executor._num_drafts = 3  # type: ignore[attr-defined]
    core.send("a", PROMPT, max_tokens=8, ignore_eos=True)
    core.run()
    assert {len(row.token_ids) for row in decode_rows(core)} == {1}
    assert core.tokens("a") == answer_alone(PROMPT, max_tokens=8, ignore_eos=True)


def test_an_executor_that_cannot_draft_is_refused_with_and_without_overlap() -> None:
    config = resolved_config(num_speculative_tokens=3, max_num_batched_tokens=64)
    for asked in (config, replace(config, overlap=True)):
        with pytest.raises(ConfigError, match="num_speculative_tokens is 3, but this model's executor has no drafts"):
            EngineCore(FakeExecutor(config.num_kv_blocks, config.block_size, range(32)), asked)


def test_drafts_nobody_asked_for_leave_half_of_a_step_to_prefill_however_many_seats_there_are() -> None:
    crowd = ResolvedConfig.of(EngineConfig(max_num_seqs=64, max_num_batched_tokens=128), drafts=True, **FOUND)
    few = ResolvedConfig.of(EngineConfig(max_num_seqs=4, max_num_batched_tokens=128), drafts=True, **FOUND)
    assert (crowd.num_speculative_tokens, crowd.max_drafting_tokens, crowd.max_decode_tokens) == (4, 64, 64)
    assert (few.num_speculative_tokens, few.max_drafting_tokens, few.max_decode_tokens) == (4, 20, 20)
    asked = EngineConfig(max_num_seqs=31, num_speculative_tokens=3, max_num_batched_tokens=128)
    assert ResolvedConfig.of(asked, drafts=True, **FOUND).max_drafting_tokens == 124, (
        "a config that asks for drafts gets them"
    )


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(
    "asked",
    [{}, {"max_num_seqs": 4}, {"num_speculative_tokens": 3}, {"num_speculative_tokens": 0}, {"overlap": True}],
    ids=str,
)
def test_how_many_tokens_may_draft_is_known_before_the_memory_is(asked: dict[str, Any], drafts: bool) -> None:
    config = EngineConfig(max_num_batched_tokens=512, **asked)
    resolved = ResolvedConfig.of(config, drafts=drafts, **FOUND)
    expected = resolved.max_drafting_tokens if resolved.num_speculative_tokens else 0
    assert max_drafting_tokens(config, drafts) == expected


def test_if_a_step_has_no_room_for_all_drafts_the_requests_that_decode_longest_keep_theirs() -> None:
    core = drafting(3, max_num_seqs=8, drafting_limit=11)
    for i in range(5):
        core.send(f"r{i}", PROMPT[: 4 + i], max_tokens=40, ignore_eos=True)
    core.run()
    plain = RecordingCore()
    for i in range(5):
        plain.send(f"r{i}", PROMPT[: 4 + i], max_tokens=40, ignore_eos=True)
    plain.run()
    full = [
        [len(row.token_ids) for row in plan.rows]
        for plan in core.plans
        if len(plan.rows) == 5 and all(row.kind is RowKind.DECODE for row in plan.rows)
    ]
    assert [4, 4, 1, 1, 1] in full
    assert max(map(sum, full)) == 11
    for i in range(5):
        assert core.tokens(f"r{i}") == plain.tokens(f"r{i}")


# --- where the answer ends -------------------------------------------------------------------------------------------


def test_the_answer_is_cut_at_a_stop_token_among_accepted_drafts_and_counted_as_usual() -> None:
    """I-30, I-35: what was accepted after the stop token is part neither of the answer nor of the usage."""
    reply = list(range(1, 21))
    num_cut = 0
    for stop in range(1, 15):
        core = drafting(7, max_num_batched_tokens=80, reply=reply)
        outputs = watch_results(core)
        core.send("a", PROMPT, max_tokens=30, stop_token_ids=(stop,))
        core.run()
        end = core.finished("a")
        assert core.tokens("a") == reply[: stop - 1]
        assert (end.reason, end.stop_token_id) == (FinishReason.STOP, stop)
        assert end.usage.completion_tokens == stop
        num_cut += outputs[-1].sampled[0][-1] != stop
        check_nothing_is_left(core)
    assert num_cut, "no stop token was followed by accepted drafts"


def test_the_end_of_sequence_among_accepted_drafts_ends_the_answer() -> None:
    core = drafting(3, reply=[7, 8, 9, 10])
    core.send("a", PROMPT, max_tokens=30)
    core.run()
    end = core.finished("a")
    assert (core.tokens("a"), end.stop_token_id, end.usage.completion_tokens) == ([7, 8, 9, 10], EOS, 5)


@pytest.mark.parametrize("k", [3, 7])
def test_no_row_reaches_past_the_last_token_that_may_be_sampled(k: int) -> None:
    for max_tokens in range(1, 14):
        core = drafting(k, max_num_batched_tokens=80)
        core.send("a", PROMPT, max_tokens=max_tokens, ignore_eos=True)
        core.run()
        assert core.tokens("a") == answer_alone(PROMPT, max_tokens=max_tokens, ignore_eos=True)
        end = core.finished("a")
        assert (end.reason, end.usage.completion_tokens) == (FinishReason.LENGTH, max_tokens)
        lifetime = len(PROMPT) + max_tokens - 1
        assert max(row.end for plan in core.plans for row in plan.rows) <= lifetime
        if max_tokens > 1:
            assert any(row.end == lifetime for row in decode_rows(core)), "but it does reach there"


def test_a_request_that_fills_the_whole_pool_fits_with_drafts_too() -> None:
    core = drafting(7, max_num_batched_tokens=80, num_kv_blocks=8, block_size=4)
    core.send("a", PROMPT, max_tokens=32 + 1 - len(PROMPT), ignore_eos=True)
    core.run()
    assert core.tokens("a") == answer_alone(PROMPT, max_tokens=14, ignore_eos=True)
    assert core.load().num_preemptions == 0


def test_stop_tokens_stay_banned_until_min_tokens() -> None:
    params = dict(max_tokens=30, min_tokens=9, stop_token_ids=(1, 2, 3))
    core = drafting(3, alphabet=[EOS, 1, 2, 3, 4, 5])
    plain = RecordingCore(alphabet=[EOS, 1, 2, 3, 4, 5])
    for i in range(12):
        for engine in (core, plain):
            engine.send(f"r{i}", PROMPT[: 1 + i], temperature=1.0, seed=i, **params)
            engine.run()
        assert core.tokens(f"r{i}") == plain.tokens(f"r{i}")
        assert core.finished(f"r{i}").usage.completion_tokens >= 9
        rows = decode_rows(core, f"r{i}")
        early = [row for row in rows if row.end - (1 + i) < 9]
        assert all(row.sampling and row.sampling.banned_token_ids == (EOS, 1, 2, 3) for row in early)
        assert [len(row.token_ids) for row in early] == [1] * 8, "one ban holds for one position"


def test_the_tokens_after_min_tokens_may_stop_in_the_very_next_row() -> None:
    core = drafting(3, reply=[7, EOS])
    core.send("a", PROMPT, max_tokens=9, min_tokens=1)
    core.run()
    assert (core.tokens("a"), core.finished("a").stop_token_id) == ([7], EOS)


# --- what a step holds -----------------------------------------------------------------------------------------------


def test_a_step_reserves_one_token_and_its_drafts_for_each_decode_row_and_prefill_gets_the_rest() -> None:
    """S5-R15: the budget was charged one token per decode row, and the step came out too large."""
    core = drafting(
        3,
        max_num_seqs=6,
        max_num_batched_tokens=25,
        max_prefill_tokens=25,
        num_kv_blocks=200,
        scheduler=SchedulerConfig(chunk_align=1),
    )
    for i in range(5):
        core.send(f"r{i}", [1 + i] * 3, max_tokens=40, ignore_eos=True)
    for _ in range(4):
        core.keep(core.step())
    core.send("long", [9] * 200, max_tokens=2)
    core.run()
    drafted = set()
    for plan in core.plans:
        decodes = [len(row.token_ids) for row in plan.rows if row.kind is RowKind.DECODE]
        prefill = [row for row in plan.rows if row.kind is not RowKind.DECODE]
        assert all(1 <= count <= 4 for count in decodes)
        assert plan.num_tokens <= 25
        drafted.update(decodes)
        if prefill and prefill[-1].request_id == "long" and prefill[-1].kind is RowKind.MIDDLE:
            assert len(prefill[-1].token_ids) == 25 - sum(decodes), "exactly what the decode rows leave"
    assert max(drafted) == 4
    assert core.tokens("long") == answer_alone([9] * 200, max_tokens=2)


def test_a_row_may_grow_by_several_blocks_at_once() -> None:
    """S5-R15: growth by one block is too little where drafts outnumber its slots."""
    core = drafting(7, max_num_batched_tokens=80, block_size=2, num_kv_blocks=120)
    for i in range(4):
        core.send(f"r{i}", [1 + i] * 3, max_tokens=40, ignore_eos=True)
    core.run()
    for i in range(4):
        rows = decode_rows(core, f"r{i}")
        grown = [len(b.block_ids) - len(a.block_ids) for a, b in pairwise(rows)]
        assert max(grown) >= 3
        assert core.tokens(f"r{i}") == answer_alone([1 + i] * 3, max_tokens=40, ignore_eos=True)
    check_nothing_is_left(core)


@pytest.mark.parametrize("preempt_policy", ["lifo", "retract"])
def test_a_preemption_drops_the_drafts_and_never_shortens_the_prompt(preempt_policy: Any) -> None:
    """S4-R14: what a preemption removed as drafts were the prompt's own tokens."""
    scheduler = SchedulerConfig(reserve_mode="prompt", watermark_blocks=0, preempt_policy=preempt_policy)
    core = drafting(3, num_kv_blocks=24, block_size=2, scheduler=scheduler)
    prompts = {f"r{i}": [1 + i] * (4 + i) for i in range(5)}
    for name, prompt in prompts.items():
        core.send(name, prompt, max_tokens=28, ignore_eos=True)
    while core.has_work:
        core.keep(core.step())
        for request in core._scheduler.waiting:
            assert request.drafts is None
            assert request.token_ids == [*prompts[request.request_id], *core.tokens(request.request_id)]
    assert core.load().num_preemptions
    for name, prompt in prompts.items():
        assert core.tokens(name) == answer_alone(prompt, max_tokens=28, ignore_eos=True)
    check_nothing_is_left(core)


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_full_reservation_with_drafts_never_runs_out(block_size: int) -> None:
    """I-15: drafts are charged to the memory that was promised, and none reaches past it."""
    scheduler = SchedulerConfig(reserve_mode="full", preempt_policy="none")
    core = drafting(
        7, max_num_batched_tokens=80, block_size=block_size, num_kv_blocks=80 // block_size, scheduler=scheduler
    )
    for i in range(12):
        core.send(f"r{i}", [1 + i] * (1 + 2 * i), max_tokens=30 - i, ignore_eos=True)
    while core.has_work:
        core.keep(core.step())
        assert 0 <= core._scheduler._promised <= core._blocks.num_available
    assert core.load().num_preemptions == 0
    for i in range(12):
        expected = answer_alone([1 + i] * (1 + 2 * i), max_tokens=30 - i, ignore_eos=True)
        assert core.tokens(f"r{i}") == expected
    check_nothing_is_left(core)


# --- what others may read --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [3, 8, 17, 30])
def test_published_blocks_hold_accepted_tokens_only(cut: int) -> None:
    """The next turn of a chat starts from KV slots that rejected drafts were once written to."""
    core = drafting(3)
    core.send("first", PROMPT, max_tokens=40, ignore_eos=True)
    while len(core.tokens("first")) < cut:
        core.keep(core.step())
    second = [*PROMPT, *core.tokens("first")[:cut], 5, 5]
    core.send("second", second, max_tokens=10, ignore_eos=True)
    core.run()
    assert core.tokens("second") == answer_alone(second, max_tokens=10, ignore_eos=True)
    assert core.tokens("first") == answer_alone(PROMPT, max_tokens=40, ignore_eos=True)
    written = len(PROMPT) + cut - 1  # the newest token is not fed yet
    assert core.finished("second").usage.cached_tokens == written // 4 * 4


def test_a_block_that_only_rejected_drafts_filled_is_not_offered() -> None:
    core = drafting(3)
    core.send("a", PROMPT, max_tokens=40, ignore_eos=True)
    ahead = 0
    while core.has_work:
        core.keep(core.step())
        if request := core._scheduler.find("a"):
            row = decode_rows(core)[-1:]
            ahead += bool(row) and row[0].end // 4 > request.computed // 4
            assert request.num_published == request.computed // 4
            assert request.computed == request.scheduled == len(request.token_ids) - 1
    assert ahead, "no rejected draft ever crossed a block's end"


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_row_with_drafts_that_fails_alone_leaves_its_neighbours_untouched() -> None:
    core = drafting(3, failing=no_logit_for_bad)
    check_bad_fails_alone(core)
    check_nothing_is_left(core)


def test_decode_rows_keep_their_drafts_through_a_retry() -> None:
    core = drafting(3, before_step=no_room_beyond_thirty, max_prefill_tokens=64)
    assert len(row_through_a_retry(core).token_ids) == 4
    check_nothing_is_left(core)
