"""The hook that empties a pod: what it counts as serving, how long it holds the pod, and what it tells a real GCS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from k8s import drain
from k8s.validate.manifests import ROOT
from loadtest.server import ended, free_port

pytestmark = pytest.mark.server

REPLICA = "ray::ServeReplica:chunkserve:Engine"


class Clock:
    """A clock that only sleeps move, and what the pod looks like at each time."""

    def __init__(self, looks: list[list[str]]) -> None:
        self.now_s = 0.0
        self._looks = looks
        self.num_looks = 0

    def look(self) -> list[str]:
        self.num_looks += 1
        return self._looks[min(self.num_looks, len(self._looks)) - 1]

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def hold(self, deadline_s: float) -> list[str]:
        return drain.hold(deadline_s, look=self.look, clock=lambda: self.now_s, sleep=self.sleep)


@pytest.fixture(autouse=True)
def _ray_ends_a_client_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own default is 60 s. A container may have less."""
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "1")


def process(proc: Path, pid: int, *arguments: str) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "cmdline").write_bytes("\0".join(arguments).encode())


def test_replicas_and_proxies_hold_a_pod_and_nothing_else_does(tmp_path: Path) -> None:
    process(tmp_path, 11, "ray::HAProxyManager.run")
    process(tmp_path, 9, REPLICA)
    process(tmp_path, 7, "/opt/venv/bin/raylet", "--node_ip_address=10.0.0.1")
    process(tmp_path, 8, "ray::IDLE")
    process(tmp_path, 10, "python", "-c", "ray::ServeReplica")
    process(tmp_path, 12, "ray::ProxyActor")
    process(tmp_path, 13)
    (tmp_path / "14").mkdir()  # ended between the listing and the look
    (tmp_path / "self").mkdir()
    assert drain.serving(tmp_path) == [REPLICA, "ray::HAProxyManager.run", "ray::ProxyActor"]


def test_an_empty_pod_is_let_go_after_a_second_look() -> None:
    clock = Clock([[]])
    assert clock.hold(960) == []
    assert (clock.num_looks, clock.now_s) == (2, drain.POLL_S)


def test_a_pod_is_held_while_anything_serves() -> None:
    clock = Clock([[REPLICA]] * 300 + [[]])
    assert clock.hold(960) == []
    assert clock.now_s == 301 * drain.POLL_S


def test_one_empty_look_between_two_replicas_is_not_the_end() -> None:
    clock = Clock([[REPLICA], [], [REPLICA], []])
    assert clock.hold(960) == []
    assert clock.num_looks == 5


def test_the_deadline_ends_the_drain_and_what_is_left_is_reported() -> None:
    clock = Clock([[REPLICA]])
    assert clock.hold(2.5) == [REPLICA]
    assert clock.now_s == 2.5


