"""Owns the forward pass of the pre-norm decoder that all families share.
Never holds the state of a request or a step, and never says how an operation is computed: the ForwardPass does."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from engine.models.description import LayerConfig, LinearAttention, ModelConfig
from engine.models.kv_cache import KVCache
from engine.models.parameters import DecoderWeights, LayerWeights, SharedExpertWeights
from engine.models.recurrent_state import RecurrentState
from engine.models.rope import RopeConfig, inverse_frequencies, rotation_factors
from kernels.forward import Array, ForwardPass, HeadShape, LinearAttentionPass


class Decoder:
    """x = scale * embed; each layer: x += post(attention(norm(x))); x += post(mlp(norm(x))); logits = lm_head(norm(x)).

    Only some families have post norms. Layers with linear attention use it instead of attention. Of a model that
    several ranks compute together, each layer has two sums over them, and logits are those of the rank's own tokens.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights, max_model_len: int) -> None:
        self.config = config
        self.weights = weights
        self.dtype: torch.dtype = weights.embedding.dtype  # which a packed embedding no longer says
        self._turns = {layer.rope: self._turns_of(layer.rope, max_model_len) for layer in config.layers}
        self._heads = HeadShape(num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)
        # Rounded to the embedding's type, as when checkpoints were trained.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype).item()

    def _turns_of(self, rope: RopeConfig | None, max_model_len: int) -> tuple[Tensor, Tensor | float]:
        """Return the inverse frequencies of a rotation, and the factor of its cos and sin."""
        head_dim, device = self.config.head_dim, self.weights.embedding.device
        if rope is None:  # angles of zero: nothing is rotated
            return torch.zeros(head_dim // 2, device=device), 1.0
        frequencies = inverse_frequencies(rope, head_dim, max_model_len).to(device)
        whole = rope.rotated_size(head_dim) == head_dim
        return frequencies, rope.attention_factor if whole else rotation_factors(rope, head_dim).to(device)

    def forward(self, run: ForwardPass, cache: KVCache, state: RecurrentState | None = None) -> Array:
        """Write the step's K and V into the cache and advance its rows' states. Return each token's final hidden state.
        # [num_tokens, hidden]

        run: must also be a LinearAttentionPass for models with linear attention, gated attention or a shared expert.
        """
        config, weights, eps = self.config, self.weights, self.config.rms_norm_eps
        caches, states = iter(cache.layers), iter(() if state is None else state.layers)
        rotations = {rope: run.rotations(*turns) for rope, turns in self._turns.items()}
        x, residual = run.embed(weights.embedding, self._embedding_scale), None  # [num_tokens, hidden]
        for layer_config, layer in zip(config.layers, weights.layers, strict=True):
            x, residual = run.add_rms_norm(x, residual, layer.input_norm, eps)
            if layer_config.linear is None:
                x = self._attention(run, x, layer_config, layer, rotations[layer_config.rope], next(caches))
            else:
                x = self._linear_attention(run, x, layer_config.linear, layer, next(states))
            x = self._post_norm(run, self._summed(run, x), layer.attention_post_norm)
            x, residual = run.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = self._summed(run, self._mlp(run, x, layer_config, layer))
            x = self._post_norm(run, x, layer.mlp_post_norm)
        x, _ = run.add_rms_norm(x, residual, weights.norm, eps)
        return x

    def _attention(
        self,
        run: ForwardPass,
        x: Array,
        layer_config: LayerConfig,
        layer: LayerWeights,
        rotations: Array,
        kv: tuple[Tensor, Tensor],
    ) -> Array:
        config, heads, gate = self.config, self._heads, None
        qkv = run.linear(x, layer.qkv)
        if config.attention_gate:
            size = heads.num_heads * heads.head_dim
            rest = size + 2 * heads.num_kv_heads * heads.head_dim
            gate, qkv = _with_linear_attention(run).split(qkv, (size, rest))
        q = run.rotate_and_cache(qkv, rotations, heads, kv, layer.norms, config.rms_norm_eps)
        x = run.attention(q, heads, kv, config.attention_scale, layer_config.window)
        if gate is not None:
            x = _with_linear_attention(run).sigmoid_gate(x, gate)
        return run.linear(x, layer.output)

    def _linear_attention(
        self,
        run: ForwardPass,
        x: Array,
        linear_config: LinearAttention,
        layer: LayerWeights,
        state: tuple[Tensor, Tensor],
    ) -> Array:
        """state: (the convolution's, the delta rule's)."""
        assert layer.linear is not None
        more, heads, weights = _with_linear_attention(run), linear_config.heads, layer.linear
        sizes = (heads.channels, heads.value_size, heads.num_value_heads, heads.num_value_heads)
        qkv, gate, strength, step = more.split(run.linear(x, layer.qkv), sizes)
        qkv = more.causal_conv(qkv, weights.conv.squeeze(1), state[0])
        x = more.delta_rule(qkv, strength, step, weights.rates, heads, state[1])
        return run.linear(more.gated_rms_norm(x, gate, weights.norm, self.config.rms_norm_eps), layer.output)

    def _add_shared(self, run: ForwardPass, x: Array, shared: SharedExpertWeights, routed: Array) -> Array:
        """Add the shared expert's output, times its gate, to the routed experts' output."""
        common = run.linear(run.gated_linear(x, shared.gate_up, self.config.activation), shared.down)
        return _with_linear_attention(run).sigmoid_gate(common, run.linear(x, shared.gate), routed)

    def _mlp(self, run: ForwardPass, x: Array, layer_config: LayerConfig, layer: LayerWeights) -> Array:
        if layer_config.experts is not None:
            assert layer.router is not None
            routed = run.experts(x, layer.router, layer.gate_up, layer.down, layer_config.experts.routing)
            return routed if layer.shared is None else self._add_shared(run, x, layer.shared, routed)
        return run.linear(run.gated_linear(x, layer.gate_up, self.config.activation), layer.down)

    def _summed(self, run: ForwardPass, x: Array) -> Array:
        """Add up what the ranks have of an output, if the model is a part of one."""
        return x if self.config.shard.size == 1 else run.all_reduce(x)

    def _post_norm(self, run: ForwardPass, x: Array, weight: Tensor | None) -> Array:
        return x if weight is None else run.add_rms_norm(x, None, weight, self.config.rms_norm_eps)[0]


def _with_linear_attention(run: ForwardPass) -> LinearAttentionPass:
    """Return the pass under its wider type, which every backend's pass has."""
    return cast(LinearAttentionPass, run)
