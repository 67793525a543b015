"""A directory that is not private or not usable is refused at the start; what is in a usable one is taken over."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from engine.config import ConfigError
from engine.tiers.disk import DiskTier
from engine.tiers.faults import TierFault
from engine.tiers.ledger import Ledger
from engine.tiers.writing import Writing
from tests.support.disk_tiers import (
    BLOCK_BYTES,
    FILE_BYTES,
    KEY,
    MODEL,
    TIMEOUT_S,
    broken_disk,
    bytes_on_disk,
    digest,
    files,
    is_right,
    opened,
    store,
)


def refused(path: Path, match: str, **changes: Any) -> None:
    with pytest.raises(ConfigError, match=match), opened(path, **changes):
        pass


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", r"kv_tiers.disk_path .*file is or goes through a file")
    refused(tmp_path / "file/kv", r"kv_tiers.disk_path .*file/kv is or goes through a file")
    refused(Path("~nosuchuser/kv"), "kv_tiers.disk_path ~nosuchuser/kv has no place, because there is no such home")
    refused(Path("/a\0b"), r"kv_tiers.disk_path '/a\\x00b' is no path: .*embedded null")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_a_directory_that_others_may_write_to_is_refused_with_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "kv"
    path.mkdir()
    path.chmod(mode)
    refused(path, rf"kv_tiers.disk_path .*kv belongs to user {os.getuid()} and has mode {mode:04o}: expected")
    path.chmod(0o755)
    with opened(path / "below") as tier:
        store(tier, 1)
    with opened(path) as tier:
        store(tier, 1)
    assert (path / "v2").stat().st_mode & 0o777 == 0o700, "others see nothing of it"


def test_a_directory_of_somebody_else_is_refused_with_both_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    refused(tmp_path, rf"belongs to user {owner} and has mode 0700: expected a directory of user {owner + 1}")


def test_a_link_to_a_private_directory_and_a_path_from_home_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    monkeypatch.setenv("HOME", str(tmp_path))
    with opened(tmp_path / "kv") as tier:
        store(tier, 1)
    for path in (tmp_path / "link", Path("~/kv")):
        with opened(path) as tier:
            assert is_right(tier, 1)


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize(("error", "told"), [("EROFS", "Read-only file system"), ("EACCES", "Permission denied")])
def test_a_directory_that_cannot_be_written_is_refused_if_it_has_nothing_to_read(
    tmp_path: Path, key: bytes | None, error: str, told: str
) -> None:
    path = tmp_path / "kv"
    with broken_disk(error):
        refused(path, rf"kv_tiers.disk_path .*kv cannot be written: {told}", key=key)
    path.mkdir(mode=0o700)
    with broken_disk(error):
        refused(path, rf"kv_tiers.disk_path .*kv cannot be written: {told}", key=key)
    with opened(path, key=key, fingerprint=b"another model") as tier:
        store(tier, 1)
    with broken_disk(error):
        refused(path, rf"kv_tiers.disk_path .*kv cannot be written: {told}", key=key)


def test_a_full_disk_is_refused(tmp_path: Path) -> None:
    with broken_disk("ENOSPC"):
        refused(tmp_path, "kv_tiers.disk_path .* cannot be written: No space left on device")
    assert files(tmp_path) == []
    assert not list(tmp_path.glob("v2/writing/*.*"))


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize("error", ["EROFS", "ENOSPC"])
def test_a_directory_that_cannot_be_written_is_read_and_one_line_says_that_nothing_is_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: bytes | None, error: str
) -> None:
    with opened(tmp_path, key=key) as tier:
        store(tier, 1)
    with broken_disk(error), opened(tmp_path, key=key) as tier:
        assert tier.take_changes() == [(digest(1), True)]
        assert is_right(tier, 1)
        for number in range(2, 9):
            with pytest.raises(TierFault):
                store(tier, number)
    assert len([text for text in caplog.messages if "stores to" in text]) == 1
    assert str(tmp_path) in caplog.text


def test_a_damaged_key_of_the_directory_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, 1)
    (tmp_path / "v2/key").write_bytes(b"short")
    refused(tmp_path, r"kv_tiers.disk_path: .*v2/key has 5 bytes, expected 32. Remove .*v2")


def test_engines_that_start_at_once_have_one_key(tmp_path: Path) -> None:
    tiers: list[DiskTier] = []
    start = threading.Barrier(4)

    def run() -> None:
        start.wait()
        tiers.append(DiskTier(tmp_path, capacity_bytes=2**30, block_bytes=BLOCK_BYTES, fingerprint=MODEL, key=None))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tiers) == 4
    for number, tier in enumerate(tiers):
        store(tier, number)
    assert all(is_right(tier, number) for tier in tiers for number in range(4))
    for tier in tiers:
        tier.close()


@pytest.mark.parametrize("together", [False, True])
def test_where_there_are_no_hard_links_the_key_of_the_directory_is_made_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    def link(*_: Any) -> None:
        if together:  # another engine has just made the file, and writes to it while this one reads it
            (tmp_path / "v2/key").touch()
            threading.Timer(0.05, lambda: (tmp_path / "v2/key").write_bytes(KEY)).start()
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with opened(tmp_path) as tier:
        store(tier, 1)
    assert [path.name for path in (tmp_path / "v2").glob("key*")] == ["key"]
    assert (tmp_path / "v2/key").stat().st_size == len(KEY)
    with opened(tmp_path) as tier:
        assert is_right(tier, 1)
        assert not together or tier._key == KEY


@pytest.mark.parametrize("name", [".nfs000001", ".DS_Store", "._file", "lost+found"])
def test_what_is_no_engines_among_files_that_are_written_is_left_alone(tmp_path: Path, name: str) -> None:
    with opened(tmp_path):
        pass
    foreign = tmp_path / "v2/writing" / name
    foreign.write_bytes(b"")
    with opened(tmp_path, fingerprint=b"another model", capacity_bytes=4 * FILE_BYTES) as tier:
        store(tier, *range(6))
        assert is_right(tier, 0)
    assert foreign.exists()


def test_what_a_killed_engine_was_writing_is_removed_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, 1)
    dead, alive = Writing(tmp_path / "v2/writing"), Writing(tmp_path / "v2/writing")
    for writing in (dead, alive):
        writing.enter()
        descriptor, _ = writing.create(BLOCK_BYTES)
        os.write(descriptor, b"half")
        os.close(descriptor)
    os.close(dead._descriptor or -1)  # and so its lock
    dead._descriptor = None
    before = {path.name.partition(".")[0] for path in (tmp_path / "v2/writing").iterdir()}
    with opened(tmp_path) as tier:
        assert tier.sizes()[1] == 2 * FILE_BYTES
        names = [path.name for path in (tmp_path / "v2/writing").glob("*.*")]
        assert [name.partition(".")[0] for name in names] == [alive._token]
        assert before == {dead._token, alive._token}
        assert dead._token not in os.listdir(tmp_path / "v2/writing")
        assert is_right(tier, 1)
    alive.leave()


@pytest.mark.parametrize("text", [None, "", "many\n", "9" * 21, f"{10**9:020d}\n", f"{0:020d}\n"])
def test_a_count_that_is_missing_damaged_or_wrong_is_corrected(tmp_path: Path, text: str | None) -> None:
    with opened(tmp_path) as tier:
        store(tier, 1, 2, 3)
    lock = tmp_path / "v2/lock"
    if text is None:
        lock.unlink()
    else:
        lock.write_text(text)
    with opened(tmp_path, capacity_bytes=4 * FILE_BYTES) as tier:
        assert tier.sizes()[1] == 3 * FILE_BYTES
        store(tier, 4, 5)
        assert bytes_on_disk(tmp_path) == tier.sizes()[1] == 4 * FILE_BYTES


def test_a_start_does_not_wait_for_the_listing_of_a_large_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as tier:
        store(tier, 1, 2)
    go_on, listdir = threading.Event(), os.listdir

    def slow(path: Any) -> list[str]:
        if threading.current_thread().name == "kv-disk":
            assert go_on.wait(TIMEOUT_S)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", slow)
    with opened(tmp_path, listed=False) as tier:
        assert tier.take_changes() == []
        assert is_right(tier, 1), "whoever knows a name may read it"
        store(tier, 3)
        assert not tier.listed.is_set()
        go_on.set()
        assert tier.listed.wait(TIMEOUT_S)
        assert sorted(tier.take_changes()) == sorted((digest(number), True) for number in (1, 2))


def test_less_free_space_than_the_bound_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path):
        pass
    assert not caplog.messages
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=FILE_BYTES))
    with opened(tmp_path):
        pass
    assert "stores fail once it is full" in caplog.text


def test_a_lock_that_somebody_keeps_does_not_keep_an_engine_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads what is there; without anything to read, it says what is wrong."""
    monkeypatch.setattr("engine.tiers.ledger.LOCK_S", 0.02)
    with opened(tmp_path / "kv") as tier:
        store(tier, 1)
    (tmp_path / "empty/v2").mkdir(mode=0o700, parents=True)
    for name in ("kv", "empty"):
        (tmp_path / name).chmod(0o700)
        holder = Ledger(tmp_path / name / "v2/lock")
        with holder.hold():
            if name == "empty":
                refused(tmp_path / name, r"cannot be written: .*v2/lock has been locked by another process for 0.02 s")
            else:
                with opened(tmp_path / name) as tier:
                    assert is_right(tier, 1)
        holder.close()
