"""Owns the decoder's weight tensors and the table from a checkpoint's names to their places in them.
Never reads a file and never computes: `engine.weights` fills what this allocates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One block. `qkv` and `gate_up` are stacked, so that each is one matrix product."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    output: Tensor  # [hidden, heads * head_dim]
    output_bias: Tensor | None
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """All weights of one decoder; `lm_head` is `embedding` itself where the checkpoint ties them."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]


def allocate(config: ModelConfig, dtype: torch.dtype) -> DecoderWeights:
    """Tensors of the right shapes with undefined contents."""
    embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_allocate_layer(config, dtype) for _ in range(config.num_layers)),
        norm=torch.empty(config.hidden_size, dtype=dtype),
        lm_head=embedding if config.tie_word_embeddings else torch.empty_like(embedding),
    )


def _allocate_layer(config: ModelConfig, dtype: torch.dtype) -> LayerWeights:
    hidden, intermediate, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    qkv_size = (config.num_heads + 2 * config.num_kv_heads) * head_dim

    def new(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype)

    return LayerWeights(
        input_norm=new(hidden),
        qkv=new(qkv_size, hidden),
        qkv_bias=new(qkv_size) if config.qkv_bias else None,
        q_norm=new(head_dim) if config.qk_norm else None,
        k_norm=new(head_dim) if config.qk_norm else None,
        output=new(hidden, config.num_heads * head_dim),
        output_bias=new(hidden) if config.output_bias else None,
        mlp_norm=new(hidden),
        gate_up=new(2 * intermediate, hidden),
        gate_up_bias=new(2 * intermediate) if config.mlp_bias else None,
        down=new(hidden, intermediate),
        down_bias=new(hidden) if config.mlp_bias else None,
    )


def checkpoint_table(config: ModelConfig, weights: DecoderWeights) -> dict[str, Tensor]:
    """Checkpoint tensor name -> the view that it fills. Every element of `weights` is filled by exactly one name."""
    table = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    if not config.tie_word_embeddings:
        table["lm_head.weight"] = weights.lm_head
    for number, layer in enumerate(weights.layers):
        for name, view in _layer_table(config, layer).items():
            if view is not None:
                table[f"model.layers.{number}.{name}"] = view
    return table


def _layer_table(config: ModelConfig, layer: LayerWeights) -> dict[str, Tensor | None]:
    q, k, v = _split(layer.qkv, config)
    gate, up = layer.gate_up.chunk(2)
    table: dict[str, Tensor | None] = {
        "input_layernorm.weight": layer.input_norm,
        "self_attn.q_proj.weight": q,
        "self_attn.k_proj.weight": k,
        "self_attn.v_proj.weight": v,
        "self_attn.q_norm.weight": layer.q_norm,
        "self_attn.k_norm.weight": layer.k_norm,
        "self_attn.o_proj.weight": layer.output,
        "self_attn.o_proj.bias": layer.output_bias,
        "post_attention_layernorm.weight": layer.mlp_norm,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": layer.down,
        "mlp.down_proj.bias": layer.down_bias,
    }
    if layer.qkv_bias is not None:
        parts = zip("qkv", _split(layer.qkv_bias, config), strict=True)
        table.update({f"self_attn.{part}_proj.bias": view for part, view in parts})
    if layer.gate_up_bias is not None:
        table["mlp.gate_proj.bias"], table["mlp.up_proj.bias"] = layer.gate_up_bias.chunk(2)
    return table


def _split(stacked: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    k_first = config.num_heads * config.head_dim
    v_first = k_first + config.num_kv_heads * config.head_dim
    return stacked[:k_first], stacked[k_first:v_first], stacked[v_first:]
