"""The group over TCP: its start, and who may be in it.
Never needs a second machine: addresses are this one's."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.collectives import gloo, star
from kernels.collectives.gloo import GlooGroup
from kernels.collectives.group import RankLostError
from kernels.collectives.star import accept_ranks, reach_leader
from loadtest.server import free_port
from tests.kernels.collectives.jobs import joined_over_tcp


def pair(address: str) -> tuple[GlooGroup, GlooGroup]:
    """Both ends of a group, in this process."""
    found: list[GlooGroup] = []
    follower = threading.Thread(target=lambda: found.append(joined_over_tcp(address, rank=1, size=2)))
    follower.start()
    leader = joined_over_tcp(address, rank=0, size=2)
    follower.join()
    return leader, found[0]


def test_a_group_ends_by_itself_and_its_address_is_free_again() -> None:
    before = threading.active_count()
    address = f"127.0.0.1:{free_port()}"
    for _ in range(2):
        leader, follower = pair(address)
        leader.send(b"message")
        assert follower.receive() == b"message"
        leader.close()
        with pytest.raises(RankLostError, match="Rank 0 has left"):
            follower.receive()
        follower.close()
        follower.close()
        for closed in (leader, follower):
            with pytest.raises(RankLostError, match=r"closed its group|Rank 0 has left"):
                closed.all_reduce(torch.ones(4))
        del leader, follower, closed
    assert threading.active_count() == before


def test_giving_up_ends_the_call_that_another_rank_is_in() -> None:
    leader, follower = pair(f"127.0.0.1:{free_port()}")
    messages: list[str] = []

    def sum_alone() -> None:
        with pytest.raises(RankLostError) as lost:
            leader.all_reduce(torch.ones(4))
        messages.append(str(lost.value))

    thread = threading.Thread(target=sum_alone)
    thread.start()
    follower.give_up("the engine ends")
    thread.join()
    assert messages == ["Rank 1 gave up: the engine ends."]
    leader.close()
    follower.close()


def test_a_rank_that_never_comes_is_named() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(RankLostError, match=r"Rank 1 did not join within 0.3 s"):
        joined_over_tcp(address, rank=0, size=2, join_timeout_s=0.3)
    with pytest.raises(RankLostError, match=rf"Rank 0 did not listen on {address} within 1 s"):
        joined_over_tcp(address, rank=1, size=2, join_timeout_s=1)


def test_a_leader_whose_port_is_taken_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port} cannot be listened on"):
            GlooGroup(f"127.0.0.1:{port}", rank=0, size=2)


def test_a_leader_holds_its_port_from_the_start_and_frees_it_without_having_joined() -> None:
    """Regression: it was chosen before weights were loaded and bound after, and another process could take it."""
    leader = GlooGroup("127.0.0.1:0", rank=0, size=2)
    host, _, port = leader.address.rpartition(":")
    assert host == "127.0.0.1"
    with pytest.raises(OSError, match="Address already in use"):
        socket.create_server(("", int(port))).close()
    leader.close()
    socket.create_server(("", int(port))).close()


def test_a_rank_that_gives_up_before_it_has_joined_tells_nobody_and_closes_in_order() -> None:
    """Otherwise a failed start would end with another error than its own."""
    leader = GlooGroup("127.0.0.1:0", rank=0, size=2)
    leader.give_up("its model could not be loaded")
    leader.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_followers_that_come_before_the_leader_has_loaded_wait_for_it(host: str) -> None:
    leader = GlooGroup(f"{host}:0", rank=0, size=2)
    received: list[bytes] = []

    def follow() -> None:
        follower = joined_over_tcp(leader.address, rank=1, size=2)
        received.append(follower.receive())
        follower.close()

    thread = threading.Thread(target=follow)
    thread.start()
    leader.join()
    leader.send(b"message")
    thread.join()
    assert received == [b"message"]
    leader.close()


def test_a_rank_that_still_loads_is_waited_for_by_those_that_have_come_and_not_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: a start ended where one of three ranks took a minute more to load than another."""
    receive, connect, done = star.Star.receive, gloo._process_group, queue.SimpleQueue[str]()

    def receives(self: star.Star, limit_s: float | None = None) -> bytes:
        done.put("waits")
        return receive(self, limit_s)

    def connects(*how: Any) -> Any:
        done.put("connects")
        return connect(*how)

    monkeypatch.setattr(star.Star, "receive", receives)
    monkeypatch.setattr(gloo, "_process_group", connects)
    leader = GlooGroup("127.0.0.1:0", rank=0, size=3)
    joined: list[GlooGroup] = []

    def join(rank: int) -> None:
        joined.append(joined_over_tcp(leader.address, rank=rank, size=3))

    leads, first, late = (
        threading.Thread(target=leader.join),
        *(threading.Thread(target=join, args=(n,)) for n in (1, 2)),
    )
    leads.start()
    first.start()
    found = done.get(timeout=30)
    late.start()
    for thread in (leads, first, late):
        thread.join()
    assert found == "waits"
    for group in (leader, *joined):
        group.close()


