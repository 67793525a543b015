"""Turns what an engine reports about its KV tiers into samples, by tier and under vLLM's names for all tiers together.
Never counts anything: an engine's totals since its start are the counters."""

from __future__ import annotations

from collections.abc import Iterator

from engine.kv_tiers import TierLoad
from engine.protocol import LoadSnapshot
from serve_app.metrics.values import Sample

OF_ALL_TIERS = frozenset(
    {
        "vllm:external_prefix_cache_queries",
        "vllm:external_prefix_cache_hits",
        "vllm:kv_offload_load_bytes",
        "vllm:kv_offload_load_time",
        "vllm:kv_offload_store_bytes",
        "vllm:kv_offload_store_time",
    }
)
"""Counters without a label for the tier, under the names that vLLM has for the same."""


def tier_samples(load: LoadSnapshot, block_size: int, missed_tokens: int) -> list[Sample]:
    """Return the samples of an engine's tiers; none for an engine without tiers. missed_tokens: prompt tokens that were
    neither in the KV cache nor loaded."""
    if not load.tiers:
        return []
    samples = [Sample("chunkserve:num_requests_loading", (), load.num_loading)]
    for tier in load.tiers:
        samples += _of_one(tier, block_size)
    return [*samples, *_of_all(load.tiers, block_size, missed_tokens)]


def _of_one(tier: TierLoad, block_size: int) -> Iterator[Sample]:
    values: dict[str, float] = {
        "capacity_bytes": tier.capacity_bytes,
        "used_bytes": tier.used_bytes,
        "blocks": tier.num_blocks,
        "hit_tokens": tier.hit_blocks * block_size,
        "loaded_bytes": tier.loaded_bytes,
        "load_seconds": tier.load_s,
        "stored_blocks": tier.stored_blocks,
        "stored_bytes": tier.stored_bytes,
        "store_seconds": tier.store_s,
        "evicted_blocks": tier.evicted_blocks,
        "refused_stores": tier.refused_stores,
        "late_loads": tier.late_loads,
    }
    for name, value in values.items():
        yield Sample(f"chunkserve:kv_tier_{name}", (tier.tier.value,), value)
    for op, failed in (("load", tier.failed_loads), ("store", tier.failed_stores)):
        yield Sample("chunkserve:kv_tier_failures", (tier.tier.value, op), failed)


def _of_all(tiers: tuple[TierLoad, ...], block_size: int, missed_tokens: int) -> Iterator[Sample]:
    hits = block_size * sum(tier.hit_blocks for tier in tiers)
    yield Sample("vllm:external_prefix_cache_queries", (), missed_tokens + hits)
    yield Sample("vllm:external_prefix_cache_hits", (), hits)
    yield Sample("vllm:kv_offload_load_bytes", (), sum(tier.loaded_bytes for tier in tiers))
    yield Sample("vllm:kv_offload_load_time", (), sum(tier.load_s for tier in tiers))
    yield Sample("vllm:kv_offload_store_bytes", (), sum(tier.stored_bytes for tier in tiers))
    yield Sample("vllm:kv_offload_store_time", (), sum(tier.store_s for tier in tiers))
