"""Owns the group of ranks that share no memory: gloo carries their tensors over TCP, between machines, too.
Never uses torch's default process group: several groups may be in a process, and each ends by itself."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from kernels.collectives.group import LEADER, RankLostError, check_ranks, no_reason
from kernels.collectives.star import Star, accept_ranks, reach_leader

_dist: Any = torch.distributed  # its types do not have what groups besides the default one are made of


class GlooGroup:
    """A kernels.collectives.group.Group over TCP.

    A killed rank is lost at once, a machine that no longer answers after some 20 seconds, and a stopped process once
    others have waited `timeout_s` for it.
    """

    def __init__(
        self, address: str, *, rank: int, size: int, join_timeout_s: float = 3600.0, timeout_s: float = 60.0
    ) -> None:
        """All ranks say the same, but for their rank.

        address: "host:port", the leader's as the others reach it; the port must be free there when it joins.
        join_timeout_s: how long this rank waits for the others to load and join.

        Raises:
            ValueError: the address is not one, or a number is out of its range.
        """
        self._address = _split(address)
        check_ranks(rank, size, timeout_s)
        if join_timeout_s <= 0:
            raise ValueError(f"join_timeout_s is {join_timeout_s}: expected a positive number of seconds")
        self._rank, self._size = rank, size
        self._join_timeout_s, self._timeout_s = join_timeout_s, timeout_s
        self._star: Star | None = None
        self._gloo: Any = None
        self._store: Any = None
        self._held = threading.Lock()
        self._in_call = self._ended = False

    def join(self, why_not: Callable[[], str | None] = no_reason) -> None:
        """Raises also:
        OSError: the leader cannot listen on the port.
        RankLostError: a rank did not join in time.
        """
        (host, port), rank, limit_s = self._address, self._rank, self._join_timeout_s
        store = _store(host, port, rank, self._size, limit_s)
        try:
            leads = rank == LEADER
            peers = _lead(store, host, self._size, limit_s, why_not) if leads else _follow(store, host, rank, limit_s)
            own_host = next(iter(peers.values())).getsockname()[0]
            self._star = Star(peers, self._timeout_s, self._end)
            self._gloo = _process_group(store, own_host, rank, self._size, self._timeout_s)
            self._store = store  # the leader's serves the others
        except RuntimeError as error:
            reason = self._star.reason if self._star is not None else None
            self.close()
            raise RankLostError(reason or f"Not all ranks joined within {limit_s:g} s: {error}") from error
        except BaseException:
            self.close()
            raise

    @property
    def has_joined(self) -> bool:
        """Whether the others can be told anything."""
        return self._star is not None

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def late_s(self) -> tuple[float, ...]:
        """Not measured: machines have no common clock."""
        return ()

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        assert x.dtype in (torch.float32, torch.bfloat16)
        assert x.device.type == "cpu"
        if not x.numel():
            return x
        own = x.view(-1)
        parts = [own if rank == self._rank else torch.empty_like(own) for rank in range(self._size)]
        others = [rank for rank in range(self._size) if rank != self._rank]
        self._exchange({rank: parts[rank] for rank in others}, dict.fromkeys(others, own))
        total = parts[0].to(torch.float32, copy=True)
        for part in parts[1:]:
            total += part
        own.copy_(total)
        return x

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor | None:
        assert x.dtype == torch.float32
        assert len(sizes) == self._size
        assert x.shape[1] == sizes[self._rank]
        if self._rank != LEADER:
            self._exchange({}, {LEADER: x.contiguous()} if x.numel() else {})
            return None
        parts = [x if rank == LEADER else x.new_empty(len(x), size) for rank, size in enumerate(sizes)]
        self._exchange({rank: part for rank, part in enumerate(parts) if rank != LEADER and part.numel()}, {})
        return torch.cat(parts, dim=1)

    def send(self, message: bytes) -> None:
        assert self._rank == LEADER
        assert self._star is not None
        self._star.send(message)

    def receive(self) -> bytes:
        assert self._rank != LEADER
        assert self._star is not None
        return self._star.receive()

    def check(self) -> None:
        assert self._star is not None
        self._star.check()

    def give_up(self, reason: str) -> None:
        assert self._star is not None
        self._star.lose(f"Rank {self._rank} gave up: {reason}.")

    def close(self) -> None:
        if self._star is not None:
            self._star.close()
        self._end()
        self._store = None

    def _end(self) -> None:
        """Close gloo's connections, now or when this rank leaves its call. Nobody can wake who waits in gloo, except by
        that: so all who are not in a call wake those who are."""
        with self._held:
            self._ended = True
            if not self._in_call:
                self._gloo = None

    def _exchange(self, receive: dict[int, Tensor], send: dict[int, Tensor]) -> None:
        begun = time.monotonic()
        with self._held:
            self.check()
            self._in_call = True
        failed = _exchanged(self._gloo, receive, send)
        with self._held:
            self._in_call = False
            if self._ended:  # meanwhile; the exchange may have been complete, though
                self._gloo = None
        if failed is not None:
            self._end()
            raise self._lost(failed, begun)

    def _lost(self, rank: int, begun: float) -> RankLostError:
        """Return what is known of why a connection to `rank` failed: it may have closed it because of another rank."""
        assert self._star is not None
        if self._star.reason is None and time.monotonic() - begun >= self._timeout_s:
            self._star.lose(f"Rank {rank} did not arrive within {self._timeout_s:g} s.")
        self._star.wait_for_reason()
        self._star.lose(f"Rank {rank} broke its connection.")
        return RankLostError(self._star.reason or "This rank has closed its group.")


def _exchanged(gloo: Any, receive: dict[int, Tensor], send: dict[int, Tensor]) -> int | None:
    """Return the rank with which an exchange failed. Not an error, which would hold on to the connections."""
    awaited = LEADER
    try:
        works = [(rank, gloo.recv([tensor], rank, 0)) for rank, tensor in receive.items()]
        works += [(rank, gloo.send([tensor], rank, 0)) for rank, tensor in send.items()]
        for rank, work in works:
            awaited = rank
            work.wait()
    except RuntimeError:
        return awaited
    return None


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"address is {address!r}: expected host:port")
    return host.strip("[]"), int(port)


def _store(host: str, port: int, rank: int, size: int, timeout_s: float) -> Any:
    """Return the leader's store, by which ranks find each other."""
    try:
        return _dist.TCPStore(
            host, port, size, rank == LEADER, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
    except _dist.DistNetworkError as error:
        if rank == LEADER:
            raise OSError(f"{host}:{port} cannot be listened on: {error}") from error
        raise RankLostError(f"Rank {LEADER} did not listen on {host}:{port} within {timeout_s:g} s.") from error


def _lead(
    store: Any, host: str, size: int, timeout_s: float, why_not: Callable[[], str | None]
) -> dict[int, socket.socket]:
    token = secrets.token_bytes(16)
    family = socket.getaddrinfo(host, None)[0][0]
    with socket.create_server(("", 0), family=family) as listener:
        store.set("star", f"{listener.getsockname()[1]} {token.hex()}")
        return accept_ranks(listener, token, size, timeout_s, why_not)


def _follow(store: Any, host: str, rank: int, timeout_s: float) -> dict[int, socket.socket]:
    port, token = store.get("star").decode().split()
    try:
        return reach_leader(host, int(port), bytes.fromhex(token), rank, timeout_s)
    except OSError as error:
        raise RankLostError(f"Rank {LEADER} cannot be reached on {host}:{port}: {error}") from error


def _process_group(store: Any, own_host: str, rank: int, size: int, timeout_s: float) -> Any:
    """own_host: this machine's address in the network by which ranks reach the leader."""
    options = _dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=own_host)]
    return _dist.ProcessGroupGloo(_dist.PrefixStore("gloo/", store), rank, size, options)
