"""Contracts of the engine's configuration: what is refused, and that the refusal names field and rule.
Contradicting settings are refused when the config is made; what an executor cannot do, once the executor is known."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from engine.build.engine import check_engine
from engine.config import ConfigError, EngineConfig, FakeConfig, SchedulerConfig
from engine.core.capabilities import check_capabilities
from engine.core.core import EngineCore
from engine.fake.executor import FakeExecutor
from engine.step import Capabilities, RowKind
from tests.support.engines import RecordingCore, resolved_config


def test_a_value_out_of_bounds_is_refused_by_field_rule_and_value() -> None:
    with pytest.raises(ConfigError, match="block_size must be >= 1, but it is 0"):
        EngineConfig(block_size=0)
    with pytest.raises(ConfigError, match="step_delay_ms must be >= 0"):
        FakeConfig(step_delay_ms=-1)


def test_a_token_budget_that_decode_rows_could_use_up_is_refused() -> None:
    """S2-R14: as many decode rows as the budget has tokens starved prefill for ever."""
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(64\) must be at least max_num_seqs \+ 1 \(65\)"):
        EngineConfig(max_num_seqs=64, max_num_batched_tokens=64)


def without_chunks(**settings: Any) -> EngineConfig:
    scheduler = SchedulerConfig(enable_chunked_prefill=False, batch_mode=settings.pop("batch_mode", "mixed"))
    return EngineConfig(executor="fake", scheduler=scheduler, **{"num_speculative_tokens": 0, **settings})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, r"max_model_len - 1 \(1000\), but max_num_batched_tokens \(1007\) leaves it 999 tokens"),
        ({"max_prefill_tokens": 600}, r"but max_prefill_tokens \(600\) leaves it 600 .* max_model_len to at most 601"),
        ({"batch_mode": "prefill_first", "max_num_batched_tokens": 999}, r"\(999\) leaves it 999 tokens: raise it"),
        ({"max_num_batched_tokens": 1012, "num_speculative_tokens": 1}, r"\(1012\) leaves it 996 tokens"),
        ({"max_model_len": None}, r"max_model_len - 1 \(\d+\), but max_num_batched_tokens \(1007\)"),
    ],
)
def test_without_chunked_prefill_a_step_must_hold_the_longest_prompt(settings: dict[str, Any], sentence: str) -> None:
    """S4-R18: a prompt that no step could take would wait for ever, and so would a preempted one with its answer."""
    with pytest.raises(ConfigError, match=r"scheduler\.enable_chunked_prefill is false, .*" + sentence):
        check_engine(
            "m",
            without_chunks(**{"max_model_len": 1001, "max_num_seqs": 8, "max_num_batched_tokens": 1007, **settings}),
        )


@pytest.mark.parametrize(
    "settings",
    [{"max_num_batched_tokens": 1008}, {"batch_mode": "prefill_first", "max_num_batched_tokens": 1000}],
)
def test_without_chunked_prefill_a_step_that_just_holds_the_longest_prompt_is_enough(settings: dict[str, Any]) -> None:
    check_engine("m", without_chunks(max_model_len=1001, max_num_seqs=8, **settings))


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(TypeError, match="max_batch"):
        EngineConfig(max_batch=4)


def test_a_config_cannot_change_after_it_was_made() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineConfig().block_size = 3


def test_the_longest_request_is_bounded_by_the_context_or_by_the_whole_kv_cache() -> None:
    assert resolved_config(max_model_len=100, num_kv_blocks=64, block_size=4).max_request_tokens == 100
    assert resolved_config(max_model_len=1000, num_kv_blocks=64, block_size=4).max_request_tokens == 257


# --- settings that contradict each other -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"prefill_fill_ratio": 1.5}, "prefill_fill_ratio must be <= 1, but it is 1.5"),
        ({"prefill_fill_ratio": -0.1}, "prefill_fill_ratio must be >= 0"),
        ({"coalesce_waiting_ms": -1}, "coalesce_waiting_ms must be >= 0"),
        ({"coalesce_partial_ms": -1}, "coalesce_partial_ms must be >= 0"),
        ({"priority_age_ms": -1}, "priority_age_ms must be >= 0"),
        ({"answer_token_weight": -1}, "answer_token_weight must be >= 0"),
        ({"state_snapshot_tokens": -1}, "state_snapshot_tokens must be >= 0"),
        ({"state_snapshots": 0}, "state_snapshots must be >= 1, but it is 0"),
        ({"chunk_owner": "engine", "long_prefill_token_threshold": 4}, "token_threshold is 4, but .* engine"),
        ({"enable_chunked_prefill": False, "chunk_halving_context": 4}, "context is 4, but .*chunked_prefill is false"),
        (
            {"enable_chunked_prefill": False, "state_snapshot_tokens": 16},
            "tokens is 16, but .*chunked_prefill is false",
        ),
        ({"chunk_owner": "engine", "long_prefill_defer_tokens": 4}, "defer_tokens is 4, but .* engine"),
        ({"chunk_owner": "engine", "chunk_halving_context": 4}, "chunk_halving_context is 4, but .* engine"),
        (
            {"chunk_owner": "engine", "chunk_boundary": "request_local", "max_partial_prefills": 0},
            "chunk_boundary is request_local, but scheduler.chunk_owner is engine",
        ),
        ({"reserve_mode": "full", "preempt_policy": "lifo"}, "is full, but scheduler.preempt_policy is lifo"),
        ({"reserve_mode": "prompt", "preempt_policy": "none"}, "prompt, .* is none: admitted requests may later"),
    ],
)
def test_a_scheduler_setting_that_could_not_act_or_contradicts_another_is_refused(
    settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        SchedulerConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"max_num_seqs": 8, "num_speculative_tokens": 3, "max_num_batched_tokens": 32},
            r"max_num_batched_tokens \(32\) must be at least max_num_seqs \* \(1 \+ num_speculative_tokens 3\) \+ 1 "
            r"\(33\)",
        ),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens must be >= 0"),
        ({"overlap": True, "scheduler": SchedulerConfig(chunk_owner="engine")}, "owner is engine, but overlap is true"),
        (
            {"block_size": 16, "scheduler": SchedulerConfig(state_snapshot_tokens=24)},
            r"state_snapshot_tokens \(24\) must be a multiple of block_size \(16\)",
        ),
    ],
)
def test_an_engine_setting_that_contradicts_another_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        EngineConfig(**settings)


def test_the_least_token_budget_and_a_snapshot_at_every_block_are_accepted() -> None:
    EngineConfig(max_num_seqs=8, num_speculative_tokens=3, max_num_batched_tokens=33)
    EngineConfig(max_num_seqs=8, max_num_batched_tokens=9)
    EngineConfig(block_size=16, scheduler=SchedulerConfig(state_snapshot_tokens=16))


@pytest.mark.parametrize(("how", "longest"), [("defer", 12), ("extend", 16)])
def test_the_longest_atomic_span_fits_beside_as_many_decode_rows_as_there_are_seats(how: str, longest: int) -> None:
    config = resolved_config(
        max_num_seqs=4,
        num_speculative_tokens=3,
        max_num_batched_tokens=32,
        max_prefill_tokens=12,
        scheduler=SchedulerConfig(atomic_policy=how),
    )
    assert (config.max_decode_tokens, config.max_atomic_span) == (16, longest)


# --- executors that cannot do what the config needs ------------------------------------------------------------------

ABLE = Capabilities(mixed_rows=True, overlap=True, drafts=True)


@pytest.mark.parametrize(
    ("overrides", "missing", "sentence"),
    [
        (
            {},
            {"mixed_rows": False},
            "batch_mode is mixed, but .* no mixed rows: this executor does not support mixed steps",
        ),
        (
            {"scheduler": SchedulerConfig(batch_mode="decode_first")},
            {"mixed_rows": False},
            "batch_mode is decode_first, but .* no mixed rows",
        ),
        ({"overlap": True}, {"overlap": False}, "overlap is true, but .* no overlap: this executor does not"),
        ({"num_speculative_tokens": 2}, {"drafts": False}, "num_speculative_tokens is 2, but .* no drafts"),
        (
            {"scheduler": SchedulerConfig(state_snapshot_tokens=8)},
            {},
            "state_snapshot_tokens is 8, but this model has no recurrent state",
        ),
        (
            {"num_speculative_tokens": 2},
            {"recurrent_state": True, "drafts": False},
            "num_speculative_tokens is 2, but .* no drafts",
        ),
        (
            {"scheduler": SchedulerConfig(chunk_owner="engine")},
            {"recurrent_state": True},
            "chunk_owner is engine, but this model has a recurrent state: chunk_owner engine does not support",
        ),
    ],
)
def test_what_the_executor_cannot_do_is_refused_and_not_done_by_halves(
    overrides: dict[str, Any], missing: dict[str, bool], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_capabilities(resolved_config(**overrides), replace(ABLE, **missing))


def test_an_executor_without_mixed_rows_serves_steps_that_are_never_mixed() -> None:
    """decode_first mixes too, once a prompt has waited too long; prefill_first never does."""
    scheduler = SchedulerConfig(batch_mode="prefill_first", decode_starve_ms=20, prefill_fill_ratio=0.5)
    check_capabilities(resolved_config(scheduler=scheduler), Capabilities(mixed_rows=False))
    core = RecordingCore(scheduler=scheduler, max_num_batched_tokens=24, max_prefill_tokens=12, num_kv_blocks=40)
    for i in range(24):
        core.send(f"r{i}", [i + 1] * (3 + 5 * i % 17), max_tokens=1 + i % 5, ignore_eos=True)
        core.keep(core.step())
    core.run()
    assert all(len({row.kind is RowKind.DECODE for row in plan.rows}) == 1 for plan in core.plans)


def test_a_core_checks_its_executor_before_it_takes_requests() -> None:
    config = resolved_config(overlap=True, scheduler=SchedulerConfig(chunk_align=1))
    executor = FakeExecutor(config.num_kv_blocks, config.block_size, range(4))
    EngineCore(executor, config)
    with pytest.raises(ConfigError, match="num_speculative_tokens is 1, but this model's executor has no drafts"):
        EngineCore(executor, replace(config, overlap=False, num_speculative_tokens=1))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"reserve_mode": "full"}, "reserve_mode is full, .* retract: every request has memory for its whole life"),
        ({"preempt_policy": "none"}, "reserve_mode is learned, .* none: admitted requests may later outgrow memory"),
        ({"chunk_boundary": "request_local"}, "request_local, but scheduler.max_partial_prefills is 1"),
        ({"ratio_min": 0.9}, r"ratio_min \(0.9\) must not exceed ratio_init \(0.7\)"),
        ({"ratio_init": 0}, "ratio_init must be > 0, but it is 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_the_reason(
    settings: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        SchedulerConfig(**settings)
