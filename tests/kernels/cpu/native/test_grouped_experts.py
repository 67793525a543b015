"""Owns the comparison of experts in groups of 4 to 8 bits with the reference on the weights that these stand for.
Never compares with stored numbers: every weight is random, and every output is poisoned first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.cpu.native.grouped import Rows
from kernels.cpu.native.program import Team, outputs_by_lane, pack, pack_grouped_experts
from kernels.forward import Linear, Routing
from tests.kernels.cpu.native.test_grouped import FORMS, OF_INTEGERS, Whole, draw
from tests.kernels.cpu.native.test_program import DTYPES, record, tokens_only
from tests.kernels.rows import seeded_generator
from tests.support.compiler import needs_compiler

pytestmark = needs_compiler

ROUTING = Routing(2, renormalize=True)
FAST = ("Q5_1", "Q6_K", "4 bits, 128 inputs", "fp8, 32 inputs")
"""Forms that differ most: the others are tested by `make test-slow`."""
COUNTS = (1, 2, 5, 9, 33, 149)
"""An expert then has no rows, few, or more than are summed at a time."""

Experts = Sequence[Whole]


def _case(name: str, dtype: torch.dtype) -> Any:
    slow = name not in FAST or (dtype == torch.float32 and FORMS[name].nested)
    return pytest.param(name, dtype, marks=pytest.mark.slow if slow else ())


def draw_experts(names: Sequence[str], outputs: int, inputs: int) -> list[Whole]:
    generator = seeded_generator()
    return [draw(name, outputs, inputs, generator) for name in names]


def weights(experts: Experts) -> Tensor:
    return torch.stack([expert.grouped.weight() for expert in experts])


def draw_rows(hidden: int, num_experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Draw tokens, whose products are of the size of one, and a router."""
    generator = seeded_generator()
    table = (torch.randn(150, hidden, generator=generator) / hidden**0.5).to(dtype)
    return table, torch.randn(num_experts, hidden, generator=generator) * 2


def mixture(
    team: Team, table: Tensor, router: Tensor, gate_up: Linear, down: Linear, routing: Routing = ROUTING
) -> Callable[..., Tensor]:
    return record(
        team, table.dtype, lambda program: program.experts(program.embed(table), router, gate_up, down, routing)
    )


APART = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""How far a token's numbers may be from the reference's, beside how large they are."""
ROUNDED_APART = {torch.float32: 1e-2, torch.bfloat16: 3e-2}
"""The same with rounded activations: what is next to a tie between two steps may go to either."""


def check(run: Callable[..., Tensor], want: Tensor, apart: dict[torch.dtype, float] = APART) -> None:
    """Compare all tokens, and the bits of each beside fewer others."""
    whole = run(tokens_only(150))
    error = (whole.double() - want.double()).norm(dim=1) / want.double().norm(dim=1)
    assert error.max() < apart[whole.dtype]
    for count in COUNTS:
        assert torch.equal(run(tokens_only(count)), whole[:count]), (
            f"the bits depend on how many rows there are: {count}"
        )


@pytest.mark.parametrize(("name", "dtype"), [_case(name, dtype) for dtype in DTYPES for name in FORMS])
def test_experts_match_the_reference_and_give_a_token_the_same_bits_beside_any_other(
    team_of_three: Team, name: str, dtype: torch.dtype
) -> None:
    hidden, size = FORMS[name].run, max(64, FORMS[name].run)
    table, router = draw_rows(hidden, 4, dtype)
    gate_up, down = draw_experts([name] * 4, 2 * size, hidden), draw_experts([name] * 4, hidden, size)
    packed = pack_grouped_experts(gate_up, gated=True), pack_grouped_experts(down)
    run = mixture(team_of_three, table, router, *packed)
    check(run, reference.experts(table.float(), router, weights(gate_up), weights(down), ROUTING))


def by_blocks(table: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The reference with activations rounded in blocks before each product; the router's are not."""
    shares, chosen = reference.route(table.float(), router, ROUTING)
    rounded, out = reference.round_blocks(table), torch.zeros(table.shape, dtype=torch.float64)
    for number, (first, second) in enumerate(zip(gate_up.double(), down.double(), strict=True)):
        gate, up = (rounded @ first.T).chunk(2, dim=-1)
        inner = reference.round_blocks((F.silu(gate) * up).to(table.dtype))
        out += (shares * (chosen == number)).sum(1, keepdim=True) * (inner @ second.T)
    return out


