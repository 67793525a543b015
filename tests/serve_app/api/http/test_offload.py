"""Owns the contract of work in threads: whichever size it has, tenants take turns at it.
Never measures time."""

from __future__ import annotations

import asyncio
import threading

import pytest

from serve_app.api.http.offload import INLINE_SIZE, LARGE_SIZE, run_sized, work_of

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("size", [INLINE_SIZE + 1, LARGE_SIZE])
async def test_a_tenants_flood_delays_anothers_work_by_one_piece(size: int) -> None:
    """Behind a hundred texts that one tenant had tokenized, another's short prompt waited for half a minute."""
    began: list[str] = []
    released = threading.Semaphore(0)

    def piece(name: str) -> None:
        began.append(name)
        assert released.acquire(timeout=30)

    async def ask(tenant: str) -> None:
        with work_of(tenant):
            await run_sized(size, lambda: piece(tenant))

    flood = [asyncio.create_task(ask("a")) for _ in range(100)]
    await asyncio.sleep(0)
    other = asyncio.create_task(ask("b"))
    await asyncio.sleep(0)
    for _ in range(101):
        released.release()
    await asyncio.gather(other, *flood)
    assert began.count("a") == 100
    assert began.index("b") <= 2 * 32 + 1, "behind those that ran, one for each thread, and one more"


async def test_small_work_runs_at_once_and_on_the_event_loop() -> None:
    assert await run_sized(INLINE_SIZE, threading.current_thread) is threading.current_thread()
