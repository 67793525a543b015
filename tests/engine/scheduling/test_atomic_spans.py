"""Contracts of spans that must not be cut: I-13, S2-R8, S2-R12, S4-R20.
Every request here is also checked to get the answer that it gets alone."""

from __future__ import annotations

from itertools import product

import pytest

from engine.config import SchedulerConfig
from engine.protocol import Failed, RequestRejected, Scheduled
from engine.step import ExecutorOutOfMemoryError, StepPlan
from tests.support.engines import RecordingCore, answer_alone, policy
from tests.support.plan_rows import chunks_of, num_prefill_tokens, prefill_rows, steps_of

Spans = tuple[tuple[int, int], ...]

PROMPT = [i % 31 + 1 for i in range(40)]
LAYOUTS: dict[str, Spans] = {
    "at the start": ((0, 5),),
    "touching": ((3, 9), (9, 16)),
    "apart": ((5, 13), (20, 27)),
    "at the end": ((33, 40),),
    "one after another": tuple((start, start + 8) for start in range(0, 40, 8)),
    "single tokens": tuple((start, start + 1) for start in range(40)),
}
BUDGETS = [(12, 8), (13, 8), (14, 9), (16, 12), (32, 10), (64, 64)]


def assert_uncut(core: RecordingCore, request_id: str, spans: Spans) -> None:
    for row in prefill_rows(core.plans):
        if row.request_id == request_id:
            for edge in (row.start, row.end):
                cut = [span for span in spans if span[0] < edge < span[1]]
                assert not cut, f"I-13: {request_id} is cut at {edge}, inside {cut[0]}"


# --- no cut, whatever the settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", ["defer", "extend", "defer, request_local", "extend, request_local", "engine"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_i13_no_chunk_and_no_prefix_hit_ends_inside_a_span(settings: str, layout: str) -> None:
    """S2-R8, S4-R20: the answer to half an image is fluent and wrong."""
    chosen: dict[str, object] = {"atomic_policy": settings.split(",")[0]}
    if "request_local" in settings:
        chosen |= {"chunk_boundary": "request_local", "max_partial_prefills": 0}
    if settings == "engine":
        chosen = {"chunk_owner": "engine"}
    spans = LAYOUTS[layout]
    for (most, prefill), align, block_size in product(BUDGETS, (1, None), (1, 4)):
        core = RecordingCore(
            block_size=block_size,
            num_kv_blocks=400 // block_size,
            max_num_seqs=4,
            max_num_batched_tokens=most,
            max_prefill_tokens=prefill,
            scheduler=SchedulerConfig(chunk_align=align, **chosen),
        )
        core.send("stream", [1, 2], max_tokens=12, ignore_eos=True)
        core.send("text", [3] * 7, max_tokens=3, ignore_eos=True)
        core.send("short", PROMPT[:14], max_tokens=1)  # leaves a prefix that ends inside spans
        core.keep(core.step())
        core.send("a", PROMPT, max_tokens=4, ignore_eos=True, atomic_spans=spans)
        core.keep(core.step())
        core.send("b", PROMPT, max_tokens=4, ignore_eos=True, atomic_spans=spans)
        core.run()
        for name in ("a", "b"):
            assert_uncut(core, name, spans)
            assert core.tokens(name) == answer_alone(PROMPT, max_tokens=4, ignore_eos=True), "I-1"
        for plan in core.plans:
            assert plan.num_tokens <= most, "I-2"
            assert num_prefill_tokens(plan) <= prefill or "extend" in settings, "I-2"


def test_without_spans_the_policy_changes_nothing() -> None:
    """Regression: where spans may make a step exceed max_prefill_tokens,
    chunks with ends of their own also did so together."""
    core = RecordingCore(
        block_size=1,
        max_num_seqs=2,
        max_num_batched_tokens=7,
        max_prefill_tokens=3,
        scheduler=policy(atomic_policy="extend", chunk_boundary="request_local", max_partial_prefills=0),
    )
    core.send("a", [1], max_tokens=1)
    core.send("b", [2] * 3, max_tokens=1)
    core.run()
    assert [num_prefill_tokens(plan) for plan in core.plans] == [1, 3]


# --- the two policies ------------------------------------------------------------------------------------------------


def with_image(spans: Spans, length: int, **overrides: object) -> RecordingCore:
    core = RecordingCore(**{"max_num_batched_tokens": 32, "max_prefill_tokens": 8, "max_num_seqs": 4, **overrides})
    core.send("a", PROMPT[:length], max_tokens=2, ignore_eos=True, atomic_spans=spans)
    core.run()
    assert core.tokens("a") == answer_alone(PROMPT[:length], max_tokens=2, ignore_eos=True)
    return core


def test_defer_leaves_a_span_for_a_step_that_has_room_and_takes_the_text_before_it_now() -> None:
    core = with_image(((4, 12),), 14, scheduler=policy(atomic_policy="defer"))
    assert chunks_of(core, "a") == [4, 8, 2]


def test_extend_goes_on_to_the_end_of_the_span_past_max_prefill_tokens() -> None:
    core = with_image(((4, 12),), 14, scheduler=policy(atomic_policy="extend"))
    assert chunks_of(core, "a") == [12, 2]


