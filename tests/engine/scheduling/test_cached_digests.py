"""Contracts of what an engine reports about its prefix cache, from the blocks up to the library."""

from __future__ import annotations

import asyncio
import threading

import pytest

from engine.async_engine import AsyncEngine
from engine.core.core import EngineCore
from engine.fake.executor import FakeExecutor
from engine.prefix import extend_chain
from engine.protocol import EngineError, ErrorCode, Finished, SamplingParams
from engine.scheduling.block_manager import BlockManager
from engine.step import ExecutorFatalError, StepPlan
from tests.support.engines import resolved_config

PROMPT = tuple(range(1, 10))


def chain_of(tokens: tuple[int, ...], block_size: int) -> list[bytes]:
    digests: list[bytes] = []
    extend_chain(digests, tokens, len(tokens) // block_size, block_size)
    return digests


def cached(blocks: BlockManager, *chains: list[bytes]) -> list[tuple[int, ...]]:
    """Hold and publish the blocks of each chain."""
    held = []
    for chain in chains:
        held.append(blocks.allocate(len(chain)))
        for block_id, digest in zip(held[-1], chain, strict=True):
            blocks.publish(block_id, digest)
    return held


def test_the_digests_are_those_of_cached_blocks_held_or_not() -> None:
    blocks = BlockManager(8, 2)
    first, second = [b"a1", b"a2"], [b"b1"]
    held = cached(blocks, first, second)
    blocks.allocate(1)
    assert set(blocks.cached_digests(10)) == {b"a1", b"a2", b"b1"}
    blocks.release(held[0])
    assert set(blocks.cached_digests(10)) == {b"a1", b"a2", b"b1"}
    blocks.claim(blocks.match(first))
    assert set(blocks.cached_digests(10)) == {b"a1", b"a2", b"b1"}


def test_what_is_in_use_comes_first_then_what_was_released_last_and_heads_before_tails() -> None:
    """A report that is cut after `limit` must not begin with tails, which are of no use without their heads."""
    blocks = BlockManager(8, 2)
    old, new, used = cached(blocks, [b"o1", b"o2"], [b"n1", b"n2"], [b"u1", b"u2"])
    blocks.release(old)
    blocks.release(new)
    assert blocks.cached_digests(10) == [b"u1", b"u2", b"n1", b"n2", b"o1", b"o2"]
    assert blocks.cached_digests(3) == [b"u1", b"u2", b"n1"]
    assert blocks.cached_digests(0) == []
    assert blocks.is_held(used[0])


def test_an_evicted_block_is_not_among_them() -> None:
    blocks = BlockManager(2, 2)
    (held,) = cached(blocks, [b"1", b"2"])
    blocks.release(held)
    blocks.allocate(1)
    assert blocks.cached_digests(10) == [b"1"]


def make_engine(before_step: object = None) -> AsyncEngine:
    config = resolved_config()
    executor = FakeExecutor(config.num_kv_blocks, config.block_size, range(32), before_step=before_step)  # type: ignore[arg-type]
    return AsyncEngine(EngineCore(executor, config))


def test_an_idle_engine_answers_with_the_prompts_that_it_has_computed() -> None:
    async def main() -> None:
        engine = make_engine()
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        events = [event async for event in engine.generate(PROMPT, params)]
        assert isinstance(events[-1], Finished)
        async with asyncio.timeout(10):
            assert set(await engine.cached_digests(100)) == set(chain_of(PROMPT, engine.config.block_size))
            assert await engine.cached_digests(1) == chain_of(PROMPT, engine.config.block_size)[:1]
        engine.shutdown()

    asyncio.run(main())


def test_a_dead_engine_raises_instead_of_never_answering() -> None:
    async def main() -> None:
        engine = make_engine()
        engine.shutdown()
        async with asyncio.timeout(10):
            with pytest.raises(EngineError) as raised:
                await engine.cached_digests(1)
        assert raised.value.code is ErrorCode.ENGINE_DEAD

    asyncio.run(main())


def test_an_engine_that_dies_with_the_question_in_its_queue_raises() -> None:
    """The thread runs no command after its last step, so a caller that asked during that step would wait for ever."""
    in_step, asked = threading.Event(), threading.Event()

    def die(plan: StepPlan) -> None:
        in_step.set()
        asked.wait(10)
        raise ExecutorFatalError("gone")

    async def main() -> None:
        engine = make_engine(die)
        request = asyncio.ensure_future(anext(engine.generate(PROMPT, SamplingParams(max_tokens=1))))
        assert await asyncio.to_thread(in_step.wait, 10)
        question = asyncio.ensure_future(engine.cached_digests(1))
        await asyncio.sleep(0)  # the question is in the queue
        asked.set()
        async with asyncio.timeout(10):
            with pytest.raises(EngineError) as raised:
                await question
        assert raised.value.code is ErrorCode.ENGINE_DEAD
        await request
        engine.shutdown()

    asyncio.run(main())


def test_a_caller_that_stops_waiting_does_the_engine_no_harm() -> None:
    async def main() -> None:
        engine = make_engine()
        mishaps: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: mishaps.append(context))
        question = asyncio.ensure_future(engine.cached_digests(1))
        await asyncio.sleep(0)
        question.cancel()
        async with asyncio.timeout(10):
            assert await engine.cached_digests(1) == []
            await engine.check_health()
        assert mishaps == []
        engine.shutdown()

    asyncio.run(main())


def test_a_loop_that_closed_before_its_answer_does_the_engine_no_harm() -> None:
    engine = make_engine()

    async def leave() -> None:
        question = asyncio.ensure_future(engine.cached_digests(1))
        await asyncio.sleep(0)
        question.cancel()

    for _ in range(20):
        asyncio.run(leave())
    assert asyncio.run(engine.cached_digests(1)) == []
    engine.shutdown()
