"""Kills a replica process that hangs: a process of its own, which the replica feeds through a pipe, and which kills the
replica after too long a silence. Run it by `python -I -S` with the replica's process id and the limit in seconds.
Never outlives the replica, never imports modules of this project or of Ray, and never kills another process."""

import argparse
import os
import select
import signal
import sys

LOOK_MS = 1000


def watch(parent: int, beats: int, most_silent_looks: int) -> bool:
    """Return False when the parent has ended, or True when it was silent in `most_silent_looks` consecutive looks.

    Looks are counted instead of time, because if the machine or the container is suspended, both processes are.
    """
    poll = select.poll()
    poll.register(beats, select.POLLIN)
    num_silent = 0
    while num_silent < most_silent_looks:
        if poll.poll(LOOK_MS):
            if not os.read(beats, 4096):
                return False
            num_silent = 0
        else:
            num_silent += 1
        if os.getppid() != parent:  # checked because a child of the parent may hold the pipe open
            return False
    return True


def kill(parent: int) -> None:
    """Kill the parent. A process that outlives its parent gets another one, so while this is the parent, the id cannot
    belong to a later process."""
    if os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill the parent when standard input has been silent for too long.")
    parser.add_argument("parent", type=int, help="the parent's process id")
    parser.add_argument("most_silent_s", type=float, help="how long the parent may be silent, in seconds")
    options = parser.parse_args()
    parent, most_silent_s = options.parent, options.most_silent_s
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent is watched until its end
        signal.signal(ignored, signal.SIG_IGN)
    if watch(parent, sys.stdin.fileno(), max(1, round(most_silent_s * 1000 / LOOK_MS))):
        print(f"process {parent} has hung for {most_silent_s:g} s and is killed", file=sys.stderr, flush=True)
        kill(parent)


if __name__ == "__main__":
    main()
