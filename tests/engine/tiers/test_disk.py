"""What is written to the disk tier is read again, by the next engine as well, within the bound of its bytes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import ConfigError
from engine.tiers import disk
from engine.tiers.cipher import Names
from engine.tiers.disk import DiskTier
from engine.tiers.faults import TierFault
from tests.support.disk_tiers import (
    BLOCK_BYTES,
    FILE_BYTES,
    KEY,
    MODEL,
    PLENTY,
    TIMEOUT_S,
    Watch,
    all_files,
    bytes_on_disk,
    content,
    digest,
    file_of,
    files,
    is_right,
    loaded,
    opened,
    path_of,
    store,
    until,
)

EVERY_FILE = range(12)


@pytest.fixture(params=[None, KEY], ids=["plain", "encrypted"])
def key(request: pytest.FixtureRequest) -> bytes | None:
    found: bytes | None = request.param
    return found


def there(tier: DiskTier, numbers: range = EVERY_FILE) -> list[int]:
    return [number for number in numbers if is_right(tier, number)]


def used_at(path: Path, age_s: float) -> None:
    """Make a file one that was last used so long ago."""
    now = time.time()
    os.utime(path, (now - age_s, now - age_s))


def test_a_block_is_read_as_it_was_written_and_another_is_not_there(tmp_path: Path, key: bytes | None) -> None:
    with opened(tmp_path / "kv", key=key) as tier:
        assert tier.write(digest(1), memoryview(content(digest(1)))) == FILE_BYTES
        assert loaded(tier, 1) == content(digest(1))
        with pytest.raises(TierFault, match=r"kv/v1/.* cannot be opened: No such file"):
            loaded(tier, 2)


def test_an_engine_finds_what_an_earlier_one_wrote_and_is_told(tmp_path: Path, key: bytes | None) -> None:
    with opened(tmp_path, key=key) as tier:
        store(tier, 1, 2, 3)
        assert tier.take_changes() == [], "its own writes"
    with opened(tmp_path, key=key) as tier:
        assert sorted(tier.take_changes()) == sorted((digest(number), True) for number in (1, 2, 3))
        assert tier.take_changes() == []
        assert there(tier) == [1, 2, 3]
        assert tier.sizes() == (PLENTY, 3 * FILE_BYTES)


def test_the_thread_that_waits_for_changes_is_woken_for_what_was_there_at_the_start(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, 1)
    with opened(tmp_path) as tier:
        woken = threading.Event()
        tier.on_change(woken.set)
        assert woken.is_set()


def test_many_changes_are_handed_over_in_parts_and_each_part_wakes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as tier:
        store(tier, *range(5))
    monkeypatch.setattr(disk, "MAX_CHANGES", 2)
    with opened(tmp_path) as tier:
        wakes: list[int] = []
        tier.on_change(lambda: wakes.append(1))
        parts = [tier.take_changes() for _ in range(4)]
    assert [len(part) for part in parts] == [2, 2, 1, 0]
    assert len(wakes) == 3
    assert {found for part in parts for found, _ in part} == {digest(number) for number in range(5)}


def test_a_change_is_told_as_it_is_when_it_is_taken(tmp_path: Path) -> None:
    """A file that was reported gone and is written again must not be taken for gone."""
    with opened(tmp_path) as tier:
        path = file_of(tmp_path, tier, 1)
        tier.refresh()
        path.unlink()
        tier.refresh()
        store(tier, 1)
        assert tier.take_changes() == [(digest(1), True)]


def test_memory_of_another_type_and_read_only_memory_are_taken(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        into = memoryview(bytearray(BLOCK_BYTES)).cast("H").cast("B").cast("I")
        store(tier, 1)
        tier.read(digest(1), into)
        assert bytes(into) == content(digest(1))


def test_a_dropped_block_is_gone_without_a_report_and_can_be_written_again(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, 1, 2)
        tier.drop([digest(1), digest(3)])
        assert there(tier) == [2]
        assert tier.sizes()[1] == FILE_BYTES
        tier.refresh()
        assert (digest(2), False) not in tier.take_changes()
        store(tier, 1)
        assert there(tier) == [1, 2]


def test_a_block_that_is_there_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as tier:
        path = file_of(tmp_path, tier, 1)
        used_at(path, 100.0)
        before = path.stat()
        store(tier, 1)
        after = path.stat()
        assert (after.st_ino, tier.sizes()[1]) == (before.st_ino, FILE_BYTES)
        assert after.st_mtime_ns > before.st_mtime_ns, "but it is used"


def test_files_leave_that_were_not_used_for_longest(tmp_path: Path) -> None:
    capacity = 4 * FILE_BYTES
    with opened(tmp_path, capacity_bytes=capacity) as tier:
        watch = Watch(tier)
        for number in range(4):
            used_at(file_of(tmp_path, tier, number), 1000.0 - number)
        assert is_right(tier, 0), "a read is a use"
        store(tier, 4)
        watch.take()
        assert watch.all == [(digest(1), False)]
        assert there(tier) == [0, 2, 3, 4]
        assert bytes_on_disk(tmp_path) == tier.sizes()[1] == capacity


def test_a_use_is_noted_once_a_minute(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        path = file_of(tmp_path, tier, 1)
        for age_s, noted in ((30.0, False), (90.0, True), (-3600.0, True)):
            used_at(path, age_s)
            before = path.stat().st_mtime_ns
            loaded(tier, 1)
            assert (path.stat().st_mtime_ns != before) == noted, age_s


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
    left = {path.name for path in (tmp_path / "v1").iterdir() if len(path.name) == 32}
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
    (tmp_path / "v1").rename(tmp_path / "v2")
    moved = tmp_path / "v2" / path.relative_to(tmp_path / "v1")
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


def test_names_and_contents_of_files_tell_no_digest(tmp_path: Path, key: bytes | None) -> None:
    with opened(tmp_path, key=key) as tier:
        store(tier, 1)
    (path,) = files(tmp_path)
    assert digest(1).hex()[:8] not in str(path.relative_to(tmp_path))
    assert digest(1)[:4] not in path.read_bytes()
    assert (content(digest(1))[:16] in path.read_bytes()) == (key is None)


def test_one_block_has_other_names_in_other_directories(tmp_path: Path) -> None:
    """Each directory without a key of the deployment's has a random one."""
    for name in ("a", "b"):
        with opened(tmp_path / name) as tier:
            store(tier, 1)
    (first,), (second,) = files(tmp_path / "a"), files(tmp_path / "b")
    assert first.name != second.name
    assert first.parts[-3] != second.parts[-3]