def test_a_rank_that_has_come_waits_for_the_others_no_longer_than_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it waited without end for a leader that was stopped."""
    clock, follow, ended = [0.0], gloo._follow, threading.Event()

    def follows(*how: Any) -> dict[int, socket.socket]:
        peers = follow(*how)
        clock[0] += 60
        return peers

    monkeypatch.setattr(gloo, "_follow", follows)
    monkeypatch.setattr(gloo, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    leader = GlooGroup("127.0.0.1:0", rank=0, size=3)  # rank 2 never comes
    reasons = queue.SimpleQueue[str]()

    def join(group: GlooGroup) -> None:
        with pytest.raises(RankLostError) as lost:
            group.join(lambda: "the test has ended" if ended.is_set() else None)
        reasons.put(str(lost.value))

    leads = threading.Thread(target=join, args=(leader,))
    follower = GlooGroup(leader.address, rank=1, size=3, join_timeout_s=60)
    joins = threading.Thread(target=join, args=(follower,))
    leads.start()
    joins.start()
    try:
        assert reasons.get(timeout=30) == "Rank 0 did not say within 60 s that all ranks have joined."
    finally:
        ended.set()
        leads.join()
        joins.join()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:port", "host:70000"])
def test_an_address_that_is_none_is_refused(address: str, rank: int) -> None:
    with pytest.raises(ValueError, match="expected host:port"):
        GlooGroup(address, rank=rank, size=2)


def test_a_follower_must_be_told_the_port() -> None:
    with pytest.raises(ValueError, match=r"address is 'host:0': expected host:port"):
        GlooGroup("host:0", rank=1, size=2)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_who_does_not_know_the_token_is_no_rank(listener: socket.socket) -> None:
    port, token = listener.getsockname()[1], b"t" * 16
    said_nothing = socket.create_connection(("127.0.0.1", port))
    said_nothing.close()
    wrong_token = reach_leader("127.0.0.1", port, b"x" * 16, 1, 5)
    no_such_rank = reach_leader("127.0.0.1", port, token, 2, 5)
    rank = reach_leader("127.0.0.1", port, token, 1, 5)
    found = accept_ranks(listener, token, 2, 5)
    assert list(found) == [1]
    found[1].sendall(b"!")
    assert rank[0].recv(1) == b"!"
    for peers in (wrong_token, no_such_rank, rank, found):
        for peer in peers.values():
            peer.close()


def test_connections_that_say_nothing_hold_the_start_up_no_longer_than_the_ranks_may_take(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each was listened to for as long as all ranks had to come, and its deadline was looked at only while
    nobody connected."""
    strays = [socket.create_connection(listener.getsockname()) for _ in range(8)]
    clock, listened = [0.0], []

    def say_nothing(peer: socket.socket, token: bytes, timeout_s: float) -> None:
        listened.append(timeout_s)
        clock[0] += timeout_s

    monkeypatch.setattr(star, "_rank_of", say_nothing)
    monkeypatch.setattr(star.time, "monotonic", lambda: clock[0])
    with pytest.raises(RankLostError, match="Rank 1 did not join within 15 s"):
        accept_ranks(listener, b"t" * 16, 2, 15)
    assert sum(listened) == 15
    assert len(listened) > 1, "a stray does not use up the time of the ranks"
    for stray in strays:
        stray.close()
