"""Owns the ways in which an engine replica hangs without ending, and does them to a process of a running server.
Never touches a process that the server under test did not start. Needs no privileges: a process may take over a socket
of its own child."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from loadtest.server import Server
from tests.chaos.support import INGRESS, kill, replicas

PIDFD_GETFD = 438  # the number of Linux's call, the same on every architecture
ESTABLISHED, LISTENING = "01", "0A"
ANY, LOOPBACK = "00000000", "0100007F"
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27

Row = tuple[str, str, str, int]
"""A TCP socket of a process: its address, its peer's, its state, and its file descriptor there."""


def tcp_sockets(pid: int) -> list[Row]:
    descriptors = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            descriptors[target[len("socket:[") : -1]] = int(entry.name)
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [(row[1], row[2], row[3], descriptors[row[9]]) for row in rows if row[9] in descriptors]


def channel_sockets(ingress: int) -> tuple[list[Row], list[Row]]:
    """Find the listening socket of an ingress replica's channel and the connections it accepted.
    The channel is the one port that is open at the node's own address: Ray listens at any address, HTTP at the
    loopback."""
    rows = tcp_sockets(ingress)
    listening = [row for row in rows if row[2] == LISTENING and row[0].split(":")[0] not in (ANY, LOOPBACK)]
    ports = {row[0] for row in listening}
    return listening, [row for row in rows if row[2] == ESTABLISHED and row[0] in ports]


@contextmanager
def borrowed(pid: int, descriptor: int) -> Iterator[socket.socket]:
    """Duplicate a socket of another process."""
    pidfd = os.pidfd_open(pid)
    try:
        taken = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, pidfd, descriptor, 0)
    finally:
        os.close(pidfd)
    if taken < 0:
        pytest.skip(f"the kernel does not lend a child's socket: {os.strerror(ctypes.get_errno())}")
    with closing(socket.socket(fileno=taken)) as connection:
        yield connection


class _Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filters", ctypes.POINTER(_Filter))]


def drop_what_comes(connection: socket.socket) -> None:
    """Have the kernel drop every packet for this socket, as if the network had lost it."""
    nothing = (_Filter * 1)(_Filter(0x06, 0, 0, 0))  # BPF_RET, 0 bytes
    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, bytes(_Program(1, nothing)))


def take_what_comes(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


class Hangs:
    """Does faults, by name, to engine replicas of one server."""

    def __init__(self, server: Server, orders: Path) -> None:
        """`orders` is the directory that the server's processes watch; see `in_process`."""
        self._server = server
        self._orders = orders
        self._cut: list[tuple[int, int]] = []

    @property
    def kinds(self) -> dict[str, Callable[[int], None]]:
        return {
            "is stopped": lambda pid: kill(pid, signal.SIGSTOP),
            "is cut off": self.cut_off,
            "holds the interpreter lock": lambda pid: self._order(pid, "holds the interpreter lock"),
            "never returns from a step": lambda pid: self._order(pid, "never returns from a step"),
        }

    def _order(self, pid: int, what: str) -> None:
        written = self._orders / f"{pid}.new"
        written.write_text(what)
        written.rename(self._orders / str(pid))

    def cut_off(self, engine: int) -> None:
        """Lose every packet between the engine and all ingress replicas, also those that connect from now on."""
        own = {row[0] for row in tcp_sockets(engine)}
        peers = set()
        for ingress in replicas(self._server, INGRESS):
            listening, accepted = channel_sockets(ingress)
            theirs = [row for row in accepted if row[1] in own]
            peers |= {row[0] for row in theirs}
            self._cut += [(ingress, row[3]) for row in (*listening, *theirs)]
        assert peers, "the engine has no channel to any ingress"
        self._cut += [(engine, row[3]) for row in tcp_sockets(engine) if row[1] in peers]
        for pid, descriptor in self._cut:
            with borrowed(pid, descriptor) as connection:
                drop_what_comes(connection)

    def heal(self) -> None:
        """Undo `cut_off`. Sockets that were closed meanwhile stay closed."""
        for ingress in replicas(self._server, INGRESS):
            for row in channel_sockets(ingress)[0]:
                with borrowed(ingress, row[3]) as connection:
                    take_what_comes(connection)
        self._cut.clear()