@pytest.mark.parametrize(("name", "dtype"), [_case(name, dtype) for dtype in DTYPES for name in OF_INTEGERS])
def test_activations_of_experts_are_rounded_in_blocks(team_of_three: Team, name: str, dtype: torch.dtype) -> None:
    hidden, size = FORMS[name].run, max(64, FORMS[name].run)
    table, router = draw_rows(hidden, 4, dtype)
    gate_up, down = draw_experts([name] * 4, 2 * size, hidden), draw_experts([name] * 4, hidden, size)
    packed = pack_grouped_experts(gate_up, gated=True, rounded=True), pack_grouped_experts(down, rounded=True)
    assert all(linear.weight.rounded for linear in packed)
    run = mixture(team_of_three, table, router, *packed)
    check(run, by_blocks(table, router, weights(gate_up), weights(down)), ROUNDED_APART)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_of_experts_in_bytes_by_output_are_rounded_too(team_of_three: Team, dtype: torch.dtype) -> None:
    generator = seeded_generator()
    table, router = draw_rows(64, 5, dtype)
    gate_up, down = (
        (torch.randn(5, *shape, generator=generator) / shape[1] ** 0.5).to(dtype) for shape in ((192, 64), (64, 96))
    )
    as_bytes = [torch.stack([reference.round_weight(own) for own in each]) for each in (gate_up, down)]
    packed = (
        pack(Linear(gate_up), gated=True, quantize=True, rounded=True),
        pack(Linear(down), quantize=True, rounded=True),
    )
    assert all(linear.weight.rounded for linear in packed)
    check(mixture(team_of_three, table, router, *packed), by_blocks(table, router, *as_bytes), ROUNDED_APART)


@pytest.mark.parametrize("rounded", [False, True])
def test_each_expert_may_have_a_form_of_its_own(team_of_three: Team, rounded: bool) -> None:
    """With minima and without, with groups of 16 and of 32, and panels of other sizes beside each other."""
    forms = ["Q6_K", "Q4_K", "Q8_0", "8 bits, 128 inputs", "Q5_1"]
    table, router = draw_rows(256, 5, torch.float32)
    gate_up, down = draw_experts(forms, 512, 256), draw_experts(forms[::-1], 256, 256)
    packed = (
        pack_grouped_experts(gate_up, gated=True, rounded=rounded),
        pack_grouped_experts(down, rounded=rounded),
    )
    run = mixture(team_of_three, table, router, *packed)
    if rounded:
        check(run, by_blocks(table, router, weights(gate_up), weights(down)), ROUNDED_APART)
    else:
        check(run, reference.experts(table, router, weights(gate_up), weights(down), ROUTING))


def test_activations_are_rounded_for_no_expert_where_one_is_in_fp8(team_of_three: Team) -> None:
    forms = ["8 bits, 32 inputs", "fp8, 32 inputs"]
    assert not pack_grouped_experts(draw_experts(forms, 64, 64), rounded=True).weight.rounded


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_matrix_of_experts_may_be_in_groups_and_the_other_not(team_of_three: Team, dtype: torch.dtype) -> None:
    """The expert's size is no multiple of 32, and its last panel of gates is filled up."""
    table, router = draw_rows(64, 5, dtype)
    gate_up = draw_experts(["Q4_1"] * 5, 80, 64)
    down = (torch.randn(5, 64, 40, generator=seeded_generator()) / 7).to(dtype)
    packed = pack_grouped_experts(gate_up, gated=True), pack(Linear(down))
    run = mixture(team_of_three, table, router, *packed)
    check(run, reference.experts(table.float(), router, weights(gate_up), down.float(), ROUTING))


def test_an_expert_without_rows_gives_nothing_to_others(team_of_three: Team) -> None:
    """Its weights are not finite, and nobody's answer is."""
    experts = draw_experts(["Q4_1"] * 4, 128, 64), draw_experts(["Q4_1"] * 4, 64, 64)
    for each in experts:
        each[2].grouped.scales.fill_(torch.nan)
    table, router = draw_rows(64, 4, torch.float32)
    table[:, 0], router[:, 0], router[2, 0] = 1.0, 0.0, -1e4
    run = mixture(
        team_of_three, table, router, pack_grouped_experts(experts[0], gated=True), pack_grouped_experts(experts[1])
    )
    chosen = reference.route(table, router, ROUTING)[1]
    assert set(chosen.flatten().tolist()) == {0, 1, 3}
    assert run(tokens_only(150)).isfinite().all()
    assert run(tokens_only(1)).isfinite().all()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FORMS])
def test_panels_of_every_expert_hold_what_the_format_defines_to_the_bit(
    team_of_three: Team, name: str, gated: bool
) -> None:
    """Read as one embedding: a row of the table is an output of an expert, in the order of panels."""
    experts = draw_experts([name] * 3, 64, 2 * FORMS[name].run)
    packed = pack_grouped_experts(experts, gated=gated).weight
    assert (packed.inputs, packed.outputs) == (2 * FORMS[name].run, 64)
    table = replace(packed, outputs=3 * 64)
    rows = record(team_of_three, torch.float32, lambda program: program.embed(table))(tokens_only(3 * 64))
    order = outputs_by_lane(packed, gated=True).flatten().long() if gated else torch.arange(64)
    assert torch.equal(rows.view(3, 64, -1), weights(experts)[:, order])
    assert not torch.equal(rows[:64], rows[64:128])


def test_an_expert_is_packed_before_the_next_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where experts take memory until they are packed, only one takes it twice."""
    events: list[str] = []
    whole = Whole.pack
    monkeypatch.setattr(Whole, "pack", lambda own, *to: (events.append("packed"), whole(own, *to)))

    def taken() -> Iterator[Rows]:
        for expert in draw_experts(["Q4_0"] * 3, 32, 64):
            events.append("taken")
            yield expert

    pack_grouped_experts(taken())
    assert events == ["taken", "packed"] * 3
