"""Owns the comparison of native kernels with the reference in edge cases, and of batch sizes. Long: all kernels.
Never compares with stored numbers: every input is random, and every output is poisoned first."""

from __future__ import annotations

import ctypes
import functools
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.cpu.native import library
from kernels.cpu.native.library import NoLibraryError, load_library
from kernels.cpu.native.program import Buffer, Program, StepRows, Team, pack
from kernels.cpu.processor import cpu_flags
from kernels.eager.forward import EagerPass
from kernels.eager.ops import REFERENCE, Ops
from kernels.forward import GELU, Array, ForwardPass, HeadShape, Linear, Routing
from kernels.kv_format import LARGEST, stored_size
from kernels.rows.step import PagedRows
from tests.kernels.rows import seeded_generator
from tests.support.compiler import needs_compiler
from tests.support.seeds import seeded_random

BLOCK = 16
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
NORMED = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
"""With per-head norms: the reference rounds their results to bfloat16 before rotating them, the kernels do not."""
MEAN = 6e-3
"""Root mean square error in bfloat16, where rounded values are multiplied again: one number in 100,000 is far off,
which does not move the mean (measured: 3e-3 with per-head norms, 4e-3 with experts)."""
EPS = 1e-5

pytestmark = needs_compiler

Rows = list[tuple[list[int], int, list[int]]]
"""(token ids, how many tokens come before them, blocks) of each row."""


def record(
    team: Team, dtype: torch.dtype, model: Callable[[Program], Buffer], block_size: int = BLOCK
) -> Callable[..., Tensor]:
    """Return a function from rows to the value that `model` returns, in poisoned memory."""
    program = Program(team, block_size=block_size, capacity=2400, dtype=dtype)
    out = model(program)

    def run(rows: Rows) -> Tensor:
        out.tensor.fill_(torch.nan)
        tokens, contexts, blocks = zip(*rows, strict=True)
        step = StepRows(tokens, contexts, [len(ids) for ids in tokens], blocks)
        program.run(step)
        assert out.tensor[step.num_tokens :].isnan().all(), "a row that the step does not have was written"
        return out.tensor[: step.num_tokens].clone()

    return run


def tokens_only(count: int) -> Rows:
    return [(list(range(count)), 0, list(range(count // BLOCK + 1)))]


def close(got: Tensor, want: Tensor, tolerance: float | None = None) -> None:
    tolerance = tolerance or TOLERANCE[got.dtype]
    assert not want.isnan().any()
    torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=tolerance)


def close_but_for_ties(got: Tensor, want: Tensor, tolerance: float, kept_in: torch.dtype) -> None:
    """A key or value that differs in its last bit may be rounded to the next number of 8 bits. Outputs that see it
    differ by a fraction of that step, and they are few: a few heads of a few tokens. In FP8, large numbers are nine
    times as far apart as in int8."""
    close(got, want, 0.1 if kept_in == torch.int8 else 0.3)
    tolerance = max(tolerance, 5e-3)
    apart = (got.double() - want.double()).abs() > tolerance + tolerance * want.double().abs()
    assert apart.sum() <= 256 + 0.03 * apart.numel()


def close_on_average(got: Tensor, want: Tensor) -> None:
    close(got, want, 0.1)
    assert (got.double() - want.double()).square().mean().sqrt() <= MEAN


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("inputs", [2, 6, 64, 130])
def test_a_product_of_any_shape_and_number_of_rows_matches_float64(
    team: Team, inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    generator = seeded_generator()
    x = torch.randn(37, inputs, generator=generator).to(dtype)
    weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    run = record(team, dtype, lambda program: program.linear(program.embed(x), pack(Linear(weight, bias))))
    want = F.linear(x.double(), weight.double(), bias.double())
    for count in (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 37):
        close(run(tokens_only(count)), want[:count])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(66, 1), (66, 33), (66, 100), (2, 33), (32, 33), (96, 33), (130, 33)])
@pytest.mark.parametrize("gated", [False, True])
def test_a_product_with_rounded_weights_matches_float64_and_is_the_same_beside_any_number_of_rows(
    team: Team, inputs: int, outputs: int, dtype: torch.dtype, gated: bool
) -> None:
    generator = seeded_generator()
    table = torch.randn(37, inputs, generator=generator).to(dtype)
    weight = (torch.randn(2 * outputs, inputs, generator=generator) / 8).to(dtype)
    bias = torch.randn(2 * outputs, generator=generator).to(dtype)
    packed = pack(Linear(weight, bias), gated=gated, quantize=True)
    operation = Program.gated_linear if gated else Program.linear
    run = record(team, dtype, lambda program: operation(program, program.embed(table), packed))
    want = F.linear(table.double(), reference.round_weight(weight), bias.double())
    if gated:
        gate, up = want.chunk(2, dim=-1)
        want = F.silu(gate) * up
    whole = run(tokens_only(37))
    close(whole, want)
    for count in (1, 2, 3, 8, 9, 16, 17, 32, 33):
        assert torch.equal(run(tokens_only(count)), whole[:count])


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_that_is_not_finite_is_not_hidden_by_rounding(team: Team, number: float, dtype: torch.dtype) -> None:
    """Regression guard: it became a byte beside finite ones, and answers were wrong without a sign of it."""
    weight = torch.ones(40, 6, dtype=dtype)
    weight[33, 2] = number
    packed = pack(Linear(weight), quantize=True)
    run = record(team, dtype, lambda program: program.linear(program.embed(torch.ones(1, 6, dtype=dtype)), packed))
    found = run(tokens_only(1))[0]
    assert found.isnan().nonzero().flatten().tolist() == [33]


def test_a_row_of_zeros_is_rounded_to_zeros(team: Team) -> None:
    packed = pack(Linear(torch.tensor([[0.0, 0.0], [3.0, -1.0]])), quantize=True)
    table = torch.tensor([[1.0, 1.0]])
    run = record(team, torch.float32, lambda program: program.linear(program.embed(table), packed))
    assert run(tokens_only(1))[0].tolist() == pytest.approx([0.0, 3.0 - 42 * 3.0 / 127])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 80])
