"""The simulator's clock: asyncio's own programs run on it, in an order that does not depend on the machine."""

from __future__ import annotations

import asyncio

import pytest

from loadtest.sim.virtual_loop import NothingLeftError, run


def test_time_goes_on_to_what_is_due_next_and_stands_still_while_anything_runs() -> None:
    async def stamps() -> list[float]:
        loop = asyncio.get_running_loop()
        found = [loop.time()]
        for wait_s in (2.5, 0.0, 3600.0):
            await asyncio.sleep(wait_s)
            found.append(loop.time())
        return found

    assert run(stamps()) == [0.0, 2.5, 2.5, 3602.5]


def test_what_is_due_at_one_time_runs_in_the_order_in_which_it_was_asked_for() -> None:
    async def order() -> list[str]:
        loop, ran = asyncio.get_running_loop(), list[str]()
        for name in "abcdefgh":
            loop.call_at(1.0, ran.append, name)
        loop.call_at(0.5, ran.append, "early")
        loop.call_soon(ran.append, "now")
        await asyncio.sleep(2)
        return ran

    assert run(order()) == ["now", "early", *"abcdefgh"]


def test_what_was_cancelled_neither_runs_nor_makes_time_go_on() -> None:
    async def cancelled() -> tuple[list[str], float]:
        loop, ran = asyncio.get_running_loop(), list[str]()
        timer = loop.call_later(100.0, ran.append, "late")
        soon = loop.call_soon(ran.append, "soon")
        for handle in (timer, soon):
            handle.cancel()
        await asyncio.sleep(1)
        return ran, loop.time()

    assert run(cancelled()) == ([], 1.0)


def test_timeouts_tasks_and_groups_of_them_are_asyncios_own() -> None:
    async def program() -> tuple[float, list[int]]:
        loop, done = asyncio.get_running_loop(), list[int]()

        async def work(number: int) -> None:
            await asyncio.sleep(number)
            done.append(number)

        async def work_together() -> None:
            async with asyncio.TaskGroup() as group:
                for number in (4, 1, 2):
                    group.create_task(work(number))

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(work_together(), 2.5)
        return loop.time(), done

    assert run(program()) == (2.5, [1, 2])


def test_a_program_that_waits_for_what_never_comes_is_ended_and_says_when() -> None:
    async def waits() -> None:
        await asyncio.sleep(7)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(NothingLeftError, match=r"at 7\.000 s all tasks wait"):
        run(waits())
