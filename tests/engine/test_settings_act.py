"""I-34: every scheduler setting changes what some step computes; a setting that does not is a promise not kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from engine.config import SchedulerConfig
from engine.step import StepPlan
from tests.support.engines import RecordingCore

PROMPT_ONLY = {"reserve_mode": "prompt", "watermark_blocks": 0}

# setting -> (base of both runs, the other value)
WITNESSES: dict[str, tuple[dict[str, Any], Any]] = {
    "batch_mode": ({}, "prefill_first"),
    "decode_starve_ms": ({"batch_mode": "prefill_first"}, 0.0),
    "prefill_starve_ms": ({"batch_mode": "decode_first"}, 0.0),
    "decode_finish_tokens": ({}, 4),
    "reserve_mode": ({}, "prompt"),
    "preempt_policy": (PROMPT_ONLY, "lifo"),
    "requeue": (PROMPT_ONLY, "back"),
    "ratio_init": ({}, 0.3),
    "ratio_min": ({"ratio_decay_steps": 5}, 0.6),
    "ratio_decay_steps": ({}, 5),
    "ratio_decay_on": ({"ratio_decay_steps": 5}, "decode_only"),
    "retract_steps": ({"reserve_clip": 3, "ratio_init": 0.01, "ratio_min": 0.01, "ratio_decay_steps": 3}, 0),
    "reserve_clip": ({}, 2),
    "watermark_blocks": (PROMPT_ONLY, 6),
    "max_partial_prefills": ({"long_prefill_token_threshold": 4}, 0),
    "long_prefill_token_threshold": ({}, 3),
    "chunk_align": ({}, 1),
    "chunk_boundary": ({"max_partial_prefills": 0}, "request_local"),
    "admission_order": (PROMPT_ONLY, "bypass"),
    "max_overtakes": ({**PROMPT_ONLY, "admission_order": "bypass"}, 1),
}


def plans(**settings: Any) -> list[StepPlan]:
    """Every step of a trace with long and short prompts, arrivals while others decode, and too little memory."""
    core = RecordingCore(
        tick_ms=10,
        num_kv_blocks=24,
        max_num_batched_tokens=20,
        max_prefill_tokens=12,
        enable_prefix_caching=False,
        scheduler=SchedulerConfig(**settings),
    )
    for i in range(24):
        core.send(f"r{i}", [i % 31 + 1] * (4 + 11 * i % 40), max_tokens=1 + 13 * i % 37, seed=0, ignore_eos=True)
        if i % 3 == 0:
            core.keep(core.step())
    core.run()
    return core.plans


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SchedulerConfig)])
def test_i34_a_setting_changes_a_plan(name: str) -> None:
    base, other = WITNESSES[name]
    assert plans(**base) == plans(**base), "a difference would be the trace's own"
    assert plans(**base) != plans(**{**base, name: other})
