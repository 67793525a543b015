"""Contracts of the engine core: a request's life, its end, and whom a fault affects. Long, because ends are many."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.config import ResolvedConfig, SchedulerConfig
from engine.protocol import (
    ErrorCode,
    Failed,
    FinishReason,
    RequestRejected,
    SamplingParams,
    Scheduled,
    Submission,
    Token,
    Usage,
)
from engine.scheduling.request import create_request
from engine.step import ExecutorFatalError, ExecutorOutOfMemoryError, RowKind, StepPlan
from tests.support.engines import EOS, VOCAB, RecordingCore, answer_alone, resolved_config

PROMPT = list(range(1, 20))


def reject(config: ResolvedConfig, prompt: list[int], **sampling: object) -> RequestRejected:
    with pytest.raises(RequestRejected) as caught:
        create_request(Submission("r", tuple(prompt), SamplingParams(**sampling)), config, 0)
    return caught.value


# --- the event grammar ---------------------------------------------------------------------------------------------


def test_events_are_scheduled_then_tokens_then_one_terminal() -> None:
    core = RecordingCore(max_num_batched_tokens=9, max_prefill_tokens=4)
    core.send("a", PROMPT, max_tokens=5, ignore_eos=True)
    core.run()
    kinds = [type(event).__name__ for event in core.events["a"]]
    assert kinds == ["Scheduled", *["Token"] * 5, "Finished"]
    assert core.finished("a").usage == Usage(prompt_tokens=19, completion_tokens=5, cached_tokens=0)


def test_no_row_of_an_unfinished_prompt_asks_for_a_sample() -> None:
    core = RecordingCore(max_num_batched_tokens=9, max_prefill_tokens=4)
    core.send("a", PROMPT, max_tokens=2, ignore_eos=True)
    core.run()
    for plan in core.plans:
        for row in plan.rows:
            assert (row.sampling is None) == (row.kind is RowKind.MIDDLE) == (row.end < len(PROMPT))


# --- the heart: the same tokens under every schedule -----------------------------------------------------------------


@pytest.mark.parametrize("budget", [9, 16, 64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_depend_on_neither_chunking_nor_neighbours_nor_prefix_hits(budget: int, temperature: float) -> None:
    prompts = {f"r{i}": PROMPT[: 5 + i] + [i] * (i * 3) for i in range(8)}
    core = RecordingCore(max_num_batched_tokens=budget, max_prefill_tokens=budget, num_kv_blocks=200)
    for _ in range(2):  # the second round hits the prefix cache
        for i, (name, prompt) in enumerate(prompts.items()):
            core.send(name, prompt, max_tokens=6 + i, temperature=temperature, seed=i)
        core.run()
        for i, (name, prompt) in enumerate(prompts.items()):
            expected = answer_alone(prompt, max_tokens=6 + i, temperature=temperature, seed=i)
            assert core.tokens(name) == expected
            core.events[name + " earlier"] = core.events.pop(name)
    assert sum(row.start > 0 and row.kind is not RowKind.DECODE for plan in core.plans for row in plan.rows)


# --- stopping --------------------------------------------------------------------------------------------------------


def test_end_of_sequence_ends_the_answer_is_counted_and_is_not_emitted() -> None:
    core = RecordingCore(reply=[7, 8])
    core.send("a", PROMPT, max_tokens=10)
    core.run()
    end = core.finished("a")
    assert (core.tokens("a"), end.reason, end.stop_token_id) == ([7, 8], FinishReason.STOP, EOS)
    assert end.usage.completion_tokens == 3


def test_end_of_sequence_as_the_first_token_is_counted_the_same_way() -> None:
    """S1-R11: one path counted this token and another did not."""
    core = RecordingCore(reply=[])
    core.send("a", PROMPT, max_tokens=10)
    core.run()
    assert (core.tokens("a"), core.finished("a").usage.completion_tokens) == ([], 1)


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    core = RecordingCore(reply=[7])
    core.send("a", PROMPT, max_tokens=4, ignore_eos=True)
    core.run()
    assert (core.tokens("a"), core.finished("a").reason) == ([7, EOS, EOS, EOS], FinishReason.LENGTH)


def test_stop_token_ids_end_the_answer_also_under_ignore_eos() -> None:
    core = RecordingCore(reply=[7, 8, 9])
    core.send("a", PROMPT, max_tokens=10, stop_token_ids=(9,), ignore_eos=True)
    core.run()
    assert (core.tokens("a"), core.finished("a").stop_token_id) == ([7, 8], 9)


def test_stop_tokens_are_banned_until_min_tokens_and_not_after() -> None:
    core = RecordingCore()
    core.send("a", PROMPT, max_tokens=6, min_tokens=3, stop_token_ids=(5,), ignore_eos=False)
    core.run()
    banned = [row.sampling.banned_token_ids for plan in core.plans for row in plan.rows if row.sampling]
    assert banned[:3] == [(EOS, 5)] * 3
    assert set(banned[3:]) <= {()}
    assert len(core.tokens("a")) >= 3


def test_max_tokens_unset_fills_the_context_and_no_more() -> None:
    core = RecordingCore(max_model_len=30)
    core.send("a", PROMPT, ignore_eos=True)
    core.run()
    assert len(core.tokens("a")) == 30 - len(PROMPT)
    assert core.finished("a").reason is FinishReason.LENGTH


# --- refusals: at submit, with the limit -----------------------------------------------------------------------------


def test_an_empty_prompt_is_refused_at_submit() -> None:
    """S1-R1: a prompt of no tokens stayed at the head of the queue and blocked it."""
    assert reject(resolved_config(), []).code is ErrorCode.EMPTY_PROMPT


def test_a_prompt_over_the_context_is_refused_with_the_limit_and_the_length() -> None:
    error = reject(resolved_config(max_model_len=16), [1] * 16)
    assert error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert (error.param, error.limit, error.value) == ("prompt", 16, 16)
    assert "maximum context length is 16 tokens" in error.message


def test_a_prompt_and_max_tokens_over_the_context_are_refused_with_what_is_left() -> None:
    error = reject(resolved_config(max_model_len=16), [1] * 10, max_tokens=7)
    assert (error.code, error.param, error.limit) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "max_tokens", 6)


def test_what_the_kv_cache_can_never_hold_is_refused_with_its_capacity() -> None:
    config = resolved_config(num_kv_blocks=4, block_size=4, max_model_len=200)
    error = reject(config, [1] * 10, max_tokens=8)
    assert (error.code, error.limit) == (ErrorCode.KV_CAPACITY_EXCEEDED, 7)
    assert "17" in error.message


def test_a_token_id_out_of_vocabulary_is_refused_by_value() -> None:
    assert reject(resolved_config(), [1, VOCAB]).value == VOCAB
    assert reject(resolved_config(), [1, -1]).value == -1
    assert reject(resolved_config(), [1], stop_token_ids=(VOCAB,)).param == "stop_token_ids"


def test_stop_tokens_that_leave_nothing_to_sample_are_refused() -> None:
    """With every token banned until min_tokens the sampler has no choice left,
    and the step would fail for all of its rows."""
    error = reject(resolved_config(), [1], stop_token_ids=tuple(range(VOCAB)), min_tokens=1)
    assert (error.code, error.param) == (ErrorCode.INVALID_PARAMETER, "stop_token_ids")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("min_p", 2.0),
        ("max_tokens", -1),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("min_tokens", -1),
        ("seed", 2**63),
    ],
)
def test_a_sampling_parameter_out_of_range_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(RequestRejected) as caught:
        SamplingParams(**{field: value})
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_PARAMETER, field)


def test_a_lifetime_writes_one_kv_slot_less_than_its_tokens() -> None:
    """S1-R8: N completions write N - 1 slots. Every size around the block boundaries
    is tested with exactly the memory of its true peak."""
    for prompt_len in range(1, 13):
        for max_tokens in range(1, 13):
            slots = prompt_len + max_tokens - 1
            blocks = -(-slots // 4)
            core = RecordingCore(num_kv_blocks=blocks, block_size=4)
            core.send("a", [1] * prompt_len, max_tokens=max_tokens, ignore_eos=True)
            core.run()
            assert len(core.tokens("a")) == max_tokens
            assert len({b for plan in core.plans for row in plan.rows for b in row.block_ids}) == blocks


# --- the prefix cache ------------------------------------------------------------------------------------------------


def test_a_repeated_prompt_computes_only_its_last_block() -> None:
    core = RecordingCore()
    for name in ("first", "second"):
        core.send(name, PROMPT[:16], max_tokens=1)
        core.run()
    assert core.events["second"][0] == Scheduled("second", cached_tokens=12)
    assert core.finished("second").usage.cached_tokens == 12
    assert core.tokens("second") == core.tokens("first")


def test_a_prompt_that_is_still_being_chunked_lends_only_what_is_computed() -> None:
    """S4-R11: prefix hashes published at allocation let another request read KV that was not there yet."""
    core = RecordingCore(max_num_batched_tokens=9, max_prefill_tokens=4, max_num_seqs=2)
    core.send("a", PROMPT, max_tokens=1)
    core.keep(core.step())
    core.send("b", PROMPT, max_tokens=1)
    core.run()
    assert core.events["b"][0].cached_tokens <= 16
    assert core.tokens("b") == core.tokens("a") == answer_alone(PROMPT, max_tokens=1)


def test_a_prompt_that_starts_beside_its_own_prefix_hits_what_is_computed_by_then() -> None:
    """S4-R11: a twin of a prompt of which one chunk of five is computed may skip that chunk and no more."""
    capped = SchedulerConfig(long_prefill_token_threshold=4, max_partial_prefills=0)
    core = RecordingCore(scheduler=capped)
    core.send("a", PROMPT, max_tokens=1)
    core.keep(core.step())
    core.send("b", PROMPT, max_tokens=1)
    core.run()
    assert core.events["b"][0] == Scheduled("b", cached_tokens=4)
    assert core.tokens("b") == core.tokens("a") == answer_alone(PROMPT, max_tokens=1)


def test_an_answer_is_cached_too_so_that_the_next_turn_of_a_chat_reuses_it() -> None:
    core = RecordingCore()
    core.send("turn 1", PROMPT, max_tokens=10, ignore_eos=True)
    core.run()
    core.send("turn 2", PROMPT + core.tokens("turn 1") + [3, 3], max_tokens=1)
    core.run()
    assert core.finished("turn 2").usage.cached_tokens == 28, "19 + 9 written positions, in whole blocks of 4"


def test_requests_that_share_a_prefix_share_its_blocks() -> None:
    full = SchedulerConfig(reserve_mode="full", preempt_policy="none")
    core = RecordingCore(num_kv_blocks=16, max_num_batched_tokens=64, max_prefill_tokens=64, scheduler=full)
    core.send("first", [1] * 40, max_tokens=1)
    core.run()
    for i in range(4):  # each would need 11 blocks alone
        core.send(f"r{i}", [1] * 40 + [i + 2], max_tokens=4, ignore_eos=True)
    core.keep(core.step())
    assert core.load().num_running == 4
    core.run()
    assert core.load().num_held_blocks == 0


# --- abort -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
def test_an_abort_in_any_state_frees_everything_at_once(steps: int) -> None:
    """S1-R2: a request cancelled in the middle of its prompt kept prefilling."""
    core = RecordingCore(max_num_batched_tokens=9, max_prefill_tokens=4)
    core.send("a", PROMPT, max_tokens=50, ignore_eos=True)
    for _ in range(steps):
        core.keep(core.step())
    core.keep(core.abort("a"))
    assert core.finished("a").reason is FinishReason.ABORT
    assert (core.load().num_held_blocks, core.has_work) == (0, False)
    assert core.abort("a") == [], "aborting twice, or after the end, is no error"


def test_an_aborted_request_leaves_its_neighbours_tokens_unchanged() -> None:
    core = RecordingCore(max_num_batched_tokens=9, max_prefill_tokens=4)
    for name in "abc":
        core.send(name, PROMPT, max_tokens=12, ignore_eos=True)
    for _ in range(9):
        core.keep(core.step())
    core.keep(core.abort("b"))
    core.run()
    assert core.tokens("a") == core.tokens("c") == answer_alone(PROMPT, max_tokens=12, ignore_eos=True)


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_failed_step_fails_its_own_rows_and_nobody_else() -> None:
    """S3-R1: the failure of a prefill step wiped the state of every request that was decoding."""

    def fail_on_seven_rows(plan: StepPlan) -> None:
        if any(7 in row.token_ids for row in plan.rows):
            raise RuntimeError("kernel fault")

    core = RecordingCore(before_step=fail_on_seven_rows, max_num_seqs=1, alphabet=[1, 2, 3])
    core.send("bad", [7, 7], max_tokens=3)
    core.send("good", [1, 2], max_tokens=3, ignore_eos=True)
    core.run()
    assert core.events["bad"] == [Scheduled("bad", 0), Failed("bad", ErrorCode.STEP_FAILED, "kernel fault")]
    assert len(core.tokens("good")) == 3
    assert core.load().num_held_blocks == 0


def test_a_row_that_fails_alone_leaves_the_rows_beside_it_untouched() -> None:
    core = RecordingCore(failing=lambda row: "no finite logit" if row.request_id == "bad" and row.start > 20 else None)
    for name in ("good", "bad", "other"):
        core.send(name, PROMPT, max_tokens=8, ignore_eos=True)
    core.run()
    assert core.events["bad"][-1] == Failed("bad", ErrorCode.STEP_FAILED, "no finite logit")
    assert core.tokens("good") == core.tokens("other") == answer_alone(PROMPT, max_tokens=8, ignore_eos=True)
    assert core.load().num_held_blocks == 0


def test_a_failed_chunk_is_never_lent_to_others() -> None:
    faults = iter([RuntimeError("kernel fault")])

    def fail_once(plan: StepPlan) -> None:
        for fault in faults:
            raise fault

    core = RecordingCore(before_step=fail_once)
    core.send("a", PROMPT, max_tokens=1)
    core.run()
    core.send("b", PROMPT, max_tokens=1)
    core.run()
    assert core.finished("b").usage.cached_tokens == 0
    assert core.tokens("b") == answer_alone(PROMPT, max_tokens=1)


def test_a_fatal_executor_error_leaves_the_core() -> None:
    def die(plan: StepPlan) -> None:
        raise ExecutorFatalError("device lost")

    core = RecordingCore(before_step=die)
    core.send("a", PROMPT, max_tokens=1)
    with pytest.raises(ExecutorFatalError, match="device lost"):
        core.step()


def test_a_token_event_carries_the_sampled_id() -> None:
    core = RecordingCore(reply=[9])
    core.send("a", PROMPT, max_tokens=1)
    core.run()
    assert core.events["a"][1] == Token("a", 9)


# --- memory for a step ------------------------------------------------------------------------------------------------


def out_of_memory_above(tokens: int) -> Callable[[StepPlan], None]:
    def check(plan: StepPlan) -> None:
        if plan.num_tokens > tokens:
            raise ExecutorOutOfMemoryError("no room for activations")

    return check


def test_a_step_with_prefill_that_ran_out_of_memory_is_tried_again_with_half() -> None:
    core = RecordingCore(before_step=out_of_memory_above(20), max_num_batched_tokens=32, max_prefill_tokens=32)
    core.send("a", range(1, 31), max_tokens=4, ignore_eos=True)
    core.send("b", [5] * 9, max_tokens=4, ignore_eos=True)
    core.run()
    assert core.tokens("a") == answer_alone(range(1, 31), max_tokens=4, ignore_eos=True)
    assert core.tokens("b") == answer_alone([5] * 9, max_tokens=4, ignore_eos=True)
    assert [plan.num_tokens for plan in core.plans][:2] == [30, 12], "half of 30, down to a block boundary"
    assert sum(isinstance(event, Scheduled) for event in core.events["a"]) == 1
    assert core.load().num_held_blocks == 0


def test_blocks_that_a_request_keeps_for_its_retry_are_not_given_to_others() -> None:
    """S5-R16: the smaller chunk needed fewer blocks than the request held, and the rest counted as free."""
    core = RecordingCore(
        before_step=out_of_memory_above(20),
        num_kv_blocks=7,
        max_num_batched_tokens=28,
        max_prefill_tokens=27,
        scheduler=SchedulerConfig(reserve_mode="prompt", watermark_blocks=0, chunk_align=8),
    )
    core.send("large", range(1, 29), max_tokens=1)  # all 7 blocks
    for name, token in (("b", 2), ("c", 3)):
        core.send(name, [token, token], max_tokens=1, ignore_eos=True)
    core.run()
    assert [[row.request_id for row in plan.rows] for plan in core.plans[:2]] == [["large"], ["large"]]
    assert [plan.num_tokens for plan in core.plans[:2]] == [24, 8]
    assert core.finished("c").reason is FinishReason.LENGTH


def test_decode_rows_of_a_step_that_ran_out_of_memory_lose_nothing() -> None:
    core = RecordingCore(before_step=out_of_memory_above(20), max_num_batched_tokens=32, max_prefill_tokens=32)
    core.send("a", [1, 2, 3], max_tokens=12, ignore_eos=True)
    core.keep(core.step())
    core.send("b", [5] * 40, max_tokens=2, ignore_eos=True)
    core.run()
    assert core.tokens("a") == answer_alone([1, 2, 3], max_tokens=12, ignore_eos=True)
    assert core.tokens("b") == answer_alone([5] * 40, max_tokens=2, ignore_eos=True)


def test_a_second_failure_in_a_row_is_an_error_of_its_own_rows() -> None:
    core = RecordingCore(before_step=out_of_memory_above(3), max_num_batched_tokens=32, max_prefill_tokens=32)
    core.send("large", [5] * 30, max_tokens=2, ignore_eos=True)
    core.keep(core.step())
    assert core.events["large"] == [Scheduled("large", 0)], "rolled back, not failed"
    core.run()
    assert core.events["large"][-1] == Failed("large", ErrorCode.STEP_FAILED, "no room for activations")
    core.send("small", [5] * 3, max_tokens=2, ignore_eos=True)
    core.run()
    assert len(core.tokens("small")) == 2


# --- what can be seen from outside ------------------------------------------------------------------------------------


def test_a_traced_step_says_what_it_carried(caplog: pytest.LogCaptureFixture) -> None:
    core = RecordingCore(step_trace=True)
    core.send("a", [1, 2, 3], max_tokens=2, ignore_eos=True)
    with caplog.at_level("INFO", logger="engine.core.core"):
        core.run()
    assert "step=0 decode=0 prefill_requests=1 prefill_tokens=3 encoded=0 waiting=0 us=" in caplog.text
    assert "step=1 decode=1 prefill_requests=0 prefill_tokens=0 encoded=0 waiting=0 us=" in caplog.text


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_a_request_ends_at_its_deadline_wherever_it_is() -> None:
    core = RecordingCore(tick_ms=100, max_num_seqs=1)
    core.send("running", PROMPT, max_tokens=100, ignore_eos=True, timeout_s=1.0)
    core.send("waiting", PROMPT, max_tokens=100, ignore_eos=True, timeout_s=0.5)
    core.run()
    assert core.events["waiting"] == [core.events["waiting"][-1]], "it never ran"
    for name in ("running", "waiting"):
        end = core.events[name][-1]
        assert isinstance(end, Failed)
        assert end.code is ErrorCode.DEADLINE_EXCEEDED
    assert "0.5 s" in core.events["waiting"][-1].message
    assert 5 < len(core.tokens("running")) < 11
    assert core.load().num_held_blocks == 0


def test_deadlines_of_requests_that_ended_do_not_pile_up() -> None:
    """Regression: a server whose clients allow ten minutes for answers of one
    second kept six hundred times too many deadlines."""
    core = RecordingCore()
    for i in range(1000):
        core.send(f"r{i}", [1, 2], max_tokens=1, timeout_s=600)
        core.run()
    assert len(core._scheduler.deadlines) == 0


def test_a_queue_deadline_ends_only_what_never_ran() -> None:
    core = RecordingCore(tick_ms=100, max_num_seqs=1)
    core.send("running", PROMPT, max_tokens=30, ignore_eos=True, queue_timeout_s=0.5)
    core.send("waiting", PROMPT, max_tokens=30, ignore_eos=True, queue_timeout_s=0.5, timeout_s=0.5)
    core.run()
    assert len(core.tokens("running")) == 30
    assert isinstance(core.events["waiting"][-1], Failed)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_timeout_that_is_no_positive_number_is_refused(value: float) -> None:
    with pytest.raises(RequestRejected, match="timeout_s must be a positive number of seconds"):
        Submission("r", (1,), SamplingParams(), timeout_s=value)
