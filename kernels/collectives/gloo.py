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

from kernels.collectives.group import LEADER, TAKE_ROWS, RankLostError, check_exchange, check_ranks, given_up, no_reason
from kernels.collectives.star import Star, accept_ranks, reach_leader

_ALL_HAVE_COME = b"all have come"
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

        address: "host:port", the leader's as the others reach it. The leader listens from now on, so that nobody takes
        the port while it loads; port 0 is any that is free there, and `address` says which.
        join_timeout_s: how long this rank waits for the others to load and join.

        Raises:
            ValueError: the address is not one, or a number is out of its range.
            OSError: the leader cannot listen on the port.
        """
        check_ranks(rank, size, timeout_s)
        if join_timeout_s <= 0:
            raise ValueError(f"join_timeout_s is {join_timeout_s}: expected a positive number of seconds")
        self._host, self._port = _split(address, rank)
        self._listener: socket.socket | None = None
        if rank == LEADER:
            self._listener = _listen(self._host, self._port)
            self._port = int(self._listener.getsockname()[1])
        self._rank, self._size = rank, size
        self._join_timeout_s, self._timeout_s = join_timeout_s, timeout_s
        self._star: Star | None = None
        self._gloo: Any = None
        self._store: Any = None
        self._held = threading.Lock()
        self._in_call = self._ended = False

    def join(self, why_not: Callable[[], str | None] = no_reason) -> None:
        """Raises also:
        RankLostError: a rank did not join in time.
        """
        host, rank, limit_s = self._host, self._rank, self._join_timeout_s
        leads, listener, self._listener = rank == LEADER, self._listener, None
        deadline = time.monotonic() + limit_s
        store = _store(host, self._port, self._size, limit_s, listener)
        try:
            peers = _lead(store, host, self._size, limit_s, why_not) if leads else _follow(store, host, rank, limit_s)
            own_host = next(iter(peers.values())).getsockname()[0]
            self._star = Star(peers, self._timeout_s, self._end)
            self._wait_for_all(self._star, deadline)
            self._gloo = _process_group(store, own_host, rank, self._size, self._timeout_s)
            self._store = store  # the leader's serves the others
        except RuntimeError as error:
            reason = self._star.reason if self._star is not None else None
            self.close()
            raise RankLostError(reason or f"Not all ranks joined within {limit_s:g} s: {error}") from error
        except BaseException:
            self.close()
            raise

    def _wait_for_all(self, star: Star, deadline: float) -> None:
        """Return once all ranks have come, which may take as long as weights do. gloo waits for a rank that it connects
        to no longer than for one in a step."""
        if self._rank == LEADER:
            star.send(_ALL_HAVE_COME)
            return
        try:
            star.receive(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            star.lose(f"Rank {LEADER} did not say within {self._join_timeout_s:g} s that all ranks have joined.")
            star.check()

    @property
    def address(self) -> str:
        """What the others are to be given, with the port that the leader listens on."""
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

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

    def exchange(self, rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
        check_exchange(rows, counts, self._size)
        own = torch.tensor([[count, rows.shape[1] * rows.element_size()] for count in counts])
        others = [rank for rank in range(self._size) if rank != self._rank]
        given, parts = torch.empty_like(own), list(torch.split(rows, list(counts)))
        given[self._rank] = own[self._rank]

        def swap(gloo: Any) -> int | None:
            if (failed := _exchanged(gloo, {r: given[r] for r in others}, {r: own[r] for r in others})) is not None:
                return failed
            found = {r: rows.new_empty(int(given[r, 0]), rows.shape[1]) for r in others}
            sent = {r: parts[r] for r in others if len(parts[r])}
            if not torch.equal(given[:, 1], own[:, 1]):
                return None  # which the caller sees
            if (failed := _exchanged(gloo, {r: part for r, part in found.items() if len(part)}, sent)) is not None:
                return failed
            for rank, part in found.items():
                parts[rank] = part
            return None

        with given_up(self, TAKE_ROWS):
            self._run(swap)
        widths = given[:, 1].tolist()
        if wrong := [rank for rank, width in enumerate(widths) if width != widths[LEADER]]:
            assert self._star is not None
            self._star.lose(  # in the words of all ranks: each may be the first
                f"Rank {wrong[0]} exchanges rows of {widths[wrong[0]]} bytes where rank {LEADER} exchanges rows of "
                f"{widths[LEADER]} bytes."
            )
            self.check()
        with given_up(self, TAKE_ROWS):
            return torch.cat(parts), given[:, 0].tolist()

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
        if self._star is not None:  # before it has joined, nobody waits for this rank's calls
            self._star.lose(f"Rank {self._rank} gave up: {reason.removesuffix('.')}.")

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
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
        self._run(lambda gloo: _exchanged(gloo, receive, send))

    def _run(self, call: Callable[[Any], int | None]) -> None:
        """Run a call on gloo, which returns the rank with which it failed. A rank that has done its part of it may have
        left before this one has."""
        begun = time.monotonic()
        with self._held:
            self.check()
            self._in_call = True
        try:
            failed = call(self._gloo)
        finally:
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


def _split(address: str, rank: int) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not (rank != LEADER) <= int(port) < 65536:
        raise ValueError(f"address is {address!r}: expected host:port")
    return host.strip("[]"), int(port)


def _listen(host: str, port: int) -> socket.socket:
    """Listen on all of this machine's addresses. host: by which the others reach it."""
    try:
        return socket.create_server(("", port), family=socket.getaddrinfo(host, None)[0][0])
    except OSError as error:
        raise OSError(f"{host}:{port} cannot be listened on: {error}") from error


def _store(host: str, port: int, size: int, timeout_s: float, listener: socket.socket | None) -> Any:
    """Return the leader's store, by which ranks find each other. listener: the leader's, which the store closes."""
    limit, descriptor = timedelta(seconds=timeout_s), None if listener is None else listener.detach()
    leads = descriptor is not None
    try:
        return _dist.TCPStore(
            host, port, size, leads, timeout=limit, wait_for_workers=False, master_listen_fd=descriptor
        )
    except _dist.DistNetworkError as error:
        if leads:
            raise RankLostError(f"Rank {LEADER} cannot reach itself on {host}:{port}: {error}") from error
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
