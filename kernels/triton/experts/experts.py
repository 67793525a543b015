"""Owns mixtures of experts on a GPU: which tile a number of tokens takes, and the launches from choice to sum.
Never waits for the device: launches are sized for the most tiles possible, and programs without a tile end at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.forward import Linear, Routing
from kernels.triton.experts import multiply
from kernels.triton.experts.routing import choose_experts, sort_pairs
from kernels.triton.shared.launch import NO_FUSION
from kernels.triton.shared.pack import PLAIN, Packed, plain

FEW_PAIRS, SOME_PAIRS, MANY_PAIRS = 16, 64, 128
"""Pairs of one expert that a program takes. A step has one size, by the pairs that an expert has on average: few leave
the time to the weights, many are what tensor cores multiply at their rate."""
MOST_FOR_FEW, MOST_FOR_SOME = 8, 64
"""Up to how many pairs of an expert, on average, a step takes the smaller tiles."""
BLOCK = 1024
GATHERED = 64
"""Inputs that a program brings into the order of weights."""


def tile_of(num_pairs: int, num_experts: int) -> int:
    """Return the pairs of a tile. It depends on the numbers that the host knows, never on what tokens choose."""
    if num_pairs <= MOST_FOR_FEW * num_experts:
        return FEW_PAIRS
    return SOME_PAIRS if num_pairs <= MOST_FOR_SOME * num_experts else MANY_PAIRS


def launch_tokens(num_experts: int, routing: Routing) -> tuple[int, ...]:
    """Return the smallest number of tokens for each launch that there is."""
    return 1, *(most * num_experts // routing.per_token + 1 for most in (MOST_FOR_FEW, MOST_FOR_SOME))


def experts(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    routing: Routing,
    *,
    batch_invariant: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Sum the outputs of each token's experts, weighted by their shares. # [num_tokens, hidden]

    x: [num_tokens, hidden]; router: [experts, hidden] float32; gate_up: [experts, 2 * size, hidden], down: [experts,
    hidden, size], in x's type. Values are rounded to that type between the products and before a token's sum. A
    token's sums have one order for all numbers of tokens with the same tile. batch_invariant: for all numbers.

    Raises:
        ValueError: a weight is not contiguous.
    """
    return narrow_experts(x, router, Linear(gate_up), Linear(down), routing, batch_invariant=batch_invariant, out=out)


def narrow_experts(
    x: Tensor,
    router: Tensor,
    gate_up: Linear,
    down: Linear,
    routing: Routing,
    *,
    batch_invariant: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The same with weights of fewer bits, widened in registers. gate_up, down: the weight is a Packed, or a Tensor."""
    first, second = _packed("gate_up", gate_up.weight), _packed("down", down.weight)
    _check_contiguous("router", router)
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    (tokens, hidden), size = x.shape, second.inputs
    if not tokens:
        return out
    shares, chosen = choose_experts(x, router, routing, batch_invariant=batch_invariant)
    how = NO_FUSION if batch_invariant else {}
    tile = tile_of(chosen.numel(), len(router))
    order, tiles = sort_pairs(chosen, len(router), tile)
    per_token = routing.per_token
    if gate_up.order is not None:
        x, per_token = _gathered(x, order, tiles, gate_up.order, per_token, tile), 0
    inner = torch.empty(len(order), size, dtype=x.dtype, device=x.device)
    launch, grid = multiply.GATE_UP[_list_of(first, tile, batch_invariant)], _grid(tiles, size, halves=2)
    sizes = (x.stride(0), per_token, hidden, size, *_layout(first), tile)
    launch[grid](x, *_tensors(first), order, tiles, inner, *sizes, **how)
    if down.order is not None:
        inner = _gathered(inner, order, tiles, down.order, 0, tile)
    parts = torch.empty(len(order), hidden, dtype=x.dtype, device=x.device)
    launch, grid = multiply.DOWN[_list_of(second, tile, batch_invariant)], _grid(tiles, hidden, halves=1)
    launch[grid](inner, *_tensors(second), order, tiles, shares, parts, hidden, size, *_layout(second), tile, **how)
    multiply.add_parts[(tokens, triton.cdiv(hidden, BLOCK))](parts, out, hidden, routing.per_token, BLOCK)
    return out


def _packed(name: str, weight: Any) -> Packed:
    if isinstance(weight, Packed):
        return weight
    _check_contiguous(name, weight)
    return plain(weight)


def _check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} {list(tensor.shape)} has strides {tensor.stride()}: expected a contiguous tensor.")


def _list_of(packed: Packed, tile: int, batch_invariant: bool) -> str:
    """Return which list of configurations a product chooses among."""
    if batch_invariant:
        return "invariant few" if tile <= SOME_PAIRS else "invariant many"
    return "few" if tile <= SOME_PAIRS else "plain" if packed.kind == PLAIN else "many"


def _grid(tiles: Tensor, outputs: int, *, halves: int) -> Callable[[dict[str, int]], tuple[int]]:
    """halves: into how many a block's outputs are divided, of which each has the same columns."""
    return lambda meta: (len(tiles) * triton.cdiv(outputs, meta["BLOCK_N"] // halves),)


def _tensors(packed: Packed) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return packed.words, packed.scales, packed.zeros


def _layout(packed: Packed) -> tuple[int, int, int, str, int]:
    return packed.words.shape[-1], packed.group, packed.group_step, packed.kind, packed.per_word


def _gathered(x: Tensor, order: Tensor, tiles: Tensor, columns: Tensor, per_token: int, tile: int) -> Tensor:
    """Return each pair's inputs in the order of its expert's weights. # [num_pairs, inputs]"""
    inputs = x.shape[1]
    out = torch.empty(len(order), inputs, dtype=x.dtype, device=x.device)
    grid = (len(tiles), triton.cdiv(inputs, GATHERED))
    multiply.gather_inputs[grid](x, order, tiles, columns, out, x.stride(0), per_token, inputs, tile, GATHERED)
    return out
