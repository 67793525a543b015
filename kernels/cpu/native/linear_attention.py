"""Owns the recording of linear attention and its gates, and of the way back past rejected drafts.
Never copies a part of a projection: operations read it where it lies."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu.native.program import Buffer, Columns, Program, StepRows
from kernels.forward import LinearHeads

Part = Buffer | Columns


class _DraftedPart(ctypes.Structure):
    """Mirrors DraftedPart of linear_attention.h."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("out", ctypes.c_void_p),
    ]


class LinearAttentionProgram(Program):
    """A Program that is a kernels.forward.LinearAttentionPass, too. States are read and written in place, each row's in
    the slot that StepRows names, except those of rows with drafts."""

    rewind: Rewind | None = None
    """Records what it takes to advance the states of rows with drafts. None: steps have no such rows."""

    def run(self, rows: StepRows) -> None:
        assert rows.num_drafted_tokens <= (0 if self.rewind is None else self.rewind.capacity)
        super().run(rows)

    def split(self, x: Buffer, sizes: Sequence[int]) -> list[Columns]:
        firsts = [sum(sizes[:number]) for number in range(len(sizes))]
        return [Columns(x, first, size) for first, size in zip(firsts, sizes, strict=True)]

    def sigmoid_gate(self, x: Buffer, gate: Part, other: Buffer | None = None) -> Buffer:
        size, width = x.stride, _width(gate)
        assert width in (1, size)
        out = self._new(size)
        self._library.program_sigmoid_gate(
            self._handle,
            self._wide,
            x.address,
            gate.address,
            gate.stride,
            int(width == 1),
            None if other is None else other.address,
            size,
            out.address,
        )
        return out

    def causal_conv(self, x: Part, weight: Tensor, state: Tensor) -> Buffer:
        if self.rewind is not None:
            (again,) = self.rewind.kept(self, x)
            self.rewind.program.causal_conv(again, weight, state)
        channels, kernel = weight.shape
        out = self._new(channels)
        self._library.program_causal_conv(
            self._handle,
            self._wide,
            x.address,
            x.stride,
            self._keep(weight.float().T.contiguous()),
            kernel,
            channels,
            len(state),
            self._keep(state),
            out.address,
        )
        return out

    def delta_rule(
        self, qkv: Part, strength: Part, step: Part, rates: tuple[Tensor, Tensor], heads: LinearHeads, state: Tensor
    ) -> Buffer:
        if self.rewind is not None:
            again = self.rewind.kept(self, qkv, strength, step)
            self.rewind.program.delta_rule(again[0], again[1], again[2], rates, heads, state)
        prepared = self._new(2 * heads.key_size + heads.num_key_heads + 2 * heads.num_value_heads, torch.float32)
        out = self._new(heads.value_size)
        self._library.program_delta_rule(
            self._handle,
            self._wide,
            *(number for part in (qkv, strength, step) for number in (part.address, part.stride)),
            *(self._keep(each.float().contiguous()) for each in rates),
            heads.num_key_heads,
            heads.num_value_heads,
            heads.key_dim,
            heads.value_dim,
            len(state),
            self._keep(state),
            prepared.address,
            out.address,
        )
        return out

    def gated_rms_norm(self, x: Buffer, gate: Part, weight: Tensor, eps: float) -> Buffer:
        size, out = len(weight), self._new(x.stride)
        self._library.program_gated_norm(
            self._handle,
            self._wide,
            x.address,
            gate.address,
            gate.stride,
            self._keep(weight.float()),
            eps,
            x.stride // size,
            size,
            out.address,
        )
        return out

    def keep_drafted(self, parts: Sequence[tuple[Part, Tensor]]) -> None:
        """Copy the numbers of the tokens in rows with drafts, each part to its tensor: [their largest number, width]"""
        given = (_DraftedPart(x.address, x.stride, _width(x), self._keep(to)) for x, to in parts)
        self._library.program_keep_drafted(self._handle, self._wide, (_DraftedPart * len(parts))(*given), len(parts))

    def gathered(self, kept: Tensor) -> Buffer:
        """Return the rows of `kept` that StepRows.sampled names, as a step's tokens."""
        out = self._new(kept.shape[1])
        self._library.program_gather(self._handle, self._wide, self._keep(kept), kept.shape[1], out.address)
        return out


class Rewind:
    """A second program, which advances the states of rows with drafts once it is known which drafts are accepted.

    The step copies the inputs of its states' operations, and leaves the states as they are. The second program runs
    these operations on the accepted tokens: `sampled` names them among those that were copied.
    """

    def __init__(self, program: LinearAttentionProgram, capacity: int, dtype: torch.dtype) -> None:
        """program: of the same team and type as the step's. capacity: the largest number of tokens in rows with drafts
        in a step."""
        self.program = program
        self.capacity = capacity
        self._dtype = dtype

    def kept(self, of: LinearAttentionProgram, *parts: Part) -> list[Buffer]:
        """Record the copy of all parts in the step's program, and return what the second program makes of each."""
        memory = [torch.zeros(self.capacity, _width(part), dtype=self._dtype) for part in parts]
        of.keep_drafted(list(zip(parts, memory, strict=True)))
        return [self.program.gathered(each) for each in memory]


def _width(part: Part) -> int:
    return part.width if isinstance(part, Columns) else part.stride
