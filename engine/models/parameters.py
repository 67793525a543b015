"""Owns the decoder's weight tensors and the table from a checkpoint's names to their places in them.
Never reads a file and never computes: `engine.weights` fills what this allocates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.config import ModelConfig
from kernels.forward import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One block. `qkv` and `gate_up` are stacked, so that each is one matrix product."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # [(heads + 2 * kv_heads) * head_dim, hidden]
    norms: tuple[Tensor, Tensor] | None  # of queries and of keys, each [head_dim]
    output: Linear  # [hidden, heads * head_dim]
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear  # [2 * intermediate, hidden]
    down: Linear  # [hidden, intermediate]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """All weights of one decoder; `lm_head`'s is `embedding` itself where the checkpoint ties them."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    lm_head: Linear  # [vocab, hidden]


def allocate(config: ModelConfig, dtype: torch.dtype) -> DecoderWeights:
    """Tensors of the right shapes with undefined contents."""
    embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_allocate_layer(config, dtype) for _ in range(config.num_layers)),
        norm=torch.empty(config.hidden_size, dtype=dtype),
        lm_head=Linear(embedding if config.tie_word_embeddings else torch.empty_like(embedding)),
    )


def _allocate_layer(config: ModelConfig, dtype: torch.dtype) -> LayerWeights:
    hidden, intermediate, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    qkv_size = (config.num_heads + 2 * config.num_kv_heads) * head_dim

    def new(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype)

    def linear(outputs: int, inputs: int, bias: bool) -> Linear:
        return Linear(new(outputs, inputs), new(outputs) if bias else None)

    return LayerWeights(
        input_norm=new(hidden),
        qkv=linear(qkv_size, hidden, config.qkv_bias),
        norms=(new(head_dim), new(head_dim)) if config.qk_norm else None,
        output=linear(hidden, config.num_heads * head_dim, config.output_bias),
        mlp_norm=new(hidden),
        gate_up=linear(2 * intermediate, hidden, config.mlp_bias),
        down=linear(hidden, intermediate, config.mlp_bias),
    )


def checkpoint_table(config: ModelConfig, weights: DecoderWeights) -> dict[str, Tensor]:
    """Checkpoint tensor name -> the view that it fills. Every element of `weights` is filled by exactly one name."""
    table = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    if not config.tie_word_embeddings:
        table["lm_head.weight"] = weights.lm_head.weight
    for number, layer in enumerate(weights.layers):
        for name, view in _layer_table(config, layer).items():
            if view is not None:
                table[f"model.layers.{number}.{name}"] = view
    return table


def _layer_table(config: ModelConfig, layer: LayerWeights) -> dict[str, Tensor | None]:
    q, k, v = _split(layer.qkv.weight, config)
    q_norm, k_norm = layer.norms or (None, None)
    gate, up = layer.gate_up.weight.chunk(2)
    table: dict[str, Tensor | None] = {
        "input_layernorm.weight": layer.input_norm,
        "self_attn.q_proj.weight": q,
        "self_attn.k_proj.weight": k,
        "self_attn.v_proj.weight": v,
        "self_attn.q_norm.weight": q_norm,
        "self_attn.k_norm.weight": k_norm,
        "self_attn.o_proj.weight": layer.output.weight,
        "self_attn.o_proj.bias": layer.output.bias,
        "post_attention_layernorm.weight": layer.mlp_norm,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": layer.down.weight,
        "mlp.down_proj.bias": layer.down.bias,
    }
    if layer.qkv.bias is not None:
        parts = zip("qkv", _split(layer.qkv.bias, config), strict=True)
        table.update({f"self_attn.{part}_proj.bias": view for part, view in parts})
    if layer.gate_up.bias is not None:
        table["mlp.gate_proj.bias"], table["mlp.up_proj.bias"] = layer.gate_up.bias.chunk(2)
    return table


def _split(stacked: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    k_first = config.num_heads * config.head_dim
    v_first = k_first + config.num_kv_heads * config.head_dim
    return stacked[:k_first], stacked[k_first:v_first], stacked[v_first:]
