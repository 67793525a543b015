"""Owns attention on a FlashAttention package: how rows are handed over, and to which of its calls.
Never imports one, and never chooses: `kernels.flash.packages` says which can run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.eager.ops import Ops
from kernels.flash.packages import Package
from kernels.rows.device import DeviceRows, on_device
from kernels.rows.step import PagedRows


def flash_ops(package: Package, module: Any, others: Ops) -> Ops:
    """Return a table with attention from `module`, and everything else from `others`."""
    prepare, run = (_there, _whole) if package.whole else (_kinds, _by_kind)
    return replace(
        others,
        name=package.module,
        prepare_attention=prepare,
        attention=partial(run, module),
        capturable=True,
        narrow_cache=False,
    )


def _there(rows: PagedRows, kv_heads: int, dtype: torch.dtype) -> DeviceRows:
    return rows if isinstance(rows, DeviceRows) else on_device(rows, rows.block_tables.device)


@dataclass(frozen=True, slots=True)
class _Kinds:
    """Rows split by kind. A row that may be a decode is passed to both calls, and in the wrong one sees a single key,
    its first: when a step is captured, the number of rows of each kind is unknown."""

    rows: DeviceRows
    is_decode: Tensor
    """[num_decode] bool: which of the rows that may be decodes are"""
    lengths: Tensor
    """[num_decode] int32: keys in the decode call"""
    first_keys: Tensor
    """[num_rows + 1] int32: cumulative keys in the varlen call"""


def _kinds(rows: PagedRows, kv_heads: int, dtype: torch.dtype) -> _Kinds:
    there = _there(rows, kv_heads, dtype)
    is_decode = torch.arange(len(there.lengths), device=there.lengths.device) < there.decodes
    lengths = there.lengths.where(is_decode, 1)[: there.num_decode]
    first_keys = F.pad(there.lengths.masked_fill(is_decode, 1).cumsum(0, dtype=torch.int32), (1, 0))
    return _Kinds(there, is_decode[: there.num_decode], lengths, first_keys)


def _limits(window: int | None) -> dict[str, tuple[int, int]]:
    """FlashAttention counts the keys to the left of a query's own; to the right there are none."""
    return {} if window is None else {"window_size": (window - 1, 0)}


def _by_kind(
    module: Any,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kinds: _Kinds,
    scale: float,
    *,
    window: int | None = None,
) -> Tensor:
    """FlashAttention-2: decode rows go to the call that splits long contexts, the others to the varlen call."""
    rows, options = kinds.rows, {"softmax_scale": scale, "causal": True, **_limits(window)}
    decoded: Tensor | None = None
    if num_decode := rows.num_decode:
        decoded = module.flash_attn_with_kvcache(
            q[:num_decode].unsqueeze(1),  # [num_decode, 1, heads, head_dim]
            k_cache,
            v_cache,
            cache_seqlens=kinds.lengths,
            block_table=rows.tables[:num_decode],
            **options,
        ).squeeze(1)
    if decoded is not None and not rows.num_chunks:
        return decoded
    out: Tensor = module.flash_attn_varlen_func(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=rows.first_tokens,
        cu_seqlens_k=kinds.first_keys,
        # With 1, FlashAttention assumes that every row has a query, and padding has none.
        max_seqlen_q=rows.max_count if len(q) == len(rows.lengths) else max(rows.max_count, 2),
        max_seqlen_k=rows.max_length,
        block_table=rows.tables,
        **options,
    )
    if decoded is not None:
        out[:num_decode] = decoded.where(kinds.is_decode[:, None, None], out[:num_decode])
    return out


def _whole(
    module: Any,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: DeviceRows,
    scale: float,
    *,
    window: int | None = None,
) -> Tensor:
    """FlashAttention-3: decode rows and chunks are rows of one call."""
    out: Tensor = module.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=rows.lengths,
        page_table=rows.tables,
        cu_seqlens_q=rows.first_tokens,
        max_seqlen_q=rows.max_count,
        softmax_scale=scale,
        causal=True,
        **_limits(window),
    )
    return out
