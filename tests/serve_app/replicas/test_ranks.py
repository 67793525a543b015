"""Contracts of the ranks as Ray actors: each in its bundle, its end noticed whatever it was, and none that outlives its
leader. One cluster of two nodes on this machine serves all tests that need Ray."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadtest.server import ended
from serve_app.replicas import ranks
from serve_app.replicas.ranks import RayRankLauncher, launcher_here
from serve_app.settings.ranks import ONE_NODE, Placement
from tests.support.tiny_models import save_model

ROOT = Path(__file__).parents[3]
Ask = Callable[[str], dict[str, Any]]


# --- without Ray ------------------------------------------------------------------------------------------------------


def test_an_engine_of_one_rank_starts_none() -> None:
    assert launcher_here(1, {"num_cpus": 1}, ONE_NODE) is None


def test_several_ranks_outside_of_a_placement_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "get_current_placement_group", lambda: None)
    with pytest.raises(RuntimeError, match="an engine of 2 ranks, but this replica is in no placement group"):
        launcher_here(2, {"num_cpus": 1}, ONE_NODE)


@pytest.mark.parametrize("rank", [0, 2, -1])
def test_a_rank_without_a_bundle_is_refused(rank: int) -> None:
    """Rank 0 is the replica; a bundle index of -1 would be any bundle."""
    group: Any = SimpleNamespace(bundle_count=2)
    with pytest.raises(ValueError, match=f"rank is {rank}: the replica's placement group has bundles for ranks 1 to 1"):
        RayRankLauncher(group, {"num_cpus": 1}, ONE_NODE).start(rank, b"")


@pytest.mark.parametrize(
    ("placement", "beside"),
    [
        ("strict_pack", [[0, 1, 2]] * 3),
        ("pack", [[0, 2], [1], [0, 2]]),
        ("spread", [[0, 2], [1], [0, 2]]),
    ],
)
def test_the_ranks_of_each_node_are_known_before_they_start(
    placement: Placement, beside: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    group: Any = object()
    nodes = {"bundles_to_node_id": {0: "a", 1: "b", 2: "a"}}
    monkeypatch.setattr(ranks, "placement_group_table", lambda asked: nodes if asked is group else {})
    launcher = RayRankLauncher(group, {"num_cpus": 1}, placement)
    assert [list(launcher.ranks_beside(rank, 3)) for rank in range(3)] == beside


# --- with Ray ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Ask]:
    with tempfile.TemporaryDirectory(prefix="cs", dir="/tmp", ignore_cleanup_errors=True) as temp:
        env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": temp, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.support.rank_cluster"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **pipes)
        with ended(process):
            assert _answer(process) == {"nodes": 2}
            yield lambda order: _ask(process, order)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def _ask(process: subprocess.Popen[str], order: str) -> dict[str, Any]:
    assert process.stdin is not None
    process.stdin.write(f"{order}\n")
    process.stdin.flush()
    return _answer(process)


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return dict(json.loads(line))
    raise AssertionError(f"the cluster ended with {process.wait()}")


@pytest.mark.server
@pytest.mark.slow
class TestWithRay:
    def test_a_rank_whose_process_is_killed_is_noticed(self, cluster: Ask) -> None:
        """Both are on one node, and poll has nothing to say before."""
        found = cluster("start strict_pack")
        assert found["poll"] is None
        assert found["leader"]["node"] == found["follower"]["node"]
        assert found["leader"]["pid"] != found["follower"]["pid"]
        os.kill(found["follower"]["pid"], signal.SIGKILL)
        assert cluster("ended")["ended"].startswith("the process of rank 1 is gone: ")

    def test_ranks_that_are_spread_are_on_a_node_each(self, cluster: Ask) -> None:
        found = cluster("start spread")
        assert found["poll"] is None
        assert found["leader"]["node"] != found["follower"]["node"]
        os.kill(found["follower"]["pid"], signal.SIGKILL)
        assert cluster("ended")["ended"].startswith("the process of rank 1 is gone: ")

    def test_a_rank_that_fails_says_why_and_one_that_returns_says_so(self, cluster: Ask) -> None:
        cluster("start strict_pack")
        failed = cluster("tell fail")["ended"]
        assert failed == "rank 1 failed: RuntimeError('out of memory, says the stand-in')"
        cluster("start strict_pack")
        assert cluster("tell end") == {"ended": "rank 1 has returned"}

    def test_a_rank_is_killed_at_once_and_a_second_time_in_vain(self, cluster: Ask) -> None:
        pid = cluster("start spread")["follower"]["pid"]
        with _process(pid) as gone:
            assert cluster("kill")["ended"].startswith("the process of rank 1 is gone: ")
            assert gone()

    def test_no_rank_outlives_its_leader(self, cluster: Ask) -> None:
        """Serve kills replicas that do not end in time; their ranks would hold GPUs for ever."""
        pid = cluster("start spread")["follower"]["pid"]
        with _process(pid) as gone:
            cluster("kill the leader")
            assert gone()

    def test_an_engine_answers_alike_with_its_ranks_on_one_node_and_on_two(self, cluster: Ask, tmp_path: Path) -> None:
        """On two nodes the ranks meet over TCP."""
        save_model("llama", tmp_path)
        found = {placement: cluster(f"engine {placement} {tmp_path}") for placement in ("strict_pack", "spread")}
        assert [found[placement]["nodes"] for placement in found] == [1, 2]
        assert len(found["spread"]["tokens"]) == 20
        assert found["spread"]["tokens"] == found["strict_pack"]["tokens"]

    def test_serve_starts_a_replica_anew_whose_rank_was_killed(self, cluster: Ask) -> None:
        """With another rank, in a placement group of Serve's own making."""
        cluster("start strict_pack")
        first = cluster("serve")["follower"]
        os.kill(first["pid"], signal.SIGKILL)
        assert cluster("next")["follower"]["pid"] != first["pid"]


@contextmanager
def _process(pid: int) -> Iterator[Callable[[], bool]]:
    """Give a function that waits for the end of a process, which is no child of this one."""
    file = os.pidfd_open(pid)
    try:
        yield lambda: bool(select.select([file], [], [], 30)[0])
    finally:
        os.close(file)
