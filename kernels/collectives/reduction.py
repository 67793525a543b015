"""Owns the ways from a recorded pass to its group: directly where the library has the group, else through Python.
Never raises in the pass: what a group raises is kept, and the pass raises it at its end."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from kernels.collectives.group import Exchanging, Group, given_up
from kernels.collectives.shared_memory import SharedMemoryGroup
from kernels.cpu.native.reduction import Reduction, RowExchange

_ExchangeFunction = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64),
    *(ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_int64), ctypes.c_void_p, ctypes.c_int64),
)
_Function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)


def reduction_of(group: Group) -> Reduction:
    """Return the group's sum for kernels.cpu.native.program."""
    return group.reduction if isinstance(group, SharedMemoryGroup) else _through_python(group)


def _through_python(group: Group) -> Reduction:
    raised: list[BaseException] = []

    def reduce(context: object, wide: int, data: int, count: int) -> int:
        dtype = torch.float32 if wide else torch.bfloat16
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(data)
        try:
            group.all_reduce(torch.frombuffer(memory, dtype=dtype))
        except BaseException as error:  # noqa: BLE001 - ctypes would print it, even an interrupt, and the pass go on
            raised.append(error)
            return 1
        return 0

    function = _Function(reduce)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return Reduction(address, 0, raised.pop, function)


def exchange_of(group: Exchanging) -> RowExchange:
    """Return the group's exchange of rows for kernels.cpu.native.program."""
    return group.row_exchange if isinstance(group, SharedMemoryGroup) else _exchange_through_python(group)


def _exchange_through_python(group: Exchanging) -> RowExchange:
    raised: list[BaseException] = []

    def exchange(context: object, data: int, row_bytes: int, counts: Any, received: Any, out: int, room: int) -> int:
        try:
            with given_up(group, "exchange rows"):  # as the library's own exchange does: others may have taken theirs
                own = counts[: group.size]
                found, numbers = group.exchange(_rows_at(data, sum(own), row_bytes), own)
                if len(found) > room:
                    raise ValueError(f"There is room for {room} rows, and {len(found)} came")
                for rank, number in enumerate(numbers):
                    received[rank] = number
                _rows_at(out, len(found), row_bytes).copy_(found)
        except BaseException as error:  # noqa: BLE001 - as above
            raised.append(error)
            return 1
        return 0

    function = _ExchangeFunction(exchange)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return RowExchange(address, 0, group.rank, group.size, raised.pop, function)


def _rows_at(address: int, count: int, row_bytes: int) -> torch.Tensor:
    """Return memory as bytes. # [count, row_bytes]"""
    if not count:
        return torch.empty(0, row_bytes, dtype=torch.uint8)
    memory = (ctypes.c_char * (count * row_bytes)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(count, row_bytes)
