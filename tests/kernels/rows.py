"""Owns random paged inputs for kernel tests: shuffled blocks, with every slot that no row owns poisoned by NaN.
Never draws a seed: tests.support.seeds gives each test its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.rows.step import PagedRows
from tests.support.seeds import next_seed


@dataclass(frozen=True)
class Case:
    q: Tensor  # [num_tokens, heads, head_dim]
    k_cache: Tensor  # [num_blocks, block_size, kv_heads, head_dim]
    v_cache: Tensor
    rows: PagedRows
    scale: float


def seeded_generator() -> torch.Generator:
    return torch.Generator().manual_seed(next_seed())


def paged_case(
    decodes: list[int],
    chunks: list[tuple[int, int]],
    *,
    block_size: int = 16,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Draw a case. decodes: contexts of decode rows; chunks: (context, count) pairs."""
    generator = seeded_generator()
    contexts = decodes + [context for context, _ in chunks]
    counts = [1] * len(decodes) + [count for _, count in chunks]
    needed = [-(-(context + count) // block_size) for context, count in zip(contexts, counts, strict=True)]
    blocks = torch.randperm(sum(needed) + 3, generator=generator)
    tables = torch.zeros(len(counts), max(needed), dtype=torch.int64)
    first = 0
    for row, length in enumerate(needed):
        tables[row] = blocks[first]
        tables[row, :length] = blocks[first : first + length]
        first += length
    rows = PagedRows(len(decodes), tuple(contexts), tuple(counts), tables, block_size)
    shape = (len(blocks), block_size, kv_heads, head_dim)
    k_cache, v_cache = torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)
    for row in range(len(counts)):
        slots = rows.slots(row)
        for cache in (k_cache, v_cache):
            values = torch.randn(len(slots), kv_heads, head_dim, generator=generator)
            cache.flatten(0, 1)[slots] = values.to(dtype)
    q = torch.randn(sum(counts), kv_heads * group, head_dim, generator=generator).to(dtype)
    return Case(q, k_cache, v_cache, rows, head_dim**-0.5)
