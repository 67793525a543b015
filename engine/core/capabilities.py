"""Owns the check that an executor can do what a config needs.
Never changes either: what does not fit is refused."""

from __future__ import annotations

from engine.config import ResolvedConfig, refuse_conflicts
from engine.features import (
    DISK_TIER,
    DRAFT_MODEL,
    DRAFTS,
    ENGINE_CHUNKS,
    HOST_TIER,
    IMAGES,
    LOCAL_CHUNKS,
    LORA,
    MIXED_STEPS,
    NO_ADAPTERS,
    NO_OVERLAP,
    NO_SECOND_MODEL,
    NO_STATE,
    NOTHING_MIXED,
    NOTHING_VERIFIED,
    OVERLAP,
    RECURRENT_STATE,
    SNAPSHOTS,
    WHOLE_PROMPTS,
    turned_on,
)
from engine.step import Capabilities

_NEEDED_OF_EXECUTORS = (
    MIXED_STEPS, OVERLAP, DRAFTS, DRAFT_MODEL, LORA, SNAPSHOTS, ENGINE_CHUNKS, LOCAL_CHUNKS, WHOLE_PROMPTS,
    HOST_TIER, DISK_TIER,
)  # fmt: skip


def check_capabilities(config: ResolvedConfig, can: Capabilities) -> None:
    """Raise ConfigError if the config needs something that the executor cannot do."""
    on = turned_on(config, _NEEDED_OF_EXECUTORS)
    if not config.has_draft_model:
        on.pop(DRAFT_MODEL, None)
    able = {
        NOTHING_MIXED: can.mixed_rows,
        NO_OVERLAP: can.overlap,
        NOTHING_VERIFIED: can.drafts,
        NO_SECOND_MODEL: can.draft_model,
        NO_ADAPTERS: can.adapters is not None,
    }
    on |= {feature: f"this model's executor has {feature.title}" for feature, has in able.items() if not has}
    # What an executor can do, it can do for its own model, of whatever kind.
    for feature, lacks in ((DRAFTS, NOTHING_VERIFIED), (DRAFT_MODEL, NO_SECOND_MODEL), (LORA, NO_ADAPTERS)):
        if lacks not in on:
            on.pop(feature, None)
    if config.inputs:
        on[IMAGES] = "this model takes images"
    if can.recurrent_state:
        on[RECURRENT_STATE] = "this model has a recurrent state"
    else:
        on[NO_STATE] = "this model has no recurrent state"
    refuse_conflicts(on)
