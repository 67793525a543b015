"""Owns mixtures of experts in torch's operators: tokens sorted by expert, and products only for experts that have any.
Never computes a token with an expert that was not chosen for it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.elementwise import silu_and_mul
from kernels.forward import Routing
from kernels.reference import route


def experts(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, routing: Routing) -> Tensor:
    """See kernels.reference.experts. x: [num_tokens, hidden], gate_up: [experts, 2 * size, hidden], down: [experts,
    hidden, size].

    A token's experts are summed in the order of their shares, so that its sum does not depend on its neighbours. Waits
    for the device: the host needs each expert's token count.
    """
    shares, chosen = route(x, router, routing)  # [num_tokens, per_token]
    order = chosen.flatten().argsort(stable=True)  # indices of (token, rank of the expert), sorted by expert
    counts = chosen.flatten().bincount(minlength=len(router)).tolist()
    found = torch.empty(len(order), x.shape[1], dtype=x.dtype, device=x.device)
    found[order] = _products(x[order // routing.per_token], counts, gate_up, down)
    by_token = found.view(len(x), routing.per_token, -1).float()
    return (by_token * shares.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def expert_products(rows: Tensor, numbers: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return what its expert makes of each row, unweighted. rows: [n, hidden]; numbers: [n] experts. # [n, hidden]"""
    order = numbers.argsort(stable=True)
    found = torch.empty_like(rows)
    found[order] = _products(rows[order], numbers.bincount(minlength=len(gate_up)).tolist(), gate_up, down)
    return found


def _products(rows: Tensor, counts: list[int], gate_up: Tensor, down: Tensor) -> Tensor:
    """rows: [n, hidden], sorted by expert; counts: how many each has. # [n, hidden]"""
    parts = [
        F.linear(silu_and_mul(F.linear(part, gate_up[number])), down[number])
        for number, part in enumerate(torch.split(rows, counts))
        if len(part)
    ]
    return torch.cat(parts) if parts else rows
