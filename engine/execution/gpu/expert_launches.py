"""Owns the first launches of a model's experts on a device: each kind of mixture once in each launch.
Never computes a request's token: inputs are random, so that kernels choose configurations for tokens that differ."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.models.decoder import Decoder
from engine.models.description import LayerConfig
from engine.models.parameters import LayerWeights
from kernels.eager.forward import mix_experts
from kernels.eager.ops import Ops
from kernels.forward import Linear

SEED = 0


@torch.inference_mode()
def warm_up_experts(decoder: Decoder, ops: Ops, most_tokens: int) -> None:
    """Compute each kind of mixture with as many tokens as each launch begins with, up to `most_tokens`. Kernels are
    compiled, and choose their configurations, when they are first launched, and every stream would wait for that."""
    if ops.expert_launches is None:
        return
    for layer_config, layer in _kinds(decoder):
        assert layer_config.experts is not None
        assert layer.router is not None
        routing, (count, hidden) = layer_config.experts.routing, layer.router.shape
        for tokens in ops.expert_launches(count, routing):
            if tokens <= most_tokens:
                x = _random(tokens, hidden, decoder.dtype, layer.router.device)
                mix_experts(ops, x, layer.router, (layer.gate_up, layer.down), routing)


def _kinds(decoder: Decoder) -> Iterator[tuple[LayerConfig, LayerWeights]]:
    """Yield a layer of each kind of mixture, by what kernels are compiled for."""
    seen = set()
    for layer_config, layer in zip(decoder.config.layers, decoder.weights.layers, strict=True):
        if layer_config.experts is None:
            continue
        kind = (layer_config.experts, *(_name(linear) for linear in (layer.gate_up, layer.down)))
        if kind not in seen:
            seen.add(kind)
            yield layer_config, layer


def _name(linear: Linear) -> str:
    """Name a weight's layout: a tensor's type, or a packed matrix's kind and group, and which tensors it has."""
    if isinstance(linear.weight, Tensor):
        return str(linear.weight.dtype)
    parts = (*(getattr(linear.weight, name, None) for name in ("kind", "group", "zeros")), linear.order)
    return " ".join("tensor" if isinstance(part, Tensor) else str(part) for part in parts)


def _random(tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(SEED)
    return torch.randn(tokens, hidden, generator=generator, dtype=dtype, device=device)
