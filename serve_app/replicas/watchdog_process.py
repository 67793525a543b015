"""Owns the end of a replica process that hangs: a process of its own, which hears from the replica through a pipe and
kills it after too long a silence. `python -I -S` this file, with the replica's process id and the most silent seconds.
Never outlives the replica, never imports anything of ours or of Ray's, and never kills another process."""

import argparse
import os
import select
import signal
import sys

LOOK_MS = 1000


def watch(parent: int, beats: int, most_silent_looks: int) -> bool:
    """Return when the parent has ended (False), or has said nothing in so many looks one after another (True).

    Looks are counted, not time: where the machine or the container stood still, both processes did.
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
        if os.getppid() != parent:  # some child of the parent may hold the pipe open
            return False
    return True


def kill(parent: int) -> None:
    """A process that outlives its parent is given another. So while this is the parent, the id is still its own, and
    not that of a later process."""
    if os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill the parent once it has fed standard input nothing for too long.")
    parser.add_argument("parent", type=int, help="its process id")
    parser.add_argument("most_silent_s", type=float, help="seconds")
    options = parser.parse_args()
    parent, most_silent_s = options.parent, options.most_silent_s
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent may take its time to end; then so do we
        signal.signal(ignored, signal.SIG_IGN)
    if watch(parent, sys.stdin.fileno(), max(1, round(most_silent_s * 1000 / LOOK_MS))):
        print(f"process {parent} has hung for {most_silent_s:g} s and is killed", file=sys.stderr, flush=True)
        kill(parent)


if __name__ == "__main__":
    main()
