"""Owns the end of a worker pod: it tells Ray that the node goes away, and holds the pod until nothing of Serve runs on
it. Never ends a process. At the end of the grace period, the kubelet kills what is left."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

POLL_S = 1.0
RETRY_S = 10.0
"""The pause before the end is announced again. A head on another node takes minutes to come."""
FIRST_ATTEMPT_S = 30.0
"""How long the first announcement may delay the watch on the pod. While no head answers, Ray's client waits for it."""
_RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
_RECONNECT_MARGIN_S = 60
_now_s = time.monotonic
_SERVE_TITLES = ("ray::ServeReplica", "ray::HAProxyManager", "ray::ProxyActor")
"""Titles of the processes that carry requests. Serve ends a proxy when its last connection is over, so a stream that
passes through this node to a replica on another one holds the pod, too."""


class DrainError(RuntimeError):
    """The end of the node could not be announced. The message says why."""


def serving(proc: Path = Path("/proc")) -> list[str]:
    """Return the titles of this container's processes that carry requests, in order of their process ids.

    They are read from the process table and not from Ray, so that this needs no token and works without the head.
    """
    titles = []
    for directory in sorted((path for path in proc.iterdir() if path.name.isdigit()), key=lambda path: int(path.name)):
        try:
            title = (directory / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace").strip()
        except OSError:  # the process has ended meanwhile
            continue
        if title.startswith(_SERVE_TITLES):
            titles.append(title)
    return titles


def announce(address: str, node_ip: str, deadline_s: float) -> str:
    """Tell the GCS at `address` (host:port) that the node with this IP goes away in `deadline_s` seconds, and return
    the node's id. Serve then starts replacements elsewhere, and ends this node's replicas when they are idle. While
    nothing listens at the address, this waits, without a limit of its own.

    Raises:
        DrainError: the GCS breaks off, does not know the node, or refuses.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # imported here, since it takes a second that --help need not
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    end_ms = int((time.time() + deadline_s) * 1000)
    try:
        gcs = GcsClient(address=address)
        node_id = _node_id(gcs, node_ip)
        accepted, why = gcs.drain_node(node_id, reason, "the pod is being deleted", end_ms)
    except DrainError:
        raise
    except Exception as error:  # many classes of Ray's and gRPC's; whatever fails, the pod must be held
        raise DrainError(f"{address}: {type(error).__name__}: {error}") from error
    if not accepted:
        raise DrainError(f"{address} does not accept it: {why}")
    return node_id


def _node_id(gcs: object, node_ip: str) -> str:
    from ray.core.generated.gcs_pb2 import GcsNodeInfo

    nodes = gcs.get_all_node_info(timeout=10)  # type: ignore[attr-defined]
    alive = [node for node in nodes.values() if node.state == GcsNodeInfo.ALIVE and not node.is_head_node]
    ids = [node.node_id.hex() for node in alive if node.node_manager_address == node_ip]
    if len(ids) != 1:
        known = sorted(node.node_manager_address for node in alive)
        raise DrainError(f"{len(ids)} worker nodes have the address {node_ip}; there are {', '.join(known) or 'none'}")
    return str(ids[0])


def hold(
    deadline_s: float,
    *,
    look: Callable[[], list[str]] = serving,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Wait until two looks in a row find nothing that serves, or until the deadline. Returns what is left then."""
    end_s = clock() + deadline_s
    empty_before = False
    while True:
        left = look()
        if (empty_before and not left) or clock() >= end_s:
            return left
        empty_before = not left
        sleep(min(POLL_S, max(0.0, end_s - clock())))


def main(arguments: list[str] | None = None) -> int:
    """Drain this node. Returns 0 if the pod is empty, 1 if it is not at the deadline. Kubernetes discards a hook's
    output, so in a pod `--log` names the first process's standard output, which is the pod's log."""
    parser = argparse.ArgumentParser(
        prog="python -m k8s.drain",
        description="Move all replicas off this worker node before it stops. Meant for a pod's preStop hook.",
    )
    parser.add_argument(
        "--deadline-s",
        type=float,
        required=True,
        help="seconds after which to give up; less than the pod's grace period",
    )
    parser.add_argument(
        "--address", default=os.environ.get("RAY_ADDRESS"), help="address of Ray's GCS, host:port (RAY_ADDRESS)"
    )
    parser.add_argument("--log", type=Path, help="file for messages, since a hook's standard error is not kept")
    parser.add_argument("--node-ip", default=os.environ.get("POD_IP"), help="address of this node (POD_IP)")
    options = parser.parse_args(arguments)
    if not options.address or not options.node_ip:
        parser.error("--address and --node-ip are needed: neither RAY_ADDRESS with POD_IP nor the options say them")
    if options.deadline_s <= 0:
        parser.error(f"--deadline-s must be > 0, but it is {options.deadline_s:g}")
    end_s, tried, ended = _now_s() + options.deadline_s, Event(), Event()
    # After this time without a head, Ray's client ends the whole process. Ray reads it when it is imported.
    os.environ[_RECONNECT] = str(math.ceil(options.deadline_s) + _RECONNECT_MARGIN_S)
    # The head may be gone, for now or for good. Streams here can still finish, so the pod is held all the same.
    Thread(target=_keep_announcing, args=(options, end_s, tried, ended), daemon=True).start()
    if not tried.wait(min(FIRST_ATTEMPT_S, options.deadline_s)):
        _say(options.log, f"the end of this node is not announced yet: {options.address} has not answered")
    left = hold(max(0.0, end_s - _now_s()))
    ended.set()
    _say(options.log, f"left at the deadline: {', '.join(left)}" if left else "nothing of Serve is left here")
    return 1 if left else 0


def _announced(options: argparse.Namespace, end_s: float) -> bool:
    try:
        _say(options.log, f"node {announce(options.address, options.node_ip, max(0.0, end_s - _now_s()))} drains")
    except DrainError as error:
        _say(options.log, f"the end of this node could not be announced: {error}")
        return False
    return True


def _keep_announcing(options: argparse.Namespace, end_s: float, tried: Event, ended: Event) -> None:
    """Announce the end until the GCS accepts it. Until Serve knows, it sends requests here, and starts nothing
    elsewhere."""
    while not _announced(options, end_s):
        tried.set()
        if ended.wait(RETRY_S):
            return
    tried.set()


def _say(log: Path | None, what: str) -> None:
    print(f"drain: {what}", file=sys.stderr, flush=True)
    if log is not None:
        with suppress(OSError), log.open("a") as file:  # the pod is held, whether or not anybody reads why
            file.write(f"drain: {what}\n")


if __name__ == "__main__":
    os._exit(main())  # a thread that waits for the GCS could not be ended otherwise
