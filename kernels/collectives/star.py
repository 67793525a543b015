"""Owns the connections of the leader to the other ranks, of any machine: messages, and the news that a rank is lost.
Never carries a tensor."""

from __future__ import annotations

import queue
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from kernels.collectives.group import LEADER, RankLostError, no_reason, stop_if

_MESSAGE, _RECEIVED, _LOST, _LEAVES = range(4)
_HEAD = struct.Struct("!BQ")  # kind, bytes after it
_UNRECEIVED = 2
"""How many messages a rank may be behind before the leader waits for it."""


_NEWS_S = 1.0
_ASKED_S = 0.2
"""How often a leader that waits for ranks asks whether it should."""
_SPEAKS_S = 10.0
"""How long a connection may take to say which rank it is from, which ranks do at once. Others wait meanwhile."""


class Star:
    """One rank's end: the leader has a connection to each other rank, and those to the leader alone.

    A thread of its own reads. A connection that ends is a rank that is lost; so is one whose machine does not answer
    for some 20 seconds.
    """

    def __init__(self, peers: Mapping[int, socket.socket], timeout_s: float, on_lost: Callable[[], None]) -> None:
        """peers: a connection to each rank; they are closed with this. timeout_s: how long a rank may take to receive a
        message once the leader waits for it. on_lost: called once, by any thread."""
        self._peers = peers
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._unreceived = dict.fromkeys(peers, 0)
        self._leaving: set[int] = set()
        self._untold: set[int] = set()
        self._reason: str | None = None
        self._closed = False
        self._writing = {rank: threading.Lock() for rank in peers}
        for peer in peers.values():
            configure(peer, timeout_s)
        self._reader = threading.Thread(target=self._read, name="ranks", daemon=True)
        self._reader.start()

    @property
    def reason(self) -> str | None:
        """Why no call can succeed any more. None: no rank is lost."""
        return self._reason

    def wait_for_reason(self) -> None:
        """Give a connection that broke time for the news of who broke it."""
        with self._changed:
            self._changed.wait_for(lambda: self._reason is not None, _NEWS_S)

    def lose(self, reason: str) -> None:
        """Keep the reason unless there is one, and tell the others. Any thread."""
        self._keep(reason, tell=True)

    def _keep(self, reason: str, *, tell: bool) -> None:
        with self._changed:
            first = self._reason is None and not self._closed
            if first:
                self._reason = reason
                self._untold = set(self._peers)
                self._changed.notify_all()
        if tell:
            self._tell()  # before connections break, which is no news of who is lost
        if first:
            self._messages.put(None)
            self._on_lost()

    def _tell(self) -> None:
        with self._changed:
            untold, self._untold = self._untold, set()
        for rank in untold:
            self._try_to_write(rank, _LOST, (self._reason or "").encode())

    def send(self, message: bytes) -> None:
        """To all peers; see Group.send."""
        with self._changed:
            self._changed.wait_for(lambda: self._reason is not None or self._slowest() is None, self._timeout_s)
            slowest = self._slowest()
            for rank in self._peers:
                self._unreceived[rank] += 1
        if slowest is not None:
            self.lose(f"Rank {slowest} did not receive a message within {self._timeout_s:g} s.")
        self.check()
        for rank in self._peers:
            try:
                self._write(rank, _MESSAGE, message)
            except OSError as error:
                self.wait_for_reason()
                self.lose(f"Rank {rank} broke its connection: {error}.")
                raise RankLostError(self._reason) from error

    def receive(self, limit_s: float | None = None) -> bytes:
        """Return the leader's next message, even if it has left since. limit_s: the most to wait; None: no limit.

        Raises:
            RankLostError: a rank is lost.
            TimeoutError: there was no message within `limit_s`.
        """
        try:
            message = self._messages.get(timeout=limit_s)
        except queue.Empty:
            raise TimeoutError(f"no message within {limit_s} s") from None
        if message is None:
            self._messages.put(None)
            raise RankLostError(self._reason)
        self._try_to_write(LEADER, _RECEIVED)
        return message

    def check(self) -> None:
        """Raise RankLostError if a rank is lost."""
        if self._closed:
            raise RankLostError("This rank has closed its group.")
        if self._reason is not None:
            self._tell()
            raise RankLostError(self._reason)

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
        for rank, peer in self._peers.items():
            if self._reason is not None:  # the reader may be about to tell it
                self._try_to_write(rank, _LOST, self._reason.encode())
            self._try_to_write(rank, _LEAVES)
            with suppress(OSError):  # the other end may have gone first
                peer.shutdown(socket.SHUT_RDWR)  # which ends the reader, too
        if threading.current_thread() is not self._reader:
            self._reader.join()
        for peer in self._peers.values():
            peer.close()

    def _slowest(self) -> int | None:
        return next((rank for rank, count in self._unreceived.items() if count >= _UNRECEIVED), None)

    def _write(self, rank: int, kind: int, content: bytes = b"") -> None:
        with self._writing[rank]:
            self._peers[rank].sendall(_HEAD.pack(kind, len(content)) + content)

    def _try_to_write(self, rank: int, kind: int, content: bytes = b"") -> None:
        """Write unless the rank is gone or so far behind that it would have to be waited for: the reader, or the end of
        the connection, says so."""
        with suppress(OSError, ValueError):
            if select.select([], [self._peers[rank]], [], 0)[1]:
                self._write(rank, kind, content)

    # --- the reader's thread ------------------------------------------------------------------------------------------

    def _read(self) -> None:
        with selectors.DefaultSelector() as ready:
            for rank, peer in self._peers.items():
                ready.register(peer, selectors.EVENT_READ, rank)
            while ready.get_map():
                for key, _ in ready.select():
                    rank = key.data
                    try:
                        self._take(rank, *_frame(self._peers[rank]))
                    except OSError:
                        ready.unregister(self._peers[rank])
                        self._end_of(rank)

    def _end_of(self, rank: int) -> None:
        """A rank that has left may have done its part of what the others are about to do. So they are told once this
        rank needs it again."""
        if rank in self._leaving:
            self._keep(f"Rank {rank} has left.", tell=False)
        else:
            self.lose(f"Rank {rank} has died.")

    def _take(self, rank: int, kind: int, content: bytes) -> None:
        if kind == _MESSAGE:
            self._messages.put(content)
        elif kind == _RECEIVED:
            with self._changed:
                self._unreceived[rank] -= 1
                self._changed.notify_all()
        elif kind == _LOST:
            self.lose(content.decode(errors="replace"))
        else:
            self._leaving.add(rank)


