"""Owns tiny random checkpoints made with transformers, the reference that loading and computing are compared with.
Never downloads anything; every shape is chosen to be awkward (odd vocabulary, GQA, head_dim unlike hidden / heads)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
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


def make_model(kind: str) -> PreTrainedModel:
    """A float32 model with random weights, norms and biases included, the same at every call."""
    torch.manual_seed(7)
    model = _MAKERS[kind]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.copy_(torch.rand_like(parameter) + 0.5 if "norm" in name else torch.randn_like(parameter))
    return model.eval()


_MAKERS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)),
    "llama_tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "llama_biased": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "llama3": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=dict(LLAMA3))),
    "yarn": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE | {"head_dim": 8}, rope_parameters=dict(YARN))),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"head_dim": 48})),
}
KINDS = tuple(_MAKERS)


def save_model(kind: str, directory: Path, **options: Any) -> PreTrainedModel:
    """Write the checkpoint as transformers does and return the model."""
    model = make_model(kind)
    model.save_pretrained(directory, **options)
    return model


def edit_config(directory: Path, **changes: Any) -> None:
    """Change keys of config.json; None removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
