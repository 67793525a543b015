"""Owns the first launches of a model's matrices that are not packed, on a device: each shape once in each launch.
Never computes a request's token, and never says which numbers of rows have a launch: the table of operators does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from engine.models.decoder import Decoder
from kernels.eager.ops import Ops
from kernels.forward import GELU, Linear

_Product = Callable[[Tensor, Linear], Tensor]


@torch.inference_mode()
def warm_up_linear(decoder: Decoder, ops: Ops, most_tokens: int, *, adapters: bool) -> None:
    """Multiply by a matrix of each shape with as many rows as each launch ends with, at most `most_tokens`. Kernels are
    compiled, and choose their configurations, when they are first launched, and no capture can hold that. adapters:
    whether rows may have some, which are added between a product and its activation."""
    seen = set()
    for product, linear in _products(decoder, ops, adapters=adapters):
        weight = linear.weight
        if not isinstance(weight, Tensor) or weight.dim() > 2 or weight.dtype != decoder.dtype:
            continue
        bias = None if linear.bias is None else linear.bias.data_ptr() % 16
        kind = (product, weight.shape, weight.data_ptr() % 16, bias)
        if kind in seen:
            continue
        seen.add(kind)
        for rows in sorted({min(rows, most_tokens) for rows in ops.linear_rows}):
            product(torch.zeros(rows, weight.shape[1], dtype=weight.dtype, device=weight.device), linear)


def _products(decoder: Decoder, ops: Ops, *, adapters: bool) -> Iterator[tuple[_Product, Linear]]:
    """Yield every product of a step by the operators of `ops`."""
    if ops.linear is None:
        return
    fused = None if decoder.config.activation == GELU else ops.gated_linear
    for layer in decoder.weights.layers:
        for linear in (layer.qkv, layer.output, layer.down):
            yield ops.linear, linear
        gated = [layer.gate_up]
        if layer.shared is not None:
            gated.append(layer.shared.gate_up)
            yield ops.linear, layer.shared.down
            yield ops.linear, layer.shared.gate
        for linear in gated:
            if fused is not None:
                yield fused, linear
            if fused is None or adapters:
                yield ops.linear, linear
    yield ops.linear, decoder.weights.lm_head
