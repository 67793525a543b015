"""Owns one end of a connection between the leader and a rank with requests of its own: whole messages, both ways.
Never blocks who sends, and never says what a message means."""

from __future__ import annotations

import logging
import pickle
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from kernels.collectives.star import configure

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 5.0
"""How long an end that reads no more waits for its last messages to be sent."""


class Line:
    """Messages are pickled: both ends are this engine's own processes, and said so with the group's token when they
    connected."""

    def __init__(
        self, peer: socket.socket, on_message: Callable[[Any], None], on_end: Callable[[str | None], None]
    ) -> None:
        """peer: is closed with this. on_message: is given each message, in order, by a thread of the line. on_end: is
        called once, by that thread, with None when the other end has closed, its process has ended or its machine no
        longer answers; and when a message could not be taken or sent, with the error. If it could not be taken, the
        other end still gets what `on_end` sends. Not called after `close`."""
        configure(peer, timeout_s=None)
        self._peer = peer
        self._pipe = Connection(socket.dup(peer.fileno()))
        self._on_message, self._on_end = on_message, on_end
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._closed = False
        self._unsent: str | None = None
        """Why this end can send no more, if the other end has not gone."""
        self._reader, self._writer = (
            threading.Thread(target=run, name="rank-line", daemon=True) for run in (self._read, self._write)
        )

    def start(self) -> None:
        """Start both threads. A reader whose first message cannot be taken waits for the writer: so that is first."""
        self._writer.start()
        self._reader.start()

    def send(self, message: object) -> None:
        """Send a message, from any thread. If the other end has gone, it is lost: `on_end` says so."""
        self._outgoing.put(pickle.dumps(message))

    def close(self) -> None:
        """Send what is left, and end the line. Waits for its threads, unless one of them calls this."""
        self._closed = True
        self._outgoing.put(None)
        outside = threading.current_thread() not in (self._reader, self._writer)
        if outside:
            self._writer.join()
        self._shut_down()  # which ends the reader, too
        if outside:
            self._reader.join()
        self._pipe.close()  # not before: a thread may be within a call on it
        self._peer.close()

    def _write(self) -> None:
        try:
            while (message := self._outgoing.get()) is not None:
                self._pipe.send_bytes(message)
        except OSError:
            return  # the other end has gone, as the reader finds
        except Exception as error:
            logger.exception("A message of this rank could not be sent, so the line ends.")
            self._unsent = f"a message could not be sent: {_told(error)}"
            self._shut_down()  # which ends the reader

    def _read(self) -> None:
        error = self._read_all()
        try:
            if not self._closed:
                self._on_end(error or self._unsent)
        finally:
            if error is not None:
                self._outgoing.put(None)
                self._writer.join(_LAST_WORDS_S)
            self._shut_down()  # whoever still writes would wait for ever

    def _read_all(self) -> str | None:
        """Read until the line ends. Return the error if a message could not be taken."""
        try:
            while (message := self._received()) is not None:
                self._on_message(pickle.loads(message))
        except Exception as error:
            logger.exception("A message to this rank could not be taken, so the line to its sender ends.")
            return f"a message could not be taken: {_told(error)}"
        return None

    def _received(self) -> bytes | None:
        """Return the next message; None once the line has ended."""
        try:
            return self._pipe.recv_bytes()
        except (EOFError, OSError):
            return None

    def _shut_down(self) -> None:
        with suppress(OSError):  # the other end may have gone first
            self._peer.shutdown(socket.SHUT_RDWR)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
