"""Owns the comparison of recorded tokens of images with plain torch: embeddings, and rotations by three positions.
Never runs a model: tests/engine/models/test_native_encoding.py does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kernels.cpu.native.multimodal import MultimodalProgram
from kernels.cpu.native.program import Buffer, Program, StepRows, Team
from kernels.cpu.native.spans import Span, Spans
from tests.kernels.rows import seeded_generator
from tests.support.compiler import needs_compiler

BLOCK = 16
AXES = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2])
FREQUENCIES = 10000.0 ** (-torch.arange(8) / 8)
HIDDEN = 24

pytestmark = needs_compiler


@dataclass
class Row:
    """A row's part of the step, and by which frame, row and column each of its tokens is rotated."""

    context: int
    shift: int
    want: list[tuple[int, int, int]]
    spans: list[tuple[int, int, int, tuple[int, int, int], int, int]] = field(default_factory=list)
    """(first and last token of the row, first token of the grid, grid, position, shift after it)"""


TEXT = Row(5, 0, [(5, 5, 5), (6, 6, 6)])
DECODE = Row(40, -9, [(31, 31, 31)])
WHOLE = Row(
    0,
    0,
    [(0, 0, 0), (1, 1, 1), (1, 1, 2), (1, 1, 3), (1, 2, 1), (1, 2, 2), (1, 2, 3), (4, 4, 4), (5, 5, 5)],
    [(1, 7, 0, (1, 2, 3), 1, -3)],
)
"""Text, an image of 2 x 3 tokens, which takes 3 positions, and text."""
TWO = Row(
    20,
    -2,
    [(18, 18, 18), (19, 19, 19), (19, 20, 19), (21, 21, 21), (22, 22, 22), (22, 22, 23), (24, 24, 24)],
    [(1, 3, 0, (1, 2, 1), 19, -2), (4, 6, 0, (1, 1, 2), 22, -2)],
)
INSIDE = Row(
    12,
    0,
    [(3, 3, 4), (3, 4, 3), (3, 4, 4), (4, 3, 3)],
    [(0, 4, 1, (2, 2, 2), 3, 99)],
)
"""A chunk that begins and ends inside of an input of two frames."""


def make_step(rows: Sequence[Row], dtype: torch.dtype = torch.float32) -> tuple[StepRows, list[Span]]:
    spans, begin = [], 0
    for row in rows:
        for first, last, at, grid, position, after in row.spans:
            embeddings = torch.randn(last - first, HIDDEN, generator=seeded_generator()).to(dtype)
            spans.append(Span(begin + first, begin + last, at, grid, position, after, embeddings))
        begin += len(row.want)
    counts = [len(row.want) for row in rows]
    tokens = [list(range(count)) for count in counts]
    given = Spans([row.shift for row in rows], spans)
    return StepRows(tokens, [row.context for row in rows], counts, [[0, 1, 2]] * len(rows), spans=given), spans


def recorded(team: Team, dtype: torch.dtype, model: Callable[[Program], Buffer]) -> tuple[Program, Buffer]:
    program = MultimodalProgram(team, AXES, block_size=BLOCK, capacity=64, dtype=dtype)
    out = model(program)
    out.tensor.fill_(torch.nan)
    return program, out


def turned(positions: Tensor) -> Tensor:
    """[cos | sin] by the position of each pair. # [num_tokens, 2 * pairs]"""
    angles = positions.float() * FREQUENCIES
    return torch.cat((angles.cos(), angles.sin()), dim=1) * 1.5


@pytest.mark.parametrize(
    "rows",
    [[TEXT], [DECODE], [WHOLE], [TWO], [INSIDE], [DECODE, TEXT, INSIDE, WHOLE, TWO, DECODE]],
    ids=["text", "after an image", "a whole image", "two images", "inside of an image", "all"],
)
def test_each_pair_is_rotated_by_its_token_s_frame_row_or_column(team: Team, rows: list[Row]) -> None:
    program, out = recorded(team, torch.float32, lambda program: program.rotations(FREQUENCIES, 1.5))
    program.run(make_step(rows)[0])
    places = torch.tensor([place for row in rows for place in row.want])
    torch.testing.assert_close(out.tensor[: len(places)], turned(places[:, AXES]), atol=1e-5, rtol=0)
    assert out.tensor[len(places) :].isnan().all(), "a row that the step does not have was written"


