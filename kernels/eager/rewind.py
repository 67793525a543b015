"""Owns the way back past rejected drafts: recurrent states from before a step, and the inputs of its drafted rows.
Never knows how a state is advanced: the step's own operators run again, on the accepted tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.rows.step import StateRows

Advance = Callable[[Sequence[Tensor], StateRows], Tensor]
"""Advances a layer's state in place, given (its inputs, each [num_tokens, ...], the rows that they belong to)."""


class _Kept(NamedTuple):
    state: Tensor  # [slots, ...], the layer's own
    before: Tensor  # [drafted rows, ...]
    inputs: tuple[Tensor, ...]  # each [tokens of drafted rows, ...]
    advance: Advance


class Rewind:
    """The rewind of one step. Rows with drafts come after the `rows.num_decode` rows of one token, and have a context.

    It keeps a copy of their states and a few numbers per token; a state after each token would take 74 MiB for
    Qwen3-Next.
    """

    def __init__(self, rows: StateRows, num_drafted: int) -> None:
        self._first = rows.num_decode
        behind = slice(self._first, self._first + num_drafted)
        self._contexts, self._counts, self._slots = rows.contexts[behind], rows.counts[behind], rows.slots[behind]
        self._index = rows.index[behind]
        self._tokens = slice(self._first, self._first + sum(self._counts))
        self._kept: list[_Kept] = []

    def keep(self, state: Tensor, inputs: Sequence[Tensor], advance: Advance) -> None:
        """Call this before the step's own `advance(inputs, rows)`. inputs: each [num_tokens, ...], of all rows."""
        fed = tuple(values[self._tokens].clone() for values in inputs)  # a slice would keep all of a layer's outputs
        self._kept.append(_Kept(state, state[self._index], fed, advance))

    def to(self, counts: Sequence[int]) -> None:
        """Set states to those after each row's first counts[row] tokens. 0: nobody reads the row's state again."""
        counted = counts[self._first : self._first + len(self._counts)]
        short = [row for row, count in enumerate(counted) if 0 < count < self._counts[row]]
        if not short:
            return
        short.sort(key=lambda row: counted[row] > 1)  # the operators expect rows of one token first
        begins = list(accumulate(self._counts, initial=0))
        tokens = torch.tensor([begins[row] + offset for row in short for offset in range(counted[row])])
        places = torch.tensor(short)
        rows = StateRows(
            num_decode=sum(counted[row] == 1 for row in short),
            contexts=tuple(self._contexts[row] for row in short),
            counts=tuple(counted[row] for row in short),
            slots=tuple(self._slots[row] for row in short),
            index=self._index[places],
        )
        for kept in self._kept:
            kept.state[rows.index] = kept.before[places]
            kept.advance([values[tokens] for values in kept.inputs], rows)
