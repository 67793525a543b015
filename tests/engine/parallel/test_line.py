"""Contracts of the line between the leader and a rank: messages whole and in order, an end that is told once.
Never starts a process: both ends are here."""

from __future__ import annotations

import pickle
import socket
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import pytest

from engine.parallel.line import Line

WAIT_S = 30.0


def ignore(what: Any) -> None:
    """Take a message, or an end."""


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def test_messages_of_any_size_arrive_whole_and_in_order_both_ways_and_also_those_before_a_close() -> None:
    near, far = pair()
    heard: SimpleQueue[Any] = SimpleQueue()
    here, there = Line(near, heard.put, ignore), Line(far, lambda message: there.send(message), ignore)
    here.start()
    there.start()
    sent = [1, "word", b"x" * 3_000_000, (), b""]
    for message in sent:
        here.send(message)
    assert [heard.get(timeout=WAIT_S) for _ in sent] == sent
    here.close()
    there.close()


def test_the_end_of_the_other_end_is_told_once_and_its_own_is_not() -> None:
    near, far = pair()
    here_ended: SimpleQueue[str | None] = SimpleQueue()
    there_ended: SimpleQueue[str | None] = SimpleQueue()
    here, there = Line(near, ignore, here_ended.put), Line(far, ignore, there_ended.put)
    here.start()
    there.start()
    here.close()
    assert there_ended.get(timeout=WAIT_S) is None
    there.send("nobody hears this")
    there.close()
    assert here_ended.empty()
    assert there_ended.empty()


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (pickle.dumps("taken"), "ValueError: injected"),
        (pickle.dumps("lost"), "OSError: injected"),
        (b"no pickle", "UnpicklingError: "),
        (b"", "EOFError: Ran out of input"),
    ],
    ids=["raises", "raises what an end raises", "unreadable", "empty"],
)
def test_a_message_that_cannot_be_taken_ends_the_line_at_both_ends_with_its_error_and_last_words(
    sent: bytes, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise nobody would read any more, and streams of the rank would wait for ever. Regression: it was told as the
    end of a process."""

    def take(message: Any) -> None:
        raise (OSError if message == "lost" else ValueError)("injected")

    def end(why: str | None) -> None:
        here.send("last words")
        here_ended.put(why)

    near, far = pair()
    heard: SimpleQueue[Any] = SimpleQueue()
    here_ended: SimpleQueue[str | None] = SimpleQueue()
    there_ended: SimpleQueue[str | None] = SimpleQueue()
    here, there = Line(near, take, end), Line(far, heard.put, there_ended.put)
    here.start()
    there.start()
    there._outgoing.put(sent)
    why = here_ended.get(timeout=WAIT_S)
    assert why is not None
    assert why.startswith(f"a message could not be taken: {error}")
    assert heard.get(timeout=WAIT_S) == "last words"
    assert there_ended.get(timeout=WAIT_S) is None
    assert "could not be taken" in caplog.text
    for line in (here, there):
        line.close()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("recv_bytes", "a message could not be taken: MemoryError: injected"),
        ("send_bytes", "a message could not be sent: MemoryError: injected"),
    ],
)
def test_an_error_while_a_message_is_received_or_sent_is_told_at_both_ends(
    call: str, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: it ended a thread of the line without a word, and nobody read or wrote any more."""
    near, far = pair()
    here_ended: SimpleQueue[str | None] = SimpleQueue()
    there_ended: SimpleQueue[str | None] = SimpleQueue()
    here, there = Line(near, ignore, here_ended.put), Line(far, ignore, there_ended.put)

    def fail(*given: Any) -> bytes:
        raise MemoryError("injected")

    monkeypatch.setattr(here._pipe, call, fail)
    here.start()
    there.start()
    here.send("word")
    assert here_ended.get(timeout=WAIT_S) == told
    assert there_ended.get(timeout=WAIT_S) is None
    assert "so the line" in caplog.text
    for line in (here, there):
        line.close()


def test_a_first_message_that_cannot_be_taken_ends_the_line_also_before_the_start_has_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the reader waited for a writer that was started after it, which raised, and the line stayed open."""
    near, far = pair()
    here_ended: SimpleQueue[str | None] = SimpleQueue()
    here = Line(near, ignore, here_ended.put)
    Connection(far.detach()).send_bytes(b"no pickle")
    start = threading.Thread.start

    def start_and_wait(thread: threading.Thread) -> None:
        start(thread)
        if thread is here._reader:
            thread.join(WAIT_S)

    monkeypatch.setattr(threading.Thread, "start", start_and_wait)
    here.start()
    assert here_ended.get(timeout=WAIT_S) is not None
    assert not here._reader.is_alive()
    here.close()


def test_a_machine_that_no_longer_answers_is_noticed_also_by_who_only_reads() -> None:
    """A machine without power closes no connection."""
    for peer in pair():
        line = Line(peer, ignore, ignore)
        assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, interval, count = (
            peer.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * count <= 20
        line.start()
        line.close()


def test_who_sends_does_not_wait_for_an_end_that_does_not_read() -> None:
    near, far = pair()
    here = Line(near, ignore, ignore)
    here.start()
    for _ in range(20):
        here.send(b"x" * 1_000_000)  # more than sockets hold
    far.close()
    here.close()
