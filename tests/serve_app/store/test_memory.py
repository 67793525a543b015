"""Owns the contract of the ways to a store of answers: in the process, and in another that may not answer.
Never starts Ray: a handle is a stand-in here, and test_serve_store has the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from serve_app.metrics.store_counts import StoreCounts
from serve_app.settings.responses_store import ResponsesStoreSettings
from serve_app.store import shared
from serve_app.store.bounded import BoundedStore
from serve_app.store.entry import Recalled, Wanted
from serve_app.store.memory import LocalMemory
from serve_app.store.shared import PAUSE_S, SharedMemory, StoreReplica
from tests.serve_app.store.test_bounded import AGE_S, Clock, entry, going_on

pytestmark = pytest.mark.anyio

SETTINGS = ResponsesStoreSettings(max_mib=1, max_age_s=AGE_S)


async def test_what_is_too_old_leaves_the_memory_though_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[tuple[float, Callable[[], None]]] = []
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda *look: looks.append(look) or look)
    clock, counts = Clock(), StoreCounts()
    kept = LocalMemory(SETTINGS, counts, BoundedStore(SETTINGS.max_bytes, AGE_S, clock))
    await kept.put("ann", entry("a"))
    clock.now = 20
    await kept.put("ann", entry("b"))
    assert (counts.num_entries, counts.num_bytes > 0) == (2, True)
    for num_left, later_s in ((1, AGE_S), (0, 20)):
        (delay_s, look), *others = looks
        assert (delay_s, others) == (later_s, [])
        looks.clear()
        clock.now = AGE_S if num_left else AGE_S + 20
        look()
        assert counts.num_entries == num_left
    assert (counts.num_bytes, looks) == (0, [])
    await kept.put("ann", entry("c"))
    assert [delay_s for delay_s, _ in looks] == [AGE_S]


async def test_lookups_are_counted_with_those_that_found_all() -> None:
    counts = StoreCounts()
    kept = LocalMemory(SETTINGS, counts)
    await kept.put("ann", entry("a"))
    await kept.recall("ann", going_on("a"))
    await kept.recall("ann", going_on("b"))
    await kept.get("ann", "a")
    await kept.get("bob", "a")
    assert (counts.queries, counts.hits) == (4, 2)


class Handle:
    """A deployment's, whose replica is in this process. `fails`: what a call does instead of its work."""

    def __init__(self) -> None:
        self.replica = StoreReplica(SETTINGS)
        self.fails: Callable[[], Awaitable[Any]] | None = None
        self.num_calls = 0

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._call(method, *arguments))

    async def _call(self, method: str, *arguments: Any) -> Any:
        self.num_calls += 1
        return await (getattr(self.replica, method)(*arguments) if self.fails is None else self.fails())


async def test_a_shared_store_is_one_for_all_who_share_it() -> None:
    handle = Handle()
    mine, others = StoreCounts(), StoreCounts()
    one = SharedMemory(handle, SETTINGS, mine)  # type: ignore[arg-type]
    other = SharedMemory(handle, SETTINGS, others)  # type: ignore[arg-type]
    assert await one.put("ann", entry("a"))
    assert await other.get("ann", "a") == entry("a")
    assert await other.recall("ann", going_on("a")) == Recalled(tuple(entry("a").conversation))
    assert await other.get("bob", "a") is None
    assert (others.queries, others.hits) == (3, 2)
    assert (others.num_entries, others.num_bytes) == (mine.num_entries, mine.num_bytes) == (1, mine.num_bytes)
    assert await other.delete("ann", "a")
    assert not await one.delete("ann", "a")


async def dead() -> Any:
    raise ActorDiedError


async def silent() -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize("fails", [dead, silent], ids=["dead", "silent"])
async def test_a_store_that_is_down_finds_nothing_and_is_not_waited_for_by_each_request(
    fails: Callable[[], Awaitable[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "ANSWER_S", 0.01)
    handle, clock, counts = Handle(), Clock(), StoreCounts()
    kept = SharedMemory(handle, SETTINGS, counts, clock)  # type: ignore[arg-type]
    assert await kept.put("ann", entry("a"))
    handle.fails, handle.num_calls = fails, 0
    assert await kept.recall("ann", going_on("a")) == Recalled(missing="a")
    assert await kept.recall("ann", Wanted(None, (("a", "msg_a"),), 100)) == Recalled(missing="msg_a")
    assert not await kept.put("ann", entry("b"))
    assert await kept.get("ann", "a") is None
    assert not await kept.delete("ann", "a")
    assert handle.num_calls == 1
    assert (counts.queries, counts.hits) == (3, 0)
    handle.fails = None
    assert await kept.get("ann", "a") is None
    clock.now = PAUSE_S
    assert await kept.get("ann", "a") == entry("a")