def test_extend_never_goes_past_max_num_batched_tokens() -> None:
    core = with_image(
        ((4, 12),), 14, max_num_batched_tokens=11, max_num_seqs=2, scheduler=policy(atomic_policy="extend")
    )
    assert chunks_of(core, "a") == [4, 8, 2], "12 tokens are more than the 11 of a step"


def test_a_span_that_does_not_fit_beside_others_waits_for_the_next_step_or_goes_past_the_limit() -> None:
    seen = {}
    for how in ("defer", "extend"):
        core = RecordingCore(
            max_num_batched_tokens=32, max_prefill_tokens=8, max_num_seqs=4, scheduler=policy(atomic_policy=how)
        )
        core.send("text", [3] * 5, max_tokens=1)
        core.send("image", PROMPT[:6], max_tokens=1, atomic_spans=((0, 6),))
        core.send("after", [4] * 2, max_tokens=1)
        core.run()
        seen[how] = [[row.request_id for row in plan.rows] for plan in core.plans]
    assert seen == {"defer": [["text", "after"], ["image"]], "extend": [["text", "image"], ["after"]]}


def test_a_per_request_limit_does_not_cut_a_span() -> None:
    core = with_image(((2, 10),), 12, max_prefill_tokens=16, scheduler=policy(long_prefill_token_threshold=3))
    assert chunks_of(core, "a") == [2, 8, 2]


def test_a_chunk_is_not_cut_inside_a_span_by_its_alignment_either() -> None:
    core = with_image(((2, 11),), 18, max_prefill_tokens=9, scheduler=SchedulerConfig(chunk_align=4))
    assert chunks_of(core, "a") == [2, 9, 7]


# --- spans that are too long, and spans that must not starve ---------------------------------------------------------


@pytest.mark.parametrize(("how", "longest"), [("defer", 16), ("extend", 24)])
def test_a_span_that_no_step_could_take_is_refused_at_submit_and_never_queued(how: str, longest: int) -> None:
    """S2-R12: such a span never ran; it blocked the others or was passed by for ever.
    32 tokens a step less 8 decode rows are 24."""
    core = RecordingCore(max_prefill_tokens=16, scheduler=policy(atomic_policy=how))
    with pytest.raises(RequestRejected, match=f"a span of {longest + 1} tokens") as refused:
        core.send("a", PROMPT, max_tokens=1, atomic_spans=((0, 3), (5, 6 + longest)))
    assert (refused.value.param, refused.value.limit, refused.value.value) == ("atomic_spans", longest, longest + 1)
    assert (core.has_work, core.load().num_waiting) == (False, 0)
    core.send("b", PROMPT, max_tokens=1, atomic_spans=((5, 5 + longest),))
    core.run()
    assert core.tokens("b") == answer_alone(PROMPT, max_tokens=1)


@pytest.mark.parametrize("how", ["defer", "extend"])
@pytest.mark.parametrize("begins", [0, 5])
def test_a_span_as_long_as_may_be_runs_also_with_endless_short_prompts_behind_it(how: str, begins: int) -> None:
    """S2-R12: whatever fitted beside the others was scheduled first, and the image never ran."""
    core = RecordingCore(max_prefill_tokens=16, scheduler=policy(atomic_policy=how, max_partial_prefills=0))
    longest = core.config.max_atomic_span
    for i in range(60):
        for j in range(2):
            core.send(f"s{i}.{j}", [i % 31 + 1, j + 1] * 3, max_tokens=3, ignore_eos=True)
        if i == 3:
            core.send("image", PROMPT, max_tokens=1, atomic_spans=((begins, begins + longest),))
        core.keep(core.step())
    assert steps_of(core, "image")[-1] <= 3 + 8
    assert core.tokens("image") == answer_alone(PROMPT, max_tokens=1)


@pytest.mark.parametrize("how", ["defer", "extend"])
def test_a_begun_prompt_reaches_its_span_also_with_endless_urgent_prompts_before_it(how: str) -> None:
    """Each urgent prompt leaves too little of the step; the age bound gives the span a step of its own."""
    core = RecordingCore(
        tick_ms=10,
        max_prefill_tokens=16,
        enable_prefix_caching=False,
        scheduler=policy(atomic_policy=how, priority_age_ms=100),
    )
    longest = core.config.max_atomic_span
    core.send("image", PROMPT, priority=1, max_tokens=1, atomic_spans=((10, 10 + longest),))
    core.keep(core.step())
    for i in range(60):
        core.send(f"u{i}", [i % 31 + 1] * 12, priority=0, max_tokens=1)
        core.keep(core.step())
    assert steps_of(core, "image")[1] <= 12
    assert core.tokens("image") == answer_alone(PROMPT, max_tokens=1)


