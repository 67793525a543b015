"""What is written to the disk tier is read again, by the next engine as well, and by nobody without its key."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.tiers import disk
from engine.tiers.disk import DiskTier
from engine.tiers.faults import TierFault
from tests.support.disk_tiers import (
    BLOCK_BYTES,
    FILE_BYTES,
    KEY,
    PLENTY,
    TIMEOUT_S,
    bytes_on_disk,
    content,
    digest,
    file_of,
    files,
    is_right,
    loaded,
    opened,
    store,
    there,
    used_at,
)


def test_a_block_is_read_as_it_was_written_and_another_is_not_there(tmp_path: Path, key: bytes | None) -> None:
    with opened(tmp_path / "kv", key=key) as tier:
        assert tier.write(digest(1), memoryview(content(digest(1)))) == FILE_BYTES
        assert loaded(tier, 1) == content(digest(1))
        with pytest.raises(TierFault, match=r"kv/v2/.* cannot be opened: No such file"):
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


@pytest.mark.parametrize("damage", [lambda path: os.truncate(path, 5), lambda path: path.write_bytes(b"x" * 9999)])
def test_a_file_of_another_length_is_written_again(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    """As a power cut may leave it."""
    with opened(tmp_path) as tier:
        damage(file_of(tmp_path, tier, 1))
        store(tier, 1)
        assert is_right(tier, 1)


def after_rename(monkeypatch: pytest.MonkeyPatch, action: Callable[[Path], object]) -> None:
    """Do something with each file just after it got its name."""
    rename = os.rename

    def patched(path: Any, name: str, *, dst_dir_fd: int) -> None:
        rename(path, name, dst_dir_fd=dst_dir_fd)
        action(Path(os.readlink(f"/proc/self/fd/{dst_dir_fd}")) / name)

    monkeypatch.setattr(os, "rename", patched)


def test_a_look_while_a_file_appears_does_not_report_the_engines_own_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as tier:
        after_rename(monkeypatch, lambda path: tier.refresh())
        store(tier, 1)
        assert tier.take_changes() == []


def test_a_file_that_left_before_its_write_had_ended_is_reported_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.tiers.disk_index._SETTLED_NS", -1)
    with opened(tmp_path) as tier:

        def evict(path: Path) -> None:
            path.unlink()
            tier.refresh()

        after_rename(monkeypatch, evict)
        store(tier, 1)
        tier.refresh()
        assert tier.take_changes() == [(digest(1), False)]


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


def test_after_its_end_a_tier_neither_reads_nor_writes_and_its_thread_is_gone(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, 1)
    assert not tier._thread.is_alive()
    for use in (lambda: loaded(tier, 1), lambda: store(tier, 2), tier.reset):
        with pytest.raises(TierFault, match="is closed"):
            use()
    tier.close()
    assert list((tmp_path / "v2/writing").iterdir()) == []


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
