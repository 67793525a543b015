"""I-34: every setting of the scheduler, and every value of one that has a few, changes what some step computes.
Never says which step: a witness is one trace whose plans differ."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from typing import Any

import pytest

from engine.config import SchedulerConfig, SpeculativeConfig, choices_of
from engine.fake.kv_mover import FakeMover
from engine.step import StepPlan
from tests.support.engines import RecordingCore

PROMPT_ONLY = {"reserve_mode": "prompt", "watermark_blocks": 0}
RATIO = {"reserve_mode": "ratio"}
GATHERING = {"prefill_fill_ratio": 1.0}

# Each setting with the base of both runs and its other value.
WITNESSES: dict[str, tuple[dict[str, Any], Any]] = {
    "preset": ({}, "atom"),
    "batch_mode": ({}, "prefill_first"),
    "decode_starve_ms": ({"batch_mode": "prefill_first"}, 0.0),
    "prefill_starve_ms": ({"batch_mode": "decode_first"}, 0.0),
    "decode_finish_tokens": ({}, 4),
    "reserve_mode": ({}, "prompt"),
    "preempt_policy": (PROMPT_ONLY, "lifo"),
    "requeue": ({**PROMPT_ONLY, "max_partial_prefills": 0}, "back"),
    "reserve_margin": ({}, 3.0),
    "reserve_caution": ({"reserve_margin": 0.0}, 4.0),
    "reserve_prior": ({}, 2),
    "reserve_window": ({}, 8),
    "reserve_tenants": ({}, 0),
    "ratio_init": (RATIO, 0.3),
    "ratio_min": ({**RATIO, "ratio_decay_steps": 5}, 0.6),
    "ratio_decay_steps": (RATIO, 5),
    "ratio_decay_on": ({**RATIO, "ratio_decay_steps": 5}, "decode_only"),
    "retract_steps": ({**RATIO, "reserve_clip": 3, "ratio_init": 0.01, "ratio_min": 0.01, "ratio_decay_steps": 3}, 0),
    "reserve_clip": ({}, 2),
    "watermark_blocks": (PROMPT_ONLY, 6),
    "max_partial_prefills": ({"long_prefill_token_threshold": 4}, 0),
    "long_prefill_token_threshold": ({}, 3),
    "enable_chunked_prefill": ({}, False),
    "long_prefill_defer_tokens": ({}, 8),
    "long_prefill_defer_ms": ({"long_prefill_defer_tokens": 8}, 0.0),
    "chunk_halving_context": ({}, 12),
    "chunk_align": ({}, 1),
    "chunk_boundary": ({"max_partial_prefills": 0}, "request_local"),
    "chunk_owner": ({}, "engine"),
    "atomic_policy": ({}, "extend"),
    "prompt_logprobs_step": ({}, "dedicated"),
    "prefill_fill_ratio": ({}, 1.0),
    "coalesce_waiting_ms": (GATHERING, 0.0),
    "coalesce_partial_ms": (GATHERING, 0.0),
    "priority_age_ms": ({}, 50.0),
    "answer_token_weight": ({}, 0.0),
    "state_snapshot_tokens": ({}, 8),
    "state_snapshots": ({"state_snapshot_tokens": 4}, 2),
    "admission_order": (PROMPT_ONLY, "bypass"),
    "max_overtakes": ({**PROMPT_ONLY, "admission_order": "bypass"}, 1),
}

GOES_WITH: dict[tuple[str, str], dict[str, Any]] = {
    ("reserve_mode", "full"): {"preempt_policy": "none"},
    ("preempt_policy", "none"): {"reserve_mode": "full"},
    ("chunk_boundary", "request_local"): {"max_partial_prefills": 0},
}
"""What else has to be set for a value to be accepted."""

LEARNING = ("reserve_margin", "reserve_caution", "reserve_prior", "reserve_window", "reserve_tenants")
"""Settings of what is learned from answers that end by themselves."""

# The same for settings outside the scheduler's that change what is planned.
ENGINE_WITNESSES: dict[str, tuple[dict[str, Any], Any]] = {
    "overlap": ({}, True),
    "num_speculative_tokens": ({"max_num_seqs": 4}, 3),
    "enable_prefix_caching": ({}, True),
    "max_num_seqs": ({"num_kv_blocks": 48}, 3),
    "max_prefill_tokens": ({}, 10),
    "max_num_batched_tokens": ({}, 13),
}

LOOKING = SpeculativeConfig(method="suffix", min_match=1, num_tokens=5, adaptive=False, free_tokens=8)

PROPOSED = SpeculativeConfig(method="draft_model", model="a name", model_cost=0.1, free_tokens=8)

# The same for those of drafts, where base and other value are settings of SpeculativeConfig. Which model drafts changes
# no plan of the scripted executor, which has no model: tests/golden/test_draft_model.py tests that it changes what is
# accepted.
LOOKUP_WITNESSES: dict[str, tuple[SpeculativeConfig, Any]] = {
    "method": (replace(LOOKING, max_match=1), "ngram"),
    "min_match": (LOOKING, 3),
    "max_match": (replace(LOOKING, method="ngram"), 1),
    "num_tokens": (LOOKING, 1),
    "adaptive": (LOOKING, True),
    "free_tokens": (replace(LOOKING, adaptive=True), 128),
    "model_cost": (PROPOSED, 5.0),
}

ENGINES: dict[str, dict[str, Any]] = {
    # Moving KV is slower than computing it, so that a victim's is moved only where the policy says so.
    "preempt_policy": {"mover": partial(FakeMover, host_blocks=100, move_s=10.0), "enable_prefix_caching": True},
    # Chunks leave all seats a token otherwise, and it is the same who takes the step's tokens first.
    "batch_mode": {"max_prefill_tokens": 20},
}
HYBRID = {"recurrent_state": True, "enable_prefix_caching": True}
"""The engine of witnesses whose settings are about recurrent state: prefix hits start from snapshots."""
ROOMY = {"max_num_batched_tokens": 88, "max_prefill_tokens": 80}
"""An engine in which a step holds the longest prompt with its answer."""


def plans(engine: dict[str, Any] | None = None, ends: bool = False, **settings: Any) -> list[StepPlan]:
    """Return every step of the trace."""
    return core_after_trace(engine, ends, **settings).plans


def core_after_trace(engine: dict[str, Any] | None = None, ends: bool = False, **settings: Any) -> RecordingCore:
    """Run a trace with long and short prompts, arrivals while others decode, and too little memory; return the core.
    The trace has two priorities with three tenants each, prompts that share prefixes, spans that must not be cut, and
    scored prompts. With `ends`, answers also end by themselves."""
    core = RecordingCore(
        tick_ms=10,
        scheduler=SchedulerConfig(**settings),
        **{
            "num_kv_blocks": 24,
            "max_num_batched_tokens": 20,
            "max_prefill_tokens": 12,
            "enable_prefix_caching": False,
            **(engine or {}),
        },
    )
    for i in range(40):
        length = 4 + 11 * i % 40
        core.send(
            f"r{i}",
            ([i % 4 + 1] * 16 + [i % 31 + 1] * 40)[:length],
            max_tokens=1 + 13 * i % 37,
            seed=0,
            ignore_eos=not ends,
            priority=int(i % 7 == 3),
            tenant="abc"[i * i % 3],
            atomic_spans=((5, 9), (21, 25)) if length > 25 else (),
            prompt_logprobs=0 if i % 5 == 4 else None,
        )
        for _ in range(i % 3 == 0 if i < 24 else 6):  # a burst, and then one after another
            core.keep(core.step())
    core.run()
    return core


@cache
def base_plans(
    engine: tuple[tuple[str, Any], ...], settings: tuple[tuple[str, Any], ...], ends: bool = False
) -> list[StepPlan]:
    """Run twice what settings are compared with: a difference between the runs would be due to the trace itself."""
    found = plans(dict(engine), ends, **dict(settings))
    assert found == plans(dict(engine), ends, **dict(settings))
    return found


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SchedulerConfig)])
def test_i34_a_setting_changes_a_plan(name: str) -> None:
    base, other = WITNESSES[name]
    engine = HYBRID if name.startswith("state_") else ROOMY if name == "enable_chunked_prefill" else {}
    ends = name in LEARNING
    assert base_plans(tuple(engine.items()), tuple(base.items()), ends) != plans(engine, ends, **{**base, name: other})


@pytest.mark.parametrize("name", choices_of(SchedulerConfig))
def test_i34_each_value_of_a_setting_has_plans_of_its_own(name: str) -> None:
    """Regression: a value that the code did not know was taken for another:
    anything but `lifo` was treated as `retract`."""
    base, _ = WITNESSES[name]
    found = {
        value: plans(ENGINES.get(name), **{**base, name: value, **GOES_WITH.get((name, value), {})})
        for value in choices_of(SchedulerConfig)[name]
    }
    alike = [(one, other) for one, other in combinations(found, 2) if found[one] == found[other]]
    assert not alike


def test_i34_no_request_gives_up_memory_where_none_may_and_some_does_otherwise() -> None:
    """`preempt_policy: none` needs a reservation of its own, which by itself would change plans."""

    def preemptions(**settings: Any) -> int:
        core = core_after_trace(**settings)
        return core.load().num_preemptions

    assert preemptions(preempt_policy="none", reserve_mode="full") == 0
    assert all(preemptions(**PROMPT_ONLY, preempt_policy=how) for how in ("lifo", "retract"))


@pytest.mark.parametrize("name", ENGINE_WITNESSES)
def test_i34_a_setting_of_the_engine_changes_a_plan(name: str) -> None:
    base, other = ENGINE_WITNESSES[name]
    assert base_plans(tuple(base.items()), ()) != plans({**base, name: other})


def test_i34_each_source_of_drafts_has_plans_of_its_own() -> None:
    """`auto` is left out: it is resolved to one of the others before anything is planned."""
    engine = {"max_num_seqs": 4, "num_speculative_tokens": 3}
    methods = [method for method in choices_of(SpeculativeConfig)["method"] if method != "auto"]
    found = {
        method: plans(
            {
                **engine,
                "speculative": replace(PROPOSED if method == "draft_model" else LOOKING, method=method, max_match=1),
            }
        )
        for method in methods
    }
    assert not [pair for pair in combinations(methods, 2) if found[pair[0]] == found[pair[1]]]


@pytest.mark.parametrize(
    "name", [field.name for field in dataclasses.fields(SpeculativeConfig) if field.name != "model"]
)
def test_i34_a_setting_of_drafts_changes_a_plan(name: str) -> None:
    base, other = LOOKUP_WITNESSES[name]
    engine = {"max_num_seqs": 4, "num_speculative_tokens": 3}
    found = base_plans(tuple({**engine, "speculative": base}.items()), ())
    assert found != plans({**engine, "speculative": replace(base, **{name: other})})
