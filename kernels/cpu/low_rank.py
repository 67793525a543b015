"""Owns what a low-rank adapter adds to a matrix product, for some of its tokens.
Never forms the product of the two factors, which would be as large as the matrix."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

Tokens = Tensor | slice
"""Token indices without duplicates: [n] int64, or a slice."""


def add_low_rank(y: Tensor, x: Tensor, a: Tensor, b: Tensor, tokens: Tokens) -> None:
    """y[tokens] += (x[tokens] a^T) b^T, in place.

    y: [num_tokens, outputs]; x: [num_tokens, inputs]; a: [rank, inputs]; b: [outputs, rank]; all of one type.
    """
    added = F.linear(F.linear(x[tokens], a), b)
    if isinstance(tokens, slice):
        y[tokens] += added
    else:
        y.index_add_(0, tokens, added)
