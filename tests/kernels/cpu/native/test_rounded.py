"""Owns the comparison of products whose activations are rounded to 8 bits with float64 and the same rounding.
Never compares with stored numbers: every number is random, and every output is poisoned first."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from kernels import reference
from kernels.cpu.native.grouped import Grouped
from kernels.cpu.native.program import Program, StepRows, Team, pack, pack_grouped
from kernels.forward import GELU, Linear
from tests.kernels.cpu.native.conftest import by_tiles
from tests.kernels.cpu.native.test_grouped import MIXED, ONE_TEAM, Whole, draw, sizes
from tests.kernels.cpu.native.test_grouped import OF_INTEGERS as FORMS
from tests.kernels.cpu.native.test_program import DTYPES, close, record, tokens_only
from tests.kernels.rows import seeded_generator
from tests.support.compiler import needs_compiler

pytestmark = needs_compiler

COUNTS = (1, 2, 3, 7, 8, 15, 16, 17, 33, 63, 64, 65, 128, 129)


def draw_rows(rows: int, inputs: int, generator: Generator) -> Tensor:
    """Draw rows whose blocks differ in size by three decimal powers, as those of real activations do."""
    size = 10 ** torch.empty(rows, inputs // 32, 1).uniform_(-2, 1, generator=generator)
    return (torch.randn(rows, inputs // 32, 32, generator=generator) * size / inputs**0.5).flatten(1)


def product(
    team: Team, parts: list[Whole], dtype: torch.dtype, *, activation: str | None = None, rows: int = 150
) -> None:
    """Compare with float64 for all numbers of rows, and the bits of each row with those beside other rows."""
    generator = seeded_generator()
    weight = torch.cat([part.grouped.weight() for part in parts])
    outputs, inputs = weight.shape
    table = draw_rows(rows, inputs, generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    packed = pack_grouped(parts, bias, gated=activation is not None, rounded=True)
    want = F.linear(reference.round_blocks(table), weight.double(), bias.double())
    if activation is None:
        run = record(team, dtype, lambda program: program.linear(program.embed(table), packed))
    else:
        run = record(team, dtype, lambda program: program.gated_linear(program.embed(table), packed, activation))
        gate, up = want.chunk(2, dim=-1)
        want = (F.gelu(gate, approximate="tanh") if activation == GELU else F.silu(gate)) * up
    whole = run(tokens_only(rows))
    close(whole, want)
    for count in (count for count in COUNTS if count < rows):
        assert torch.equal(run(tokens_only(count)), whole[:count]), (
            f"the bits depend on how many rows there are: {count}"
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [1, pytest.param(33, marks=pytest.mark.slow), 100])
@pytest.mark.parametrize("name", FORMS)
def test_a_product_matches_float64_with_the_same_rounding_and_is_the_same_beside_any_number_of_rows(
    team: Team, name: str, outputs: int, dtype: torch.dtype
) -> None:
    generator = seeded_generator()
    for inputs in sizes(name):
        product(team, [draw(name, outputs, inputs, generator)], dtype)


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_a_product_of_many_rows_matches_float64(team: Team, name: str) -> None:
    product(team, [draw(name, 40, 512, seeded_generator())], torch.float32, rows=500)


@ONE_TEAM
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("size", "activation"), [(17, GELU), (40, "silu")])
def test_a_gated_product_matches_float64(team: Team, name: str, size: int, activation: str, dtype: torch.dtype) -> None:
    product(team, [draw(name, 2 * size, 256, seeded_generator())], dtype, activation=activation)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_a_product_may_differ_in_their_form(team: Team, dtype: torch.dtype) -> None:
    generator = seeded_generator()
    names = [*MIXED, "Q8_0", "Q5_0"]
    parts = [draw(name, outputs, 512, generator) for name, outputs in zip(names, [33, 64, 5, 40, 1], strict=True)]
    product(team, parts, dtype)


def ones(name: str, values: Tensor) -> Whole:
    """A matrix of these numbers q whose weights are q less the zero point."""
    form, (outputs, inputs) = FORMS[name], values.shape
    groups = inputs // (form.floats or form.group)
    kind = torch.float32 if form.floats else torch.int8 if form.nested else torch.float16
    scales = torch.ones(outputs, groups).to(kind)
    minima = torch.zeros(outputs, groups).to(kind) if form.minimum else None
    kinds = (2 if form.minimum else 1) if form.nested else 0
    units = tuple(torch.ones(outputs, inputs // form.run).half() for _ in range(kinds))
    return Whole(Grouped(form=form, values=values, scales=scales, minima=minima, units=units))


def integers(rows: int, inputs: int, generator: Generator) -> Tensor:
    """Draw activations that are their own rounding: whole numbers, 127 among those of each block."""
    drawn = torch.randint(-127, 128, (rows, inputs // 32, 32), generator=generator)
    drawn[..., 7] = 127
    drawn[0], drawn[1], drawn[2, ..., ::2] = 127, -127, -127
    return drawn.flatten(1).float()


@pytest.mark.parametrize("name", FORMS)
def test_sums_of_whole_numbers_are_exact_up_to_the_largest(team: Team, name: str) -> None:
    """No sum of products saturates: rows of nothing but 127 or -127 meet outputs of nothing but the largest numbers."""
    form, generator = FORMS[name], seeded_generator()
    low, high = (-128, 127) if form.bits == 8 else (0, (1 << form.bits) - 1)
    values = torch.randint(low, high + 1, (34, 256), generator=generator).to(torch.int8)
    values[0], values[1], values[33] = high, low, high
    whole = ones(name, values if form.bits == 8 else values.view(torch.uint8))
    table = integers(19, 256, generator)
    packed = pack_grouped([whole], rounded=True)
    got = record(team, torch.float32, lambda program: program.linear(program.embed(table), packed))(tokens_only(19))
    assert torch.equal(got.double(), table.double() @ whole.grouped.weight().double().T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_are_rounded_as_the_reference_says_to_the_bit(team: Team, dtype: torch.dtype) -> None:
    """By a product with ones: what comes out is a block's scale times its numbers. Ties are among them."""
    generator = seeded_generator()
    table = draw_rows(40, 256, generator)
    table[0] = torch.arange(-128, 128) / 2  # of a block's largest number over 127, many are halves
    table[1, ::32] = 127.0
    table[1] = table[1].round() + 0.5 * (table[1] < 127)
    packed = pack_grouped([ones("Q8_0", torch.eye(256).to(torch.int8))], rounded=True)
    table = table.to(dtype)
    program = Program(team, block_size=16, capacity=40, dtype=dtype)
    logits = program.logits(program.embed(table), packed, 40)  # float32 for either type
    logits.tensor.fill_(torch.nan)
    program.run(StepRows([list(range(40))], [0], [40], [[0]], list(range(40))))
    assert torch.equal(logits.tensor, reference.round_blocks(table).float())


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q6_K", "8 bits, 128 inputs"])
def test_blocks_of_zeros_and_of_numbers_next_to_nothing_add_nothing(team: Team, name: str) -> None:
    generator = seeded_generator()
    whole = draw(name, 33, 512, generator)
    table = torch.randn(4, 512, generator=generator)
    table[0], table[1, :256], table[2] = 0.0, 0.0, 1e-31
    table[3, 64:96] = torch.randn(32, generator=generator) * 1e-38
    run = record(
        team, torch.float32, lambda program: program.linear(program.embed(table), pack_grouped([whole], rounded=True))
    )
    got = run(tokens_only(4))
    want = reference.round_blocks(table) @ whole.grouped.weight().double().T
    assert not got[0].any()
    assert not got[2].any()
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q6_K", "8 bits, 32 inputs"])
def test_a_row_with_nan_or_infinity_is_nan_and_no_other_row_is(team: Team, name: str, dtype: torch.dtype) -> None:
    generator = seeded_generator()
    whole = draw(name, 33, 256, generator)
    table = torch.randn(20, 256, generator=generator)
    table[3, 100], table[7, 0], table[11, 255] = torch.nan, torch.inf, -torch.inf
    packed = pack_grouped([whole], rounded=True)
    table = table.to(dtype)
    got = record(team, dtype, lambda program: program.linear(program.embed(table), packed))(tokens_only(20))
    bad = [3, 7, 11]
    assert got[bad].isnan().all()
    assert not got[[row for row in range(20) if row not in bad]].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", [False, True], ids=["rounded weights", "weights of a checkpoint"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_product_with_bytes_by_output_matches_float64_with_the_same_rounding(
    team: Team, gated: bool, kept: bool, dtype: torch.dtype
) -> None:
    generator = seeded_generator()
    table = draw_rows(90, 96, generator).to(dtype)
    weight = (torch.randn(66, 96, generator=generator) / 4).to(dtype)
    bias = torch.randn(66, generator=generator).to(dtype)
    want_weight = reference.round_weight(weight)
    linear = Linear(weight, bias)
    if kept:
        values, scales = (
            torch.randint(-128, 128, (66, 96), generator=generator),
            torch.rand(66, generator=generator) / 64,
        )
        linear, want_weight = Linear(values.to(torch.int8), bias, scales), values * scales.double().unsqueeze(1)
    packed = pack(linear, gated=gated, quantize=not kept, dtype=dtype, rounded=True)
    assert packed.weight.rounded
    operation = Program.gated_linear if gated else Program.linear
    run = record(team, dtype, lambda program: operation(program, program.embed(table), packed))
    want = F.linear(reference.round_blocks(table), want_weight, bias.double())
    if gated:
        gate, up = want.chunk(2, dim=-1)
        want = F.silu(gate) * up
    whole = run(tokens_only(90))
    close(whole, want)
    for count in (1, 2, 15, 16, 17, 64, 65):
        assert torch.equal(run(tokens_only(count)), whole[:count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_are_no_bytes_or_no_whole_blocks_are_multiplied_as_without_it(
    team: Team, dtype: torch.dtype
) -> None:
    generator = seeded_generator()
    for inputs, quantize in ((66, True), (64, False)):
        table = torch.randn(17, inputs, generator=generator).to(dtype)
        linear = Linear((torch.randn(33, inputs, generator=generator) / 8).to(dtype))
        found = []
        for rounded in (False, True):
            packed = pack(linear, quantize=quantize, rounded=rounded)
            assert not packed.weight.rounded
            run = record(
                team, dtype, lambda program, packed=packed, table=table: program.linear(program.embed(table), packed)
            )
            found.append(run(tokens_only(17)))
        assert torch.equal(*found)


def digest() -> str:
    """Hash the bits of products in every form, the same numbers in any process. By the matrix unit, if there is one."""
    with by_tiles():
        return _digest()


def _digest() -> str:
    found, generator, team = hashlib.sha256(), torch.Generator().manual_seed(5), Team(2)
    for name in FORMS:
        packed = pack_grouped([draw(name, 70, 512, generator)], rounded=True)
        table = draw_rows(90, 512, generator)
        run = record(
            team,
            torch.float32,
            lambda program, table=table, packed=packed: program.linear(program.embed(table), packed),
        )
        found.update(run(tokens_only(90)).numpy().tobytes())
    return found.hexdigest()
