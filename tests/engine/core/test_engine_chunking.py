"""Contracts of the splitter inside the engine (S2-B1, S2-R11), and of steps for prompts that are scored (S3).
The executor records every launch; launches of one step share its number."""

from __future__ import annotations

from itertools import pairwise

import pytest

from engine.config import ConfigError, EngineConfig, SchedulerConfig
from engine.core.capabilities import check_capabilities
from engine.protocol import Failed, PromptLogprobs
from engine.step import Capabilities, ExecutorOutOfMemoryError, RowKind, StepPlan
from tests.support.engines import RecordingCore, answer_alone, resolved_config
from tests.support.plan_rows import chunks_of, kinds, launches, num_prefill_tokens

LONG = [i % 31 + 1 for i in range(41)]


def engine_owned(**overrides: object) -> RecordingCore:
    settings = {"chunk_owner": "engine", **overrides.pop("settings", {})}  # type: ignore[dict-item]
    return RecordingCore(
        **{
            "max_num_batched_tokens": 20,
            "max_prefill_tokens": 16,
            "max_num_seqs": 4,
            "scheduler": SchedulerConfig(**settings),
            **overrides,
        }
    )


def scores(core: RecordingCore, request_id: str) -> list[PromptLogprobs]:
    return [event for event in core.events[request_id] if isinstance(event, PromptLogprobs)]


# --- the cuts --------------------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_a_step_runs_alone_in_one_step_as_several_launches() -> None:
    core = engine_owned()
    core.send("long", LONG, max_tokens=1)
    core.send("short", [1, 2, 3], max_tokens=1)
    core.keep(core.step())
    assert core.load().num_steps == 1
    assert [[(row.request_id, len(row.token_ids)) for row in plan.rows] for plan in core.plans] == [
        [("long", 16)],
        [("long", 16)],
        [("long", 9)],
    ]
    assert [plan.rows[0].kind for plan in core.plans] == [RowKind.MIDDLE, RowKind.MIDDLE, RowKind.LAST]
    assert [plan.rows[0].sampling is None for plan in core.plans] == [True, True, False], "I-7"
    assert {plan.step_id for plan in core.plans} == {0}
    assert core.tokens("long") == answer_alone(LONG, max_tokens=1)


def test_short_prompts_share_a_step_and_nothing_is_cut() -> None:
    core = engine_owned()
    for name, length in (("a", 5), ("b", 6), ("c", 8)):
        core.send(name, [length] * length, max_tokens=1)
    core.run()
    seen = [[(row.request_id, len(row.token_ids)) for row in plan.rows] for plan in core.plans]
    assert seen == [[("a", 5), ("b", 6)], [("c", 8)]], "c would be cut at 5 beside the others"


def test_a_prompt_that_fits_beside_decode_rows_shares_their_step() -> None:
    core = engine_owned()
    core.send("stream", [1, 2], max_tokens=10, ignore_eos=True)
    core.keep(core.step())
    core.send("fits", [3] * 16, max_tokens=1)
    core.keep(core.step())
    assert kinds(core.plans[-1]) == "dp"


@pytest.mark.parametrize(("most", "prefill"), [(20, 16), (20, 7), (9, 64), (5, 3)])
def test_every_launch_obeys_both_token_limits_and_every_answer_is_that_of_the_request_alone(
    most: int, prefill: int
) -> None:
    core = engine_owned(max_num_batched_tokens=most, max_prefill_tokens=prefill)
    prompts = {f"r{i}": [(i * 5 + j) % 31 + 1 for j in range(1 + 13 * i % 38)] for i in range(9)}
    for name, prompt in prompts.items():
        core.send(name, prompt, max_tokens=6, ignore_eos=True)
        core.keep(core.step())
    core.run()
    assert any(len(plans) > 1 for plans in launches(core))
    for plan in core.plans:
        assert plan.num_tokens <= most, "I-2"
        assert num_prefill_tokens(plan) <= prefill, "I-2"
    for plans in launches(core):
        assert len(plans) == 1 or {kinds(plan) for plan in plans} == {"p"}, "only a prompt that is alone is cut"
    for name, prompt in prompts.items():
        assert core.tokens(name) == answer_alone(prompt, max_tokens=6, ignore_eos=True), "I-1"


