"""Owns the library calls that convert whole blocks of a cache of the native kernels to 8 bits and back.
Never copies what is converted: rows and blocks are read and written where they are."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.narrow_blocks import BlockForm
from kernels.cpu.native.grouped import LANES
from kernels.cpu.native.library import load_library


class NativeBlocks:
    """A kernels.cpu.narrow_blocks.NarrowBlocks of a cache in the library's own order; see cache.h."""

    def __init__(self, form: BlockForm) -> None:
        assert form.tokens % LANES == 0, form.tokens
        assert form.head_dim % LANES == 0, form.head_dim
        assert form.dtype in (torch.float32, torch.bfloat16), form.dtype
        self.form = form
        self._library = load_library()
        self._types = int(form.dtype == torch.float32), int(form.kept_in == torch.float8_e4m3fn)
        self._shape = form.tensors, form.vectors // LANES, form.head_dim

    def narrow(self, block: Tensor, row: memoryview) -> None:
        self._check(block, row)
        self._library.narrow_block(*self._types, block.data_ptr(), block.stride(0), *self._shape, _address(row))

    def widen(self, row: memoryview, block: Tensor) -> None:
        self._check(block, row)
        self._library.widen_block(*self._types, _address(row), *self._shape, block.stride(0), block.data_ptr())

    def _check(self, block: Tensor, row: memoryview) -> None:
        form = self.form
        shape = (form.tensors, form.vectors * form.head_dim * form.dtype.itemsize)
        if block.shape != shape or block.stride(1) != 1 or row.nbytes != form.row_bytes:
            raise ValueError(
                f"A block {list(block.shape)} and a row of {row.nbytes} bytes: expected {list(shape)} and "
                f"{form.row_bytes}."
            )


def _address(row: memoryview) -> int:
    return torch.frombuffer(row, dtype=torch.uint8).data_ptr()
