"""Owns the rows of one step as kernels see them: where each row's tokens, keys and recurrent state lie.
Never says how anything is computed from them; `kernels.reference` does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The rows of one step as attention sees them. Their tokens are contiguous in the step's tensors.

        rows     | decode 0 | decode 1 | ... | chunk 0      | chunk 1 |
        tokens   | 1        | 1        | ... | counts[r]    | ...     |

    Row r's tokens sit at positions [contexts[r], contexts[r] + counts[r]) of its request. `num_decode` alone says which
    rows are decodes: a chunk of one token is not.
    """

    num_decode: int
    contexts: tuple[int, ...]
    """Tokens of the request whose K and V were in the cache before this step."""
    counts: tuple[int, ...]
    block_tables: Tensor
    """[num_rows, max_blocks] int64, each row padded with any valid block."""
    block_size: int

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    def slots(self, row: int) -> Tensor:
        """Return the cache slots of a row's tokens, this step's included. # [contexts[row] + counts[row]]"""
        positions = torch.arange(self.contexts[row] + self.counts[row], device=self.block_tables.device)
        return self.block_tables[row, positions // self.block_size] * self.block_size + positions % self.block_size


@dataclass(frozen=True, slots=True)
class StateRows:
    """The rows of one step as layers with recurrent state see them: like PagedRows, but each with its request's slot.

    A row whose context is 0 starts from a zero state, whatever its slot holds.
    """

    num_decode: int
    contexts: tuple[int, ...]
    counts: tuple[int, ...]
    slots: tuple[int, ...]
    index: Tensor
    """[num_rows] int64: `slots`, on the device of the states."""
