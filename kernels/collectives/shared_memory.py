"""Owns the group of ranks on one machine: each is a process, and all of them write and read one segment of memory.
Never copies a tensor in Python: the native library reads and writes it where it lies."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kernels.collectives.group import (
    LEADER,
    TAKE_ROWS,
    RankLostError,
    check_exchange,
    check_ranks,
    given_up,
    no_reason,
    stop_if,
)
from kernels.cpu.native.library import load_library
from kernels.cpu.native.reduction import Reduction, RowExchange

MEMORY = Path("/dev/shm")
_ALIGNMENT = 64
_REASON_BYTES = 1024
_DONE, _LATER = 0, 2
_POLL_S = 0.005


def new_directory(parent: Path = MEMORY) -> Path:
    """Make a group's directory, which this user alone can read. The leader makes it and tells the others; it is gone
    once all have joined. parent: in memory, or what ranks exchange is written to a disk."""
    return Path(tempfile.mkdtemp(prefix="chunkserve-ranks-", dir=parent))


class SharedMemoryGroup:
    """A kernels.collectives.group.Group of the processes of one machine.

    A rank lives for as long as its process does: a stopped process is not lost until others have waited `timeout_s` for
    it, and a killed one is, even if nobody has reaped it. A process that was forked from a rank, and executed nothing
    else, keeps it alive.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        size: int,
        slot_bytes: int = 1 << 20,
        message_bytes: int = 1 << 18,
        timeout_s: float = 60.0,
    ) -> None:
        """Prepare to join: a pass may be recorded before the group has formed. All ranks say the same, but for their
        rank.

        directory: see new_directory. slot_bytes: the most that a rank sums or gathers at once; what is larger goes in
        pieces. message_bytes: the same of messages. The segment takes 2 * (size * slot_bytes + message_bytes) bytes.

        Raises:
            NoLibraryError: there is no native library on this machine; ranks need gloo, then.
        """
        check_ranks(rank, size, timeout_s)
        _check_sizes(slot_bytes, message_bytes)
        self._rank, self._size, self._directory = rank, size, directory
        self._owns_directory = rank == LEADER
        self._library = load_library()
        sizes = (slot_bytes, message_bytes, int(timeout_s * 1000))
        self._handle = self._library.ranks_create(str(directory).encode(), rank, size, *sizes)

    def join(self, why_not: Callable[[], str | None] = no_reason) -> None:
        """Raises also:
        OSError: the directory does not hold the group's files, has no room for them, or another process is this
            rank.
        """
        try:
            self._join(why_not)
        except FileExistsError:
            self._owns_directory = False  # another group does
            self.close()
            raise
        except BaseException:
            self.close()
            shutil.rmtree(self._directory, ignore_errors=True)  # with its memory: this group will not be
            raise
        if self._owns_directory:
            shutil.rmtree(self._directory)
        self._owns_directory = False

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._library.ranks_destroy(handle)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def reduction(self) -> Reduction:
        """The sum as a recorded pass calls it, without Python."""
        function = ctypes.cast(self._library.ranks_all_reduce, ctypes.c_void_p).value
        assert function is not None
        return Reduction(function, self._handle, self._lost, self)

    @property
    def row_exchange(self) -> RowExchange:
        """The exchange of rows as a recorded pass calls it, without Python."""
        function = ctypes.cast(self._library.ranks_exchange, ctypes.c_void_p).value
        assert function is not None
        return RowExchange(function, self._handle, self._rank, self._size, self._lost, self)

    @property
    def late_s(self) -> list[float]:
        """For how many seconds the others have waited for each rank alone so far, when they met it for sums or gathered
        columns. # [size]"""
        found = (ctypes.c_int64 * self._size)()
        self._library.ranks_late(self._handle, found)
        return [late_ns / 1e9 for late_ns in found]

    @property
    def num_meetings(self) -> list[int]:
        """How often each rank has come to meet the others so far, for sums, gathered columns and exchanges. Between two
        steps it is the same for all. # [size]"""
        found = (ctypes.c_int64 * self._size)()
        self._library.ranks_meetings(self._handle, found)
        return list(found)

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        assert x.dtype in (torch.float32, torch.bfloat16)
        assert x.device.type == "cpu"
        wide = int(x.dtype == torch.float32)
        self._check(self._library.ranks_all_reduce(self._handle, wide, x.data_ptr(), x.numel()))
        return x

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor | None:
        assert x.dtype == torch.float32
        assert len(sizes) == self._size
        assert x.shape[1] == sizes[self._rank]
        x, leads = x.contiguous(), self._rank == LEADER
        found = torch.empty(len(x), sum(sizes)) if leads else None
        numbers, out = (ctypes.c_int64 * self._size)(*sizes), None if found is None else found.data_ptr()
        self._check(self._library.ranks_gather(self._handle, x.data_ptr(), len(x), numbers, out))
        return found

    def exchange(self, rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
        check_exchange(rows, counts, self._size)
        given, received = ((ctypes.c_int64 * self._size)(*numbers) for numbers in (counts, ()))
        row_bytes = rows.shape[1] * rows.element_size()
        self._check(self._library.ranks_offer(self._handle, rows.data_ptr(), row_bytes, given, received))
        with given_up(self, TAKE_ROWS):
            found = rows.new_empty(sum(received), rows.shape[1])
            self._check(self._library.ranks_take(self._handle, found.data_ptr()))
        return found, list(received)

    def send(self, message: bytes) -> None:
        assert self._rank == LEADER
        self._check(self._library.ranks_send(self._handle, message, len(message)))

    def receive(self) -> bytes:
        assert self._rank != LEADER
        size = ctypes.c_int64()
        while (outcome := self._library.ranks_pending(self._handle, ctypes.byref(size))) == _LATER:
            pass  # the process has seen its signals
        self._check(outcome)
        message = ctypes.create_string_buffer(size.value)
        self._check(self._library.ranks_receive(self._handle, message, size.value))
        return message.raw

    def check(self) -> None:
        self._check(self._library.ranks_check(self._handle))

    def give_up(self, reason: str) -> None:
        self._library.ranks_give_up(self._handle, reason.encode())

    def close(self) -> None:
        """Give back what the group holds. Waits for a call in another thread, which `give_up` would end."""
        self._library.ranks_close(self._handle)
        if self._owns_directory:  # nobody will need it
            shutil.rmtree(self._directory, ignore_errors=True)

    def _join(self, why_not: Callable[[], str | None]) -> None:
        while self._rank != LEADER and not (self._directory / "segment").exists():
            stop_if(why_not)
            time.sleep(_POLL_S)
        if (outcome := self._library.ranks_open(self._handle)) != _DONE:
            raise (FileExistsError if outcome == _LATER else OSError)(self._reason())
        while (outcome := self._library.ranks_join(self._handle)) == _LATER:
            stop_if(why_not)
        self._check(outcome)

    def _check(self, outcome: int) -> None:
        if outcome != _DONE:
            raise self._lost()

    def _lost(self) -> RankLostError:
        return RankLostError(self._reason())

    def _reason(self) -> str:
        reason = ctypes.create_string_buffer(_REASON_BYTES)
        self._library.ranks_reason(self._handle, reason, _REASON_BYTES)
        return reason.value.decode(errors="replace")


def _check_sizes(slot_bytes: int, message_bytes: int) -> None:
    for name, value in (("slot_bytes", slot_bytes), ("message_bytes", message_bytes)):
        if value <= 0 or value % _ALIGNMENT:
            raise ValueError(f"{name} is {value}: expected a positive multiple of {_ALIGNMENT}")