@pytest.mark.parametrize("biased", [False, True])
def test_a_gated_product_matches_the_reference(team: Team, size: int, dtype: torch.dtype, biased: bool) -> None:
    generator = seeded_generator()
    x = torch.randn(19, 48, generator=generator).to(dtype)
    weight = (torch.randn(2 * size, 48, generator=generator) / 7).to(dtype)
    bias = torch.randn(2 * size, generator=generator).to(dtype) if biased else None
    run = record(
        team, dtype, lambda program: program.gated_linear(program.embed(x), pack(Linear(weight, bias), gated=True))
    )
    both = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    gate, up = both.chunk(2, dim=-1)
    for count in (1, 2, 5, 8, 19):
        close(run(tokens_only(count)), (F.silu(gate) * up)[:count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_gated_by_gelu_matches_the_reference(team: Team, dtype: torch.dtype) -> None:
    generator = seeded_generator()
    x = torch.randn(19, 48, generator=generator).to(dtype)
    weight = (torch.randn(2 * 33, 48, generator=generator) / 3).to(dtype)
    packed = pack(Linear(weight), gated=True)
    run = record(team, dtype, lambda program: program.gated_linear(program.embed(x), packed, GELU))
    gate, up = F.linear(x.double(), weight.double()).chunk(2, dim=-1)
    close(run(tokens_only(19)), F.gelu(gate, approximate="tanh") * up)


def test_gelu_of_an_extreme_gate_is_its_limit(team: Team) -> None:
    table = torch.tensor([[-1e4, 1.0], [1e4, 1.0], [-60.0, 1.0], [-1e30, 1.0]])
    packed = pack(Linear(torch.eye(2)), gated=True)
    run = record(team, torch.float32, lambda program: program.gated_linear(program.embed(table), packed, GELU))
    assert run(tokens_only(4)).flatten().tolist() == pytest.approx([0.0, 1e4, 0.0, 0.0], abs=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [7.0, 55.5])
def test_an_embedding_may_be_scaled(team: Team, scale: float, dtype: torch.dtype) -> None:
    table = torch.randn(19, 50, generator=seeded_generator()).to(dtype)
    run = record(team, dtype, lambda program: program.embed(table, scale))
    assert torch.equal(run(tokens_only(19)), table * scale)


def experts_case(dtype: torch.dtype, num_experts: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw tokens, a router, and the experts' gate_up and down."""
    generator = seeded_generator()
    table = torch.randn(40, 34, generator=generator).to(dtype)
    router = torch.randn(num_experts, 34, generator=generator) / 2
    gate_up = (torch.randn(num_experts, 2 * size, 34, generator=generator) / 6).to(dtype)
    down = (torch.randn(num_experts, 34, size, generator=generator) / size**0.5).to(dtype)
    return table, router, gate_up, down


def record_experts(
    team: Team, case: tuple[Tensor, Tensor, Tensor, Tensor], routing: Routing, **how: bool
) -> Callable[..., Tensor]:
    table, router, *weights = case
    gate_up, down = (Linear(weight.clone()) for weight in weights)
    packed = pack(gate_up, gated=True, **how), pack(down, **how)
    return record(team, table.dtype, lambda program: program.experts(program.embed(table), router, *packed, routing))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("routing", [Routing(1, renormalize=True), Routing(3, renormalize=False)], ids=str)
@pytest.mark.parametrize(("num_experts", "size"), [(3, 16), (5, 38), (64, 24)])
@pytest.mark.parametrize("consume", [False, True])
def test_experts_match_the_reference_and_give_a_token_the_same_bits_beside_any_other(
    team: Team, num_experts: int, size: int, routing: Routing, dtype: torch.dtype, consume: bool
) -> None:
    case = experts_case(dtype, num_experts, size)
    run = record_experts(team, case, routing, consume=consume)
    whole = run(tokens_only(40))
    (close_on_average if dtype == torch.bfloat16 else close)(whole, reference.experts(*case, routing))
    for count in (1, 2, 9, 33):
        assert torch.equal(run(tokens_only(count)), whole[:count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_with_rounded_weights_match_the_reference_of_those(team: Team, dtype: torch.dtype) -> None:
    table, router, *weights = experts_case(dtype, 5, 38)
    routing = Routing(2, renormalize=True)
    rounded = [torch.stack([reference.round_weight(matrix) for matrix in weight]).to(dtype) for weight in weights]
    run = record_experts(team, (table, router, *weights), routing, quantize=True)  # type: ignore[arg-type]
    want = reference.experts(table, router, *rounded, routing)  # type: ignore[call-arg]
    (close_on_average if dtype == torch.bfloat16 else close)(run(tokens_only(40)), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_that_is_not_finite_spoils_no_other_token_of_its_experts(team: Team, dtype: torch.dtype) -> None:
    case = experts_case(dtype, 4, 16)
    want = record_experts(team, case, Routing(2, renormalize=True))(tokens_only(40))
    case[0][5] = torch.nan
    got = record_experts(team, case, Routing(2, renormalize=True))(tokens_only(40))
    others = [token for token in range(40) if token != 5]
    assert torch.equal(got[others], want[others])
    assert got[5].isnan().all()


def test_silu_of_an_extreme_gate_is_its_limit(team: Team) -> None:
    table = torch.tensor([[-1e4, 1.0], [1e4, 1.0], [-60.0, 1.0]])
    weight = torch.eye(2)
    run = record(
        team,
        torch.float32,
        lambda program: program.gated_linear(program.embed(table), pack(Linear(weight), gated=True)),
    )
    got = run(tokens_only(3)).flatten().tolist()
    assert got[1] == 1e4
    assert got[0] == pytest.approx(0.0, abs=1e-30)
    assert got[2] == pytest.approx(0.0, abs=1e-20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 48, 130])
def test_norms_with_and_without_a_residual_match_the_reference(team: Team, size: int, dtype: torch.dtype) -> None:
    generator = seeded_generator()
    table = (torch.randn(9, size, generator=generator) * 5).to(dtype)
    weight, other = (torch.rand(size, generator=generator).to(dtype) for _ in "ab")

    def model(run: ForwardPass) -> Array:
        x, residual = run.add_rms_norm(run.embed(table), None, weight, EPS)
        return run.add_rms_norm(x, residual, other, EPS)

    rows = tokens_only(9)
    want, total = model(eager(rows, BLOCK))
    close(record(team, dtype, lambda program: model(program)[0])(rows), want)
    # The sum is in float32, but of a term rounded to `dtype`, which may differ by one rounding step.
    close(record(team, dtype, lambda program: model(program)[1])(rows), total, TOLERANCE[dtype])


def test_the_residual_stream_stays_in_float32(team: Team) -> None:
    """In bfloat16 it was rounded after each of thirty layers, and "What is the capital of France?" lost its answer."""
    table = torch.tensor([[1.0] * 64], dtype=torch.bfloat16)
    weight = torch.full((64,), 2.0**-9, dtype=torch.bfloat16)

    def model(program: Program) -> Buffer:
        x, total = program.add_rms_norm(program.embed(table), None, weight, 0.0)
        for _ in range(4):
            _, total = program.add_rms_norm(x, total, weight, 0.0)
        return total

    assert record(team, torch.bfloat16, model)(tokens_only(1))[0, 0] == 1 + 4 * 2.0**-9


def rounding(kept_in: torch.dtype) -> Ops:
    """Return the reference with a cache of keys and values that are rounded to a type of 8 bits."""

    def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        rounded = (reference.round_token(x, kept_in).to(x.dtype) for x in (k, v))
        REFERENCE.write_cache(*rounded, k_cache, v_cache, slots)

    return replace(REFERENCE, write_cache=write)


def eager(rows: Rows, block_size: int, table: Ops = REFERENCE) -> EagerPass:
    """Return an eager pass over the same rows, by default on the reference."""
    tables = torch.zeros(len(rows), max(len(blocks) for _, _, blocks in rows), dtype=torch.int64)
    for row, (_, _, blocks) in enumerate(rows):
        tables[row, : len(blocks)] = torch.tensor(blocks)
    contexts, counts = tuple(row[1] for row in rows), tuple(len(row[0]) for row in rows)
    paged = PagedRows(0, contexts, counts, tables, block_size)
    return EagerPass(
        table,
        token_ids=torch.tensor([token for tokens, _, _ in rows for token in tokens]),
        positions=torch.cat([torch.arange(c, c + n) for c, n in zip(contexts, counts, strict=True)]),
        slots=torch.cat([paged.slots(row)[contexts[row] :] for row in range(len(rows))]),
        plan=paged,
    )


class AttentionCase:
    """Sequences of random queries, keys and values, in shuffled blocks of caches poisoned by NaN."""

    def __init__(
        self,
        lengths: list[int],
        heads: HeadShape,
        dtype: torch.dtype,
        *,
        norms: bool,
        block_size: int,
        window: int | None = None,
        kept_in: torch.dtype | None = None,
    ) -> None:
        generator = seeded_generator()
        self.kept_in = kept_in
        self.heads, self.dtype, self.block_size, self.window = heads, dtype, block_size, window
        width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
        self.table = torch.randn(sum(lengths), width, generator=generator).to(dtype)
        self.frequencies = torch.rand(heads.head_dim // 2, generator=generator)
        self.norms = None
        if norms:
            q_norm, k_norm = (torch.rand(heads.head_dim, generator=generator).to(dtype) + 0.5 for _ in "qk")
            self.norms = q_norm, k_norm
        needed = [-(-length // block_size) for length in lengths]
        blocks = iter(torch.randperm(sum(needed) + 2, generator=generator).tolist())
        self.blocks = [[next(blocks) for _ in range(count)] for count in needed]
        self.num_blocks = sum(needed) + 2
        ends = torch.tensor(lengths).cumsum(0).tolist()
        self.tokens = [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]

    def caches(self) -> tuple[Tensor, Tensor]:
        shape = (self.num_blocks, self.block_size, self.heads.num_kv_heads, self.heads.head_dim)
        return torch.full(shape, torch.nan, dtype=self.dtype), torch.full(shape, torch.nan, dtype=self.dtype)

    def row(self, sequence: int, start: int, end: int) -> tuple[list[int], int, list[int]]:
        return self.tokens[sequence][start:end], start, self.blocks[sequence][: -(-end // self.block_size)]

    def model(self, run: ForwardPass, caches: tuple[Tensor, Tensor]) -> Array:
        # A different factor for each pair, none near zero.
        factors = torch.linspace(0.75, 1.5, len(self.frequencies))
        q = run.rotate_and_cache(
            run.embed(self.table), run.rotations(self.frequencies, factors), self.heads, caches, self.norms, EPS
        )
        return run.attention(q, self.heads, caches, self.heads.head_dim**-0.5, self.window)

    def native(self, team: Team) -> Callable[[Rows], Tensor]:
        caches = self.caches()
        if self.kept_in is not None:  # a scale with all bits set is NaN
            *shape, head_dim = caches[0].shape
            size = stored_size(head_dim, self.kept_in)
            k, v = (torch.full((*shape, size), -1, dtype=torch.int8).view(self.kept_in) for _ in "kv")
            caches = k, v
        return record(team, self.dtype, lambda program: self.model(program, caches), self.block_size)

    def reference(self) -> Callable[[Rows], Tensor]:
        caches = self.caches()
        table = REFERENCE if self.kept_in is None else rounding(self.kept_in)
        return lambda rows: self.model(eager(rows, self.block_size, table), caches)


def check_attention(
    team: Team,
    rows: list[tuple[int, int]],
    dtype: torch.dtype,
    *,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 32,
    norms: bool = False,
    block_size: int = BLOCK,
    window: int | None = None,
    kept_in: torch.dtype | None = None,
) -> None:
    """Compare with the reference. rows: (context, count) of each; contexts are computed first, in arbitrary chunks."""
    heads = HeadShape(num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=head_dim)
    lengths = [context + count for context, count in rows]
    case = AttentionCase(lengths, heads, dtype, norms=norms, block_size=block_size, window=window, kept_in=kept_in)
    got, want = case.native(team), case.reference()
    held: Callable[[Tensor, Tensor], None]
    tolerance = (NORMED if norms else TOLERANCE)[dtype]
    held = functools.partial(close, tolerance=tolerance)
    if kept_in is not None:
        held = functools.partial(close_but_for_ties, tolerance=tolerance, kept_in=kept_in)
    elif norms and dtype == torch.bfloat16:
        held = close_on_average
    draw = seeded_random()
    for sequence, (context, _) in enumerate(rows):
        cut = draw.randint(0, context)
        for start, end in ((0, cut), (cut, context)):
            if start < end:
                part = [case.row(sequence, start, end)]
                held(got(part), want(part))
    step = [case.row(sequence, context, context + count) for sequence, (context, count) in enumerate(rows)]
    held(got(step), want(step))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 63, 64, 65, 257])
def test_a_decode_row_of_any_length_matches_the_reference(team: Team, length: int, dtype: torch.dtype) -> None:
    check_attention(team, [(length - 1, 1)], dtype)


@pytest.mark.parametrize("team", [pytest.param(1, marks=pytest.mark.slow), 3], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("context", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 100])
@pytest.mark.parametrize("count", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 64])
def test_a_chunk_of_any_length_after_any_context_matches_the_reference(
    team: Team, context: int, count: int, dtype: torch.dtype
) -> None:
    check_attention(team, [(context, count)], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_every_gqa_ratio_matches_the_reference(team: Team, group: int, kv_heads: int, dtype: torch.dtype) -> None:
    check_attention(team, [(5, 1), (BLOCK, 1), (0, 9), (33, 2)], dtype, group=group, kv_heads=kv_heads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("norms", [False, True])
def test_every_head_size_with_and_without_norms_matches_the_reference(
    team: Team, head_dim: int, norms: bool, dtype: torch.dtype
) -> None:
    check_attention(team, [(40, 1), (20, 7), (130, 1), (60, 20)], dtype, head_dim=head_dim, norms=norms)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 32, 48])
def test_every_block_size_matches_the_reference(team: Team, block_size: int, dtype: torch.dtype) -> None:
    rows = [(0, 1), (15, 1), (16, 1), (130, 1), (0, 40), (17, 1), (48, 33)]
    check_attention(team, rows, dtype, block_size=block_size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 16, 37, 127, 128, 129, 300])
def test_a_window_of_any_length_matches_the_reference(team: Team, window: int, dtype: torch.dtype) -> None:
    """In a chunk, each query has a window of its own; a long row reads keys 128 at a time from within its window."""
    check_attention(team, [(0, 1), (window, 1), (260, 1), (0, 40), (window - 1, 17), (300, 33)], dtype, window=window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept_in", LARGEST)
@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 257])
def test_a_decode_row_over_keys_and_values_in_eight_bits_matches_the_reference_over_rounded_ones(
    team: Team, length: int, kept_in: torch.dtype, dtype: torch.dtype
) -> None:
    check_attention(team, [(length - 1, 1)], dtype, kept_in=kept_in)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept_in", LARGEST)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"kv_heads": 1, "group": 8},
        {"kv_heads": 3, "group": 1, "head_dim": 64},
        {"head_dim": 16, "norms": True},
        {"head_dim": 80},
        {"head_dim": 256, "block_size": 48},
        {"window": 16},
        {"window": 129},
    ],
    ids=str,
)
def test_attention_over_eight_bits_matches_the_reference_for_every_shape(
    team: Team, shape: dict[str, Any], kept_in: torch.dtype, dtype: torch.dtype
) -> None:
    rows = [(0, 1), (15, 1), (16, 1), (130, 1), (0, 40), (17, 1), (48, 33), (300, 33)]
    check_attention(team, rows, dtype, kept_in=kept_in, **shape)


@pytest.mark.parametrize("kept_in", LARGEST)
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_token_that_is_not_finite_is_not_hidden_by_eight_bits(
    team: Team, number: float, kept_in: torch.dtype
) -> None:
    heads = HeadShape(num_heads=6, num_kv_heads=2, head_dim=32)
    case = AttentionCase([20, 20], heads, torch.float32, norms=False, block_size=BLOCK, kept_in=kept_in)
    case.table[7, -3] = number
    found = case.native(team)([case.row(0, 0, 20), case.row(1, 0, 20)])
    assert found[7:20].isnan().any(dim=1).all()
    assert found[20:].isfinite().all()


def cuts(length: int, size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + size, length)) for start in range(0, length, size))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 9, pytest.param(130, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kept_in", "head_dim"),
    [
        *((kept_in, 32) for kept_in in (None, *LARGEST)),
        (None, 48),
        *(pytest.param(kept_in, 48, marks=pytest.mark.slow) for kept_in in LARGEST),
    ],
)
def test_attention_gives_a_token_the_same_bits_in_any_chunk_and_beside_any_row(
    team: Team, head_dim: int, window: int | None, dtype: torch.dtype, kept_in: torch.dtype | None
) -> None:
    heads = HeadShape(num_heads=6, num_kv_heads=2, head_dim=head_dim)
    case = AttentionCase([150, 90, 33], heads, dtype, norms=True, block_size=BLOCK, window=window, kept_in=kept_in)
    whole = case.native(team)([case.row(0, 0, 150)])
    for size in (1, 3, 16, 64):
        run = case.native(team)
        assert torch.equal(torch.cat([run([case.row(0, *cut)]) for cut in cuts(150, size)]), whole)
    run, found = case.native(team), []
    for (start, end), other in zip(cuts(150, 29), cuts(90, 15), strict=True):
        found.append(
            run([case.row(1, *other), case.row(0, start, end), case.row(2, 0, 33)])[other[1] - other[0] :][
                : end - start
            ]
        )
    assert torch.equal(torch.cat(found), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1025, 1700])
