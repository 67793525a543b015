"""What an engine replica does before it is ready."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from engine.async_engine import AsyncEngine
from engine.config import KvTiersConfig
from engine.core.core import EngineCore
from engine.fake.executor import FakeExecutor
from engine.protocol import EngineError
from engine.step import RowKind, ScheduledRequest, StepPlan
from serve_app.replicas.served_model import warm_up
from tests.support.engines import resolved_config

pytestmark = pytest.mark.anyio


class Warmed:
    """An engine, and the steps that it made."""

    def __init__(self, failing: str | None = None, **overrides: object) -> None:
        self.plans: list[StepPlan] = []
        config = resolved_config(**overrides)

        def fail(row: ScheduledRequest) -> str | None:
            return failing

        executor = FakeExecutor(
            config.num_kv_blocks, config.block_size, range(32), before_step=self.plans.append, failing=fail
        )
        self.engine = AsyncEngine(EngineCore(executor, config))


@pytest.fixture
async def engines() -> AsyncIterator[list[AsyncEngine]]:
    made: list[AsyncEngine] = []
    yield made
    for engine in made:
        engine.shutdown()


async def test_warming_up_makes_the_largest_prefill_step_and_a_decode_step_and_leaves_nothing(
    engines: list[AsyncEngine],
) -> None:
    warmed = Warmed()
    engines.append(warmed.engine)
    await warm_up(warmed.engine)
    assert max(plan.num_tokens for plan in warmed.plans) == warmed.engine.config.max_prefill_tokens
    assert {row.kind for plan in warmed.plans for row in plan.rows} >= {RowKind.LAST, RowKind.DECODE}
    load = warmed.engine.load()
    assert (load.num_held_blocks, load.num_running, await warmed.engine.cached_digests(10)) == (0, 0, [])


async def test_warming_up_wipes_no_tier_and_computes_its_prompt_though_a_disk_may_have_it(
    engines: list[AsyncEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reset at the start would take from a shared disk what all engines of the machine have stored there."""
    resets: list[bool] = []
    warmed = Warmed(kv_tiers=KvTiersConfig(host_memory_gib=1.0))
    engines.append(warmed.engine)
    monkeypatch.setattr(warmed.engine, "reset_prefix_cache", lambda: resets.append(True))
    for _ in range(2):
        warmed.plans.clear()
        await warm_up(warmed.engine)
        assert max(plan.num_tokens for plan in warmed.plans) == warmed.engine.config.max_prefill_tokens
    assert resets == []


async def test_an_engine_whose_context_is_shorter_than_a_step_warms_up_within_it(engines: list[AsyncEngine]) -> None:
    warmed = Warmed(max_model_len=8)
    engines.append(warmed.engine)
    await warm_up(warmed.engine)
    assert warmed.plans


async def test_an_engine_that_makes_embeddings_alone_warms_up_with_one(engines: list[AsyncEngine]) -> None:
    warmed = Warmed(headless=True)
    engines.append(warmed.engine)
    await warm_up(warmed.engine)
    assert max(plan.num_tokens for plan in warmed.plans) == warmed.engine.config.max_prefill_tokens


async def test_an_engine_that_cannot_warm_up_is_not_ready(engines: list[AsyncEngine]) -> None:
    warmed = Warmed(failing="out of luck")
    engines.append(warmed.engine)
    with pytest.raises(EngineError, match="failed to warm up"):
        await warm_up(warmed.engine)
