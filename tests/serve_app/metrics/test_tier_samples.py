"""Contracts of the metrics of KV tiers: what an engine tells is what a scrape shows, tier by tier and in all.
Never runs tiers: what they would report is written down."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import pytest

from engine.kv_tiers import Tier, TierLoad
from engine.observer import StepFacts
from engine.protocol import LoadSnapshot, SamplingParams, Scheduled, Submission
from serve_app.metrics.catalogue import BY_NAME
from serve_app.metrics.engine_recorder import EngineRecorder
from serve_app.metrics.exposition import Scrape, expose
from serve_app.metrics.values import ReplicaSamples
from tests.support.engines import resolved_config
from tests.support.fleet import load_snapshot

HOST = TierLoad(
    Tier.HOST,
    num_blocks=7,
    capacity_bytes=1000,
    used_bytes=700,
    hit_blocks=3,
    stored_blocks=9,
    evicted_blocks=2,
    loaded_bytes=300,
    stored_bytes=900,
    load_s=0.25,
    store_s=0.5,
    failed_loads=0,
    failed_stores=1,
    refused_stores=4,
    late_loads=0,
)
DISK = TierLoad(
    Tier.DISK,
    num_blocks=20,
    capacity_bytes=5000,
    used_bytes=2000,
    hit_blocks=5,
    stored_blocks=6,
    evicted_blocks=0,
    loaded_bytes=500,
    stored_bytes=600,
    load_s=1.25,
    store_s=2.5,
    failed_loads=8,
    failed_stores=10,
    refused_stores=11,
    late_loads=12,
)
BLOCK_SIZE = 4


def with_tiers(*tiers: TierLoad, num_loading: int = 0) -> LoadSnapshot:
    return replace(load_snapshot(num_waiting=num_loading + 1), tiers=tiers, num_loading=num_loading)


def scraped(load: LoadSnapshot, recorder: EngineRecorder | None = None) -> dict[str, float]:
    """Return the series of a scrape: name and labels, without those of the model and the engine, -> value."""
    samples = (recorder or EngineRecorder(resolved_config())).samples(load)
    lines = expose({"m": Scrape([ReplicaSamples("e", samples)])}).splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
    series = [
        (name.replace('model_name="m",engine="e",', "").replace('model_name="m",engine="e"', ""), value)
        for name, value in pairs
    ]
    doubled = [name for name, count in Counter(name for name, _ in series).items() if count > 1]
    assert not doubled, "Prometheus refuses a scrape in which a series stands twice"
    return {name.replace("{}", ""): float(value) for name, value in series}


def test_a_scrape_has_every_number_of_every_tier() -> None:
    found = scraped(with_tiers(HOST, DISK, num_loading=2))
    own = {name: value for name, value in found.items() if name.startswith("chunkserve:kv_tier_")}
    assert own == {
        f'chunkserve:kv_tier_{name}{{tier="{tier}"{more}}}': value
        for name, more, *values in (
            ("capacity_bytes", "", 1000, 5000),
            ("used_bytes", "", 700, 2000),
            ("blocks", "", 7, 20),
            ("hit_tokens_total", "", 3 * BLOCK_SIZE, 5 * BLOCK_SIZE),
            ("loaded_bytes_total", "", 300, 500),
            ("load_seconds_total", "", 0.25, 1.25),
            ("stored_blocks_total", "", 9, 6),
            ("stored_bytes_total", "", 900, 600),
            ("store_seconds_total", "", 0.5, 2.5),
            ("evicted_blocks_total", "", 2, 0),
            ("failures_total", ',op="load"', 0, 8),
            ("failures_total", ',op="store"', 1, 10),
            ("refused_stores_total", "", 4, 11),
            ("late_loads_total", "", 0, 12),
        )
        for tier, value in zip(("host", "disk"), values, strict=True)
    }
    assert found["chunkserve:num_requests_loading"] == 2


def test_vllms_names_have_the_sum_of_all_tiers() -> None:
    found = scraped(with_tiers(HOST, DISK))
    assert found["vllm:external_prefix_cache_hits_total"] == 8 * BLOCK_SIZE
    assert found["vllm:kv_offload_load_bytes_total"] == 800
    assert found["vllm:kv_offload_load_time_total"] == 1.5
    assert found["vllm:kv_offload_store_bytes_total"] == 1500
    assert found["vllm:kv_offload_store_time_total"] == 3.0


def test_what_the_kv_cache_had_by_itself_was_not_looked_up_in_the_tiers() -> None:
    """There are 24 prompt tokens, of which 16 are cached, 8 of these from a tier: the tiers were asked for those 8, and
    for the 8 that nothing had."""
    recorder = EngineRecorder(resolved_config())
    recorder.submitted(Submission("a", tuple(range(24)), SamplingParams()))
    recorder.stepped(StepFacts(0.0), [Scheduled("a", 16)])
    found = scraped(with_tiers(replace(HOST, hit_blocks=2)), recorder)
    assert found["vllm:prefix_cache_hits_total"] == 16
    assert found["vllm:external_prefix_cache_hits_total"] == 8
    assert found["vllm:external_prefix_cache_queries_total"] == 16


def test_a_request_whose_kv_is_loaded_does_not_wait_for_capacity() -> None:
    found = scraped(with_tiers(HOST, num_loading=2))
    assert found['vllm:num_requests_waiting_by_reason{reason="deferred"}'] == 2
    assert found['vllm:num_requests_waiting_by_reason{reason="capacity"}'] == 1


def test_an_engine_without_tiers_has_no_series_of_them() -> None:
    assert not [name for name in scraped(load_snapshot()) if "tier" in name or "offload" in name or "external" in name]


@pytest.mark.parametrize("field", [spec.name for spec in fields(TierLoad)[1:]])
def test_no_number_that_a_tier_tells_is_left_out(field: str) -> None:
    """A number that was added to TierLoad and forgotten here would change nothing."""
    changed = replace(DISK, **{field: getattr(DISK, field) + 1})
    assert scraped(with_tiers(DISK)) != scraped(with_tiers(changed))


def test_every_sample_of_a_tier_is_in_the_catalogue() -> None:
    samples = EngineRecorder(resolved_config()).samples(with_tiers(HOST, DISK))
    unknown = [one.name for one in samples if len(BY_NAME[one.name].labels) != len(one.labels)]
    assert not unknown