def test_cuts_are_those_of_what_the_prefix_cache_leaves_to_compute() -> None:
    core = engine_owned()
    core.send("before", LONG[:20], max_tokens=1)
    core.run()
    core.send("long", LONG, max_tokens=3, ignore_eos=True)
    core.run()
    assert chunks_of(core, "long") == [16, 5], "of 41, five blocks of 4 are cached"
    assert core.tokens("long") == answer_alone(LONG, max_tokens=3, ignore_eos=True)


def test_a_preempted_request_is_cut_like_any_other_when_it_is_computed_again() -> None:
    core = engine_owned(
        num_kv_blocks=16,
        max_num_batched_tokens=14,
        max_prefill_tokens=8,
        enable_prefix_caching=False,
        settings={"reserve_mode": "prompt", "watermark_blocks": 0},
    )
    for name in ("elder", "victim"):
        core.send(name, LONG[:10], max_tokens=40, ignore_eos=True)
    core.run()
    assert core.load().num_preemptions
    assert chunks_of(core, "victim")[2:5] == [8, 8, 8]
    for name in ("elder", "victim"):
        assert core.tokens(name) == answer_alone(LONG[:10], max_tokens=40, ignore_eos=True)


# --- decoding goes on ------------------------------------------------------------------------------------------------


def test_decoding_waits_for_prompts_that_the_engine_cuts_no_longer_than_its_bound() -> None:
    core = engine_owned(tick_ms=10, settings={"decode_starve_ms": 30})
    core.send("stream", [1, 2], max_tokens=20, ignore_eos=True)
    core.keep(core.step())
    for i in range(12):
        core.send(f"long{i}", [i + 1] * 30, max_tokens=1)
    core.run()
    decoded = [number for number, plans in enumerate(launches(core)) if "d" in kinds(plans[0])]
    gaps = [b - a for a, b in pairwise([0, *decoded])]
    assert max(gaps) == 4, "three steps of 10 ms, then decode rows have one"


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_prompt_that_does_not_fit_beside_decode_rows_is_not_kept_waiting_by_them(num_drafts: int) -> None:
    """Regression: decode rows with drafts were counted as one token each.
    The prompt was not cut, and fitted no step beside them."""
    core = engine_owned(
        tick_ms=10,
        max_num_seqs=2,
        max_num_batched_tokens=9,
        max_prefill_tokens=9,
        num_speculative_tokens=num_drafts,
        settings={"decode_starve_ms": 30},
    )
    core.send("stream", [1, 2], max_tokens=100, ignore_eos=True)
    core.keep(core.step())
    for length in (7, 8, 9, 10):
        core.send(f"p{length}", [length] * length, max_tokens=1)
        for _ in range(5):
            core.keep(core.step())
        assert core.tokens(f"p{length}"), "after five steps"
    core.run()


# --- what chunks return ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefill", [1, 5, 16])
def test_log_probabilities_of_a_prompt_are_those_of_all_its_chunks(prefill: int) -> None:
    """S2-R11: what the chunks before the last one returned was thrown away."""
    whole = RecordingCore(max_num_batched_tokens=64, max_prefill_tokens=64)
    cut = engine_owned(max_prefill_tokens=prefill)
    for core in (whole, cut):
        core.send("a", LONG, max_tokens=2, prompt_logprobs=2, ignore_eos=True)
        core.run()
    (expected,), (found,) = scores(whole, "a"), scores(cut, "a")
    assert len(found.logprobs) == len(LONG) - 1
    assert found.logprobs == expected.logprobs


