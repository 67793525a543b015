"""Contracts of the line between the leader and a rank: messages whole and in order, an end that is told once.
Never starts a process: both ends are here."""

from __future__ import annotations

import socket
from queue import SimpleQueue
from threading import Event
from typing import Any

import pytest

from engine.parallel.line import Line

WAIT_S = 30.0


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def test_messages_of_any_size_arrive_whole_and_in_order_both_ways_and_also_those_before_a_close() -> None:
    near, far = pair()
    heard: SimpleQueue[Any] = SimpleQueue()
    here, there = Line(near, heard.put, Event().set), Line(far, lambda message: there.send(message), Event().set)
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
    here_ended, there_ended = Event(), Event()
    here = Line(near, lambda message: None, here_ended.set)
    there = Line(far, lambda message: None, there_ended.set)
    here.start()
    there.start()
    here.close()
    assert there_ended.wait(WAIT_S)
    there.send("nobody hears this")
    there.close()
    assert not here_ended.is_set()


@pytest.mark.parametrize("sent", ["taken", None], ids=["raises", "unreadable"])
def test_a_message_that_cannot_be_taken_is_the_end_of_the_line_at_both_ends_and_logged(
    sent: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise nobody would read any more, and streams of the rank would wait for ever."""

    def take(message: Any) -> None:
        raise ValueError("injected")

    near, far = pair()
    here_ended, there_ended = Event(), Event()
    here, there = Line(near, take, here_ended.set), Line(far, take, there_ended.set)
    here.start()
    there.start()
    if sent is None:
        there._outgoing.put(b"no pickle")
    else:
        there.send(sent)
    assert here_ended.wait(WAIT_S)
    assert there_ended.wait(WAIT_S)
    assert "could not be taken" in caplog.text
    for line in (here, there):
        line.close()


def test_a_machine_that_no_longer_answers_is_noticed_also_by_who_only_reads() -> None:
    """A machine without power closes no connection."""
    for peer in pair():
        line = Line(peer, lambda message: None, Event().set)
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
    here = Line(near, lambda message: None, Event().set)
    here.start()
    for _ in range(20):
        here.send(b"x" * 1_000_000)  # more than sockets hold
    far.close()
    here.close()
