"""No fault of a disk becomes a wrong block, a wait without end, or more than one line of the log."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from engine.tiers.disk import DiskTier
from engine.tiers.faults import TierFault
from engine.tiers.ledger import Ledger
from engine.tiers.pause import TOLERATED
from tests.support.disk_tiers import (
    FILE_BYTES,
    KEY,
    Watch,
    broken_disk,
    bytes_on_disk,
    digest,
    file_of,
    files,
    is_right,
    loaded,
    opened,
    process,
    store,
    until,
)


def truncated(length: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, length)


def flipped(position: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position] ^= 0x10
        path.write_bytes(data)

    return flip


def replaced_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": truncated(0),
    "part of a header": truncated(100),
    "a header": truncated(128),
    "part of a payload": truncated(640),
    "all but a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 1),
    "zeros, as after a power cut": replaced_by(lambda path: path.write_bytes(bytes(1160))),
    "a bit of the magic": flipped(0),
    "a bit of the version": flipped(8),
    "a bit of the name": flipped(50),
    "a bit of the payload": flipped(700),
    "a bit of the proof": flipped(-1),
    "a link": replaced_by(lambda path: path.symlink_to("/etc/passwd")),
    "a pipe": replaced_by(lambda path: os.mkfifo(path)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_is_a_fault_and_goes(tmp_path: Path, key: bytes | None, damage: Callable[[Path], None]) -> None:
    with opened(tmp_path, key=key) as tier:
        path = file_of(tmp_path, tier, 1)
        store(tier, 2)
        damage(path)
        with pytest.raises(TierFault, match=str(path)):
            loaded(tier, 1)
        assert tier.take_changes() == [(digest(1), False)]
        assert not os.path.lexists(path)
        assert is_right(tier, 2)
        store(tier, 1)
        assert is_right(tier, 1)


def test_a_directory_in_the_place_of_a_file_is_a_fault(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        path = file_of(tmp_path, tier, 1)
        path.unlink()
        path.mkdir()
        with pytest.raises(TierFault, match=r"Is a directory|has 4096 bytes"):
            loaded(tier, 1)
        store(tier, 2)
        assert is_right(tier, 2)


def test_a_file_of_another_block_is_a_fault(tmp_path: Path, key: bytes | None) -> None:
    with opened(tmp_path, key=key) as tier:
        first, second = file_of(tmp_path, tier, 1), file_of(tmp_path, tier, 2)
        shutil.copy(first, second)
        with pytest.raises(TierFault, match="its header is not this block's"):
            loaded(tier, 2)
        assert is_right(tier, 1)


@pytest.mark.parametrize("changes", [{"fingerprint": b"another model"}, {"key": bytes(32)}, {"key": None}])
def test_a_file_of_another_model_or_key_under_a_blocks_name_is_a_fault(tmp_path: Path, changes: dict[str, Any]) -> None:
    with opened(tmp_path / "other", **{"key": KEY, **changes}) as other:
        foreign = file_of(tmp_path / "other", other, 1)
    with opened(tmp_path / "kv", key=KEY) as tier:
        path = file_of(tmp_path / "kv", tier, 1)
        shutil.copy(foreign, path)
        with pytest.raises(TierFault, match="is removed"):
            loaded(tier, 1)


def test_many_damaged_files_make_one_line_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as tier:
        for number in range(10):
            flipped(200)(file_of(tmp_path, tier, number))
        assert not any(is_right(tier, number) for number in range(10))
        assert tier.take_changes() == [(digest(number), False) for number in range(10)]
        assert files(tmp_path) == []
        assert tier.sizes()[1] == 0
    assert len(caplog.messages) == 1
    assert "its content is not as it was written" in caplog.text


def test_a_file_that_was_written_anew_while_the_old_one_was_read_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as tier:
        path = file_of(tmp_path, tier, 1)
        good = path.read_bytes()
        flipped(200)(path)
        preadv = os.preadv

        def read(*arguments: Any) -> int:
            count = preadv(*arguments)
            aside = tmp_path / "aside"
            aside.write_bytes(good)
            aside.replace(path)
            return count

        monkeypatch.setattr(os, "preadv", read)
        with pytest.raises(TierFault):
            loaded(tier, 1)
        monkeypatch.undo()
        assert is_right(tier, 1)


def test_a_read_error_of_the_disk_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as tier:
        store(tier, 1)

        def fail(*_: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(TierFault, match="Input/output error"):
            loaded(tier, 1)


def test_a_file_that_cannot_be_opened_just_now_stays_and_is_told_of_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as tier:
        store(tier, 1)
        tier.refresh()
        real = os.open

        def fail(path: Any, *arguments: Any, **named: Any) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(os, "open", fail)
        with pytest.raises(TierFault, match="Too many open files"):
            loaded(tier, 1)
        monkeypatch.setattr(os, "open", real)
        assert tier.take_changes() == [(digest(1), False)]
        tier.refresh()
        assert tier.take_changes() == [(digest(1), True)]
        assert is_right(tier, 1)


@pytest.mark.parametrize("error", ["ENOSPC", "EROFS", "EIO", "EDQUOT"])
def test_a_disk_that_fails_is_written_to_less_and_less_and_read_all_the_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: str
) -> None:
    with opened(tmp_path) as tier:
        store(tier, 1)
        with broken_disk(error) as tried:
            for number in range(2, 40):
                with pytest.raises(TierFault):
                    store(tier, number)
                assert is_right(tier, 1)
                with suppress(TierFault):
                    store(tier, 1)  # which needs no writing
            assert len(tried) < 3 * (TOLERATED + 1), "the rest were refused at once"
        assert len(caplog.messages) == 1
        assert os.strerror(getattr(errno, error)) in caplog.text
        assert bytes_on_disk(tmp_path) == FILE_BYTES
        tier._pause._until = 0.0
        store(tier, 2)
        assert is_right(tier, 2)
        assert tier.take_changes() == []
    with opened(tmp_path) as tier:
        assert bytes_on_disk(tmp_path) == tier.sizes()[1] == 2 * FILE_BYTES


NO_SPACE = """
import resource, sys
from pathlib import Path
from tests.support.disk_tiers import *
with opened(Path(sys.argv[1])) as tier:
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        store(tier, 1)
    except TierFault as fault:
        print(fault, flush=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store(tier, 1)
    print(is_right(tier, 1), tier.sizes()[1], flush=True)
"""


def test_a_file_that_the_system_wrote_in_part_is_not_there_afterwards(tmp_path: Path) -> None:
    """A limit of a file's length is the one full disk that needs no disk."""
    with process(NO_SPACE, tmp_path) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        print(file=child.stdin, flush=True)
        assert "File too large" in child.stdout.readline()
        assert child.stdout.readline().split() == ["True", str(FILE_BYTES)]
        assert child.wait() == 0
    assert bytes_on_disk(tmp_path) == FILE_BYTES


def test_a_lock_that_a_stopped_process_keeps_costs_stores_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.tiers.ledger.LOCK_S", 0.01)
    with opened(tmp_path) as tier:
        store(tier, 1, 2)
        holder = Ledger(tmp_path / "v2/lock")
        with holder.hold():
            with pytest.raises(TierFault, match=r"locked by another process for 0.01 s"):
                store(tier, 3)
            assert is_right(tier, 1)
            tier.drop([digest(2)])
            assert not is_right(tier, 2)
            assert tier.reset() == 1
            assert not is_right(tier, 1)
        holder.close()
        store(tier, 3)
        assert is_right(tier, 3)
    with opened(tmp_path) as tier:
        assert bytes_on_disk(tmp_path) == tier.sizes()[1] == FILE_BYTES


def test_where_nothing_can_be_written_a_reset_says_so_and_nothing_is_read_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as tier:
        store(tier, 1)
        with broken_disk("EROFS"), pytest.raises(TierFault, match="could not be reset, and is not used any more"):
            tier.reset()
        assert not is_right(tier, 1)
        with pytest.raises(TierFault, match="could not be reset"):
            store(tier, 2)
    assert "could not be reset" in caplog.text


@pytest.mark.parametrize("below", [".", "v2"])
@pytest.mark.parametrize("reset", [False, True])
def test_a_directory_that_somebody_emptied_is_made_again(tmp_path: Path, below: str, reset: bool) -> None:
    path = tmp_path / "kv"
    with opened(path) as tier:
        store(tier, 1, 2)
        watch = Watch(tier)
        (path / below).resolve().rename(tmp_path / "gone")  # not file by file, while the tier's thread makes it again
        shutil.rmtree(tmp_path / "gone")
        if reset:
            tier.reset()
        until(lambda: stored(tier, 3))
        assert is_right(tier, 3)
        assert not is_right(tier, 1)
        tier.refresh()
        watch.take()
        assert watch.present.get(digest(1)) is False
    with opened(path) as tier:
        assert is_right(tier, 3)
        assert bytes_on_disk(path) == tier.sizes()[1] == FILE_BYTES
        assert (path.stat().st_mode & 0o777, (path / "v2").stat().st_mode & 0o777) == (0o700, 0o700)


def stored(tier: DiskTier, number: int) -> bool:
    """Store a block, if that goes, and look around if it does not, as the tier's thread does."""
    try:
        store(tier, number)
    except TierFault:
        tier._due.set()
        return False
    return True


def test_files_that_nobody_here_wrote_are_left_alone_and_count(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        folder = file_of(tmp_path, tier, 1).parent
    (folder / "README").write_text("not a block")
    (folder / ("ab" * 32)).write_bytes(b"a name that no key made")
    (folder.parent / "notes").mkdir()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat").write_bytes(b"x" * 10 * FILE_BYTES)
    with opened(tmp_path, capacity_bytes=4 * FILE_BYTES) as tier:
        assert tier.take_changes() == [(digest(1), True)]
        assert tier.sizes()[1] == 3 * FILE_BYTES
        store(tier, *range(2, 9))
        assert bytes_on_disk(tmp_path) <= 4 * FILE_BYTES
    assert (tmp_path / "photos/cat").exists()
