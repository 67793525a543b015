"""Owns the promise that streams outlive the token channel: its connections are cut while tokens flow.
Never needs privileges: a process may take over a socket of its own child, and shut it down."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
from contextlib import closing
from pathlib import Path

import pytest

from loadtest.server import Server
from tests.chaos.support import INGRESS, check_undisturbed, completions, replicas, undisturbed
from tests.support.streams import Crowd, begun

pytestmark = [pytest.mark.anyio, pytest.mark.chaos]

PIDFD_GETFD = 438  # Linux's number of the call, on every architecture
ESTABLISHED, LISTENING = "01", "0A"
CUT_INTERVAL_S = 1.0
ANY, LOOPBACK = "00000000", "0100007F"


def sockets(pid: int) -> dict[str, int]:
    """File descriptors of a process's sockets, by inode."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            found[target[len("socket:[") : -1]] = int(entry.name)
    return found


def channel_connections(pid: int) -> list[int]:
    """File descriptors of an ingress replica's channel: what was accepted on its one port that is open at the node's
    own address. Ray listens at any address, HTTP at the loopback."""
    own = sockets(pid)
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    mine = [(row[1], row[3], own[row[9]]) for row in rows if row[9] in own]
    listening = {local for local, state, _ in mine if state == LISTENING and local.split(":")[0] not in (ANY, LOOPBACK)}
    return [fd for local, state, fd in mine if state == ESTABLISHED and local in listening]


def shut(pid: int, fd: int) -> None:
    """End a connection of another process under its hands."""
    pidfd = os.pidfd_open(pid)
    try:
        taken = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, pidfd, fd, 0)
    finally:
        os.close(pidfd)
    if taken < 0:
        pytest.skip(f"the kernel does not lend a child's socket: {os.strerror(ctypes.get_errno())}")
    with closing(socket.socket(fileno=taken)) as connection:
        connection.shutdown(socket.SHUT_RDWR)


async def test_streams_are_whole_when_the_channel_is_cut_again_and_again(server: Server) -> None:
    bodies = completions(40, 100)
    crowd = Crowd(server.url, bodies)
    crowd.start()
    await crowd.until(begun)
    num_cut = 0
    while crowd.num_live:
        for pid in replicas(server, INGRESS):
            for fd in channel_connections(pid):
                shut(pid, fd)
                num_cut += 1
        await asyncio.sleep(CUT_INTERVAL_S)
    check_undisturbed(await crowd.finish(), await undisturbed(bodies))
    print(f"{num_cut} connections of the channel cut")
    assert num_cut >= 6