@pytest.mark.parametrize("deadline", ["0", "-1"])
def test_a_deadline_must_lie_ahead(deadline: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        drain.main(["--deadline-s", deadline, "--address", "127.0.0.1:1", "--node-ip", "127.0.0.1"])
    assert end.value.code == 2
    assert f"--deadline-s must be > 0, but it is {deadline}" in capsys.readouterr().err


def test_a_pod_that_does_not_know_itself_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("POD_IP", raising=False)
    with pytest.raises(SystemExit):
        drain.main(["--deadline-s", "1"])
    assert "--address and --node-ip are needed" in capsys.readouterr().err


def test_without_a_head_the_pod_is_held_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(address: str, node_ip: str, deadline_s: float) -> str:
        raise drain.DrainError(f"{address}: no answer")

    held: list[float] = []
    monkeypatch.setattr(drain, "announce", gone)
    monkeypatch.setattr(drain, "hold", lambda deadline_s: held.append(deadline_s) or [])
    monkeypatch.setattr(drain, "_now_s", lambda: 0.0)
    log = tmp_path / "log"
    arguments = ["--deadline-s", "960", "--address", "head:6379", "--node-ip", "10.0.0.1", "--log", str(log)]
    assert drain.main(arguments) == 0
    assert held == [960.0]
    assert "could not be announced: head:6379: no answer" in log.read_text()
    assert log.read_text() == capsys.readouterr().err


def test_where_nothing_listens_the_hook_holds_the_pod_until_its_deadline() -> None:
    """Ray's client does not raise there: it blocks, and then ends the process."""
    with subprocess.Popen([REPLICA, "-c", "input()"], executable=sys.executable, stdin=subprocess.PIPE) as replica:
        hook = [sys.executable, "-m", "k8s.drain", "--deadline-s", "0.2", "--node-ip", "127.0.0.1"]
        hook += ["--address", f"127.0.0.1:{free_port()}"]
        done = subprocess.run(hook, cwd=ROOT, capture_output=True, text=True, timeout=60)
        replica.kill()
    assert done.returncode == 1
    assert "drain: left at the deadline: " in done.stderr
    assert REPLICA in done.stderr


def test_a_head_that_does_not_answer_delays_the_watch_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def blocked(address: str, node_ip: str, deadline_s: float) -> str:
        over.wait(30)
        return "n1"

    over, held = Event(), list[float]()
    monkeypatch.setattr(drain, "announce", blocked)
    monkeypatch.setattr(drain, "FIRST_ATTEMPT_S", 0)
    monkeypatch.setattr(drain, "_now_s", lambda: 0.0)
    monkeypatch.setattr(drain, "hold", lambda deadline_s: held.append(deadline_s) or [])
    assert drain.main(["--deadline-s", "960", "--address", "head:6379", "--node-ip", "10.0.0.1"]) == 0
    over.set()
    for thread in threading.enumerate():
        if "_keep_announcing" in thread.name:
            thread.join()
    assert held == [960.0]
    assert "not announced yet: head:6379 has not answered" in capsys.readouterr().err


def test_rays_client_does_not_end_the_hook_before_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[str] = []
    monkeypatch.setattr(drain, "announce", lambda *_: limits.append(os.environ[drain._RECONNECT]) or "n1")
    monkeypatch.setattr(drain, "hold", lambda deadline_s: [])
    assert drain.main(["--deadline-s", "959.5", "--address", "head:6379", "--node-ip", "10.0.0.1"]) == 0
    assert limits == ["1020"]


def test_a_head_that_comes_back_is_told_while_the_pod_is_held(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise Serve would go on sending requests here, and the kubelet would cut them off."""
    told = Event()
    left_s: list[float] = []

    def answers_the_third_time(address: str, node_ip: str, deadline_s: float) -> str:
        left_s.append(deadline_s)
        now_s.append(now_s[-1] + 40)  # as long as a client of Ray's waits for a head
        if len(left_s) < 3:
            raise drain.DrainError(f"{address}: no answer")
        told.set()
        return "n1"

    def hold(deadline_s: float) -> list[str]:
        assert told.wait(30)
        return []

    now_s = [0.0]
    monkeypatch.setattr(drain, "RETRY_S", 0)
    monkeypatch.setattr(drain, "_now_s", lambda: now_s[-1])
    monkeypatch.setattr(drain, "announce", answers_the_third_time)
    monkeypatch.setattr(drain, "hold", hold)
    assert drain.main(["--deadline-s", "960", "--address", "head:6379", "--node-ip", "10.0.0.1"]) == 0
    assert left_s == [960, 920, 880], "Ray is told when the pod ends, which no attempt puts off"
    assert capsys.readouterr().err.count("could not be announced") == 2


def test_a_long_attempt_to_announce_is_a_part_of_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the kubelet, whose grace period begins with the hook, would end the pod before the hook does."""

    def slow(address: str, node_ip: str, deadline_s: float) -> str:
        now_s.append(40.0)
        return "n1"

    now_s, held = [0.0], list[float]()
    monkeypatch.setattr(drain, "_now_s", lambda: now_s[-1])
    monkeypatch.setattr(drain, "announce", slow)
    monkeypatch.setattr(drain, "hold", lambda deadline_s: held.append(deadline_s) or [])
    assert drain.main(["--deadline-s", "150", "--address", "head:6379", "--node-ip", "10.0.0.1"]) == 0
    assert held == [110.0]


def test_a_log_that_cannot_be_written_does_not_let_the_pod_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drain, "announce", lambda *_: "n1")
    monkeypatch.setattr(drain, "hold", lambda deadline_s: [REPLICA])
    arguments = ["--deadline-s", "960", "--address", "head:6379", "--node-ip", "10.0.0.1"]
    assert drain.main([*arguments, "--log", str(tmp_path / "none" / "log")]) == 1
    assert capsys.readouterr().err == f"drain: node n1 drains\ndrain: left at the deadline: {REPLICA}\n"


CLUSTER = """
import json, sys, time
import ray
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated.gcs_pb2 import GcsNodeInfo
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from loadtest.server import free_port

head = {"num_cpus": 0, "include_dashboard": False, "dashboard_port": free_port()}
cluster = Cluster(initialize_head=True, head_node_args=head)
node = cluster.add_node(num_cpus=1, node_ip_address="127.0.0.2")
ray.init(address=cluster.address, log_to_driver=False)
gcs = GcsClient(address=cluster.address)

@ray.remote(num_cpus=0)
class Proxy:
    def is_there(self):
        return True

proxy = Proxy.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)).remote()
ray.get(proxy.is_there.remote())

def say(**facts):
    print(json.dumps(facts), flush=True)

def is_alive():
    nodes = gcs.get_all_node_info(timeout=10).values()
    return any(one.node_id.hex() == node.node_id and one.state == GcsNodeInfo.ALIVE for one in nodes)

say(address=cluster.address, node=node.node_id)
for line in sys.stdin:
    if line.strip() == "draining":
        say(ids=[getattr(name, "hex", lambda: name)() for name in gcs.get_draining_nodes()],
            answers=ray.get(proxy.is_there.remote()))
    elif line.strip() == "end":
        ray.kill(proxy)
        while is_alive():
            time.sleep(0.1)
        say(alive=False)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run a real GCS with a head and a worker, whose address is 127.0.0.2, in processes of their own."""
    with tempfile.TemporaryDirectory(prefix="cs", dir="/tmp", ignore_cleanup_errors=True) as temp:
        env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": temp}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, "-c", CLUSTER], cwd=ROOT, env=env, start_new_session=True, **pipes)
        with ended(process):
            yield process, ask(process)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def ask(process: subprocess.Popen[str], order: str | None = None) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    if order is not None:
        process.stdin.write(order + "\n")
        process.stdin.flush()
    for line in process.stdout:
        if line.startswith("{"):
            return dict(json.loads(line))
    raise AssertionError(f"the cluster ended with {process.wait()}")


def announce(address: str, node_ip: str) -> subprocess.CompletedProcess[str]:
    """Announce the end in a process of its own, as in a pod: a Ray client leaves threads behind."""
    code = f"from k8s import drain; print(drain.announce({address!r}, {node_ip!r}, 600))"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("node_ip", ["127.0.0.9", "head"])
def test_a_node_that_is_no_worker_is_not_drained(
    node_ip: str, cluster: tuple[subprocess.Popen[str], dict[str, Any]]
) -> None:
    address = cluster[1]["address"]
    node_ip = address.partition(":")[0] if node_ip == "head" else node_ip
    done = announce(address, node_ip)
    assert done.returncode == 1
    assert f"DrainError: 0 worker nodes have the address {node_ip}; there are 127.0.0.2" in done.stderr


def test_the_gcs_learns_which_node_ends_and_the_node_stays_for_a_proxy_that_takes_no_cpu(
    cluster: tuple[subprocess.Popen[str], dict[str, Any]],
) -> None:
    """A raylet that drains ends when it is idle. If what takes no CPU did not count, the raylet would end, and with it
    the streams that pass through its node's proxy."""
    process, started = cluster
    done = announce(started["address"], "127.0.0.2")
    assert done.stdout.split() == [started["node"]], done.stderr
    for _ in range(10):  # an end that must not come cannot be waited for: look for five seconds
        assert ask(process, "draining") == {"ids": [started["node"]], "answers": True}
        time.sleep(0.5)
    assert ask(process, "end") == {"alive": False}
