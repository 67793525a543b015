"""Owns the forward pass of the pre-norm decoder that Llama, Qwen2 and Qwen3 share.
Never holds state of a request or of a step: what it reads and writes comes in as arguments."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.inputs import StepInputs
from engine.kv_cache import KVCache
from engine.models.config import ModelConfig
from engine.models.parameters import DecoderWeights, LayerWeights
from engine.models.rope import inverse_frequencies
from kernels.ops import Ops


class Decoder:
    """x = embed; each layer: x += attention(norm(x)); x += mlp(norm(x)); logits = lm_head(norm(x))."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, ops: Ops, max_model_len: int) -> None:
        self.config = config
        self.ops = ops
        self._weights = weights
        self._inverse_frequencies = inverse_frequencies(config.rope, config.head_dim, max_model_len)
        self._scale = config.head_dim**-0.5

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.embedding.dtype

    def forward(self, inputs: StepInputs, cache: KVCache) -> Tensor:
        """Write this step's K and V into the cache; the final hidden state of each token. # [num_tokens, hidden]"""
        cos, sin = self._rotations(inputs.positions)
        plan = self.ops.prepare_attention(inputs.rows, self.config.num_kv_heads, self.dtype)
        x = F.embedding(inputs.token_ids, self._weights.embedding)  # [num_tokens, hidden]
        residual = torch.zeros_like(x, dtype=torch.float32)
        for layer, (k_cache, v_cache) in zip(self._weights.layers, cache.layers, strict=True):
            x, residual = self.ops.add_rms_norm(x, residual, layer.input_norm, self.config.rms_norm_eps)
            q, k, v = self._project(layer, x, cos, sin)
            self.ops.write_cache(k, v, k_cache, v_cache, inputs.slots)
            mixed = self.ops.attention(q, k_cache, v_cache, plan, self._scale)  # [num_tokens, heads, head_dim]
            x = F.linear(mixed.flatten(1), layer.output, layer.output_bias)
            x, residual = self.ops.add_rms_norm(x, residual, layer.mlp_norm, self.config.rms_norm_eps)
            x = self._mlp(layer, x)
        x, _ = self.ops.add_rms_norm(x, residual, self._weights.norm, self.config.rms_norm_eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab]."""
        return F.linear(hidden, self._weights.lm_head)

    def _rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of each token's angles: # [num_tokens, head_dim / 2] float32"""
        angles = positions.to(torch.float32).unsqueeze(1) * self._inverse_frequencies
        factor = self.config.rope.attention_factor
        return angles.cos() * factor, angles.sin() * factor

    def _project(self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values: # [num_tokens, heads or kv_heads, head_dim]"""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), heads + 2 * kv_heads, self.config.head_dim)
        q_and_k, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self.ops.rms_norm(q_and_k[:, :heads], layer.q_norm, self.config.rms_norm_eps)
            k = self.ops.rms_norm(q_and_k[:, heads:], layer.k_norm, self.config.rms_norm_eps)
            q_and_k = torch.cat((q, k), dim=1)
        rotated = self.ops.rope(q_and_k, cos, sin)
        return rotated[:, :heads], rotated[:, heads:], v

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x)). # [num_tokens, hidden]"""
        gate_up = F.linear(x, layer.gate_up, layer.gate_up_bias)
        return F.linear(self.ops.silu_and_mul(gate_up), layer.down, layer.down_bias)
