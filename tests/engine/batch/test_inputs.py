"""Owns the contracts of a step's block tables: what they hold, and what it costs to make them.
Never runs a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from engine.batch import inputs
from engine.batch.inputs import build_inputs
from engine.step import RowKind, RowSampling, ScheduledRequest, StepPlan
from kernels.rows.integers import joined

BLOCK = 4
GREEDY = RowSampling(temperature=0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def decode_row(number: int, num_blocks: int) -> ScheduledRequest:
    """Return a decode row whose last token is in the last of its blocks but one."""
    block_ids = tuple(range(1000 * number, 1000 * number + num_blocks + 1))
    return ScheduledRequest(f"r{number}", RowKind.DECODE, BLOCK * num_blocks - 1, (5,), block_ids, GREEDY)


def test_a_rows_table_has_its_blocks_up_to_its_end_and_then_its_first_block() -> None:
    made = build_inputs(StepPlan(0, (decode_row(1, 2), decode_row(2, 4), decode_row(3, 1))), BLOCK)
    assert made.rows.block_tables.tolist() == [
        [1000, 1001, 1000, 1000],
        [2000, 2001, 2002, 2003],
        [3000, 3000, 3000, 3000],
    ]


def test_a_long_row_does_not_make_the_tables_of_short_ones_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of Python's are converted one by one: 255 rows beside one of 130,000 tokens took 50 ms of every step."""
    converted = 0

    def spy(parts: Iterable[Sequence[int]]) -> object:
        nonlocal converted
        given = list(parts)
        converted += sum(len(part) for part in given if isinstance(part, list | tuple))
        return joined(given)

    monkeypatch.setattr(inputs, "joined", spy)
    made = build_inputs(StepPlan(0, (*(decode_row(number, 2) for number in range(99)), decode_row(99, 800))), BLOCK)
    assert made.rows.block_tables.shape == (100, 800)
    assert converted == 99 * 2 + 800 + 100  # the rows' own blocks, and a token each
