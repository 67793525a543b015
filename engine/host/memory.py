"""Owns the question how much memory this process may still take: the machine's or its container's, whichever is less.
Never allocates any, and knows nothing of what it is for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_NO_LIMIT = 2**60
"""Limits from here on mean no limit: version 1 of cgroups writes the largest multiple of a page for that."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Free and total bytes, and the file that says so."""

    free: int
    total: int
    source: str


@dataclass(frozen=True, slots=True)
class _Files:
    """The names of a cgroup version's files, and of the page cache that the kernel reclaims first."""

    limits: tuple[str, ...]
    usage: str
    cache: str


_V1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files(("memory.max", "memory.high"), "memory.current", "inactive_file")


def host_memory(root: Path = Path("/")) -> HostMemory | None:
    """The tightest of MemAvailable and the limits of this process's cgroup and those above it. None if the system says
    nothing. root: where the system's files are, for tests."""
    found = [*_machine(root), *_groups(root)]
    return min(found, key=lambda memory: memory.free, default=None)


def _machine(root: Path) -> Iterator[HostMemory]:
    lines = _read(root / "proc/meminfo").splitlines()
    sizes = {name: 1024 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    if "MemAvailable" in sizes:
        yield HostMemory(sizes["MemAvailable"], sizes["MemTotal"], "MemAvailable in /proc/meminfo")


def _groups(root: Path) -> Iterator[HostMemory]:
    paths = {
        controllers: PurePosixPath(path)
        for line in _read(root / "proc/self/cgroup").splitlines()
        for _, controllers, path in [line.split(":", 2)]
    }
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mount, _, rest = line.partition(" - ")
        kind, _, rest = rest.partition(" ")
        if kind not in ("cgroup", "cgroup2"):  # others may have spaces in their fields
            continue
        _, _, _, top, point, *_ = mount.split()
        options = rest.rpartition(" ")[2]
        if kind == "cgroup2":
            yield from _upwards(root, PurePosixPath(point), PurePosixPath(top), paths.get(""), _V2)
        elif "memory" in options.split(","):
            own = next((path for names, path in paths.items() if "memory" in names.split(",")), None)
            yield from _upwards(root, PurePosixPath(point), PurePosixPath(top), own, _V1)


def _upwards(
    root: Path, point: PurePosixPath, top: PurePosixPath, own: PurePosixPath | None, files: _Files
) -> Iterator[HostMemory]:
    """Limits from this process's own group up to the mount. point: where the group `top` is mounted. In a container,
    the mount may be the container's own group while /proc names another path."""
    below = own.relative_to(top) if own is not None and own.is_relative_to(top) else PurePosixPath()
    group = point / below
    while True:
        yield from _group(root / group.relative_to("/"), str(group), files)
        if group == point:
            return
        group = group.parent


def _group(directory: Path, name: str, files: _Files) -> Iterator[HostMemory]:
    usage, stat = _read(directory / files.usage).strip(), _read(directory / "memory.stat")
    counts = dict(line.split(" ", 1) for line in stat.splitlines())
    cache = int(counts.get(files.cache, 0))
    for file in files.limits:
        limit = _read(directory / file).strip()
        if usage.isdigit() and limit.isdigit() and int(limit) < _NO_LIMIT:
            free = int(limit) - max(0, int(usage) - cache)
            yield HostMemory(max(0, free), int(limit), f"{name}/{file}")


def _read(path: Path) -> str:
    """The file's text; empty if there is no such file, as on other systems and above a container's own group."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
