"""Owns the end of what nobody will read: files that a reset has put aside, and empty directories of other models.
Never holds the lock for long: other engines write meanwhile."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from engine.tiers.ledger import Ledger, on_disk

TRASH = "trash-"
"""A space whose name begins so was reset."""

_SPACE = re.compile(r"[0-9a-f]{32}")
_UNUSED_S = 86_400.0

_AT_ONCE = 16
"""Files that are removed while the lock is held."""


def empty_trash(root: Path, ledger: Ledger, proceed: Callable[[], bool]) -> None:
    """Remove all trash below `root`, the directory of a version. Asks `proceed` now and then whether to go on.

    Raises:
        OSError: something cannot be removed. The next call goes on.
    """
    for name in sorted(os.listdir(root)):
        if name.startswith(TRASH):
            for folder in sorted(_listed(root / name)):
                if not _empty(root / name / folder, ledger, proceed):
                    return
            _remove_directory(root / name)


def remove_unused(root: Path, own: str) -> None:
    """Remove directories of other models and keys that have no file and were made long ago. An engine that still uses
    one makes it again."""
    for name in sorted(_listed(root)):
        path = root / name
        with suppress(OSError):  # it has files, or is a file itself
            if name != own and _SPACE.fullmatch(name) and time.time() - path.stat().st_mtime > _UNUSED_S:
                for folder in sorted(_listed(path)):
                    (path / folder).rmdir()
                path.rmdir()


def _empty(folder: Path, ledger: Ledger, proceed: Callable[[], bool]) -> bool:
    """Remove a directory with its files. Return False if `proceed` did."""
    names = _listed(folder)
    for start in range(0, len(names), _AT_ONCE):
        if not proceed():
            return False
        with ledger.hold():
            ledger.add(-sum(_remove(folder / name) for name in names[start : start + _AT_ONCE]))
    _remove_directory(folder)
    return True


def _listed(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:  # another engine was faster
        return []


def _remove(path: Path) -> int:
    """Remove a file; return how many bytes it took."""
    with suppress(FileNotFoundError):
        size = on_disk(path.stat().st_size)
        path.unlink()
        return size
    return 0


def _remove_directory(path: Path) -> None:
    """Remove a directory, unless another engine did or has put a file into it meanwhile: the next call finds it."""
    with suppress(FileNotFoundError, OSError):
        path.rmdir()
