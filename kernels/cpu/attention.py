"""Owns paged attention for the CPU: gather each row's context, then matrix products over all heads at once.
Never loops over tokens, and never reads a slot that no row owns (stale or poisoned slots cannot leak)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.narrow_cache import widen
from kernels.kv_format import LARGEST, SCALE_BYTES
from kernels.rows.step import PagedRows

# Decode rows are padded to the longest of their bucket. Buckets are powers of two, so padding at most doubles a row's
# work, and one long row does not slow down all. Below this length a call costs more than the padding it saves.
SMALLEST_BUCKET = 256
# Scores held at a time, in elements: 64 MiB in bfloat16. A chunk with more is processed in slices of its queries.
MOST_SCORES = 1 << 25


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Decode rows of similar length, as one batch."""

    rows: Tensor | None
    """[bucket_rows] row numbers; None if the bucket is all of the step's tokens in order."""
    cells: Tensor
    """[bucket_rows * kv_heads * longest]; padding repeats the row's own first slot, which is always written."""
    mask: Tensor | None
    """[bucket_rows, 1, 1, longest], -inf on padding; None where all rows are equally long."""


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """One prefill chunk: tokens [first, first + count) of the step."""

    first: int
    count: int
    cells: Tensor
    """[kv_heads * seen]: the part of the context that the chunk's first query sees, and the chunk itself."""
    mask: Tensor
    """[count, seen], -inf on the future and before a query's window."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """Gather indices and masks, built once per step and used by every layer of the same window.

    A cell is one KV head of one slot: cell = slot * kv_heads + head. Gathering cells head by head gives matrices that
    are contiguous per head, at the price of gathering; strided ones are three times slower to multiply.
    """

    decodes: tuple[DecodeBucket, ...]
    chunks: tuple[ChunkRow, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One step's rows, with gather indices for each window."""

    rows: PagedRows
    kv_heads: int
    dtype: torch.dtype
    _by_window: dict[int | None, Gathered] = field(default_factory=dict)

    def within(self, window: int | None) -> Gathered:
        """Return what layers with this window need. It is built when the first of them asks."""
        found = self._by_window.get(window)
        if found is None:
            found = self._by_window[window] = _gathered(self.rows, self.kv_heads, self.dtype, window)
        return found


def prepare_attention(rows: PagedRows, kv_heads: int, dtype: torch.dtype) -> AttentionPlan:
    """Return the step's plan. dtype: that of the queries; a mask of another type would be converted in every layer."""
    return AttentionPlan(rows, kv_heads, dtype)


def _gathered(rows: PagedRows, kv_heads: int, dtype: torch.dtype, window: int | None) -> Gathered:
    first, chunks = rows.num_decode, []
    for row in range(rows.num_decode, len(rows.counts)):
        context, count = rows.contexts[row], rows.counts[row]
        unseen = 0 if window is None else max(0, context + 1 - window)  # by any query of the chunk
        mask = torch.full((count, context + count - unseen), -torch.inf, dtype=dtype)
        mask.triu_(diagonal=context - unseen + 1)
        if window is not None:
            mask += torch.full_like(mask, -torch.inf).tril_(diagonal=context - unseen - window)
        chunks.append(ChunkRow(first, count, _cells(rows.slots(row)[unseen:], kv_heads), mask))
        first += count
    return Gathered(_decode_buckets(rows, kv_heads, dtype, window), tuple(chunks))


def _cells(slots: Tensor, kv_heads: int) -> Tensor:
    """[..., length] slots -> [... * kv_heads * length] cells."""
    return (slots.unsqueeze(-2) * kv_heads + torch.arange(kv_heads).unsqueeze(-1)).flatten()


def _decode_buckets(rows: PagedRows, kv_heads: int, dtype: torch.dtype, window: int | None) -> tuple[DecodeBucket, ...]:
    members: dict[int, list[int]] = {}
    for row in range(rows.num_decode):
        length = max(_seen(rows, row, window), SMALLEST_BUCKET)
        members.setdefault((length - 1).bit_length(), []).append(row)
    return tuple(_decode_bucket(rows, bucket, kv_heads, dtype, window) for bucket in members.values())


def _seen(rows: PagedRows, row: int, window: int | None) -> int:
    """Return how many tokens a decode row's query sees."""
    length = rows.contexts[row] + 1
    return length if window is None else min(length, window)