def test_a_row_that_fails_in_a_chunk_ends_there_and_fails_alone() -> None:
    core = engine_owned(failing=lambda row: "injected" if row.request_id == "long" and row.start == 16 else None)
    core.send("stream", [1, 2], max_tokens=10, ignore_eos=True)
    core.keep(core.step())
    core.send("long", LONG, max_tokens=1)
    core.run()
    assert chunks_of(core, "long") == [16, 16], "the third chunk would build on KV that is not there"
    last = core.events["long"][-1]
    assert isinstance(last, Failed)
    assert last.message == "injected"
    assert core.tokens("stream") == answer_alone([1, 2], max_tokens=10, ignore_eos=True)
    assert core.load().num_held_blocks == 0


def test_a_step_that_fails_in_a_later_chunk_fails_its_request_and_leaks_nothing() -> None:
    def fail(plan: StepPlan) -> None:
        if plan.rows[0].start == 32:
            raise RuntimeError("injected")

    core = engine_owned(before_step=fail)
    core.send("long", LONG, max_tokens=1)
    core.send("next", [1] * 5, max_tokens=2, ignore_eos=True)
    core.run()
    assert isinstance(core.events["long"][-1], Failed)
    assert core.tokens("next") == answer_alone([1] * 5, max_tokens=2, ignore_eos=True)
    assert core.load().num_held_blocks == 0


def test_a_chunk_that_runs_out_of_memory_is_tried_again_with_chunks_of_half_the_size() -> None:
    """Regression: the new limit was half of the whole prompt,
    which allowed larger chunks than those that had not fitted."""
    ran_out: list[int] = []

    def run_out_once(plan: StepPlan) -> None:
        if plan.rows[0].start == 16 and not ran_out:
            ran_out.append(plan.step_id)
            raise ExecutorOutOfMemoryError("injected")

    core = engine_owned(before_step=run_out_once)
    core.send("long", LONG, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    core.run()
    assert chunks_of(core, "long") == [16, 16, 8, 8, 8, 8, 8, 1]
    assert core.tokens("long") == answer_alone(LONG, max_tokens=2, ignore_eos=True)
    assert [len(event.logprobs) for event in scores(core, "long")] == [len(LONG) - 1], "each once, sent once"


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{"chunk_boundary": "request_local", "max_partial_prefills": 0}, {"long_prefill_token_threshold": 8}]
)
def test_settings_that_cut_prompts_are_refused_beside_the_engine_that_does(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="chunk_owner is engine: chunk_owner engine computes a prompt in one call"):
        SchedulerConfig(chunk_owner="engine", **settings)


def test_the_engine_cuts_no_prompts_with_overlap_or_of_a_model_with_recurrent_state() -> None:
    cuts = SchedulerConfig(chunk_owner="engine")
    with pytest.raises(
        ConfigError, match="chunk_owner is engine, but overlap is true: chunk_owner engine runs several"
    ):
        EngineConfig(overlap=True, scheduler=cuts)
    with pytest.raises(ConfigError, match="chunk_owner engine does not support recurrent state"):
        check_capabilities(resolved_config(scheduler=cuts), Capabilities(recurrent_state=True))


# --- prompt_logprobs_step --------------------------------------------------------------------------------------------


def scored_beside_streams(how: str, **settings: object) -> RecordingCore:
    """Run two streams, then scored prompts of three chunks each and one that is not scored."""
    core = RecordingCore(
        tick_ms=10,
        max_num_batched_tokens=20,
        max_prefill_tokens=8,
        scheduler=SchedulerConfig(prompt_logprobs_step=how, **settings),
    )
    for name in ("s0", "s1"):
        core.send(name, [1, 2], max_tokens=40, ignore_eos=True)
    core.keep(core.step())
    for i in range(4):
        core.send(f"scored{i}", [(i + 3 * j) % 31 + 1 for j in range(24)], max_tokens=1, prompt_logprobs=0)
    core.send("plain", [9] * 24, max_tokens=1)
    core.run()
    for i in range(4):
        (event,) = scores(core, f"scored{i}")
        assert len(event.logprobs) == 23
    for name in ("s0", "s1"):
        assert core.tokens(name) == answer_alone([1, 2], max_tokens=40, ignore_eos=True)
    return core


