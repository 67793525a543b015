"""Owns the contract of the store of answers: what is found, by whom, for how long, and how much memory it takes.
Never tests what a client sees of it; test_responses_store does."""

from __future__ import annotations

import tracemalloc

import pytest

from serve_app.store.bounded import BoundedStore
from serve_app.store.entry import ENTRY_BYTES, PLACE_BYTES, Entry, Recalled, Wanted
from serve_app.store.tenant_store import size_of
from tests.support.seeds import seeded_random

PLENTY = 2**20
AGE_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def entry(name: str, size: int = 10, previous: str | None = None, asked: bytes = b"hi") -> Entry:
    """An answer of so many bytes; each is another text."""
    return Entry(name, previous, (asked,), {f"msg_{name}": name.encode().ljust(size, b".")}, (b"{}",))


def store_of(num_bytes: int = PLENTY, clock: Clock | None = None) -> BoundedStore:
    return BoundedStore(num_bytes, AGE_S, clock or Clock())


def room_for(count: int, size: int) -> int:
    """Bytes for so many answers of this size to one tenant, which share their input and their fields."""
    return count * (ENTRY_BYTES + 3 * PLACE_BYTES + size) + len(b"hi{}")


def names(store: BoundedStore, tenant: str, asked: str) -> str:
    """Those of the names that the store has, without using them."""
    return "".join(name for name in asked if name in store._stores.get(tenant, ()))


def going_on(name: str, max_bytes: int = PLENTY) -> Wanted:
    return Wanted(name, (), max_bytes)


def test_what_is_kept_is_found_by_its_id_until_it_is_deleted() -> None:
    store = store_of()
    assert store.put("ann", entry("a"))
    assert store.get("ann", "a") == entry("a")
    assert store.delete("ann", "a")
    assert store.get("ann", "a") is None
    assert not store.delete("ann", "a")
    assert (store.num_entries, store.num_bytes) == (0, 0)


def test_another_tenants_answer_is_as_unknown_as_any() -> None:
    store = store_of()
    store.put("ann", entry("a"))
    assert store.get("bob", "a") is None
    assert not store.delete("bob", "a")
    assert store.recall("bob", going_on("a")) == Recalled(missing="a")
    assert store.recall("bob", Wanted(None, (("a", "msg_a"),), PLENTY)) == Recalled(missing="msg_a")
    assert store.get("ann", "a") is not None


def test_the_least_recently_used_leaves_when_there_is_no_room() -> None:
    store = store_of(room_for(3, 100))
    for name in "abc":
        assert store.put("ann", entry(name, 100))
    store.get("ann", "a")
    assert store.put("ann", entry("d", 100))
    assert names(store, "ann", "abcd") == "acd"
    assert store.num_bytes == room_for(3, 100)


def test_an_answer_that_is_larger_than_the_store_is_not_kept_and_pushes_nothing_out() -> None:
    store = store_of(room_for(2, 100))
    store.put("ann", entry("a", 100))
    assert not store.put("ann", entry("b", room_for(2, 100)))
    assert names(store, "ann", "ab") == "a"


def test_an_answer_that_pushes_out_what_it_goes_on_from_is_not_kept() -> None:
    """Regression: it was said to be kept, and could not be continued."""
    store = store_of(room_for(2, 100))
    assert store.put("ann", entry("a", 100))
    assert store.put("ann", entry("b", 100, previous="a"))
    assert store.recall("ann", Wanted("b", (), PLENTY)).missing is None
    assert not store.put("ann", entry("c", 100, previous="b"))
    assert names(store, "ann", "abc") == "a"


def test_the_tenant_that_keeps_most_makes_room() -> None:
    store = store_of(room_for(4, 100) + len(b"hi{}"))
    store.put("bob", entry("z", 100))
    for name in "abcde":
        assert store.put("ann", entry(name, 100))
    assert names(store, "bob", "z") == "z"
    assert names(store, "ann", "abcde") == "cde"


def test_an_answer_that_others_leave_no_room_for_is_said_not_to_be_kept() -> None:
    store = store_of(room_for(1, 1000) + 1000)
    store.put("bob", entry("z", 400))
    assert not store.put("ann", entry("a", 1900))
    assert (names(store, "ann", "a"), names(store, "bob", "z")) == ("", "z")


@pytest.mark.parametrize("later_s", [AGE_S - 1, AGE_S])
def test_an_answer_is_kept_for_so_long_after_its_last_use(later_s: float) -> None:
    clock = Clock()
    store = store_of(clock=clock)
    store.put("ann", entry("a"))
    store.put("ann", entry("b"))
    clock.now = 10
    assert store.get("ann", "a") is not None
    clock.now = 10 + later_s
    assert (store.get("ann", "a") is None) is (later_s == AGE_S)
    assert store.get("ann", "b") is None
    assert store.num_entries == (0 if later_s == AGE_S else 1)


