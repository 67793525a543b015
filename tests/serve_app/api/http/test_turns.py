"""Who is next where work takes a core for seconds, and what becomes of the place of a request that is gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from serve_app.api.http.turns import TenantTurns

pytestmark = pytest.mark.anyio


class Work:
    """Pieces of work that are held until they are released, and the order in which they began."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self._news, self._released = threading.Semaphore(0), threading.Semaphore(0)

    def piece(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.began.append(name)
            self._news.release()
            assert self._released.acquire(timeout=30)
            return name

        return run

    async def has_begun(self, count: int = 1) -> None:
        """Wait until so many more pieces have begun."""
        for _ in range(count):
            assert await asyncio.to_thread(self._news.acquire, timeout=30)

    def release(self, count: int = 1) -> None:
        self._released.release(count)


def num_waiting(turns: TenantTurns) -> int:
    return sum(map(len, turns._waiting.values()))


async def test_a_tenant_waits_for_one_piece_of_another_and_not_for_all() -> None:
    """Thirty-two small grammars that took a second each delayed another tenant's request by fifteen."""
    turns, work = TenantTurns(1), Work()
    tasks = [asyncio.create_task(turns.run("b", work.piece(f"b{number}"))) for number in range(32)]
    await work.has_begun()
    tasks.append(asyncio.create_task(turns.run("a", work.piece("a0"))))
    await asyncio.sleep(0)
    work.release(33)
    await asyncio.gather(*tasks)
    assert work.began.index("a0") <= 2
    assert [name for name in work.began if name != "a0"] == [f"b{number}" for number in range(32)]


async def test_no_more_runs_at_a_time_than_there_are_threads() -> None:
    turns, work = TenantTurns(2), Work()
    tasks = [asyncio.create_task(turns.run(str(number), work.piece(str(number)))) for number in range(5)]
    await work.has_begun(2)
    assert (sorted(work.began), num_waiting(turns)) == (["0", "1"], 3)
    work.release(5)
    assert await asyncio.gather(*tasks) == ["0", "1", "2", "3", "4"]


async def test_work_that_is_cancelled_while_it_waits_is_not_begun_and_others_are() -> None:
    turns, work = TenantTurns(1), Work()
    first, gone, last = (asyncio.create_task(turns.run("a", work.piece(name))) for name in ("first", "gone", "last"))
    await work.has_begun()
    gone.cancel()
    work.release(2)
    assert await asyncio.gather(first, last) == ["first", "last"]
    assert work.began == ["first", "last"]
    with pytest.raises(asyncio.CancelledError):
        await gone


async def test_a_cancelled_request_keeps_its_thread_until_the_work_is_done() -> None:
    turns, work = TenantTurns(1), Work()
    gone = asyncio.create_task(turns.run("a", work.piece("gone")))
    await work.has_begun()
    gone.cancel()
    following = asyncio.create_task(turns.run("b", work.piece("following")))
    await asyncio.sleep(0)  # both tasks have had their turn of the loop
    await asyncio.sleep(0)
    assert (work.began, num_waiting(turns)) == (["gone"], 1)
    work.release(2)
    assert await following == "following"


async def test_a_turn_that_came_as_its_request_was_cancelled_goes_to_the_next() -> None:
    turns, work = TenantTurns(1), Work()
    first = asyncio.create_task(turns.run("a", work.piece("first")))
    await work.has_begun()
    gone = asyncio.create_task(turns.run("b", work.piece("gone")))
    last = asyncio.create_task(turns.run("c", work.piece("last")))
    await asyncio.sleep(0)
    turns._pass_on()  # as if the first had ended: it is now the second's turn
    gone.cancel()
    work.release(2)
    assert await asyncio.gather(first, last) == ["first", "last"]
    assert "gone" not in work.began


async def test_an_error_reaches_its_request_and_the_next_one_runs() -> None:
    turns = TenantTurns(1)

    def fail() -> None:
        raise ValueError("no grammar")

    with pytest.raises(ValueError, match="no grammar"):
        await turns.run("a", fail)
    assert await turns.run("a", lambda: 1) == 1
