"""Owns the comparison of what adapters add to native products with float64, for every kind of packed matrix.
Never compares with stored numbers: every number is random, and every output is poisoned first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from kernels import reference
from kernels.cpu.native.low_rank import AdaptedMatrix, PackedAdapter
from kernels.cpu.native.program import Buffer, Packed, Program, StepRows, Team, outputs_by_lane, pack, pack_grouped
from kernels.forward import Linear, LowRankStack
from tests.kernels.cpu.native.test_grouped import draw
from tests.kernels.cpu.native.test_program import DTYPES, close
from tests.kernels.rows import seeded_generator
from tests.support.compiler import needs_compiler

pytestmark = needs_compiler

TOKENS, MOST = 70, 64
KINDS = ("plain", "int8", "blocks", "rounded", "fp8")
STORED = {"blocks": "Q4_1", "rounded": "Q4_1", "fp8": "fp8, 32 inputs"}
"""What has matrices in groups."""
QKV = (80, 48, 16)
"""Two parts meet within a panel."""


@dataclass(frozen=True)
class Own:
    """An adapter of one matrix, in the type of the activations."""

    a: list[Tensor | None]  # of each part [rank, inputs]
    b: Tensor  # [outputs, rank]

    @property
    def rank(self) -> int:
        return self.b.shape[1]


@dataclass
class Case:
    """A product with adapters, recorded; the token i of a step has the embedding i."""

    dtype: torch.dtype
    inputs: int
    parts: tuple[int, ...]
    kind: str = "plain"
    gated: bool = False
    generator: Generator = field(default_factory=seeded_generator)

    def __post_init__(self) -> None:
        outputs = sum(self.parts)
        self.table = (torch.randn(TOKENS, self.inputs, generator=self.generator) * self.size).to(self.dtype)
        self.bias = torch.randn(outputs, generator=self.generator).to(self.dtype)
        if self.kind in STORED:
            sizes = [outputs] if self.gated else self.parts
            stored = [draw(STORED[self.kind], size, self.inputs, self.generator) for size in sizes]
            self.weight = torch.cat([part.grouped.weight() for part in stored]).double()
            packed = pack_grouped(stored, self.bias, gated=self.gated, rounded=self.kind == "rounded").weight
        else:
            weight = (torch.randn(outputs, self.inputs, generator=self.generator) / self.inputs**0.5).to(self.dtype)
            self.weight = reference.round_weight(weight) if self.kind == "int8" else weight.double()
            packed = pack(Linear(weight, self.bias), gated=self.gated, quantize=self.kind == "int8").weight
        self.matrix = AdaptedMatrix(0, MOST, self.firsts, outputs_by_lane(packed, gated=self.gated))
        self.packed: Packed = replace(packed, adapted=self.matrix)

    @property
    def size(self) -> float:
        """The magnitude of activations. Weights in blocks are near one, and their products should be, too."""
        return self.inputs**-0.5 if self.kind in STORED else 1.0

    @property
    def firsts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.parts[:-1], initial=0))

    def adapter(self, rank: int, *, without: Sequence[int] = ()) -> Own:
        """Draw an adapter. without: parts that it does not adapt."""
        outputs = sum(self.parts)
        size = self.inputs**-0.5 / self.size
        a = [torch.randn(rank, self.inputs, generator=self.generator) * size for _ in self.parts]
        b = torch.randn(outputs, rank, generator=self.generator) / rank**0.5
        for part in without:
            b[self.firsts[part] : self.firsts[part] + self.parts[part]] = torch.nan  # never read
        kept = [None if part in without else one.to(self.dtype) for part, one in enumerate(a)]
        return Own(kept, b.to(self.dtype))

    def packed_adapter(self, own: Own | None) -> PackedAdapter | None:
        if own is None:
            return None
        adapter = PackedAdapter(1, self.dtype)
        adapter.put(self.matrix, own.a, own.b.float())
        return adapter

    def record(self, team: Team, packed: Packed | None = None) -> Run:
        program = Program(team, block_size=16, capacity=TOKENS, dtype=self.dtype)
        operation = Program.gated_linear if self.gated else Program.linear
        out = operation(program, program.embed(self.table), Linear(packed or self.packed))
        return Run(self, program, out)

    def want(self, tokens: Sequence[int], owns: Sequence[Own | None]) -> Tensor:
        """Return the product of tokens with these adapters, in float64."""
        x = self.table[list(tokens)]
        x = reference.round_blocks(x) if self.kind == "rounded" else x.double()
        y = F.linear(x, self.weight, self.bias.double())
        adapters = [own for own in owns if own is not None]
        if adapters:
            stack = self.stack(adapters)
            slots = [-1 if own is None else next(i for i, one in enumerate(adapters) if one is own) for own in owns]
            y = reference.add_low_rank(y, self.table[list(tokens)].double(), stack, slots)
        if self.gated:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        return y

    def stack(self, adapters: Sequence[Own]) -> LowRankStack:
        a = torch.zeros(len(adapters), len(self.parts), MOST, self.inputs, dtype=torch.float64)
        b = torch.zeros(len(adapters), sum(self.parts), MOST, dtype=torch.float64)
        for slot, own in enumerate(adapters):
            for part, one in enumerate(own.a):
                if one is not None:
                    of_part = slice(self.firsts[part], self.firsts[part] + self.parts[part])
                    a[slot, part, : own.rank], b[slot, of_part, : own.rank] = one, own.b[of_part]
        return LowRankStack(a, b, self.firsts)


@dataclass
class Run:
    case: Case
    program: Program
    out: Buffer

    def __call__(
        self, tokens: Sequence[int], owns: Sequence[Own | None], *, rows: Sequence[int] | None = None
    ) -> Tensor:
        """Run tokens with an adapter each, in rows of these sizes (default: one token each), in poisoned memory."""
        by_own = {id(own): self.case.packed_adapter(own) for own in owns}
        sizes = list(rows or [1] * len(tokens))
        begins = list(accumulate(sizes, initial=0))[:-1]
        ids = [list(tokens[begin : begin + size]) for begin, size in zip(begins, sizes, strict=True)]
        adapters = [by_own[id(owns[begin])] for begin in begins]
        self.out.tensor.fill_(torch.nan)
        for shrunk in self.program._shrunk.values():
            shrunk.fill_(torch.nan)
        self.program.run(StepRows(ids, [0] * len(sizes), sizes, [[0] * 8] * len(sizes), adapters=adapters))
        assert self.out.tensor[len(tokens) :].isnan().all(), "a row that the step does not have was written"
        return self.out.tensor[: len(tokens)].clone()


def same_bits(got: Tensor, want: Tensor) -> bool:
    """Unlike torch.equal, tells zeros of different signs apart."""
    kind = torch.int32 if got.dtype == torch.float32 else torch.int16
    return torch.equal(got.view(kind), want.view(kind))


def in_turn(count: int, owns: Sequence[Own | None]) -> list[Own | None]:
    return [owns[i % len(owns)] for i in range(count)]


def check(case: Case, run: Run, owns: Sequence[Own | None]) -> None:
    """In bfloat16 x A^T is rounded, too: a number may be far off where large ones cancel, but few are."""
    tokens = range(len(owns))
    got, want = run(tokens, owns), case.want(tokens, owns)
    close(got, want, 0.1 if case.dtype == torch.bfloat16 else None)
    off = (got.double() - want).square().mean() / want.square().mean()
    assert off.sqrt() < (5e-3 if case.dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_several_ranks_add_to_queries_keys_and_values_what_the_reference_adds(
    team: Team, kind: str, dtype: torch.dtype
) -> None:
    case = Case(dtype, 96, QKV, kind)
    run = case.record(team)
    owns = [case.adapter(rank) for rank in (1, 8, 16, 64)]
    for count in (1, 2, 5, 9, 33, TOKENS):
        check(case, run, in_turn(count, [None, *owns]))
        check(case, run, in_turn(count, owns))
    for own in owns:
        check(case, run, [own] * 37)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [16, 40])
def test_gates_and_their_values_get_theirs_before_the_gate_is_applied(
    team: Team, size: int, kind: str, dtype: torch.dtype
) -> None:
    case = Case(dtype, 64, (size, size), kind, gated=True)
    run = case.record(team)
    owns = [case.adapter(3), None, case.adapter(16), case.adapter(5, without=[0]), case.adapter(4, without=[1])]
    for count in (1, 3, 34):
        check(case, run, in_turn(count, owns))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [2, 34, 130])
@pytest.mark.parametrize("outputs", [1, 33, 100])
def test_a_matrix_of_any_shape_gets_what_the_reference_adds(
    team_of_three: Team, inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    case = Case(dtype, inputs, (outputs,))
    check(case, case.record(team_of_three), in_turn(11, [case.adapter(7), None, case.adapter(2)]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("without", [(0,), (1,), (0, 2), (1, 2)])
def test_parts_that_an_adapter_lacks_keep_their_bits(team_of_three: Team, without: tuple[int, ...], kind: str) -> None:
    case = Case(torch.float32, 32, QKV, kind)
    run, own = case.record(team_of_three), case.adapter(6, without=without)
    got, plain = run(range(9), [own] * 9), run(range(9), [None] * 9)
    close(got, case.want(range(9), [own] * 9))
    for part, (first, size) in enumerate(zip(case.firsts, QKV, strict=True)):
        of_part = slice(first, first + size)
        assert torch.equal(got[:, of_part], plain[:, of_part]) is (part in without)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
def test_a_token_without_an_adapter_keeps_its_bits_beside_any_that_has_one(
    team_of_three: Team, gated: bool, kind: str, dtype: torch.dtype
) -> None:
    case = Case(dtype, 64, (48, 48) if gated else QKV, kind, gated=gated)
    case.table[3], case.bias[:] = -0.0, -0.0  # sums of zero keep their sign, too
    run, plain = case.record(team_of_three), case.record(team_of_three, replace(case.packed, adapted=None))
    want = plain(range(40), [None] * 40)
    assert same_bits(run(range(40), [None] * 40), want)
    owns = in_turn(40, [case.adapter(4), None, None, None, case.adapter(9)])
    got = run(range(40), owns)
    bare = [token for token, own in enumerate(owns) if own is None]
    assert same_bits(got[bare], want[bare])
    assert not torch.equal(got[0], want[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
def test_a_token_with_an_adapter_has_the_same_bits_alone_in_any_chunk_and_beside_other_adapters(
    team: Team, gated: bool, kind: str, dtype: torch.dtype
) -> None:
    case = Case(dtype, 96, (48, 48) if gated else QKV, kind, gated=gated)
    run = case.record(team)
    own, others = case.adapter(13), [case.adapter(1), None, case.adapter(64)]
    want = torch.cat([run([token], [own]) for token in range(20)])
    for count in (2, 3, 4, 7, 16, 17, 20):
        assert same_bits(run(range(count), [own] * count), want[:count])
        assert same_bits(run(range(count), [own] * count, rows=[count]), want[:count])
    beside = [token for i in range(20) for token in (i, 30 + i)]
    owns = [one for i in range(20) for one in (own, others[i % 3])]
    assert same_bits(run(beside, owns)[::2], want)
    assert same_bits(run(beside[::-1], owns[::-1]).flip(0)[::2], want)
    rows = [token for begin in (5, 40, 0, 60) for token in range(begin, begin + 5)]
    assert same_bits(run(rows, [own] * 5 + [others[0]] * 5 + [own] * 5 + [None] * 5, rows=[5] * 4)[10:15], want[:5])


def test_an_adapter_that_takes_the_place_of_another_leaves_nothing_of_it(team: Team) -> None:
    case = Case(torch.float32, 64, QKV)
    run, first, second = case.record(team), case.adapter(64), case.adapter(2, without=[1])
    want = case.record(team)(range(6), [second, None] * 3)
    run(range(6), [first, None] * 3)
    assert same_bits(run(range(6), [second, None] * 3), want)
    close(want, case.want(range(6), [second, None] * 3))


def test_numbers_that_are_not_finite_stay_with_the_rows_of_their_adapter(team: Team) -> None:
    case = Case(torch.float32, 64, QKV)
    run, own, broken = case.record(team), case.adapter(4), case.adapter(4)
    broken.b.fill_(torch.inf)
    got = run(range(30), in_turn(30, [own, broken, None]))
    want = run(range(30), in_turn(30, [own, None, None]))
    assert not got[1::3].isfinite().any()
    for begin in (0, 2):
        assert same_bits(got[begin::3], want[begin::3])


def test_a_matrix_that_an_adapter_lacks_is_multiplied_as_without_it(team: Team) -> None:
    case = Case(torch.float32, 64, QKV)
    run = case.record(team)
    case.packed_adapter = lambda own: None if own is None else PackedAdapter(1, torch.float32)  # type: ignore[method-assign]
    assert same_bits(run(range(9), [case.adapter(4)] * 9), run(range(9), [None] * 9))


def test_products_one_after_another_each_take_their_own_factors(team: Team) -> None:
    """Their sums of ranks share memory, and the last product takes no adapters."""
    case = Case(torch.float32, 64, (64,))
    weights = [torch.randn(64, 64, generator=case.generator) / 8 for _ in range(3)]
    lanes = case.matrix.lanes
    matrices = [AdaptedMatrix(number, 8, (0,), lanes) for number in range(2)]
    program = Program(team, block_size=16, capacity=TOKENS, dtype=torch.float32)
    x = program.embed(case.table)
    for weight, matrix in zip(weights, [*matrices, None], strict=True):
        x = program.linear(x, Linear(replace(pack(Linear(weight)).weight, adapted=matrix)))
    adapter, want = PackedAdapter(2, torch.float32), case.table[:21].double()
    for matrix, weight in zip(matrices, weights, strict=False):
        own = case.adapter(8)
        adapter.put(matrix, own.a, own.b)
        assert own.a[0] is not None
        want = want @ weight.T.double() + want @ own.a[0].T.double() @ own.b.T.double()
    program.run(StepRows([list(range(21))], [0], [21], [[0, 1]], adapters=[adapter]))
    close(x.tensor[:21], want @ weights[2].T.double(), 1e-4)


def test_the_memory_of_an_adapter_is_that_of_its_factors_in_whole_panels_and_pairs() -> None:
    case = Case(torch.bfloat16, 64, (96, 40))
    adapter = case.packed_adapter(case.adapter(5, without=[0]))
    assert adapter is not None
    assert adapter.num_bytes == 2 * (6 * 64 + 6 * 160)


def test_lanes_of_two_parts_in_one_half_of_a_panel_are_an_error_of_ours() -> None:
    packed = pack(Linear(torch.zeros(40, 2))).weight
    with pytest.raises(AssertionError, match="sixteen lanes are of one part"):
        AdaptedMatrix(0, 4, (0, 24), outputs_by_lane(packed, gated=False)).parts()
