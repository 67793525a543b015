"""Owns the way from a recorded pass to its group: directly where the library has the group, else through Python.
Never raises in the pass: what a group raises is kept, and the pass raises it at its end."""

from __future__ import annotations

import ctypes

import torch

from kernels.collectives.group import Group
from kernels.collectives.shared_memory import SharedMemoryGroup
from kernels.cpu.native.reduction import Reduction

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
