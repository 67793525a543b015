"""Files of all engines and models stay within one bound, and those leave first that were not used for longest."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from engine.config import ConfigError
from engine.tiers.cipher import Names
from engine.tiers.disk import DiskTier
from engine.tiers.faults import TierFault
from engine.tiers.writing import Writing
from tests.support.disk_tiers import (
    BLOCK_BYTES,
    FILE_BYTES,
    MODEL,
    Watch,
    bytes_on_disk,
    digest,
    file_of,
    files,
    is_right,
    loaded,
    opened,
    path_of,
    store,
    there,
    used_at,
)

MINUTE_NS = 60_000_000_000


def test_what_others_are_writing_counts_and_a_block_that_finds_no_room_is_not_written(tmp_path: Path) -> None:
    with opened(tmp_path, capacity_bytes=4 * FILE_BYTES) as tier:
        store(tier, 1, 2)
        other = Writing(tmp_path / "v2/writing")
        other.enter()
        for _ in range(4):
            descriptor, _ = other.create(BLOCK_BYTES)
            os.close(descriptor)
        (tmp_path / "v2/lock").unlink()  # so that it is counted anew
        with pytest.raises(TierFault, match="has no room yet"):
            store(tier, 3)
        assert sorted(tier.take_changes()) == sorted([(digest(1), False), (digest(2), False)])
        other.leave()
        store(tier, 3)
        assert there(tier) == [3]


def test_files_leave_that_were_not_used_for_longest(tmp_path: Path) -> None:
    capacity = 4 * FILE_BYTES
    with opened(tmp_path) as tier:
        for number in range(4):
            used_at(file_of(tmp_path, tier, number), 1000.0 - 100 * number)
    with opened(tmp_path, capacity_bytes=capacity) as tier:
        watch = Watch(tier)
        watch.take()
        watch.all.clear()
        assert is_right(tier, 0), "a read is a use"
        store(tier, 4)
        watch.take()
        assert watch.all == [(digest(1), False)]
        assert there(tier) == [0, 2, 3, 4]
        assert bytes_on_disk(tmp_path) == tier.sizes()[1] == capacity


def at_minute(monkeypatch: pytest.MonkeyPatch, minute: float) -> None:
    """Stop the clock that files are dated by, so many minutes after some full one."""
    monkeypatch.setattr(time, "time_ns", lambda: round((20_000_000 + minute) * MINUTE_NS))


def test_a_use_is_noted_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as tier:
        path = file_of(tmp_path, tier, 1)
        at_minute(monkeypatch, 0.5)
        for minute, noted in ((0.1, False), (0.9, False), (-0.1, True), (-1.5, True), (60.0, True)):
            used_ns = round((20_000_000 + minute) * MINUTE_NS)
            os.utime(path, ns=(used_ns, used_ns))
            loaded(tier, 1)
            assert path.stat().st_mtime_ns == (time.time_ns() if noted else used_ns), minute


def test_a_chain_that_was_written_within_a_minute_loses_its_tail_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its head, the rest of a chain cannot be used."""
    with opened(tmp_path) as tier:
        for number in range(12):
            at_minute(monkeypatch, number / 20)
            store(tier, number)
    with opened(tmp_path, capacity_bytes=5 * FILE_BYTES) as tier:
        assert there(tier) == [0, 1, 2, 3], "and some room; it was listed by another engine, in any order"
        at_minute(monkeypatch, 1.9)
        store(tier, 20, 21)
        assert there(tier) == [0, 1, 2]


def test_a_chain_that_was_read_within_a_minute_loses_its_tail_first_however_old_its_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, capacity_bytes=6 * FILE_BYTES) as tier:
        for number in range(6):
            at_minute(monkeypatch, number)
            store(tier, number)
        for number in range(5):  # block 5 is of this minute already
            at_minute(monkeypatch, 5.5 + number / 100)
            loaded(tier, number)
        at_minute(monkeypatch, 7.0)
        for number in (20, 21):
            store(tier, number)
        assert there(tier) == [0, 1, 2, 5], "block 5 was used before all that was read"


def test_what_was_used_in_an_earlier_minute_leaves_before_a_tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, capacity_bytes=3 * FILE_BYTES) as tier:
        for number, minute in ((0, 0.9), (1, 1.0), (2, 1.1)):
            at_minute(monkeypatch, minute)
            store(tier, number)
        at_minute(monkeypatch, 1.2)
        store(tier, 3)
        assert there(tier) == [1, 2, 3]


