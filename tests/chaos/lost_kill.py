"""Shows a fault of Ray 2.60, to report it there: a stopped actor outlives `ray.kill` where the raylet's connection to
its worker has failed already. Nothing here is of this project.

The GCS sends KillLocalActor to the raylet, which asks the worker to exit by an RPC. If that RPC hangs, a timer sends
SIGKILL after 5 s. If it fails at once, nobody signals the process.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import ray
from ray._private.internal_api import node_stats

GIVEN_UP_S = 45.0


@ray.remote(num_cpus=0)
class Hung:
    def pid(self) -> int:
        return os.getpid()


def ask_workers() -> None:
    """Have the raylet call each worker, which opens its connection to each anew."""
    node = ray.nodes()[0]
    try:
        node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=True)
    except RuntimeError as error:
        print("node_stats:", error)


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.lost_kill",
        description="Show that a stopped Ray actor can outlive ray.kill, as a report to Ray's authors.",
    )
    parser.add_argument(
        "--wait-s", type=float, default=40.0, help="between the stop and the kill; 0: the raylet has not noticed it yet"
    )
    wait_s = parser.parse_args().wait_s
    with tempfile.TemporaryDirectory(prefix="ray") as directory:
        ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", _temp_dir=directory)
        actor = Hung.remote()
        pid = ray.get(actor.pid.remote())
        os.kill(pid, signal.SIGSTOP)
        try:
            if wait_s:
                threading.Thread(target=ask_workers, daemon=True).start()
                time.sleep(wait_s)
            began = time.monotonic()
            ray.kill(actor)
            while alive(pid) and time.monotonic() - began < GIVEN_UP_S:
                time.sleep(0.1)
            found = "still there" if alive(pid) else "gone"
            print(f"{found} {time.monotonic() - began:.1f} s after ray.kill")
        finally:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
            ray.shutdown()


if __name__ == "__main__":
    main()
