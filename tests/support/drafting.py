"""Owns what tests of drafts share, whoever makes them: schedules, requests whose answers are compared, a step's retry.
Never knows where a draft comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.config import ResolvedConfig, SchedulerConfig
from engine.protocol import ErrorCode, Failed, SamplingParams, Submission, Token
from engine.scheduling.request import Request, create_request
from engine.step import ExecutorOutOfMemoryError, RowKind, ScheduledRequest, StepPlan
from tests.support.engines import EOS, RecordingCore, answer_alone

PROMPT = [1, 2, 3, 4, 5, 6] * 3
FEW = [EOS, 1, 2]
"""An alphabet in which half of the drafts are right by chance."""
TIGHT = SchedulerConfig(reserve_mode="prompt", watermark_blocks=0, preempt_policy="lifo")
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "small steps": {"max_num_seqs": 2, "max_num_batched_tokens": 9, "max_prefill_tokens": 3},
    "preemptions": {"num_kv_blocks": 18, "block_size": 2, "scheduler": TIGHT},
    "no prefix cache": {"enable_prefix_caching": False},
    "prefill alone": {"scheduler": SchedulerConfig(batch_mode="prefill_first")},
    "decodes alone": {"scheduler": SchedulerConfig(batch_mode="decode_first")},
    "all promised": {"scheduler": SchedulerConfig(reserve_mode="full", preempt_policy="none"), "num_kv_blocks": 24},
}


def decode_rows(core: RecordingCore, request_id: str | None = None) -> list[ScheduledRequest]:
    rows = [row for plan in core.plans for row in plan.rows if row.kind is RowKind.DECODE]
    return [row for row in rows if request_id in (None, row.request_id)]


def check_nobody_can_tell(core: RecordingCore, schedule: str, temperature: float, *, num_texts: int) -> None:
    """Send nine requests, whose prompts begin in `num_texts` ways, and check that every event but its step is that of a
    core without drafts. The core has the alphabet FEW and the settings of `schedule`."""
    plain = RecordingCore(alphabet=FEW)
    for each in (plain, core):
        for i in range(9):
            params = {"stop_token_ids": (2,)} if i == 7 else {"min_tokens": 5} if i == 8 else {"ignore_eos": i % 3 > 0}
            each.send(
                f"r{i}",
                [1 + i % num_texts, *PROMPT[: 2 + i]],
                max_tokens=3 * i + 1,
                temperature=temperature,
                seed=i,
                logprobs=2 if i % 2 else None,
                **params,
            )
        each.run()
    for i in range(9):
        got, want = ([event for event in each.events[f"r{i}"] if isinstance(event, Token)] for each in (core, plain))
        assert got == want, "log-probabilities included"
        got_end, want_end = (each.finished(f"r{i}") for each in (core, plain))
        assert got_end == replace(want_end, usage=got_end.usage)
        assert got_end.usage.completion_tokens == want_end.usage.completion_tokens
    assert bool(core.load().num_preemptions) is (schedule == "preemptions")
    assert max(plan.num_tokens for plan in core.plans) <= core.config.max_num_batched_tokens


def check_another_engine_goes_on(make: Callable[[], RecordingCore]) -> None:
    """Continue an answer elsewhere from after its first token, from within it, and before its last one."""
    whole = answer_alone(PROMPT, max_tokens=30, temperature=1.0, seed=4, ignore_eos=True)
    for cut in (1, 7, 29):
        other = make()
        other.send("b", [*PROMPT, *whole[:cut]], max_tokens=30 - cut, temperature=1.0, seed=4, ignore_eos=True)
        other.run()
        assert [*whole[:cut], *other.tokens("b")] == whole


def no_room_beyond_thirty(plan: StepPlan) -> None:
    """Run out of memory in a step of more than thirty tokens; for RecordingCore's `before_step`."""
    if plan.num_tokens > 30:
        raise ExecutorOutOfMemoryError("no room for activations")


def row_through_a_retry(core: RecordingCore) -> ScheduledRequest:
    """Return a row with drafts of a step that has no room for a prompt beside it and is planned again; check that it is
    the same in both. The core has `no_room_beyond_thirty`."""
    core.send("a", [1, 2, 3], max_tokens=30, ignore_eos=True)
    for _ in range(3):
        core.keep(core.step())
    core.send("b", [5] * 40, max_tokens=2, ignore_eos=True)
    core.run()
    failed = next(i for i, plan in enumerate(core.plans) if plan.num_tokens > 30)
    before, after = (plan.rows[0] for plan in core.plans[failed : failed + 2])
    assert before == after
    assert core.tokens("a") == answer_alone([1, 2, 3], max_tokens=30, ignore_eos=True)
    assert core.tokens("b") == answer_alone([5] * 40, max_tokens=2, ignore_eos=True)
    return before


def no_logit_for_bad(row: ScheduledRequest) -> str | None:
    """Fail the row of the request "bad"; for RecordingCore's `failing`."""
    return "no logit" if row.request_id == "bad" and row.start > 22 else None


def check_bad_fails_alone(core: RecordingCore) -> None:
    """Check that a row with drafts fails, and that its neighbour's answer is what it is alone.
    The core has `no_logit_for_bad`."""
    for name in ("good", "bad"):
        core.send(name, PROMPT, max_tokens=20, ignore_eos=True)
    core.run()
    assert core.events["bad"][-1] == Failed("bad", ErrorCode.STEP_FAILED, "no logit")
    answer = answer_alone(PROMPT, max_tokens=20, ignore_eos=True)
    assert core.tokens("good") == answer
    assert core.tokens("bad") == answer[: len(core.tokens("bad"))]


def decoding_requests(config: ResolvedConfig, count: int) -> list[Request]:
    """Make requests whose texts repeat themselves, for an engine that runs no steps."""
    params, text = SamplingParams(temperature=0.0, max_tokens=200), (1, 2, 3) * 5
    return [create_request(Submission(f"r{number}", text, params), config, number) for number in range(count)]