def test_directories_and_files_are_their_owners_alone(tmp_path: Path, key: bytes | None) -> None:
    before = os.umask(0)
    try:
        with opened(tmp_path / "kv", key=key) as tier:
            store(tier, 1)
            found = [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]
            modes = {path: path.stat().st_mode & 0o777 for path in found}
    finally:
        os.umask(before)
    assert len(modes) >= 7
    assert modes == {path: 0o700 if path.is_dir() else 0o600 for path in found}


def test_with_another_key_no_block_is_read_and_none_is_lost(tmp_path: Path) -> None:
    with opened(tmp_path, key=KEY) as tier:
        store(tier, 1)
    for wrong in (bytes(32), None):
        with opened(tmp_path, key=wrong) as tier:
            assert tier.take_changes() == []
            assert there(tier) == []
            store(tier, 2)
            assert tier.reset() == 1
    with opened(tmp_path, key=KEY) as tier:
        assert there(tier) == [1]


def test_a_reset_removes_all_blocks_of_the_model_and_none_of_another(tmp_path: Path) -> None:
    with opened(tmp_path, fingerprint=b"another model") as other, opened(tmp_path) as tier:
        store(other, 9)
        store(tier, 1, 2, 3)
        tier.refresh()
        assert tier.reset() == 3
        assert there(tier) == []
        assert tier.take_changes() == [(digest(number), False) for number in EVERY_FILE], "the failed reads"
        assert tier.reset() == 0
        assert there(other) == [9]
        until(lambda: len(all_files(tmp_path)) == 1)
        until(lambda: not list((tmp_path / "v1").glob("trash-*")))
        store(tier, 1)
        assert there(tier) == [1]
    with opened(tmp_path) as tier:
        assert tier.sizes()[1] == 2 * FILE_BYTES


