"""Contracts of the engine's configuration."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from engine.config import ConfigError, EngineConfig, FakeConfig
from tests.support.engines import resolved_config


def test_a_value_out_of_bounds_is_refused_by_field_rule_and_value() -> None:
    with pytest.raises(ConfigError, match="block_size must be >= 1, but it is 0"):
        EngineConfig(block_size=0)
    with pytest.raises(ConfigError, match="step_delay_ms must be >= 0"):
        FakeConfig(step_delay_ms=-1)


def test_a_token_budget_that_decode_rows_could_use_up_is_refused() -> None:
    """S2-R14: as many decodes as budget starved prefill for ever."""
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(64\) must be at least max_num_seqs \+ 1 \(65\)"):
        EngineConfig(max_num_seqs=64, max_num_batched_tokens=64)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(TypeError, match="max_batch"):
        EngineConfig(max_batch=4)


def test_a_config_cannot_change_after_it_was_made() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineConfig().block_size = 3


def test_the_longest_request_is_bounded_by_the_context_or_by_the_whole_kv_cache() -> None:
    assert resolved_config(max_model_len=100, num_kv_blocks=64, block_size=4).max_request_tokens == 100
    assert resolved_config(max_model_len=1000, num_kv_blocks=64, block_size=4).max_request_tokens == 257
