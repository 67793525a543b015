"""After a reset, nothing that was written before is read again, however it was under way."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.tiers import disk
from engine.tiers.faults import TierFault
from tests.support.disk_tiers import (
    FILE_BYTES,
    all_files,
    bytes_on_disk,
    digest,
    files,
    loaded,
    opened,
    store,
    there,
    until,
)


def during(monkeypatch: pytest.MonkeyPatch, name: str, action: Callable[[], object]) -> None:
    """Do something once, just before the system is called next."""
    call = getattr(os, name)

    def patched(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(os, name, call)
        action()
        return call(*arguments, **named)

    monkeypatch.setattr(os, name, patched)


def test_a_reset_removes_all_blocks_of_the_model_and_none_of_another(tmp_path: Path) -> None:
    with opened(tmp_path, fingerprint=b"another model") as other, opened(tmp_path) as tier:
        store(other, 9)
        store(tier, 1, 2, 3)
        tier.refresh()
        assert tier.reset() == 3
        assert there(tier) == []
        assert tier.take_changes() == [(digest(number), False) for number in range(12)], "the failed reads"
        assert tier.reset() == 0
        assert there(other) == [9]
        until(lambda: len(all_files(tmp_path)) == 1)
        until(lambda: not list((tmp_path / "v2").glob("trash-*")))
        store(tier, 1)
        assert there(tier) == [1]
        assert tier.sizes()[1] == 2 * FILE_BYTES


def test_changes_that_were_not_taken_before_a_reset_are_void(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, 1)
    with opened(tmp_path) as tier:
        tier.reset()
        tier.refresh()
        assert tier.take_changes() == []


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


def test_a_reset_leaves_no_descriptor_open(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, 0)
        tier.refresh()
        before = len(os.listdir("/proc/self/fd"))
        for number in range(20):
            store(tier, number)
            tier.refresh()
            tier.reset()
        until(lambda: not list((tmp_path / "v2").glob("trash-*")))
        tier.refresh()  # so that what it has seen of the trash is gone, too
        assert len(os.listdir("/proc/self/fd")) <= before + 2, "what the tier's thread has open right now"


def test_a_reset_lists_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called while requests wait, and a directory has any number of files."""
    with opened(tmp_path) as tier:
        store(tier, 1, 2, 3)
    with opened(tmp_path) as tier:
        listdir, caller, listed = os.listdir, threading.current_thread(), list[object]()

        def listing(path: Any) -> list[str]:
            if threading.current_thread() is caller:
                listed.append(path)
            return listdir(path)

        monkeypatch.setattr(os, "listdir", listing)
        assert tier.reset() == 3
        assert listed == []


def test_what_a_killed_engines_reset_left_is_removed_by_the_next(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, 1, 2)
        space = files(tmp_path)[0].parents[1]
    space.rename(tmp_path / "v2/trash-of-a-killed-engine")
    with opened(tmp_path) as tier:
        assert there(tier) == []
        assert [path.name for path in (tmp_path / "v2").iterdir() if path.name.startswith("trash")] == []
        assert tier.sizes()[1] == 0