def test_scored_chunks_share_steps_with_decode_rows_by_default() -> None:
    """S3-N3: a dedicated step is a workaround for kernels that cannot return all logits of a mixed one."""
    core = scored_beside_streams(SchedulerConfig().prompt_logprobs_step)
    assert [kinds(plan) for plan in core.plans[1:16]] == ["ddp"] * 15


def test_dedicated_steps_with_scored_chunks_carry_no_decode_row() -> None:
    core = scored_beside_streams("dedicated", decode_starve_ms=30)
    for plan in core.plans:
        scored = any(row.request_id.startswith("scored") for row in plan.rows)
        assert not (scored and "d" in kinds(plan))


def test_dedicated_steps_keep_decoding_waiting_no_longer_than_its_bound() -> None:
    core = scored_beside_streams("dedicated", decode_starve_ms=30)
    runs = "".join("d" if "d" in kinds(plan) else "p" for plan in core.plans[1:]).split("d")
    assert max(len(run) for run in runs) == 3


def test_prompts_that_are_not_scored_mix_with_decode_rows_also_when_steps_are_dedicated() -> None:
    core = scored_beside_streams("dedicated", decode_starve_ms=30)
    plain = [kinds(plan) for plan in core.plans if any(row.request_id == "plain" for row in plan.rows)]
    assert plain == ["ddp"] * 3


def test_a_scored_prompt_behind_another_does_not_slip_into_a_mixed_step() -> None:
    """The first prompt decides how the step is composed, and any that follows must be allowed in such a step."""
    core = RecordingCore(scheduler=SchedulerConfig(prompt_logprobs_step="dedicated"))
    core.send("stream", [1, 2], max_tokens=10, ignore_eos=True)
    core.keep(core.step())
    core.send("plain", [3] * 4, max_tokens=1)
    core.send("scored", [4] * 4, max_tokens=1, prompt_logprobs=0)
    core.keep(core.step())
    assert [row.request_id for row in core.plans[-1].rows] == ["stream", "plain"]
    assert core.load().wait_reason == "mode"
    core.keep(core.step())
    assert [row.request_id for row in core.plans[-1].rows] == ["scored"]


def test_a_begun_scored_prompt_behind_another_is_left_out_of_a_mixed_step() -> None:
    core = RecordingCore(
        scheduler=SchedulerConfig(
            prompt_logprobs_step="dedicated", long_prefill_token_threshold=4, max_partial_prefills=0
        )
    )
    core.send("plain", [3] * 16, max_tokens=1)
    core.send("scored", [4] * 16, max_tokens=1, prompt_logprobs=0)
    core.send("stream", [1, 2], max_tokens=10, ignore_eos=True)
    core.run()
    seen = [[row.request_id for row in plan.rows] for plan in core.plans[:5]]
    assert seen == [["plain", "scored", "stream"], *[["stream", "plain"]] * 3, ["scored"]]


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"prompt_logprobs_step": "dedicated"}, "scored"), ({"chunk_owner": "engine"}, "long")],
)
def test_decode_first_comes_before_steps_that_prompts_would_have_alone(settings: dict[str, str], name: str) -> None:
    """Regression: prompts with a step of their own took it at once, while others waited for prefill_starve_ms."""
    core = RecordingCore(
        tick_ms=10,
        max_num_batched_tokens=20,
        max_prefill_tokens=8,
        scheduler=SchedulerConfig(batch_mode="decode_first", prefill_starve_ms=50, **settings),
    )
    core.send("stream", [1, 2], max_tokens=30, ignore_eos=True)
    core.keep(core.step())
    core.send(name, [3] * 24, max_tokens=1, **({"prompt_logprobs": 0} if name == "scored" else {}))
    core.run()
    first = next(plan.step_id for plan in core.plans if any(row.request_id == name for row in plan.rows))
    assert 5 <= first <= 7
