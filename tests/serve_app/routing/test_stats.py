"""Contracts of the stats that engines give to Serve for the routers."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace
from typing import Any, cast

import pytest

from engine.adapter_cache import AdapterCache
from engine.async_engine import AsyncEngine
from engine.core.core import EngineCore
from engine.fake.executor import FakeExecutor
from engine.kv_tiers import Tier, TierLoad
from engine.prefix_index import KEY_BYTES, prefix_keys
from engine.protocol import EngineError, ErrorCode, LoadSnapshot, PrefillCosts, SamplingParams
from serve_app.engines.versions import EngineVersion
from serve_app.routing.stats import RoutingReport, RoutingReporter, TierReport, decode, encode, version_of
from tests.support.engines import resolved_config
from tests.support.reports import snapshot, stats

pytestmark = pytest.mark.anyio
DIGESTS = (b"a" * 16, b"b" * 16)


class Engine:
    """An engine that answers what a test puts there."""

    def __init__(self) -> None:
        self.digests: list[bytes] = []
        self.snapshot = snapshot()
        self.dead = False
        self.adapters = AdapterCache(None, 0)

    async def cached_digests(self, limit: int) -> list[bytes]:
        if self.dead:
            raise EngineError(ErrorCode.ENGINE_DEAD, "dead")
        return self.digests[:limit]

    def load(self) -> LoadSnapshot:
        return self.snapshot


def reporter(engine: Engine, published_blocks: int = 10) -> RoutingReporter:
    return RoutingReporter(cast(AsyncEngine, engine), published_blocks, lambda: 500.0)


def test_what_was_packed_is_unpacked() -> None:
    packed = stats(7.0, *DIGESTS, limit=2, rate=500.0, requests=3, waiting=1, queued=90, free_blocks=60, cached=5)
    assert decode(pickle.loads(pickle.dumps(packed))) == RoutingReport(
        taken_at_s=7.0,
        num_requests=3,
        num_queued_tokens=90,
        prefill_tokens_per_s=500.0,
        num_waiting=1,
        num_blocks=100,
        num_held_blocks=40,
        num_free_blocks=60,
        max_cached_blocks=45,
        prefix_keys=(b"a" * KEY_BYTES, b"b" * KEY_BYTES),
        all_prefixes=False,
    )


def test_stats_of_an_engine_that_does_not_tell_its_blocks_are_read() -> None:
    """In a rolling update, a router meets engines of the version before."""
    packed = stats(7.0, free_blocks=60)
    for name in ("waiting", "blocks", "held_blocks"):
        del packed[name]
    report = decode(packed)
    assert report is not None
    assert (report.num_free_blocks, report.num_blocks, report.num_waiting) == (60, 0, 0)


def test_predicted_times_are_packed_only_by_an_engine_that_predicts() -> None:
    """An engine of an earlier version, or without targets, has none; its stats are compared by tokens."""
    costs = PrefillCosts(0.002, 1e-6)
    report = decode(stats(7.0, queued=90, queued_s=0.5, costs=costs))
    assert report is not None
    assert (report.queued_prefill_s, report.prefill_costs, report.idle_prefill_costs) == (0.5, costs, costs)
    packed = stats(7.0, queued=90)
    assert not {"queued_prefill_s", "token_s", "pair_s"} & packed.keys()
    report = decode(packed)
    assert report is not None
    assert (report.queued_prefill_s, report.prefill_costs) == (None, None)


@pytest.mark.parametrize("packed", [{}, {"format": 0, "taken_at_s": 1.0}, {"queued_tokens": 5}])
def test_stats_of_another_kind_are_none(packed: dict[str, Any]) -> None:
    assert decode(packed) is None


async def test_nothing_is_reported_anew_while_an_idle_engine_stays_as_it_is() -> None:
    """Even a new time alone would be broadcast to every router, with the stats of all replicas."""
    engine = Engine()
    idle = reporter(engine)
    first = await idle.report()
    assert await idle.report() is first
    engine.digests = list(DIGESTS)
    second = await idle.report()
    assert second is not first
    assert await idle.report() is second


async def test_an_engine_that_became_slower_is_reported_even_if_it_is_idle() -> None:
    """As by a noisy neighbour: routers would go on to expect its former speed. Small changes come all the time."""
    engine = Engine()
    told = reporter(engine)
    costs = [PrefillCosts(token_s, 0.0) for token_s in (0.001, 0.00109, 0.0012, 0.0010)]
    reports = []
    for engine.snapshot in [snapshot(), *(snapshot(costs=one) for one in costs)]:
        reports.append(await told.report())
    assert [report.get("token_s") for report in reports] == [None, 0.001, 0.001, 0.0012, 0.001]


async def test_a_queue_that_does_not_move_is_reported_each_time() -> None:
    """Routers expect the queue to become shorter from the time of the report on."""
    engine = Engine()
    engine.snapshot = snapshot(requests=1, queued=100)
    stuck = reporter(engine)
    assert await stuck.report() is not await stuck.report()


async def test_a_dead_engine_repeats_its_last_stats_and_leaves_the_news_to_the_health_check() -> None:
    engine = Engine()
    told = reporter(engine)
    last = await told.report()
    engine.dead, engine.snapshot = True, snapshot(requests=1, queued=100)
    assert await told.report() is last


@pytest.mark.parametrize(("published_blocks", "num_keys", "complete"), [(100, 3, True), (3, 3, False), (0, 0, False)])
async def test_as_many_blocks_are_published_as_asked_for(published_blocks: int, num_keys: int, complete: bool) -> None:
    config, prompt = resolved_config(), tuple(range(1, 14))
    engine = AsyncEngine(EngineCore(FakeExecutor(config.num_kv_blocks, config.block_size, range(32)), config))
    try:
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        _ = [event async for event in engine.generate(prompt, params)]
        async with asyncio.timeout(20):
            report = decode(await RoutingReporter(engine, published_blocks, lambda: 500.0).report())
    finally:
        engine.shutdown()
    assert report is not None
    assert set(report.prefix_keys) <= set(prefix_keys(prompt, config.block_size, 100))
    assert (len(report.prefix_keys), report.all_prefixes) == (num_keys, complete)


# --- tiers -----------------------------------------------------------------------------------------------------------


class TieredEngine(Engine):
    """An engine with two tiers, with some digests that are only there."""

    def __init__(self) -> None:
        super().__init__()
        self.below: dict[Tier, list[bytes]] = {Tier.HOST: [b"h" * 32], Tier.DISK: [b"d" * 32, b"e" * 32]}
        self.snapshot = replace(
            snapshot(), tiers=(TierLoad(Tier.HOST, num_blocks=5), TierLoad(Tier.DISK, num_blocks=7))
        )

    async def tier_digests(self, limit: int) -> dict[Tier, list[bytes]]:
        return {tier: digests[:limit] for tier, digests in self.below.items()}


async def test_each_tier_is_reported_with_what_is_only_there() -> None:
    packed = await reporter(TieredEngine(), published_blocks=2).report()
    report = decode(pickle.loads(pickle.dumps(packed)))
    assert report is not None
    assert report.tiers == (
        TierReport((b"h" * KEY_BYTES,), all_prefixes=True, num_blocks=5),
        TierReport((b"d" * KEY_BYTES, b"e" * KEY_BYTES), all_prefixes=False, num_blocks=7),
    )


async def test_a_block_that_went_to_a_tier_is_news_and_nothing_else_is() -> None:
    engine = TieredEngine()
    told = reporter(engine)
    first = await told.report()
    assert await told.report() is first
    engine.below[Tier.HOST].append(b"i" * 32)
    assert await told.report() is not first


async def test_an_engine_without_tiers_is_not_asked_for_them() -> None:
    """It may be of a version that cannot answer."""
    report = decode(await reporter(Engine()).report())
    assert report is not None
    assert report.tiers == ()


async def test_stats_of_an_engine_that_knows_of_no_tiers_are_read() -> None:
    packed = dict(await reporter(Engine()).report())
    del packed["tiers"]
    report = decode(packed)
    assert report is not None
    assert report.tiers == ()


def test_what_an_engine_is_travels_in_its_reports() -> None:
    version = EngineVersion("m", "s", "f")
    packed = pickle.loads(
        pickle.dumps(encode(snapshot(), (), limit=9, prefill_tokens_per_s=0, taken_at_s=1.0, version=version))
    )
    assert version_of(packed) == version
    assert version_of({}) is None, "it has not reported yet"
    assert version_of(stats(1.0)) is None
