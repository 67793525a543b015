"""Owns a Ray cluster of two nodes in a process of its own, and a leader that starts a rank there. It takes orders on
standard input, and answers each with a line of JSON. Never serves anything; nothing of it outlives this process.

The leader is an actor in the first bundle of a placement group, as Serve starts a replica.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.config import EngineConfig
from loadtest.server import free_port
from serve_app.replicas.ranks import RayRankProcess, launcher_here
from serve_app.settings.ranks import ONE_NODE, Placement, placement_options, rank_options

FOLLOWER = "tests.support.rank_follower"
SIZE = 2
NUM_NODES, NUM_CPUS = 2, 2
"""Each node has room for both ranks."""
PROMPT = list(range(5, 25))
PATIENCE_S = 30.0
LONGEST_S = 300.0
"""A pipe that nobody opens must not hold a test for ever."""


class Pipes:
    """What a follower says, and is told."""

    def __init__(self, folder: Path) -> None:
        self._paths = {name: str(folder / name) for name in ("up", "down")}
        for path in self._paths.values():
            os.mkfifo(path)
        self.spec = json.dumps(self._paths).encode()

    def hear(self) -> dict[str, Any]:
        """Wait for the next follower that starts."""
        with open(self._paths["up"], encoding="utf-8") as up:
            return dict(json.load(up))

    def tell(self, word: str) -> None:
        with open(self._paths["down"], "w", encoding="utf-8") as down:
            down.write(word)


class Leader:
    """Stands where EngineReplica is."""

    def __init__(self, options: dict[str, float | str]) -> None:
        launcher = launcher_here(SIZE, options, ONE_NODE, FOLLOWER)
        assert launcher is not None
        self._launcher = launcher
        self._process: RayRankProcess | None = None

    def start(self, rank: int, spec: bytes) -> dict[str, Any]:
        self._process = self._launcher.start(rank, spec)
        return {"node": ray.get_runtime_context().get_node_id(), "pid": os.getpid()}

    def poll(self) -> str | None:
        assert self._process is not None
        return self._process.poll()

    def ended(self) -> str | None:
        """Wait until the rank has ended, and return what `poll` then says."""
        assert self._process is not None
        ray.wait([self._process._running], timeout=PATIENCE_S)
        return self.poll()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.kill()


class EngineLeader:
    """Stands where EngineReplica is, with an engine."""

    def greedy(self, model_dir: str, placement: Placement, options: dict[str, float | str]) -> dict[str, Any]:
        """Return some tokens of an engine whose ranks are placed so."""
        from engine.build.executor import create_executor
        from tests.support.plans import greedy_text

        launcher = launcher_here(SIZE, options, placement)
        assert launcher is not None
        config = EngineConfig(tensor_parallel_size=SIZE, dtype="float32", num_kv_blocks=12, num_threads=1)
        executor, _ = create_executor(Path(model_dir), config, launcher=launcher)
        try:
            return {"tokens": greedy_text(executor, PROMPT, range(4), 20)}
        finally:
            executor.shutdown()


class Served:
    """Stands where EngineReplica is, in Serve's own hands."""

    def __init__(self, options: dict[str, float | str], spec: bytes) -> None:
        launcher = launcher_here(SIZE, options, ONE_NODE, FOLLOWER)
        assert launcher is not None
        self._process = launcher.start(1, spec)

    def check_health(self) -> None:
        if ended := self._process.poll():
            raise RuntimeError(ended)


def serve_it(folder: Path) -> Pipes:
    """Let Serve start a replica with a rank, and start it again whenever it is not healthy."""
    pipes = Pipes(folder)
    options = rank_options(SIZE, 2.0, 0.0, None)
    keywords = placement_options(SIZE, options, ONE_NODE)
    serve.start(proxy_location="Disabled")
    served = serve.deployment(health_check_period_s=0.5, ray_actor_options=dict(options), **keywords)(Served)
    serve.run(served.bind(options, pipes.spec), route_prefix=None)
    return pipes