@pytest.mark.parametrize("kept_in", [None, torch.int8])
def test_a_long_row_whose_keys_are_divided_among_threads_matches_the_reference(
    window: int | None, dtype: torch.dtype, kept_in: torch.dtype | None
) -> None:
    """Lengths about multiples of a split. Some queries of the chunks see nothing of their tile's first or last one."""
    for length in (1024, 1025, 2048, 2300):
        check_attention(Team(4), [(length - 1, 1)], dtype, window=window, kept_in=kept_in)
    for start, count in ((1017, 16), (2044, 9), (2200, 40)):
        check_attention(Team(4), [(start, count)], dtype, window=window, kept_in=kept_in)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1500])
def test_a_long_row_has_the_same_bits_however_its_keys_are_divided(window: int | None, dtype: torch.dtype) -> None:
    heads = HeadShape(num_heads=6, num_kv_heads=2, head_dim=32)
    case = AttentionCase([2500, 40, 1400], heads, dtype, norms=True, block_size=BLOCK, window=window)
    last, other, short = case.row(0, 2499, 2500), case.row(2, 1399, 1400), case.row(1, 39, 40)
    found, shares = [], []
    for threads in (1, 2, 3, 8):
        team = Team(threads)
        run = case.native(team)
        for sequence, length in enumerate((2499, 39, 1399)):
            for start, end in cuts(length, 900):
                run([case.row(sequence, start, end)])
        before = team.num_shares
        found.append(run([last]))
        shares.append(team.num_shares - before)
        found.append(run([last, other, short])[:1])
        found.append(run([*[short] * 90, last])[-1:])
        found.append(run([case.row(0, 2490, 2500)])[-1:])
        found.append(run([case.row(0, 2003, 2500), case.row(2, 700, 1400)])[496:497])
    assert all(torch.equal(other, found[0]) for other in found)
    assert shares[0] < shares[1] == shares[2] == shares[3], "what was to be compared is the same"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_gives_a_row_the_same_bits_beside_any_number_of_rows(team: Team, dtype: torch.dtype) -> None:
    generator = seeded_generator()
    table = torch.randn(300, 130, generator=generator).to(dtype)
    weight, gated = (torch.randn(100, 130, generator=generator).to(dtype) for _ in "ab")
    for model in (
        lambda program: program.linear(program.embed(table), pack(Linear(weight))),
        lambda program: program.gated_linear(program.embed(table), pack(Linear(gated), gated=True)),
    ):
        run = record(team, dtype, model)
        whole = run(tokens_only(300))
        for count in (1, 2, 3, 8, 13, 16, 17, 32, 33, 64):
            assert torch.equal(run(tokens_only(count)), whole[:count])