def test_changes_that_were_not_taken_before_a_reset_are_void(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, 1)
    with opened(tmp_path) as tier:
        tier.reset()
        tier.refresh()
        assert tier.take_changes() == []


def during(monkeypatch: pytest.MonkeyPatch, name: str, action: Callable[[], object]) -> None:
    """Do something once, just before the system is called next."""
    call = getattr(os, name)

    def patched(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(os, name, call)
        action()
        return call(*arguments, **named)

    monkeypatch.setattr(os, name, patched)


@pytest.mark.parametrize("call", ["writev", "rename"])
@pytest.mark.parametrize("folder_exists", [False, True])
def test_a_write_under_way_at_a_reset_is_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, folder_exists: bool
) -> None:
    with opened(tmp_path) as tier:
        if folder_exists:
            store(tier, 1)
            tier.drop([digest(1)])
        monkeypatch.setattr(disk, "empty_trash", lambda *_: None)  # it is still there when the write ends
        during(monkeypatch, call, tier.reset)
        with pytest.raises(TierFault, match="was reset"):
            store(tier, 1)
        assert there(tier) == []
        tier.refresh()
        assert (digest(1), True) not in tier.take_changes()
        store(tier, 1)
        assert there(tier) == [1]
    monkeypatch.undo()
    with opened(tmp_path) as tier:
        assert there(tier) == [1]
        assert bytes_on_disk(tmp_path) == tier.sizes()[1] == FILE_BYTES


def test_a_read_under_way_at_a_reset_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as tier:
        store(tier, 1)
        during(monkeypatch, "preadv", tier.reset)
        with pytest.raises(TierFault, match="was reset"):
            loaded(tier, 1)


def test_what_a_killed_engines_reset_left_is_removed_by_the_next(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, 1, 2)
        space = files(tmp_path)[0].parents[1]
    space.rename(tmp_path / "v1/trash-of-a-killed-engine")
    with opened(tmp_path) as tier:
        assert there(tier) == []
        assert [path.name for path in (tmp_path / "v1").iterdir() if path.name.startswith("trash")] == []
        assert tier.sizes()[1] == 0


def test_after_its_end_a_tier_neither_reads_nor_writes_and_its_thread_is_gone(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, 1)
    assert not tier._thread.is_alive()
    for use in (lambda: loaded(tier, 1), lambda: store(tier, 2), tier.reset):
        with pytest.raises(TierFault, match="is closed"):
            use()
    tier.close()
    assert list((tmp_path / "v1/writing").iterdir()) == []


def test_a_tier_ends_while_it_lists_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as tier:
        store(tier, *range(50))
    folders: list[int] = []
    reached, go_on = threading.Event(), threading.Event()
    listdir = os.listdir

    def slow(path: Any) -> list[str]:
        if isinstance(path, int):
            folders.append(path)
            reached.set()
            assert go_on.wait(TIMEOUT_S)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", slow)
    with opened(tmp_path, listed=False) as tier:
        assert reached.wait(TIMEOUT_S)
        tier._stopping.set()
        go_on.set()
    assert not tier._thread.is_alive()
    assert len(folders) < 10


def test_threads_that_write_read_and_drop_at_once_meet_nothing_wrong(tmp_path: Path) -> None:
    capacity = 30 * FILE_BYTES
    wrong: list[BaseException] = []

    def work(tier: DiskTier, seed: int) -> None:
        try:
            for step in range(120):
                number = (step * (2 * seed + 1)) % 60
                store(tier, number)
                is_right(tier, (number * 7) % 60)
                if step % 10 == seed:
                    tier.drop([digest(number)])
        except BaseException as error:  # noqa: BLE001 - shown below
            wrong.append(error)

    with opened(tmp_path, capacity_bytes=capacity, poll_s=0.001) as tier:
        threads = [threading.Thread(target=work, args=(tier, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert bytes_on_disk(tmp_path) <= capacity
        assert tier.sizes()[1] <= capacity