def test_text_has_the_bits_of_a_program_for_text(team: Team) -> None:
    step, _ = make_step([TEXT, Row(33, 0, [(0, 0, 0)] * 17)])
    found = []
    text = Program(team, block_size=BLOCK, capacity=64, dtype=torch.float32)
    for program in (text, MultimodalProgram(team, AXES, block_size=BLOCK, capacity=64, dtype=torch.float32)):
        out = program.rotations(FREQUENCIES, 1.0)
        program.run(step)
        found.append(out.tensor[: step.num_tokens].clone())
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_an_input_have_its_embeddings_and_all_others_the_table_s_times_the_scale(
    team: Team, dtype: torch.dtype
) -> None:
    table = torch.randn(40, HIDDEN, generator=seeded_generator()).to(dtype)
    program, out = recorded(team, dtype, lambda program: program.embed(table, 2.0))
    rows = [DECODE, WHOLE, INSIDE, TWO]
    step, spans = make_step(rows, dtype)
    program.run(step)
    want = torch.cat([table[: len(row.want)] for row in rows]) * 2.0
    for span in spans:
        want[span.begin : span.end] = span.embeddings
    assert torch.equal(out.tensor[: len(want)], want)
    program.run(make_step([TEXT], dtype)[0])
    assert torch.equal(out.tensor[:2], table[:2] * 2.0), "spans of an earlier step are forgotten"


@pytest.mark.parametrize(
    "places",
    [[(-1, 1)], [(1, 1)], [(1, 3)], [(3, 6)], [(3, 4), (0, 1)], [(2, 4), (3, 5)]],
    ids=["before the step", "of no tokens", "of two rows", "beyond the step", "out of order", "overlapping"],
)
def test_a_span_outside_its_row_is_refused_and_nothing_is_computed(team: Team, places: list[tuple[int, int]]) -> None:
    program, out = recorded(team, torch.float32, lambda program: program.rotations(FREQUENCIES, 1.0))
    program.embed(torch.zeros(10, HIDDEN))
    given = [Span(begin, end, 0, (1, 2, 2), 0, 0, torch.zeros(end - begin, HIDDEN)) for begin, end in places]
    rows = [[1, 2], [3, 4, 5]]
    with pytest.raises(IndexError, match="or span that is not there"):
        program.run(StepRows(rows, [0, 0], [2, 3], [[0], [1]], spans=Spans([0, 0], given)))
    assert out.tensor.isnan().all()


@pytest.mark.parametrize(
    ("first", "grid", "embeddings", "why"),
    [
        (-1, (1, 1, 2), torch.zeros(2, HIDDEN), "tokens -1 to 1 of a grid"),
        (1, (1, 1, 2), torch.zeros(2, HIDDEN), "tokens 1 to 3 of a grid"),
        (0, (1, 0, 2), torch.zeros(2, HIDDEN), "tokens 0 to 2 of a grid"),
        (0, (1, 1, 2), torch.zeros(3, HIDDEN), "2 tokens has embeddings"),
        (0, (1, 1, 2), torch.zeros(2, 2 * HIDDEN)[:, ::2], "strided"),
    ],
)
def test_a_span_that_is_not_of_its_grid_or_embeddings_is_refused(
    first: int, grid: tuple[int, int, int], embeddings: torch.Tensor, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        Spans([0], [Span(0, 2, first, grid, 0, 0, embeddings)])


@pytest.mark.parametrize(
    ("shifts", "embeddings", "why"),
    [
        ([0], torch.zeros(2, HIDDEN), "2 rows has 1 shifts"),
        ([0, 0], torch.zeros(2, HIDDEN - 1), r"expected \[tokens, "),
        ([0, 0], torch.zeros(2, HIDDEN, dtype=torch.bfloat16), "float32"),
    ],
)
def test_what_the_library_would_read_beyond_is_refused(
    team: Team, shifts: list[int], embeddings: torch.Tensor, why: str
) -> None:
    program, _ = recorded(team, torch.float32, lambda program: program.embed(torch.zeros(10, HIDDEN)))
    given = Spans(shifts, [Span(0, 2, 0, (1, 1, 2), 0, 0, embeddings)])
    with pytest.raises(ValueError, match=why):
        program.run(StepRows([[1, 2], [3]], [0, 0], [2, 1], [[0], [1]], spans=given))


def test_a_step_without_the_positions_of_its_text_is_refused(team: Team) -> None:
    program, _ = recorded(team, torch.float32, lambda program: program.rotations(FREQUENCIES, 1.0))
    with pytest.raises(IndexError, match="span"):
        program.run(StepRows([[1, 2]], [0], [2], [[0]]))
