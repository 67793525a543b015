"""Owns the rows of a step as kernels read them on a device: PagedRows and StateRows with their numbers in tensors.
Never computes attention, and never waits for the device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kernels.rows.step import PagedRows, StateRows


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRows(PagedRows):
    """Rows whose numbers are also on the device.

    A captured step reads the same tensors in each replay, with other rows in them; `contexts` and `counts` are empty
    there, and nowhere else. `num_decode`, `num_chunks`, `max_count` and `max_length` are then upper bounds that the
    capture was made for; only `decodes` says how many rows are decodes.
    """

    num_chunks: int
    decodes: Tensor
    """[1] int32: how many of the rows, from the first on, are decodes"""
    first_tokens: Tensor
    """[num_rows + 1] int32: where each row's tokens begin, and where the last row's end"""
    lengths: Tensor
    """[num_rows] int32: contexts + counts"""
    first_keys: Tensor
    """[num_rows + 1] int32: cumulative sums of `lengths`, from 0"""
    tables: Tensor
    """`block_tables` in int32"""
    max_count: int
    max_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStateRows(StateRows):
    """Rows with recurrent state whose numbers are also on the device. In a captured step they are like DeviceRows.

    A padding row has slot -1.
    """

    first_tokens: Tensor
    """[num_rows + 1] int32"""
    lengths: Tensor
    """[num_rows] int32: contexts + counts"""
    max_count: int


def states_on_device(rows: StateRows) -> DeviceStateRows:
    """Return the same rows, copied one tensor after another to the device of `rows.index`."""
    lengths = [context + count for context, count in zip(rows.contexts, rows.counts, strict=True)]
    numbers = (list(accumulate(rows.counts, initial=0)), lengths)
    first_tokens, of_rows = (torch.tensor(values, dtype=torch.int32, device=rows.index.device) for values in numbers)
    return DeviceStateRows(
        num_decode=rows.num_decode,
        contexts=rows.contexts,
        counts=rows.counts,
        slots=rows.slots,
        index=rows.index,
        first_tokens=first_tokens,
        lengths=of_rows,
        max_count=max(rows.counts),
    )


def on_device(rows: PagedRows, device: torch.device) -> DeviceRows:
    """Return the same rows, copied to `device` one tensor after another."""
    lengths = [context + count for context, count in zip(rows.contexts, rows.counts, strict=True)]

    def tensor(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    return DeviceRows(
        num_decode=rows.num_decode,
        contexts=rows.contexts,
        counts=rows.counts,
        block_tables=rows.block_tables.to(device),
        block_size=rows.block_size,
        num_chunks=len(rows.counts) - rows.num_decode,
        decodes=tensor([rows.num_decode]),
        first_tokens=tensor(list(accumulate(rows.counts, initial=0))),
        lengths=tensor(lengths),
        first_keys=tensor(list(accumulate(lengths, initial=0))),
        tables=rows.block_tables.to(device, torch.int32),
        max_count=max(rows.counts),
        max_length=max(lengths),
    )
