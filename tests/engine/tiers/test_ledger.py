"""One process or thread at a time has the lock over a shared directory, and nobody waits for it without an end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.tiers.ledger import Ledger, on_disk


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


@pytest.fixture
def ledgers(path: Path) -> Iterator[tuple[Ledger, Ledger]]:
    """Those of two engines."""
    pair = Ledger(path), Ledger(path)
    yield pair
    for ledger in pair:
        ledger.close()


def is_free(ledger: Ledger) -> bool:
    try:
        with ledger.hold(0):
            return True
    except TimeoutError:
        return False


def test_while_one_has_the_lock_no_other_has(ledgers: tuple[Ledger, Ledger]) -> None:
    first, second = ledgers
    with first.hold():
        assert not is_free(second)
        with (
            pytest.raises(TimeoutError, match=r"lock has been locked by another process for 0.01 s"),
            second.hold(0.01),
        ):
            pass
    assert is_free(second)


def test_threads_of_one_engine_exclude_each_other_too(ledgers: tuple[Ledger, Ledger]) -> None:
    first, _ = ledgers
    free: list[bool] = []
    with first.hold():
        thread = threading.Thread(target=lambda: free.append(is_free(first)))
        thread.start()
        thread.join()
    assert free == [False]
    assert is_free(first)


def test_an_error_ends_the_lock(ledgers: tuple[Ledger, Ledger]) -> None:
    first, second = ledgers
    with pytest.raises(OSError, match="no space"), first.hold():
        raise OSError("no space")
    assert is_free(second)


def test_a_lock_whose_file_was_removed_is_taken_anew(ledgers: tuple[Ledger, Ledger], path: Path) -> None:
    """Otherwise an engine that knew the old file and one that made another would both have the lock."""
    first, second = ledgers
    assert is_free(first)
    path.unlink()
    with second.hold():
        assert not is_free(first)
    with first.hold():
        assert not is_free(second)


def test_the_count_is_one_for_all(ledgers: tuple[Ledger, Ledger]) -> None:
    first, second = ledgers
    with first.hold():
        assert first.read() is None
        first.add(5)
        assert first.read() is None, "nobody has counted yet"
        first.write(100)
    with second.hold():
        second.add(20)
        assert second.read() == 120
        second.add(-500)
        assert second.read() == 0
        second.write(7)
    first.look()
    assert first.last == 7


@pytest.mark.parametrize("text", ["", "12", "x" * 21, f"{5:020d}"])
def test_a_damaged_count_is_none(ledgers: tuple[Ledger, Ledger], path: Path, text: str) -> None:
    first, _ = ledgers
    path.write_text(text)
    with first.hold():
        assert first.read() is None


def test_a_file_takes_whole_pages() -> None:
    assert [on_disk(size) for size in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