def configure(peer: socket.socket, timeout_s: float | None) -> None:
    """Let a connection end when the other machine has not answered for some 20 seconds. timeout_s: the most that a
    write or a read may take; None: no limit."""
    peer.settimeout(timeout_s)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)


def _frame(peer: socket.socket) -> tuple[int, bytes]:
    kind, size = _HEAD.unpack(_exactly(peer, _HEAD.size))
    return kind, _exactly(peer, size)


def _exactly(peer: socket.socket, size: int) -> bytes:
    found = bytearray(size)
    view, got = memoryview(found), 0
    while got < size:
        if not (count := peer.recv_into(view[got:])):
            raise ConnectionResetError("the other end has closed")
        got += count
    return bytes(found)


# --- how the connections come about -----------------------------------------------------------------------------------

_HELLO = struct.Struct("!16sI")  # the group's token, the rank


def accept_ranks(
    listener: socket.socket,
    token: bytes,
    size: int,
    timeout_s: float,
    why_not: Callable[[], str | None] = no_reason,
) -> dict[int, socket.socket]:
    """Wait for the other ranks. token: [16], what they say first; others are turned away. why_not: see Group.join.

    Raises:
        RankLostError: a rank did not come within `timeout_s`, or why_not had a reason.
    """
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + timeout_s
    listener.settimeout(min(_ASKED_S, timeout_s))
    try:
        while len(found) < size - 1:
            stop_if(why_not)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                missing = next(rank for rank in range(1, size) if rank not in found)
                raise RankLostError(f"Rank {missing} did not join within {timeout_s:g} s.")
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                continue
            rank = _rank_of(peer, token, min(_SPEAKS_S, left_s))
            if rank is None or rank in found or not 0 < rank < size:
                peer.close()
            else:
                found[rank] = peer
    except RankLostError:
        for peer in found.values():
            peer.close()
        raise
    return found


def _rank_of(peer: socket.socket, token: bytes, timeout_s: float) -> int | None:
    """Return which rank a connection says it is from; None: it does not know the token."""
    peer.settimeout(timeout_s)
    try:
        said, rank = _HELLO.unpack(_exactly(peer, _HELLO.size))
    except OSError:
        return None
    return int(rank) if said == token else None


def reach_leader(host: str, port: int, token: bytes, rank: int, timeout_s: float) -> dict[int, socket.socket]:
    """Connect to the leader.

    Raises:
        OSError: it cannot be reached.
    """
    peer = socket.create_connection((host, port), timeout_s)
    peer.sendall(_HELLO.pack(token, rank))
    return {LEADER: peer}
