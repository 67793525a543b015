"""Owns tiny random checkpoints made with transformers, the reference that loading and computing are compared with.
Never downloads anything; every shape is chosen to be awkward (odd vocabulary, GQA, head_dim unlike hidden / heads)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

VOCAB = 211
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


WINDOW = 24
"""A length that is a multiple neither of a block nor of a chunk."""
LOCAL, GLOBAL = "sliding_attention", "full_attention"
GEMMA_ROPES = {
    GLOBAL: {"rope_type": "default", "rope_theta": 1e5},
    LOCAL: {"rope_type": "default", "rope_theta": 100.0},
}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
# Phi-3 has no head_dim of its own in every place that asks.
PHI: dict[str, Any] = {"num_attention_heads": 3, "num_key_value_heads": 1, "pad_token_id": 0}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
LINEAR = "linear_attention"
HYBRID: dict[str, Any] = {
    "layer_types": [LINEAR, GLOBAL, LINEAR],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "tie_word_embeddings": False,
}
SHARED: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
}
INTERLEAVED: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
    },
}
TOWER: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": SHAPE["hidden_size"],
    "num_position_embeddings": 16,
    "patch_size": 4,
}
LONG: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.02, 1.1, 1.3, 1.5, 1.7],
        "long_factor": [1.1, 1.4, 2.0, 3.0, 5.0, 8.0],
    },
    "original_max_position_embeddings": 64,
}
"""Fields of LongRoPE, which is another model within the original context than beyond it: see phi3_long."""


SHARPENED = ("mixtral", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_vl")


def greedy_answer(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the tokens with which transformers continues, ignoring ends."""
    ids = torch.tensor([list(prompt)])
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    found: list[int] = answer[0, len(prompt) :].tolist()
    return found


def make_model(kind: str) -> PreTrainedModel:
    """Make a float32 model with random weights, norms and biases included, the same at every call."""
    torch.manual_seed(7)
    model = _MAKERS[kind]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                from_zero = kind == "gemma3" or (kind in HYBRIDS and "linear_attn" not in name)  # stored as 1 + w
                parameter.copy_(torch.rand_like(parameter) + (-0.5 if from_zero else 0.5))
            elif name.endswith("A_log"):  # slow decays: a state remembers what is far behind, too
                parameter.copy_(torch.rand_like(parameter) * 3 - 4)
            elif name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter))
            elif kind in SHARPENED and name.endswith("mlp.gate.weight"):
                parameter.mul_(4)  # unequal shares: what a near tie decides in bfloat16 then weighs less
    return model.eval()


_MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)),
    "llama_tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "llama_biased": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "llama3": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=dict(LLAMA3))),
    "yarn": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE | {"head_dim": 8}, rope_parameters=dict(YARN))),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"head_dim": 48})),
    "qwen2_window": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=WINDOW)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SHAPE,
            sliding_window=WINDOW,
            layer_types=[LOCAL, GLOBAL, LOCAL],
            rope_parameters=deepcopy(GEMMA_ROPES),
            query_pre_attn_scalar=20,
        )
    ),
    "smollm3": lambda: SmolLM3ForCausalLM(SmolLM3Config(**SHAPE, no_rope_layer_interval=2, pad_token_id=0)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SHAPE | PHI, sliding_window=WINDOW, rope_parameters=dict(PARTIAL))),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE | EXPERTS)),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**SHAPE, num_local_experts=5, num_experts_per_tok=2, sliding_window=None)
    ),
    "qwen3_next": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**SHAPE, **HYBRID, **SHARED, mlp_only_layers=[1])),
    "qwen3_5": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE, **HYBRID)),
    "qwen3_5_moe": lambda: Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**SHAPE, **HYBRID, **SHARED)),
    "qwen3_5_vl": lambda: Qwen3_5ForConditionalGeneration(_with_vision(Qwen3_5Config)),
    "qwen3_5_moe_vl": lambda: Qwen3_5MoeForConditionalGeneration(_with_vision(Qwen3_5MoeConfig, **SHARED)),
}


def _with_vision(kind: type[PreTrainedConfig], **fields: Any) -> PreTrainedConfig:
    """Make the config of a vision-language model;
    `fields` are those of its text decoder, besides those of all hybrids."""
    text = SHAPE | HYBRID | deepcopy(INTERLEAVED) | fields
    return kind(text_config=text, vision_config=dict(TOWER), tie_word_embeddings=False)


KINDS = tuple(_MAKERS)
HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_vl", "qwen3_5_moe_vl")
"""Models with recurrent state; of the last two only the text decoder is served."""
RENAMED = ("qwen3_5_vl", "qwen3_5_moe_vl")
"""Hybrids that differ from others by the names of their tensors alone, once they are loaded."""


def renamed_slow(kinds: Sequence[str]) -> list[Any]:
    """Return the parameters of a test of what is computed: to repeat it for RENAMED says little more."""
    return [pytest.param(kind, marks=pytest.mark.slow) if kind in RENAMED else kind for kind in kinds]


DISTINCT_FAMILIES = ("mistral", "gemma3", "smollm3", "phi3", "qwen3_moe", "mixtral", *HYBRIDS)
"""Models that differ from Llama in more than a bias or a norm."""
_MAKERS["phi3_long"] = lambda: Phi3ForCausalLM(Phi3Config(**SHAPE | PHI, **deepcopy(LONG)))


def save_model(kind: str, directory: Path, **options: Any) -> PreTrainedModel:
    """Write the checkpoint as transformers does and return the model."""
    model = make_model(kind)
    model.save_pretrained(directory, **options)
    return model


def edit_config(directory: Path, **changes: Any) -> None:
    """Change keys of config.json, or of its `text_config` where they are there; None removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        fields = config["text_config"] if key in config.get("text_config", {}) else config
        fields[key] = value
        if value is None:
            del fields[key]
    path.write_text(json.dumps(config))


def edit_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors (dots spelled as double underscores), or drop them with None."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for key, value in changes.items():
        tensors.pop(key.replace("__", "."), None)
        if value is not None:
            tensors[key.replace("__", ".")] = value
    save_file(tensors, path)


def save_tokenizer(directory: Path) -> None:
    """Save a tokenizer of as many bytes as the model has tokens; prompts are sent as token ids."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCAB]
    core = tokenizers.Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({}))
