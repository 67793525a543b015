"""Owns the scheduler's presets: the settings that make the scheduler follow each of five public designs.
Never sizes an engine: budgets, seats and blocks depend on the model and the machine. engine/DESIGNS.md has the rest."""

from __future__ import annotations

from collections.abc import Mapping

_OPENINFER: Mapping[str, object] = {
    "batch_mode": "mixed",
    "reserve_mode": "full",
    "preempt_policy": "none",
    "max_partial_prefills": 1,
    "chunk_align": 1,
    "chunk_halving_context": 0,
    "admission_order": "strict",
}

PRESETS: Mapping[str, Mapping[str, object]] = {
    "openinfer": _OPENINFER,
    "mminf": {
        "batch_mode": "mixed",
        "reserve_mode": "prompt",
        "watermark_blocks": 0,
        "preempt_policy": "lifo",
        "requeue": "arrival",
        "max_partial_prefills": 1,
        "chunk_align": 1,
        "chunk_halving_context": 0,
        "admission_order": "bypass",
    },
    "openinfer_echo": {**_OPENINFER, "admission_order": "bypass"},
    "atom": {
        "batch_mode": "prefill_first",
        "decode_starve_ms": 200.0,
        "reserve_mode": "prompt",
        "watermark_blocks": 0,
        "preempt_policy": "lifo",
        "requeue": "front",
        "max_partial_prefills": 0,
        "long_prefill_token_threshold": 0,
        "chunk_align": 1,
        "chunk_halving_context": 0,
        "admission_order": "strict",
    },
    "fastdeploy": {
        "batch_mode": "prefill_first",
        "decode_starve_ms": 200.0,
        "reserve_mode": "ratio",
        "ratio_init": 0.7,
        "ratio_min": 0.21,
        "ratio_decay_steps": 600,
        "ratio_decay_on": "decode_only",
        "retract_steps": 20,
        "reserve_clip": 4096,
        "preempt_policy": "retract",
        "requeue": "back",
        "max_partial_prefills": 1,
        "chunk_halving_context": 0,
        "admission_order": "strict",
    },
}
"""Preset -> setting -> value. A preset has all settings that its design needs, even defaults, since these may
change."""


def over_preset(written: Mapping[str, object]) -> dict[str, object]:
    """Return the written settings over those of the preset that they name."""
    preset = written.get("preset")
    return {**(PRESETS.get(preset, {}) if isinstance(preset, str) else {}), **written}