def wait_until_free() -> None:
    """Wait until all that was removed has given its CPUs back: ranks are spread only where there is room."""
    deadline = time.monotonic() + PATIENCE_S
    while ray.available_resources().get("CPU", 0) < NUM_NODES * NUM_CPUS and time.monotonic() < deadline:
        time.sleep(0.05)


def run_engine(placement: str, model_dir: str) -> dict[str, Any]:
    wait_until_free()
    options = rank_options(SIZE, 2.0, 0.0, None)
    reserved = placement_options(SIZE, options, cast(Placement, placement))
    group = placement_group(reserved["placement_group_bundles"], strategy=reserved["placement_group_strategy"])
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    leader = ray.remote(EngineLeader).options(**options, scheduling_strategy=place).remote()
    try:
        found = dict(ray.get(leader.greedy.remote(model_dir, placement, options), timeout=LONGEST_S))
        return found | {"nodes": len({*placement_group_table(group)["bundles_to_node_id"].values()})}
    finally:
        ray.kill(leader)
        remove_placement_group(group)


class Replica:
    """A placement group with a leader in it, and a rank that it started."""

    def __init__(self, placement: Any, folder: Path) -> None:
        options = rank_options(SIZE, 2.0, 0.0, None)
        keywords = placement_options(SIZE, options, placement)
        self.group = placement_group(keywords["placement_group_bundles"], keywords["placement_group_strategy"])
        place = PlacementGroupSchedulingStrategy(self.group, 0, placement_group_capture_child_tasks=True)
        self.leader = ray.remote(Leader).options(**options, scheduling_strategy=place).remote(options)
        self._pipes = Pipes(folder)

    def start(self) -> dict[str, Any]:
        leader = ray.get(self.leader.start.remote(1, self._pipes.spec))
        follower = self._pipes.hear()
        return {"leader": leader, "follower": follower, "poll": ray.get(self.leader.poll.remote())}

    def order(self, order: str) -> dict[str, Any]:
        if order == "kill":
            ray.get(self.leader.kill.remote())
        elif order == "kill the leader":
            ray.kill(self.leader)
            return {}
        elif order.startswith("tell"):
            self._pipes.tell(order.removeprefix("tell").strip())
        return {"ended": ray.get(self.leader.ended.remote())}

    def remove(self) -> None:
        """End it, and return once both nodes are free again: until then, spreading has no choice."""
        remove_placement_group(self.group)
        deadline_s = time.monotonic() + PATIENCE_S
        while ray.available_resources().get("CPU", 0.0) < NUM_CPUS * NUM_NODES:
            assert time.monotonic() < deadline_s, ray.available_resources()
            time.sleep(0.05)


class Orders:
    """What this process can be told to do."""

    def __init__(self) -> None:
        self._replica: Replica | None = None
        self._served: Pipes | None = None

    def obey(self, order: str) -> dict[str, Any]:
        """`start PLACEMENT` makes a new replica in place of the last one; `serve` lets Serve make one, and `next` waits
        for its next rank; all other orders are the replica's."""
        if order == "next":
            assert self._served is not None
            return {"follower": self._served.hear()}
        if order.startswith(("engine", "start", "serve")):
            if self._replica is not None:
                self._replica.remove()
                self._replica = None
            if order.startswith("engine"):
                return run_engine(*order.split()[1:])
            folder = Path(tempfile.mkdtemp(dir=os.environ["RAY_TMPDIR"]))
            if order == "serve":
                self._served = serve_it(folder)
                return {"follower": self._served.hear()}
            self._replica = Replica(order.split()[1], folder)
            return self._replica.start()
        assert self._replica is not None
        return self._replica.order(order)


def main() -> None:
    argparse.ArgumentParser(description="Run a cluster of two nodes, and obey orders on standard input.").parse_args()
    faulthandler.dump_traceback_later(LONGEST_S, exit=True)
    head = {"num_cpus": NUM_CPUS, "include_dashboard": False, "dashboard_port": free_port()}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=NUM_CPUS)
    ray.init(address=cluster.address, log_to_driver=False)
    orders = Orders()
    print(json.dumps({"nodes": len(ray.nodes())}), flush=True)
    for line in sys.stdin:
        print(json.dumps(orders.obey(line.strip())), flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
