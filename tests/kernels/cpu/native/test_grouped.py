"""Owns the comparison of products and embeddings in groups of 4 to 8 bits with float64, for every form.
Never compares with stored numbers: every weight is random, and every output is poisoned first."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from kernels.cpu.native.grouped import FORMS as OF_GGUF
from kernels.cpu.native.grouped import FP8, INTEGERS, Form, Grouped, Rows, panels_of
from kernels.cpu.native.program import Program, StepRows, Team, pack_grouped
from kernels.forward import GELU
from tests.kernels.cpu.native.test_program import DTYPES, close, record, tokens_only
from tests.kernels.rows import seeded_generator
from tests.support.compiler import needs_compiler

pytestmark = needs_compiler

OF_INTEGERS = OF_GGUF | {f"{bits} bits, {group} inputs": form for (bits, group), form in INTEGERS.items()}
FORMS = OF_INTEGERS | {f"fp8, {group} inputs": form for group, form in FP8.items()}
MIXED = ["Q4_K", "Q6_K", "Q4_1"]
CASES = [
    pytest.param(name, dtype, marks=pytest.mark.slow if dtype == torch.float32 and form.floats == 32 else ())
    for dtype in DTYPES
    for name, form in FORMS.items()
]
"""Where two forms differ only in how many inputs share a scale, one of them is enough in float32."""
ONE_TEAM = pytest.mark.parametrize("team", [pytest.param(1, marks=pytest.mark.slow), 3], indirect=True)
"""Tests of repack.cpp, with blocks that only an engine knows."""


@dataclass(frozen=True)
class Whole:
    """A matrix in groups, as `panels_of` takes it."""

    grouped: Grouped

    @property
    def form(self) -> Form:
        return self.grouped.form

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.grouped.values.shape
        return outputs, inputs

    def above(self, other: object) -> Rows:
        raise NotImplementedError

    def pack(self, rows: Tensor, panels: Tensor) -> None:
        own = self.grouped
        minima = None if own.minima is None else own.minima[rows]
        units = tuple(unit[rows] for unit in own.units)
        values = own.values.view(torch.uint8)[rows].view(own.values.dtype)
        taken = Grouped(form=own.form, values=values, scales=own.scales[rows], minima=minima, units=units)
        panels.copy_(taken.panels())


def draw(name: str, outputs: int, inputs: int, generator: Generator) -> Whole:
    """Draw numbers of the whole range, with scales that keep weights near one in magnitude."""
    form, groups = FORMS[name], inputs // FORMS[name].group
    values = torch.randint(0, 1 << form.bits, (outputs, inputs), generator=generator).to(torch.uint8)

    def halves(count: int, size: float) -> Tensor:
        return (torch.randn(outputs, count, generator=generator) * size).half()

    size = 2.0 / (1 << form.bits)
    if form.fp8:
        values[values & 127 == 127] = 0  # not NaN
        scales = torch.randn(outputs, inputs // form.run, generator=generator) / 128
        return Whole(Grouped(form=form, values=values.view(torch.float8_e4m3fn), scales=scales))
    if form.floats:
        scales, minima = (halves(inputs // form.run, each).float() for each in (size, 1.0))
        values = values.view(torch.int8) if form.bits == 8 else values
        return Whole(Grouped(form=form, values=values, scales=scales, minima=minima))
    if not form.nested:
        minima = halves(groups, 1.0) if form.minimum else None
        whole = Grouped(form=form, values=values, scales=halves(groups, size), minima=minima)
    else:
        least, end = (0, 64) if form.minimum else (-128, 128)
        scales, minima = (
            torch.randint(least, end, (outputs, groups), generator=generator).to(torch.int8) for _ in range(2)
        )
        units = halves(inputs // form.run, size / end), halves(inputs // form.run, 1 / 64)
        if form.minimum:
            whole = Grouped(form=form, values=values, scales=scales, minima=minima, units=units)
        else:
            whole = Grouped(form=form, values=values, scales=scales, units=units[:1])
    if form.bits == 8:
        whole = Grouped(form=form, values=values.view(torch.int8), scales=whole.scales)
    return Whole(whole)


def sizes(name: str) -> list[int]:
    """A single run, and several that do not fill the buffer of a product."""
    return [FORMS[name].run, 3 * FORMS[name].run, 608 // FORMS[name].run * FORMS[name].run]


@ONE_TEAM
@pytest.mark.parametrize("outputs", [1, pytest.param(31, marks=pytest.mark.slow), 33, 100])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_row_of_a_packed_table_is_what_its_numbers_stand_for(
    team: Team, name: str, outputs: int, dtype: torch.dtype
) -> None:
    generator = seeded_generator()
    for inputs in sizes(name):
        whole = draw(name, outputs, inputs, generator)
        table = pack_grouped([whole]).weight
        got = record(team, dtype, lambda program, table=table: program.embed(table))(tokens_only(outputs))
        assert torch.equal(got, whole.grouped.weight().to(dtype))


@ONE_TEAM
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_table_may_be_scaled(team: Team, dtype: torch.dtype) -> None:
    whole = draw("Q5_K", 40, 256, seeded_generator())
    run = record(team, dtype, lambda program: program.embed(pack_grouped([whole]).weight, 7.0))
    assert torch.equal(run(tokens_only(40)), (whole.grouped.weight() * 7.0).to(dtype))


def product(
    team: Team, parts: list[Whole], dtype: torch.dtype, *, activation: str | None = None, rows: int = 150
) -> None:
    """Compare with float64 for all numbers of rows, and the bits of each row with those beside other rows."""
    generator = seeded_generator()
    weight = torch.cat([part.grouped.weight() for part in parts])
    outputs, inputs = weight.shape
    table = (torch.randn(rows, inputs, generator=generator) / inputs**0.5).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    packed = pack_grouped(parts, bias, gated=activation is not None)
    want = F.linear(table.double(), weight.double(), bias.double())
    if activation is None:
        run = record(team, dtype, lambda program: program.linear(program.embed(table), packed))
    else:
        run = record(team, dtype, lambda program: program.gated_linear(program.embed(table), packed, activation))
        gate, up = want.chunk(2, dim=-1)
        want = (F.gelu(gate, approximate="tanh") if activation == GELU else F.silu(gate)) * up
    whole = run(tokens_only(rows))
    close(whole, want)
    for count in (1, 2, 3, 7, 8, 9, 16, 17, 33, 63, 64, 65, 71, 128, 129):
        assert torch.equal(run(tokens_only(count)), whole[:count]), (
            f"the bits depend on how many rows there are: {count}"
        )


@pytest.mark.parametrize("outputs", [1, 33, 100])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_product_in_groups_matches_float64_and_is_the_same_beside_any_number_of_rows(
    team: Team, name: str, outputs: int, dtype: torch.dtype
) -> None:
    generator = seeded_generator()
    for inputs in sizes(name):
        product(team, [draw(name, outputs, inputs, generator)], dtype)


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize(
    ("size", "activation"), [pytest.param(16, "silu", marks=pytest.mark.slow), (17, GELU), (40, "silu")]
)
def test_a_gated_product_in_groups_matches_float64(
    team: Team, name: str, size: int, activation: str, dtype: torch.dtype
) -> None:
    product(team, [draw(name, 2 * size, 256, seeded_generator())], dtype, activation=activation)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_a_product_may_differ_in_their_form_and_end_anywhere_in_a_panel(
    team: Team, dtype: torch.dtype
) -> None:
    generator = seeded_generator()
    sizes = [33, 64, 5]
    parts = [draw(name, outputs, 512, generator) for name, outputs in zip(MIXED, sizes, strict=True)]
    product(team, parts, dtype)


@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q6_K", "fp8, 128 inputs"])
def test_a_large_input_whose_weight_is_zero_changes_nothing(team: Team, name: str) -> None:
    """A number is multiplied less its zero point: a sum of q and one of zero points would differ in their last bits."""
    generator = seeded_generator()
    whole = draw(name, 32, 256, generator)
    whole.grouped.values.view(torch.uint8)[:, 5] = whole.form.zero
    table = torch.randn(2, 256, generator=generator)
    table[1] = table[0]
    table[1, 5] = 1e8
    run = record(team, torch.float32, lambda program: program.linear(program.embed(table), pack_grouped([whole])))
    got = run(tokens_only(2))
    assert torch.equal(got[0], got[1])


def test_logits_come_from_packed_rows_of_the_sampled_tokens(team: Team) -> None:
    whole = draw("Q6_K", 100, 256, seeded_generator())
    packed = pack_grouped([whole])
    program = Program(team, block_size=16, capacity=4, dtype=torch.float32)
    logits = program.logits(program.embed(packed.weight), packed, 9)
    logits.tensor.fill_(torch.nan)
    program.run(StepRows([[1, 2, 3, 99]], [0], [4], [[0]], [3, 1]))
    weight = whole.grouped.weight().double()
    close(logits.tensor[:2], (weight[[99, 2]] @ weight.T).float(), 1e-3)
    assert logits.tensor[2:].isnan().all()


@pytest.mark.parametrize("name", FORMS)
def test_panels_take_as_many_bytes_as_their_form_says(name: str) -> None:
    whole = draw(name, 70, 512, seeded_generator())
    panels = panels_of([whole])
    assert sum(part.nbytes for part in panels.data) == FORMS[name].nbytes(70, 512)