def test_expiring_tells_when_to_look_again() -> None:
    clock = Clock()
    store = store_of(clock=clock)
    assert store.expire() is None
    store.put("ann", entry("a"))
    clock.now = 20
    store.put("bob", entry("b"))
    assert store.expire() == AGE_S - 20
    clock.now = AGE_S
    assert store.expire() == 20
    assert (names(store, "ann", "a"), names(store, "bob", "b")) == ("", "b")


def test_a_conversation_is_recalled_from_its_first_answer_on() -> None:
    store = store_of()
    store.put("ann", entry("a", 1, asked=b"1"))
    store.put("ann", entry("b", 1, "a", asked=b"2"))
    store.put("ann", entry("x", 1))
    assert store.recall("ann", going_on("b")) == Recalled((b"1", b"a", b"2", b"b"))


def test_a_conversation_that_goes_on_keeps_its_beginning() -> None:
    clock = Clock()
    store = store_of(clock=clock)
    store.put("ann", entry("a"))
    for number, name in enumerate("bcdef"):
        clock.now += AGE_S / 2
        previous = "abcde"[number]
        assert store.recall("ann", going_on(previous)).missing is None
        store.put("ann", entry(name, previous=previous))
    assert len(store.recall("ann", going_on("f")).conversation) == 12


def test_of_a_conversation_its_last_answer_leaves_first() -> None:
    """The others are of use without it; without the first, none is."""
    store = store_of(room_for(3, 100))
    for previous, name in ((None, "a"), ("a", "b"), ("b", "c")):
        store.put("ann", entry(name, 100, previous))
    store.recall("ann", going_on("c"))
    store.put("ann", entry("x", 100))
    assert names(store, "ann", "abcx") == "abx"


def test_a_conversation_with_a_gap_names_what_is_missing() -> None:
    store = store_of()
    store.put("ann", entry("a"))
    store.put("ann", entry("b", previous="a"))
    store.delete("ann", "a")
    assert store.recall("ann", going_on("b")) == Recalled(missing="a")


def test_items_are_found_by_the_answer_that_has_them() -> None:
    store = store_of()
    store.put("ann", entry("a", 1))
    assert store.recall("ann", Wanted(None, (("a", "msg_a"),), 1)) == Recalled(items={"msg_a": b"a"})
    assert store.recall("ann", Wanted(None, (("a", "msg_b"),), 1)) == Recalled(missing="msg_b")


@pytest.mark.parametrize("num_bytes", [9, 10])
def test_no_more_is_recalled_than_is_wanted_at_most(num_bytes: int) -> None:
    store = store_of()
    store.put("ann", entry("a", 3, asked=b"1"))
    store.put("ann", entry("b", 2, "a", asked=b"2"))
    recalled = store.recall("ann", Wanted("b", (("a", "msg_a"),), num_bytes))
    assert recalled.is_too_large is (num_bytes == 9)
    assert bool(recalled.conversation) is bool(recalled.items) is (num_bytes == 10)


def test_a_text_that_many_answers_have_is_kept_and_counted_once() -> None:
    store = store_of()
    prompt = bytes(100_000)
    for name in "abc":
        store.put("ann", entry(name, asked=bytes(bytearray(prompt))))
    assert len({id(store.get("ann", name).input[0]) for name in "abc"}) == 1  # type: ignore[union-attr]
    assert store.num_bytes < 2 * len(prompt)
    store.delete("ann", "a")
    store.delete("ann", "b")
    assert store.get("ann", "c") == entry("c", asked=prompt)
    store.delete("ann", "c")
    assert store.num_bytes == 0


def test_the_bound_is_one_of_the_process_memory() -> None:
    """Many small answers, which take most beside their texts."""
    limit = 2 * 2**20
    store = BoundedStore(limit, AGE_S, Clock())
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(4000):
            name = f"resp_{number:032}"
            items = {f"msg_{number:032}_{place}": f"{number}, {place}".encode() for place in range(number % 5)}
            store.put("ann", Entry(name, None, (f"[{number}]".encode(),), items, (f"<{number}>".encode(), b"{}")))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert store.num_entries < 1500, "the store is full"
    assert after - before <= 1.1 * limit


def test_whatever_happens_the_sizes_are_those_of_what_is_there() -> None:
    random, clock = seeded_random(), Clock()
    limit = room_for(8, 300)
    store = store_of(limit, clock)
    for step in range(2000):
        clock.now += random.random()
        tenant, name = random.choice("xyz"), f"{step}"
        match random.randrange(4):
            case 0 | 1:
                store.put(tenant, entry(name, random.randrange(1, 600), asked=random.choice((b"1", b"2" * 200))))
            case 2:
                store.get(tenant, f"{step - random.randrange(10)}")
            case 3:
                store.delete(tenant, f"{step - random.randrange(10)}")
        for kept_by in store._stores.values():
            entries = [kept for _, kept in kept_by._entries.values()]
            texts = {text for kept in entries for text in kept.texts}
            own = sum(size_of(kept) - sum(map(len, set(kept.texts))) for kept in entries)
            assert entries
            assert kept_by.num_bytes == own + sum(map(len, texts))
        assert store.num_bytes <= limit