def test_logits_are_those_of_the_sampled_tokens_and_the_lowest_of_equal_tokens_is_the_most_likely(team: Team) -> None:
    table = torch.tensor([[1.0, 0.0], [0.0, 1.0], [torch.nan, 0.0], [-torch.inf, 0.0]])
    weight = torch.zeros(40, 2)
    weight[7, 0] = weight[33, 0] = 3.0
    weight[12, 1] = 5.0
    program = Program(team, block_size=BLOCK, capacity=8, dtype=torch.float32)
    logits = program.logits(program.embed(table), pack(Linear(weight)), 4)
    tokens, best = program.argmax(logits)
    program.run(StepRows([[0, 1, 2, 1]], [0], [4], [[0]], [3, 0, 2]))
    assert tokens.tensor[:2].flatten().tolist() == [12, 7]
    assert best.tensor[:2].flatten().tolist() == [5.0, 3.0]
    assert best.tensor[2].isnan()
    assert tokens.tensor[2] == 0, "a token that exists: a draft model reads it next"
    assert torch.equal(logits.tensor[0], weight[:, 1])


@pytest.mark.parametrize("vocab", [1, 40, 64, 67, 200])
def test_the_most_likely_token_is_found_wherever_it_is_and_nan_is_too(team: Team, vocab: int) -> None:
    """The logits of the only token are the first weights of each output."""
    usual = torch.randn(vocab, generator=seeded_generator()).clamp(-3, 3)

    def chosen(logits: Tensor) -> tuple[int, float]:
        weight = torch.stack([logits, torch.zeros(vocab)], dim=1)
        program = Program(team, block_size=BLOCK, capacity=1, dtype=torch.float32)
        found = program.logits(program.embed(torch.tensor([[1.0, 0.0]])), pack(Linear(weight)), 1)
        tokens, best = program.argmax(found)
        program.run(StepRows([[0]], [0], [1], [[0]], [0]))
        return int(tokens.tensor[0]), float(best.tensor[0])

    for place in range(vocab):
        once, nan = usual.clone(), usual.clone()
        once[place:], nan[place] = 4.0, torch.nan
        assert chosen(once) == (place, 4.0), "the lowest of equals"
        assert math.isnan(chosen(nan)[1])
    assert chosen(torch.full((vocab,), -torch.inf)) == (0, -math.inf)


