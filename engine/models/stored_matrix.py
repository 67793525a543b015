"""Owns matrices that stay as a checkpoint stores them, whose parts may be stored differently, and those of experts.
Never computes with them: the native kernels pack the parts, one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from kernels.cpu.native.grouped import Form, Rows


@dataclass(eq=False, slots=True)
class StoredMatrix:
    """[outputs, inputs] in place of a weight's Tensor, until it is packed. `split` gives parts that are filled one by
    one."""

    outputs: int
    inputs: int
    form: Form
    """In panels, or the largest of those of its parts."""
    dtype: torch.dtype
    """The type of the activations that it is multiplied by."""
    device: torch.device
    first: int = 0
    filled: dict[int, Rows] = field(default_factory=dict)
    """By their first output. Shared by all parts."""

    def split(self, sizes: Sequence[int]) -> list[StoredMatrix]:
        """Return views of these numbers of outputs."""
        found, first = [], self.first
        for size in sizes:
            found.append(StoredMatrix(size, self.inputs, self.form, self.dtype, self.device, first, self.filled))
            first += size
        return found

    def fill(self, rows: Rows) -> None:
        assert rows.shape == (self.outputs, self.inputs)
        self.filled[self.first] = rows

    def take_parts(self) -> list[Rows]:
        """Return the parts in order, neighbours of one form joined, and let go of them: what is packed is not in
        memory twice."""
        parts: list[Rows] = []
        for first in sorted(self.filled):
            rows = self.filled.pop(first)
            if parts and parts[-1].form == rows.form:
                rows = parts.pop().above(rows)
            parts.append(rows)
        assert sum(part.shape[0] for part in parts) == self.outputs
        return parts

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs

    @property
    def nbytes(self) -> int:
        """The bytes in panels; an upper bound where parts differ."""
        return self.form.nbytes(self.outputs, self.inputs)

    def numel(self) -> int:
        return self.outputs * self.inputs

    def __len__(self) -> int:
        return self.outputs


@dataclass(frozen=True, eq=False, slots=True)
class StoredExperts:
    """[experts, outputs, inputs] in place of a weight's Tensor: the matrices of a mixture, until they are packed."""

    matrices: tuple[StoredMatrix, ...]

    def take(self) -> Iterator[Rows]:
        """Yield each expert's outputs, of one form, and let go of them: what is packed is not in memory twice."""
        for matrix in self.matrices:
            (rows,) = matrix.take_parts()
            yield rows

    @property
    def dtype(self) -> torch.dtype:
        return self.matrices[0].dtype

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.matrices), *self.matrices[0].shape

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self.matrices)

    def numel(self) -> int:
        return sum(matrix.numel() for matrix in self.matrices)

    def __getitem__(self, number: int) -> StoredMatrix:
        return self.matrices[number]

    def __len__(self) -> int:
        return len(self.matrices)
