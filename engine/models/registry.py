"""Owns the table of supported families, by the architecture that a checkpoint's config.json names.
Never describes a family: each has a file of its own."""

from __future__ import annotations

from engine.models.families.gemma3 import GEMMA3
from engine.models.families.hybrid import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_VL, QWEN3_5_VL, QWEN3_NEXT
from engine.models.families.llama import LLAMA
from engine.models.families.mistral import MISTRAL
from engine.models.families.moe import MIXTRAL, QWEN3_MOE
from engine.models.families.phi3 import PHI3
from engine.models.families.qwen import QWEN2, QWEN3
from engine.models.families.qwen_vl import QWEN2_5_VL
from engine.models.families.smollm3 import SMOLLM3
from engine.models.family import ModelFamily

_DENSE = (LLAMA, QWEN2, QWEN3, MISTRAL, GEMMA3, SMOLLM3, PHI3)
_WITH_EXPERTS = (QWEN3_MOE, MIXTRAL)
_HYBRID = (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, QWEN3_5_VL, QWEN3_5_MOE_VL)

FAMILIES: dict[str, ModelFamily] = {
    family.architecture: family for family in (*_DENSE, *_WITH_EXPERTS, *_HYBRID, QWEN2_5_VL)
}

BASE_MODELS: dict[str, ModelFamily] = {
    "LlamaModel": LLAMA,
    "Qwen2Model": QWEN2,
    "Qwen3Model": QWEN3,
    "MistralModel": MISTRAL,
    "Gemma3TextModel": GEMMA3,
    "SmolLM3Model": SMOLLM3,
    "Phi3Model": PHI3,
    "Qwen3MoeModel": QWEN3_MOE,
    "MixtralModel": MIXTRAL,
    "Qwen3NextModel": QWEN3_NEXT,
    "Qwen3_5TextModel": QWEN3_5,
    "Qwen3_5MoeTextModel": QWEN3_5_MOE,
    "Qwen3_5Model": QWEN3_5_VL,
    "Qwen3_5MoeModel": QWEN3_5_MOE_VL,
    "Qwen2_5_VLModel": QWEN2_5_VL,
}
"""The same by the names of the models without an LM head, under which models for embeddings are often saved."""
