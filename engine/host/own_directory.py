"""Owns where a user's processes leave notes for each other: a directory of their own, which nobody else may write to.
Never trusts one that was there before under that name: in a directory that all may write to, it may be a trap."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def own_directory(name: str, parent: Path | None = None) -> Path:
    """`<parent>/<name>-<user id>`, made if it is not there. parent: None means the directory for temporary files.

    Raises:
        OSError: it cannot be made, or it is somebody else's.
    """
    path = (parent or Path(tempfile.gettempdir())) / f"{name}-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{path} is not this user's alone: remove it")
    return path