def test_a_file_that_cannot_be_removed_costs_one_store_and_not_all_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink, tried = os.unlink, list[str]()
    with opened(tmp_path, capacity_bytes=4 * FILE_BYTES) as tier:
        stuck = path_of(tier, 0).name

        def unlinking(path: Any, **named: Any) -> None:
            if str(path).endswith(stuck):
                tried.append(stuck)
                raise OSError(errno.EPERM, "it is immutable")
            unlink(path, **named)

        monkeypatch.setattr(os, "unlink", unlinking)
        at_minute(monkeypatch, 0.0)
        store(tier, 0)
        at_minute(monkeypatch, 1.0)
        store(tier, 1, 2, 3)
        with pytest.raises(TierFault, match="it is immutable"):
            store(tier, 4)
        store(tier, 4, 5)  # of the same minute: the later leaves first, but not the one that cannot
        at_minute(monkeypatch, 5.0)
        store(tier, 6, 7)
        assert tried == [stuck]
        assert is_right(tier, 0)
        assert bytes_on_disk(tmp_path) <= 4 * FILE_BYTES


def test_files_of_other_models_count_and_leave_too(tmp_path: Path) -> None:
    with opened(tmp_path, fingerprint=b"another model") as other:
        for number in range(3):
            used_at(file_of(tmp_path, other, number), 1000.0)
    with opened(tmp_path, capacity_bytes=4 * FILE_BYTES) as tier:
        assert tier.sizes()[1] == 3 * FILE_BYTES
        assert tier.take_changes() == [], "no block of this model"
        store(tier, 1, 2, 3)
        assert there(tier) == [1, 2, 3]
        assert len(files(tmp_path)) == 4


def test_the_empty_directories_of_models_that_nobody_has_used_for_long_go(tmp_path: Path) -> None:
    for model in (b"used", b"old", b"new"):
        with opened(tmp_path, fingerprint=model) as other:
            store(other, 1)
            if model != b"used":
                other.drop([digest(1)])
            space = path_of(other, 1).parents[1]
            if model != b"new":
                used_at(space, 100_000.0)
    with opened(tmp_path) as tier:
        store(tier, 1)
    left = {path.name for path in (tmp_path / "v2").iterdir() if len(path.name) == 32}
    assert left == {Names(tier._key, model).space.hex() for model in (b"used", b"new", MODEL)}


def test_an_engine_whose_empty_directory_another_removed_makes_it_again(tmp_path: Path) -> None:
    with opened(tmp_path, fingerprint=b"another model") as other:
        used_at(path_of(other, 1).parents[1], 100_000.0)
        with opened(tmp_path):
            assert not path_of(other, 1).parents[1].exists()
        with pytest.raises(TierFault, match="was reset"):
            store(other, 1)
        store(other, 1)
        assert there(other) == [1]


def test_files_of_another_version_count_and_leave_and_are_not_read(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        path = file_of(tmp_path, tier, 1)
    (tmp_path / "v2").rename(tmp_path / "v3")
    moved = tmp_path / "v3" / path.relative_to(tmp_path / "v2")
    used_at(moved, 1000.0)
    with opened(tmp_path, capacity_bytes=2 * FILE_BYTES) as tier:
        assert tier.take_changes() == []
        assert there(tier) == []
        assert tier.sizes()[1] == FILE_BYTES
        store(tier, 1)
        assert moved.exists()
        store(tier, 2)
        assert not moved.exists()


def test_a_smaller_bound_holds_from_the_start_on(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, *range(10))
    with opened(tmp_path, capacity_bytes=4 * FILE_BYTES) as tier:
        watch = Watch(tier)
        watch.take()
        assert bytes_on_disk(tmp_path) == tier.sizes()[1] <= 4 * FILE_BYTES
        assert sum(watch.present.values()) == len(there(tier)) == len(files(tmp_path))


def test_many_files_leave_in_several_turns_while_a_disk_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wait for the lock meanwhile."""
    with opened(tmp_path) as tier:
        store(tier, *range(10))
    monkeypatch.setattr("engine.tiers.disk_writer._EVICT_S", 1e-9)
    with opened(tmp_path, capacity_bytes=4 * FILE_BYTES) as tier:
        assert bytes_on_disk(tmp_path) <= 4 * FILE_BYTES
        assert tier.sizes()[1] == bytes_on_disk(tmp_path)


def test_a_bound_below_one_file_is_refused_and_both_sizes_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_tiers.disk_gib is .*, and a file of one block takes .* GiB"):
        DiskTier(tmp_path, capacity_bytes=FILE_BYTES - 1, block_bytes=BLOCK_BYTES, fingerprint=b"", key=None)
