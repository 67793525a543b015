"""Owns the table of supported architectures: what each one's config.json leaves unsaid.
Never holds code: the three families share one decoder block."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Where an architecture differs from the shared block."""

    always_qkv_bias: bool = False
    reads_attention_bias: bool = False
    """`attention_bias` switches the bias of q, k, v and the output projection."""
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    """Queries and keys pass an RMS norm over head_dim before they are rotated."""
    default_head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""


FAMILIES = {
    "LlamaForCausalLM": Family(reads_attention_bias=True, reads_mlp_bias=True),
    "Qwen2ForCausalLM": Family(always_qkv_bias=True),
    "Qwen3ForCausalLM": Family(reads_attention_bias=True, qk_norm=True, default_head_dim=128),
}
