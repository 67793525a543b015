"""Owns the forward pass of the pre-norm decoder that Llama, Qwen2 and Qwen3 share.
Never holds state of a request or of a step, and never says how an operation is done: that is the pass's own."""

from __future__ import annotations

import torch

from engine.kv_cache import KVCache
from engine.models.config import ModelConfig
from engine.models.parameters import DecoderWeights
from engine.models.rope import inverse_frequencies
from kernels.forward import Array, ForwardPass, HeadShape


class Decoder:
    """x = embed; each layer: x += attention(norm(x)); x += mlp(norm(x)); logits = lm_head(norm(x))."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, max_model_len: int) -> None:
        self.config = config
        self.weights = weights
        self._inverse_frequencies = inverse_frequencies(config.rope, config.head_dim, max_model_len)
        self._heads = HeadShape(num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)
        self._scale = config.head_dim**-0.5

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    def forward(self, run: ForwardPass, cache: KVCache) -> Array:
        """Write the step's K and V into the cache; the final hidden state of each token. # [num_tokens, hidden]"""
        weights, heads, eps = self.weights, self._heads, self.config.rms_norm_eps
        rotations = run.rotations(self._inverse_frequencies, self.config.rope.attention_factor)
        x, residual = run.embed(weights.embedding), None  # [num_tokens, hidden]
        for layer, kv in zip(weights.layers, cache.layers, strict=True):
            x, residual = run.add_rms_norm(x, residual, layer.input_norm, eps)
            q = run.rotate_and_cache(run.linear(x, layer.qkv), rotations, heads, kv, layer.norms, eps)
            x = run.linear(run.attention(q, heads, kv, self._scale), layer.output)
            x, residual = run.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = run.linear(run.gated_linear(x, layer.gate_up), layer.down)
        x, _ = run.add_rms_norm(x, residual, weights.norm, eps)
        return x
