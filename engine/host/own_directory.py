"""Owns the directory where a user's processes leave notes for each other, which nobody else may write to.
Never trusts a directory of that name without checking it: where all users may write, somebody else may have made it."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def own_directory(name: str, parent: Path | None = None) -> Path:
    """Return `<parent>/<name>-<user id>`, and make it if necessary. parent: None means the directory for temporary
    files.

    Raises:
        OSError: it cannot be made, or somebody else owns it or may write to it.
    """
    path = (parent or Path(tempfile.gettempdir())) / f"{name}-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{path} is not this user's alone: remove it")
    return path
