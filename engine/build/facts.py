"""Owns the description of a model in terms of engine.features, so that conflicting settings can be refused.
Never refuses anything itself, and never knows settings."""

from __future__ import annotations

from engine.features import EXPERTS, IMAGES, LINEAR_ATTENTION, NO_EXPERTS, NO_STATE, RECURRENT_STATE, TEXT, Feature
from engine.models.description import ModelConfig


def facts_of(model: ModelConfig) -> dict[Feature, str]:
    """Return the features that `model` has, each with a clause that names its architecture."""
    clauses = {
        EXPERTS: (bool(model.expert_sizes), "is a mixture of experts"),
        NO_EXPERTS: (not model.expert_sizes, "has no experts"),
        LINEAR_ATTENTION: (model.needs_linear_attention_pass, "has linear attention"),
        RECURRENT_STATE: (bool(model.linear_layers), "has a recurrent state"),
        NO_STATE: (not model.linear_layers, "has no recurrent state"),
        IMAGES: (model.vision is not None, "takes images"),
        TEXT: (model.vision is None, "takes text alone"),
    }
    return {feature: f"{model.architecture} {clause}" for feature, (applies, clause) in clauses.items() if applies}
