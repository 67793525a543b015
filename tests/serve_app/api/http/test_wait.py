"""Waits that somebody else ends: they keep what asyncio.timeout promises, without its timer."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.api.http.wait import Wait, WaitEnded

pytestmark = pytest.mark.anyio


async def waiting(wait: Wait) -> None:
    with wait:
        await asyncio.Event().wait()


async def test_an_ended_wait_says_so_and_the_task_goes_on() -> None:
    wait = Wait()

    async def main() -> str:
        with pytest.raises(WaitEnded):
            await waiting(wait)
        await asyncio.sleep(0)  # nothing of the cancellation is left
        with wait:
            await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        return "went on"

    task = asyncio.ensure_future(main())
    await asyncio.sleep(0)
    assert wait.is_on
    wait.end()
    wait.end()
    assert await task == "went on"
    assert not wait.is_on


async def test_ending_no_wait_is_nothing_to_the_next() -> None:
    wait = Wait()
    wait.end()
    with wait:
        await asyncio.sleep(0)


async def test_a_cancelled_task_is_cancelled() -> None:
    task = asyncio.ensure_future(waiting(Wait()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("first", ["cancelled", "ended"])
async def test_a_task_that_is_cancelled_while_its_wait_ends_is_cancelled(first: str) -> None:
    wait = Wait()
    task = asyncio.ensure_future(waiting(wait))
    await asyncio.sleep(0)
    steps = [task.cancel, wait.end]
    for step in steps if first == "cancelled" else reversed(steps):
        step()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_arrives_as_the_wait_ends_is_not_taken_for_the_end_of_another() -> None:
    wait = Wait()
    there = asyncio.Event()

    async def main() -> None:
        with pytest.raises(WaitEnded), wait:
            await there.wait()
        await asyncio.sleep(0)

    task = asyncio.ensure_future(main())
    await asyncio.sleep(0)
    there.set()
    wait.end()
    await task
