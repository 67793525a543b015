"""Owns stand-ins for FlashAttention's packages: each checks its call as the real one does, and computes the reference.
Never knows the engine's rows: what it attends to comes from the arguments alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels import reference
from kernels.rows.step import PagedRows


@dataclass
class FakeFlash:
    """FlashAttention-2's two calls, as vllm-flash-attn 2.6.2 and flash-attn 2.6 define them."""

    any_dtype: bool = False
    """Accept float32, too, which the real ones refuse."""
    block_multiple: int = 16
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        self._record("varlen", locals())
        assert block_table is not None
        assert (dropout_p, softcap, return_attn_probs) == (0.0, 0.0, False)
        self._check_paged(q, k, v, block_table)
        rows = len(block_table)
        for sums in (cu_seqlens_q, cu_seqlens_k):
            check_integers(sums, (rows + 1,))
            assert sums[0] == 0
            assert (sums.diff() >= 0).all()
        assert cu_seqlens_q[-1] == len(q)
        counts, lengths = cu_seqlens_q.diff(), cu_seqlens_k.diff()
        assert type(max_seqlen_q) is type(max_seqlen_k) is int
        assert counts.max() <= max_seqlen_q
        assert max_seqlen_q > 1 or len(q) == rows, "a query of each row, then: q is viewed as [rows, ...]"
        assert lengths.max() <= max_seqlen_k <= block_table.shape[1] * k.shape[1]
        return self._attend(q, k, v, counts, lengths, block_table, softmax_scale, causal, window_size)

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        block_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Tensor | None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        self._record("kvcache", locals())
        assert (k, v, rotary_cos, cache_batch_idx, return_softmax_lse) == (None, None, None, None, False)
        assert q.dim() == 4, "[rows, tokens of each, heads, head_dim]"
        assert block_table is not None
        assert cache_seqlens is not None
        self._check_paged(q, k_cache, v_cache, block_table)
        check_integers(cache_seqlens, (len(q),))
        assert len(block_table) == len(q)
        counts = torch.full((len(q),), q.shape[1])
        flat = self._attend(
            q.flatten(0, 1), k_cache, v_cache, counts, cache_seqlens, block_table, softmax_scale, causal, window_size
        )
        return flat.view(q.shape)

    def _record(self, call: str, arguments: dict[str, Any]) -> None:
        self.calls.append((call, {name: value for name, value in arguments.items() if name != "self"}))

    def _check_paged(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> None:
        heads, head_dim = q.shape[-2:]
        assert k.shape == v.shape
        assert k.dim() == 4
        assert k.shape[3] == head_dim
        assert heads % k.shape[2] == 0
        assert k.shape[1] % self.block_multiple == 0, "page size"
        assert head_dim % 8 == 0
        assert q.dtype == k.dtype == v.dtype
        assert self.any_dtype or q.dtype in (torch.float16, torch.bfloat16)
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        check_integers(table, (len(table), table.shape[1]))
        assert ((table >= 0) & (table < len(k))).all(), "every entry is a block, padding too"

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        counts: Tensor,
        lengths: Tensor,
        table: Tensor,
        scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
    ) -> Tensor:
        """Compute attention. Causal masks are aligned at the bottom right, as in FlashAttention since 2.1. A window's
        two numbers count tokens before and after a query's own; -1: all."""
        assert causal
        before, after = window_size
        assert after == (-1 if before == -1 else 0)
        assert scale is not None
        contexts = tuple((lengths - counts).tolist())
        assert min(contexts) >= 0
        rows = PagedRows(0, contexts, tuple(counts.tolist()), table.long(), k.shape[1])
        return reference.attention(q, k, v, rows, scale, window=None if before == -1 else before + 1)


@dataclass
class FakeFlash3(FakeFlash):
    """FlashAttention-3: one call, and other names."""

    block_multiple: int = 1

    def flash_attn_varlen_func(self, *_: Any, **__: Any) -> Tensor:
        raise AssertionError("this one has no block tables")

    def flash_attn_with_kvcache(  # type: ignore[override]
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        qv: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k_new: Tensor | None = None,
        max_seqlen_q: int | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        num_splits: int = 0,
    ) -> Tensor:
        self._record("kvcache", locals())
        assert q.dim() == 3, "[tokens, heads, head_dim] where cu_seqlens_q is given"
        assert page_table is not None
        assert cache_seqlens is not None
        assert cu_seqlens_q is not None
        self._check_paged(q, k_cache, v_cache, page_table)
        check_integers(cache_seqlens, (len(page_table),))
        check_integers(cu_seqlens_q, (len(page_table) + 1,))
        counts = cu_seqlens_q.diff()
        assert cu_seqlens_q[-1] == len(q)
        assert max_seqlen_q is not None
        assert counts.max() <= max_seqlen_q
        return self._attend(q, k_cache, v_cache, counts, cache_seqlens, page_table, softmax_scale, causal, window_size)


def check_integers(tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Check lengths and tables as the packages themselves do."""
    assert tensor.dtype == torch.int32
    assert tensor.is_contiguous()
    assert tuple(tensor.shape) == shape
