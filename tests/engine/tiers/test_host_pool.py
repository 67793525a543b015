"""The host tier's rows: named, held, free again, and never two owners."""

from __future__ import annotations

import random

import pytest

from engine.tiers.host_pool import HostPool
from tests.support.seeds import next_seed

A, B = b"a" * 16, b"b" * 16


def test_a_row_is_free_once_it_has_no_name_and_nobody_holds_it() -> None:
    pool = HostPool(1, 0, 8)
    row = pool.take()
    assert row is not None
    assert pool.name(row, A)
    pool.release(row)
    assert pool.take() is None
    assert pool.find(A) == row
    pool.drop(A)
    assert pool.find(A) is None
    assert pool.take() is None, "it is still read"
    pool.release(row)
    assert pool.take() == row


def test_there_are_no_more_names_than_blocks_and_each_has_one_row() -> None:
    pool = HostPool(1, 2, 8)
    first, second = pool.take(), pool.take()
    assert first is not None
    assert second is not None
    assert (pool.name(first, A), pool.name(second, A), pool.name(second, B)) == (True, False, False)
    pool.drop(A)
    assert pool.name(second, B)
    assert (pool.num_named, pool.has(A), pool.has(B)) == (1, False, True)


def test_rows_are_apart_and_keep_what_was_written() -> None:
    pool = HostPool(3, 1, 8)
    rows = [row for _ in range(4) if (row := pool.take()) is not None]
    for row in rows:
        pool.view(row)[:] = bytes([row]) * 8
    assert [bytes(pool.view(row)) for row in rows] == [bytes([row]) * 8 for row in rows]
    assert pool.take() is None


def test_a_reset_frees_all_rows_but_those_that_are_held() -> None:
    pool = HostPool(2, 0, 8)
    for digest in (A, B):
        row = pool.take()
        assert row is not None
        pool.name(row, digest)
        pool.release(row)
    held = pool.find(A)
    assert held is not None
    assert pool.reset() == 2
    assert pool.num_named == 0
    assert pool.take() != held
    assert pool.take() is None


def test_a_release_too_many_is_a_bug_that_is_found() -> None:
    pool = HostPool(1, 0, 8)
    row = pool.take()
    assert row is not None
    pool.release(row)
    with pytest.raises(AssertionError, match="more often than held"):
        pool.release(row)


def test_memory_is_made_known_to_the_device_once_and_taken_from_it_at_the_end() -> None:
    log: list[str] = []

    def pin(memory: memoryview) -> object:
        log.append(f"pinned {len(memory)}")
        return lambda: log.append("unpinned")

    pool = HostPool(2, 1, 8, pin)  # type: ignore[arg-type]
    view = pool.view(1)
    pool.close()
    pool.close()
    view[:] = b"whatever"  # whoever still has a row may use it
    assert log == ["pinned 24", "unpinned"]


def test_in_random_lives_no_row_has_two_contents() -> None:
    draw, pool = random.Random(next_seed()), HostPool(4, 3, 1)
    held: list[int] = []
    named: dict[bytes, int] = {}
    for _ in range(3000):
        action = draw.randrange(4)
        digest = bytes([draw.randrange(8)])
        if action == 0 and (row := pool.take()) is not None:
            assert row not in held
            assert row not in named.values()
            held.append(row)
        elif action == 1 and held:
            row = draw.choice(held)
            if row not in named.values() and pool.name(row, digest):
                assert digest not in named
                named[digest] = row
        elif action == 2 and held:
            row = held.pop(draw.randrange(len(held)))
            pool.release(row)
        elif draw.random() < 0.5:
            pool.drop(digest)
            named.pop(digest, None)
        elif (row := pool.find(digest)) is not None:
            assert named[digest] == row
            held.append(row)
        assert pool.num_named == len(named) <= 4
