"""Owns the format of K and V in 8 bits: which types there are, and how many bytes a token's vector of one head takes.
Never lays them out: `kernels.cpu.narrow_cache` does for a CPU, and `kernels.triton.shared.narrow_cache` for a GPU."""

from __future__ import annotations

import torch

SCALE_BYTES = 4
"""The size of the float32 scale of each vector of a (slot, KV head)."""

LARGEST: dict[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The types that a cache may be narrowed to, each with what the largest magnitude becomes."""


def stored_size(head_dim: int, dtype: torch.dtype) -> int:
    """Return how many elements of `dtype` one head's vector takes."""
    return head_dim + SCALE_BYTES if dtype in LARGEST else head_dim