def _decode_bucket(
    rows: PagedRows, members: list[int], kv_heads: int, dtype: torch.dtype, window: int | None
) -> DecodeBucket:
    everything = len(members) == len(rows.counts)
    index = torch.tensor(members)
    lengths = torch.tensor([_seen(rows, row, window) for row in members]).unsqueeze(1)
    positions = torch.arange(int(lengths.max())).unsqueeze(0)
    padding = positions >= lengths  # [bucket_rows, longest]
    positions = positions.masked_fill(padding, 0)
    if window is not None:
        positions = positions + torch.tensor([rows.contexts[row] + 1 for row in members]).unsqueeze(1) - lengths
    blocks = rows.block_tables[index].gather(1, positions // rows.block_size)
    slots = blocks * rows.block_size + positions % rows.block_size
    mask = torch.zeros(padding.shape, dtype=dtype).masked_fill_(padding, -torch.inf) if padding.any() else None
    mask = None if mask is None else mask[:, None, None]
    return DecodeBucket(None if everything else index, _cells(slots, kv_heads), mask)


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float, *, window: int | None = None
) -> Tensor:
    """See kernels.reference.attention. q: [num_tokens, heads, head_dim]; caches: [num_blocks, block_size, kv_heads,
    head_dim], or narrow_cache's layout; they already hold this step's K and V."""
    gathered = plan.within(window)
    if not gathered.chunks and len(gathered.decodes) == 1:
        return _decode(q, k_cache, v_cache, gathered.decodes[0], scale)
    out = torch.empty_like(q)
    for bucket in gathered.decodes:
        assert bucket.rows is not None, "a bucket that is the whole step returned above"
        out.index_copy_(0, bucket.rows, _decode(q.index_select(0, bucket.rows), k_cache, v_cache, bucket, scale))
    for chunk in gathered.chunks:
        tokens = slice(chunk.first, chunk.first + chunk.count)
        out[tokens] = _chunk(q[tokens], k_cache, v_cache, chunk, scale)
    return out


def _decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, bucket: DecodeBucket, scale: float) -> Tensor:
    rows, heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    # The query heads that share a KV head are treated as query positions: K and V are not copied for each of them.
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    k = _gather(k_cache, bucket.cells, rows * kv_heads, q.dtype)  # [rows * kv_heads, longest, head_dim]
    v = _gather(v_cache, bucket.cells, rows * kv_heads, q.dtype)
    if q.dtype == torch.bfloat16:
        return _matmul_attention(grouped, k, v, bucket.mask, scale).view(rows, heads, head_dim)
    k, v = (x.view(rows, kv_heads, -1, head_dim) for x in (k, v))
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=bucket.mask, scale=scale)
    return out.reshape(rows, heads, head_dim)


def _chunk(q: Tensor, k_cache: Tensor, v_cache: Tensor, chunk: ChunkRow, scale: float) -> Tensor:
    count, heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    grouped = q.reshape(count, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    k = _gather(k_cache, chunk.cells, kv_heads, q.dtype)  # [kv_heads, context + count, head_dim]
    v = _gather(v_cache, chunk.cells, kv_heads, q.dtype)
    if q.dtype == torch.bfloat16:
        step = max(1, MOST_SCORES // (heads * k.shape[1]))
        parts = zip(grouped.split(step, dim=2), chunk.mask.split(step), strict=True)  # type: ignore[no-untyped-call]
        out = torch.cat([_matmul_attention(queries, k, v, mask, scale) for queries, mask in parts], dim=2)
    else:
        k, v = (x.unsqueeze(1).expand(-1, heads // kv_heads, -1, -1) for x in (k, v))  # stride 0: nothing is copied
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=chunk.mask, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(count, heads, head_dim)  # from [kv_heads, group, count, head_dim]


def _gather(cache: Tensor, cells: Tensor, matrices: int, dtype: torch.dtype) -> Tensor:
    """Gather cells in `dtype`, which is the cache's own unless that is narrow. # [matrices, length, head_dim]"""
    size = cache.shape[-1]
    if cache.dtype in LARGEST:
        stored = cache.view(torch.int8).view(-1, size).index_select(0, cells)
        return widen(stored, cache.dtype, dtype).view(matrices, -1, size - SCALE_BYTES)
    return cache.view(-1, size).index_select(0, cells).view(matrices, -1, size)


def _matmul_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(q k^T * scale + mask) v with whole matrices, for bfloat16, which torch's fused CPU kernel widens first.

    This is 2 to 3 times as fast. Scores are rounded to bfloat16 before the softmax, as in transformers' eager
    attention.
    q: [a, b, queries, head_dim], k and v: [a or a * b, length, head_dim], mask: broadcasts to [a, b, queries, length].
    """
    matrices, length, head_dim = k.shape
    if mask is None:
        scores = q.new_empty(matrices, q.numel() // (matrices * head_dim), length)
    else:
        # Cloned even where `reshape` would return a view: the product is added in place.
        scores = mask.expand(*q.shape[:3], length).clone(memory_format=torch.contiguous_format)
        scores = scores.view(matrices, -1, length)
    queries = q.reshape(matrices, -1, head_dim)
    scores.baddbmm_(queries, k.transpose(1, 2), beta=0 if mask is None else 1, alpha=scale)
    return torch.bmm(scores.softmax(dim=-1), v).view(q.shape)
