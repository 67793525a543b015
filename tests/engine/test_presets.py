"""Contracts of the scheduler's presets: what one sets, what wins over it, and what is refused.
Never looks at plans; tests/engine/scheduling/test_designs.py runs each design's own examples on its preset."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from engine.build.engine import check_engine
from engine.config import ConfigError, EngineConfig, SchedulerConfig, choices_of
from engine.presets import PRESETS

FROM_YAML = TypeAdapter(SchedulerConfig).validate_python


def from_python(settings: dict[str, Any]) -> SchedulerConfig:
    return SchedulerConfig(**settings)


BOTH = pytest.mark.parametrize("made", [from_python, FROM_YAML], ids=["python", "yaml"])


def test_the_choices_of_the_setting_are_the_presets() -> None:
    assert choices_of(SchedulerConfig)["preset"] == (*PRESETS, None)


@BOTH
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_what_it_lists_and_leaves_the_rest_at_its_default(name: str, made: Any) -> None:
    found = dataclasses.asdict(made({"preset": name}))
    assert found == {**dataclasses.asdict(SchedulerConfig()), "preset": name, **PRESETS[name]}


@BOTH
def test_without_a_preset_every_setting_has_its_default(made: Any) -> None:
    defaults = {spec.name: spec.default for spec in dataclasses.fields(SchedulerConfig)}
    assert dataclasses.asdict(made({})) == defaults
    assert dataclasses.asdict(made({"preset": None})) == defaults


@BOTH
def test_a_setting_that_is_written_wins_over_the_preset_even_where_it_is_the_default(made: Any) -> None:
    """Comparing values with defaults would lose what the user wrote here."""
    found = made({"preset": "atom", "requeue": "arrival", "batch_mode": "mixed", "max_partial_prefills": 3})
    assert (found.requeue, found.batch_mode, found.max_partial_prefills) == ("arrival", "mixed", 3)
    assert (found.preempt_policy, found.chunk_align) == ("lifo", 1)


def test_a_changed_copy_keeps_what_was_chosen_before() -> None:
    asked = SchedulerConfig(preset="atom", requeue="arrival")
    copy = dataclasses.replace(asked, chunk_align=8)
    assert (copy.requeue, copy.chunk_align, copy.preempt_policy) == ("arrival", 8, "lifo")
    assert pickle.loads(pickle.dumps(copy)) == copy


def test_a_preset_stands_in_an_engine_s_config_beside_its_sizes() -> None:
    found = TypeAdapter(EngineConfig).validate_python({"max_num_seqs": 8, "scheduler": {"preset": "mminf"}})
    assert (found.max_num_seqs, found.scheduler) == (8, SchedulerConfig(preset="mminf"))


def test_an_unknown_preset_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError) as refused:
        SchedulerConfig(preset="vllm")
    names = "openinfer, mminf, openinfer_echo, atom, fastdeploy"
    assert str(refused.value) == f"preset must be one of {names}, but it is vllm."
    for unknown in ("vllm", ["atom"], {"atom": 1}):
        with pytest.raises(ValidationError) as refused_yaml:
            FROM_YAML({"preset": unknown})
        assert all(f"'{name}'" in str(refused_yaml.value) for name in PRESETS)


@BOTH
def test_a_refused_combination_says_what_came_from_the_preset(made: Any) -> None:
    """The user wrote only one of the two settings that the message names."""
    with pytest.raises(
        ValueError, match=r"reserve_mode is learned, but .* The preset openinfer sets preempt_policy none\."
    ):
        made({"preset": "openinfer", "reserve_mode": "learned"})
    assert made({"preset": "openinfer", "reserve_mode": "learned", "preempt_policy": "lifo"}).chunk_align == 1


def test_a_refusal_that_is_not_the_preset_s_does_not_name_it() -> None:
    with pytest.raises(ConfigError, match=r"ratio_min must be <= 1, but it is 2\.$"):
        SchedulerConfig(preset="atom", ratio_min=2)


def test_a_value_that_no_setting_has_is_refused_in_python_too() -> None:
    """Regression: such a value was taken for one of the others."""
    with pytest.raises(ConfigError, match="preempt_policy must be one of none, lifo, retract, offload, but it is fifo"):
        SchedulerConfig(preempt_policy="fifo")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="dtype must be one of auto, bfloat16, float16, float32, but it is int4"):
        EngineConfig(dtype="int4")  # type: ignore[arg-type]


def test_a_resolved_config_says_which_preset_and_what_differs_from_it() -> None:
    def reasons(**scheduler: Any) -> dict[str, str]:
        return check_engine("m", EngineConfig(executor="fake", scheduler=SchedulerConfig(**scheduler))).reasons

    assert "scheduler" not in reasons()
    assert reasons(preset="mminf")["scheduler"] == "preset mminf"
    changed = reasons(preset="mminf", requeue="back", watermark_blocks=2, max_overtakes=3)["scheduler"]
    assert changed == "preset mminf, with watermark_blocks 2, requeue back instead"
