"""What the machine and the container say of their memory, in the files of both versions of cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.host.memory import HostMemory, host_memory

GIB = 2**30
V2_MOUNT = "41 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
V1_MOUNTS = (
    "33 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def machine(root: Path, *, groups: str, mounts: str) -> Path:
    """Make a machine of 64 GiB, of which 48 are available."""
    info = f"MemTotal: {64 * 2**20} kB\nMemFree: {9 * 2**20} kB\nMemAvailable: {48 * 2**20} kB\n"
    return write(root, {"proc/meminfo": info, "proc/self/cgroup": groups, "proc/self/mountinfo": mounts})


def v2(directory: str, *, limit: str, used: int = 0, cache: int = 0, high: str = "max") -> dict[str, str]:
    return {
        f"{directory}/memory.max": f"{limit}\n",
        f"{directory}/memory.high": f"{high}\n",
        f"{directory}/memory.current": f"{used}\n",
        f"{directory}/memory.stat": f"anon 1\ninactive_file {cache}\nactive_file 7\n",
    }


def test_without_a_limit_it_is_what_linux_calls_available(tmp_path: Path) -> None:
    root = machine(tmp_path, groups="0::/user\n", mounts=V2_MOUNT)
    write(root, v2("sys/fs/cgroup/user", limit="max", used=GIB))
    assert host_memory(root) == HostMemory(48 * GIB, 64 * GIB, "MemAvailable in /proc/meminfo")


def test_a_container_has_what_its_limit_leaves_and_its_page_cache_is_free(tmp_path: Path) -> None:
    root = machine(tmp_path, groups="0::/\n", mounts=V2_MOUNT)
    write(root, v2("sys/fs/cgroup", limit=str(16 * GIB), used=6 * GIB, cache=2 * GIB))
    assert host_memory(root) == HostMemory(12 * GIB, 16 * GIB, "/sys/fs/cgroup/memory.max")


def test_the_limit_of_a_group_above_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, groups="0::/pods/pod7/main\n", mounts=V2_MOUNT)
    write(root, v2("sys/fs/cgroup/pods/pod7/main", limit=str(40 * GIB)))
    write(root, v2("sys/fs/cgroup/pods/pod7", limit="max"))
    write(root, v2("sys/fs/cgroup/pods", limit=str(30 * GIB), used=10 * GIB))
    found = host_memory(root)
    assert found == HostMemory(20 * GIB, 30 * GIB, "/sys/fs/cgroup/pods/memory.max")


def test_the_limit_from_which_linux_throttles_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, groups="0::/\n", mounts=V2_MOUNT)
    write(root, v2("sys/fs/cgroup", limit=str(16 * GIB), high=str(8 * GIB), used=9 * GIB))
    assert host_memory(root) == HostMemory(0, 8 * GIB, "/sys/fs/cgroup/memory.high")


@pytest.mark.parametrize("below", ["/docker/abc", "/"])
def test_a_limit_by_the_first_version_counts_where_the_group_is_mounted_or_below(tmp_path: Path, below: str) -> None:
    root = machine(tmp_path, groups=f"5:cpu:/elsewhere\n4:memory:{below}\n0::/\n", mounts=V1_MOUNTS)
    directory = f"sys/fs/cgroup/memory{below}".rstrip("/")
    sizes = {"memory.limit_in_bytes": 4 * GIB, "memory.usage_in_bytes": 3 * GIB}
    write(root, {f"{directory}/{name}": f"{size}\n" for name, size in sizes.items()})
    write(root, {f"{directory}/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\n"})
    found = host_memory(root)
    assert found is not None
    assert (found.free, found.total) == (2 * GIB, 4 * GIB)


def test_the_first_versions_way_to_write_no_limit_is_none(tmp_path: Path) -> None:
    root = machine(tmp_path, groups="4:memory:/\n", mounts=V1_MOUNTS)
    no_limit = {"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "5"}
    write(root, {f"sys/fs/cgroup/memory/{name}": text for name, text in no_limit.items()})
    assert host_memory(root) == HostMemory(48 * GIB, 64 * GIB, "MemAvailable in /proc/meminfo")


def test_a_group_that_is_mounted_as_its_own_root_is_found_there(tmp_path: Path) -> None:
    """This is a container without a cgroup namespace: its path is the host's, and the mount shows only its own part."""
    mounts = "41 31 0:38 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    root = machine(tmp_path, groups="0::/docker/abc/inner\n", mounts=mounts)
    write(root, v2("sys/fs/cgroup/inner", limit=str(3 * GIB)))
    assert host_memory(root) == HostMemory(3 * GIB, 3 * GIB, "/sys/fs/cgroup/inner/memory.max")


def test_a_path_outside_of_the_mount_means_the_mount(tmp_path: Path) -> None:
    root = machine(tmp_path, groups="0::/../../elsewhere\n", mounts=V2_MOUNT.replace(" / /sys", " /a /sys"))
    write(root, v2("sys/fs/cgroup", limit=str(3 * GIB)))
    assert host_memory(root) == HostMemory(3 * GIB, 3 * GIB, "/sys/fs/cgroup/memory.max")


def test_a_system_that_says_nothing_is_not_guessed_about(tmp_path: Path) -> None:
    assert host_memory(tmp_path) is None


def test_this_machine_says_something_that_can_be() -> None:
    found = host_memory()
    assert found is not None
    assert 0 < found.free <= found.total


@pytest.mark.parametrize(
    "mount",
    [
        rb"600 500 0:50 / /Docker/host rw - 9p drvfs rw,path=C:\Program Files\Docker;symlinkroot=/mnt/",
        b"29 23 0:26 / /mnt rw,relatime - tmpfs  rw",
        b"29 23 0:26 / /mnt/\xe9t\xe9 rw,relatime - tmpfs x rw",
    ],
    ids=["Docker Desktop on WSL", "no source", "not UTF-8"],
)
def test_mounts_that_are_no_cgroups_may_look_as_they_like(tmp_path: Path, mount: bytes) -> None:
    """Regression: each of these lines kept an engine from starting."""
    root = machine(tmp_path, groups="0::/\n", mounts="")
    (root / "proc/self/mountinfo").write_bytes(mount + b"\n" + V2_MOUNT.encode())
    write(root, v2("sys/fs/cgroup", limit=str(16 * GIB)))
    assert host_memory(root) == HostMemory(16 * GIB, 16 * GIB, "/sys/fs/cgroup/memory.max")