@pytest.mark.parametrize(("tokens", "blocks"), [([0, 9], [0]), ([-1], [0]), ([0], [3]), ([0], [-1])])
def test_a_token_or_block_that_is_not_there_is_refused_before_anything_is_read(
    team: Team, tokens: list[int], blocks: list[int]
) -> None:
    case = AttentionCase(
        [9], HeadShape(num_heads=1, num_kv_heads=1, head_dim=16), torch.float32, norms=False, block_size=BLOCK
    )
    run = case.native(team)
    with pytest.raises(IndexError, match="not there"):
        run([(tokens, 0, blocks)])
    assert not run([case.row(0, 0, 9)]).isnan().any()


@pytest.mark.parametrize(
    "weight", [torch.zeros(4, 3), torch.zeros(4, 4, dtype=torch.float16), torch.zeros(4, 4, dtype=torch.float64)]
)
def test_weights_that_the_kernels_do_not_read_are_refused(weight: Tensor) -> None:
    with pytest.raises(ValueError, match=f"{weight.shape[1]} inputs in {weight.dtype}"):
        pack(Linear(weight))


@pytest.mark.parametrize("gated", [False, True])
def test_packing_in_place_takes_no_further_memory_and_changes_nothing_else(gated: bool) -> None:
    """Regression guard: gates and values were put in order elsewhere, so half of a model was in memory twice."""
    weight = torch.randn(64, 10, generator=seeded_generator())
    copy, address = pack(Linear(weight.clone()), gated=gated).weight, weight.data_ptr()
    consumed = pack(Linear(weight), gated=gated, consume=True).weight
    assert consumed.panels.data_ptr() == address
    assert torch.equal(consumed.panels, copy.panels)


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("CHUNKSERVE_KERNELS_CACHE", str(tmp_path))
    load_library.cache_clear()
    yield tmp_path
    load_library.cache_clear()


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        ("no-such-compiler", "no C++ compiler: no-such-compiler is not on the PATH"),
        ("false", "false failed with status 1"),
        ("g++ -include no_such_header.h", "no_such_header.h"),
    ],
)
def test_a_compiler_that_is_missing_or_fails_is_the_reason_that_is_given(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, why: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(NoLibraryError, match=why.replace("+", r"\+")):
        load_library()
    assert not list(fresh_cache.iterdir()), "nothing half made is left behind"


def test_what_was_compiled_before_runs_where_there_is_no_compiler_any_more(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression guard: an image whose compiler was removed after the build fell back to torch's operators."""
    monkeypatch.delenv("CHUNKSERVE_KERNELS_CACHE")
    made = library._compiled()
    monkeypatch.setenv("CHUNKSERVE_KERNELS_CACHE", str(fresh_cache))
    shutil.copy(made, fresh_cache)
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    assert load_library()._name == str(fresh_cache / made.name)


def test_another_processor_is_the_reason_that_is_given(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.platform, "machine", lambda: "riscv64")
    with pytest.raises(NoLibraryError, match="Linux on x86-64, and this is Linux on riscv64"):
        load_library()


def test_a_processor_with_a_matrix_unit_multiplies_by_it() -> None:
    """A prompt of 256 tokens took 300 ms with vectors on such a processor, and 112 ms with torch's operators."""
    if not {"amx_tile", "amx_bf16", "avx512_bf16"} <= cpu_flags():
        pytest.skip("this processor has none that multiplies bfloat16")
    if ctypes.CDLL(None).syscall(158, 0x1023, 18):  # arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)
        pytest.skip("Linux does not grant it")
    assert load_library().matrix_unit() == 1


def test_where_the_matrix_unit_of_a_processor_is_not_granted_vectors_multiply() -> None:
    """Linux refuses the unit if a thread's signal stack is too small for the state that it adds."""
    if "amx_tile" not in cpu_flags():
        pytest.skip("this processor has none: vectors multiply in all tests")
    program = """
import ctypes

class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(4096)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 4096)), None) == 0
from kernels.cpu.native.library import load_library
assert load_library().matrix_unit() != 1
import sys, pytest
which = "a_product_of_any_shape or every_gqa_ratio"
sys.exit(pytest.main(["-q", "-p", "no:faulthandler", "-p", "no:xdist", "-k", which, sys.argv[1]]))
"""
    command = [sys.executable, "-X", "faulthandler=0", "-c", program, __file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
