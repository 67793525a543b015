"""Owns a Ray cluster of two nodes on one machine, in a process of its own, that takes orders on its standard input.
Never serves anything: `serve run --address` joins the cluster. Nothing of the cluster outlives this process."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from loadtest.server import free_port

PREEMPTION = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    """Answer each order with one JSON line: `drain SECONDS` announces the end of the second node, `remove` ends it."""
    head = {"num_cpus": 1, "resources": {"head": 1}, "include_dashboard": False, "dashboard_port": free_port()}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(num_cpus=1)
    say(address=cluster.address, node_id=node.node_id)
    for line in sys.stdin:
        order, *numbers = line.split()
        if order == "drain":
            end_ms = int((time.time() + float(numbers[0])) * 1000)
            accepted, why = GcsClient(address=cluster.address).drain_node(node.node_id, PREEMPTION, "test", end_ms)
            say(accepted=accepted, why=why)
        elif order == "remove":
            cluster.remove_node(node, allow_graceful=False)
            say(removed=True)
    cluster.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m tests.chaos.two_nodes",
        description="Run a Ray cluster of two nodes on this machine, and take orders on standard input.",
    ).parse_args()
    main()
