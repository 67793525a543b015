"""Owns the order in which Triton's interpreter runs a launch's programs: a GPU promises none, it always takes the same.
Never runs a program twice or leaves one out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product


@contextmanager
def shuffled_programs(order: random.Random) -> Iterator[None]:
    """Run the programs of each launch in an order drawn from `order`, so that none can depend on another."""
    from triton.runtime.interpreter import interpreter_builder as builder

    begin, enter = builder.set_grid_dim, builder.set_grid_idx
    programs: list[tuple[int, int, int]] = []

    def begin_shuffled(*sizes: int) -> None:
        begin(*sizes)
        programs[:] = product(*map(range, sizes))
        order.shuffle(programs)

    builder.set_grid_dim = begin_shuffled
    builder.set_grid_idx = lambda x, y, z: enter(*programs.pop())
    try:
        yield
    finally:
        builder.set_grid_dim, builder.set_grid_idx = begin, enter