@pytest.mark.parametrize("local", [False, True])
def test_a_span_runs_although_the_prefill_limit_was_halved_for_want_of_memory(local: bool) -> None:
    ran_out: list[int] = []

    def run_out_once(plan: StepPlan) -> None:
        if num_prefill_tokens(plan) == 16 and not ran_out:
            ran_out.append(plan.step_id)
            raise ExecutorOutOfMemoryError("injected")

    settings = {"chunk_boundary": "request_local", "max_partial_prefills": 0} if local else {}
    core = RecordingCore(max_prefill_tokens=16, before_step=run_out_once, scheduler=policy(**settings))
    core.send("stream", [1, 2], max_tokens=30, ignore_eos=True)
    core.keep(core.step())
    core.send("text", [3] * 16, max_tokens=1)
    core.send("image", PROMPT, max_tokens=2, ignore_eos=True, atomic_spans=((4, 18), (20, 34)))
    core.run()
    assert ran_out
    assert max(chunks_of(core, "text")[1:]) == 8, "half of 16"
    assert max(chunks_of(core, "image")) == 14
    assert_uncut(core, "image", ((4, 18), (20, 34)))
    assert core.tokens("image") == answer_alone(PROMPT, max_tokens=2, ignore_eos=True)


def test_a_span_whose_own_step_runs_out_of_memory_is_tried_once_more_and_fails_alone() -> None:
    def run_out(plan: StepPlan) -> None:
        if num_prefill_tokens(plan) > 10:
            raise ExecutorOutOfMemoryError("injected")

    core = RecordingCore(max_prefill_tokens=16, before_step=run_out, scheduler=policy())
    core.send("stream", [1, 2], max_tokens=12, ignore_eos=True)
    core.keep(core.step())
    core.send("image", PROMPT, max_tokens=2, atomic_spans=((4, 18),))
    core.send("text", [3] * 16, max_tokens=1)
    core.run()
    assert isinstance(core.events["image"][-1], Failed)
    assert core.tokens("text") == answer_alone([3] * 16, max_tokens=1)
    assert core.load().num_held_blocks == 0


# --- prefix hits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spans", "cached"),
    [
        ((), 20),
        (((20, 30),), 20),
        (((12, 20),), 20),
        (((18, 30),), 16),
        (((6, 24),), 4),
        (((9, 15), (15, 22)), 8),
        (((2, 24),), 0),
    ],
)
def test_a_prefix_hit_that_ends_inside_a_span_goes_back_to_a_block_boundary_before_it(
    spans: Spans, cached: int
) -> None:
    """20 tokens of a prompt are cached, in blocks of 4. The last boundary before the span (15, 22) is 12, which in turn
    is inside the span (9, 15)."""
    core = RecordingCore(max_num_batched_tokens=64, max_prefill_tokens=64)
    core.send("before", PROMPT[:21], max_tokens=1)
    core.run()
    core.send("a", PROMPT, max_tokens=4, ignore_eos=True, atomic_spans=spans)
    core.run()
    first = core.events["a"][0]
    assert isinstance(first, Scheduled)
    assert first.cached_tokens == cached
    assert core.tokens("a") == answer_alone(PROMPT, max_tokens=4, ignore_eos=True)


def test_a_hybrid_model_starts_from_a_snapshot_that_is_outside_every_span() -> None:
    core = RecordingCore(
        max_num_batched_tokens=64,
        max_prefill_tokens=64,
        recurrent_state=True,
        scheduler=SchedulerConfig(state_snapshot_tokens=8),
    )
    core.send("before", PROMPT[:30], max_tokens=1)
    core.run()
    core.send("a", PROMPT, max_tokens=4, ignore_eos=True, atomic_spans=((18, 30),))
    core.run()
    first = core.events["a"][0]
    assert isinstance(first, Scheduled)
    assert first.cached_tokens == 16
    assert_uncut(core, "a", ((18, 30),))
    assert core.tokens("a") == answer_alone(PROMPT, max_tokens=4, ignore_eos=True)


def test_a_preempted_request_computes_its_spans_whole_again() -> None:
    core = RecordingCore(
        num_kv_blocks=16,
        max_num_batched_tokens=24,
        max_prefill_tokens=12,
        enable_prefix_caching=False,
        scheduler=policy(reserve_mode="prompt", watermark_blocks=0),
    )
    core.send("elder", [1] * 10, max_tokens=40, ignore_eos=True)
    core.send("victim", PROMPT[:20], max_tokens=30, ignore_eos=True, atomic_spans=((5, 16),))
    core.run()
    assert core.load().num_preemptions
    assert len(chunks_of(core, "victim")) > 3
    assert_uncut(core, "victim", ((5, 16),))
    assert core.tokens("victim") == answer_alone(PROMPT[:20], max_tokens=30, ignore_eos=True)


# --- spans that are no spans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spans", [((0, 4), (3, 6)), ((5, 8), (0, 2)), ((4, 4),), ((5, 3),), ((-1, 3),), ((35, 41),), ((40, 44),)]
)
def test_spans_that_overlap_or_are_empty_or_outside_the_prompt_are_refused(spans: Spans) -> None:
    core = RecordingCore()
    with pytest.raises(RequestRejected, match="atomic_spans must be") as refused:
        core.send("a", PROMPT, max_tokens=1, atomic_spans=spans)
    assert refused.value.param == "atomic_spans"
    assert not core.has_work
