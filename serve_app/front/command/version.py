"""Implements `chunkserve version`: the releases of this package, of Python, and of what it runs on.
Never imports what it names: a release is read from the installed package's metadata."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from serve_app.front.command.arguments import Parser

_ROOT = Path(__file__).parents[3]
_GIT_TIMEOUT_S = 5


def main(arguments: Sequence[str], prog: str) -> int:
    Parser(prog, "Show the versions of chunkserve, Python, torch and Ray, one in a line.").parse_args(arguments)
    commit = commit_of(_ROOT)
    print(f"chunkserve {release('chunkserve')}" + (f", commit {commit}" if commit else ""))
    print(f"Python {platform.python_version()}")
    for name in ("torch", "ray"):
        print(f"{name} {release(name)}")
    return 0


def release(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def commit_of(root: Path) -> str | None:
    """Return the commit of a checkout at `root`, or that from which the package was installed; None if it is not
    known."""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() or None
    try:
        origin = distribution("chunkserve").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    commit: str | None = json.loads(origin or "{}").get("vcs_info", {}).get("commit_id")
    return commit
