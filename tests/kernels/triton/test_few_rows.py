"""Owns the comparison of Triton's products of few rows with the same products in float64, in the interpreter.
Never compares with stored numbers: every input is random, and every output and every buffer is poisoned first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.eager.forward import EagerPass
from kernels.forward import GELU, Linear
from tests.kernels.rows import seeded_generator
from tests.kernels.triton.cases import POISON, TOLERANCE, poisoned, poisoned_buffers
from tests.support.distances import assert_close

from kernels.triton.elementwise.activation import silu_and_mul  # isort: skip
from kernels.triton.forward import TritonPass  # isort: skip
from kernels.triton.linear import few_rows  # isort: skip
from kernels.triton.linear.few_rows import (  # isort: skip
    FEW_ROWS,
    LAUNCH_ROWS,
    few_row_gated_linear,
    few_row_linear,
    span_of,
    tile_of,
    wide_linear,
)
from kernels.triton.ops import TRITON  # isort: skip

F16 = torch.float16
EDGES = (1, 15, 16, 17, 33, 64)


@pytest.fixture(autouse=True)
def _poisoned_buffers() -> Iterator[None]:
    with poisoned_buffers():
        yield


def case(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype = F16, *, bias: bool = False
) -> tuple[Tensor, Linear]:
    generator = seeded_generator()
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
    return x, Linear(weight, torch.randn(outputs, generator=generator).to(dtype) if bias else None)


def exact(x: Tensor, linear: Linear) -> Tensor:
    product = x.double() @ linear.weight.double().T
    return product if linear.bias is None else product + linear.bias.double()


def moved(linear: Linear, device: str) -> Linear:
    return Linear(linear.weight.to(device), None if linear.bias is None else linear.bias.to(device))


def check(x: Tensor, linear: Linear, device: str) -> None:
    out = poisoned((len(x), len(linear.weight)), x.dtype, device)
    assert few_row_linear(x.to(device), moved(linear, device), out=out) is out
    tolerance = TOLERANCE[x.dtype]
    assert_close(out.cpu(), exact(x, linear).to(x.dtype), atol=tolerance, rtol=tolerance)


def check_gated(x: Tensor, linear: Linear, device: str) -> None:
    out = poisoned((len(x), len(linear.weight) // 2), x.dtype, device)
    assert few_row_gated_linear(x.to(device), moved(linear, device), out=out) is out
    gate, up = exact(x, linear).chunk(2, dim=1)
    tolerance = 2 * TOLERANCE[x.dtype]  # gate and up are rounded, then their product
    want = torch.nn.functional.silu(gate) * up
    assert_close(out.cpu(), want.to(x.dtype), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows", EDGES)
def test_rows_at_the_edges_of_a_tile_match_the_exact_product(device: str, rows: int) -> None:
    check(*case(rows, 96, 72), device)
    check_gated(*case(rows, 96, 80), device)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 16), (63, 127), (64, 128), (66, 129), (128, 256), (258, 300)])
def test_outputs_and_inputs_that_fill_no_block_match_the_exact_product(device: str, outputs: int, inputs: int) -> None:
    check(*case(3, inputs, outputs), device)
    check_gated(*case(3, inputs, 2 * outputs), device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_each_type_matches_the_exact_product(device: str, dtype: torch.dtype) -> None:
    check(*case(5, 256, 128, dtype, bias=True), device)
    check_gated(*case(5, 256, 256, dtype, bias=True), device)


@pytest.mark.parametrize(("inputs", "splits"), [(384, 1), (512, 2), (1100, 3), (2048, 8)])
def test_splits_are_added_with_the_bias_once(device: str, inputs: int, splits: int) -> None:
    assert -(-inputs // span_of(inputs, 70)) == splits
    for rows in (1, 17):
        check(*case(rows, inputs, 70, bias=True), device)


def test_inputs_are_split_where_outputs_alone_leave_a_gpu_idle() -> None:
    """The shapes are those of Llama 3.1 8B and Qwen3-0.6B: how sums are ordered is part of a row's result."""
    assert {shape: shape[0] // span_of(*shape) for shape in ((4096, 6144), (4096, 28672), (4096, 128256))} == {
        (4096, 6144): 1,
        (4096, 28672): 1,
        (4096, 128256): 1,
    }
    assert span_of(4096, 4096) == 2048
    assert span_of(14336, 4096) == 7168
    assert span_of(2048, 1024) == 256
    assert span_of(3072, 1024) == 384
    assert span_of(1024, 4096) == 512


@pytest.mark.parametrize("bias", [False, True])
def test_the_fused_activation_gives_the_bits_of_both_kernels(
    device: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With integers, because the interpreter multiplies blocks of other sizes with NumPy, in another order."""
    monkeypatch.setattr(few_rows, "MOST_SPLITS", 1)  # as where outputs are many: sums then have the same order
    generator = seeded_generator()
    for rows in (1, 33):
        x = torch.randint(-3, 4, (rows, 272), generator=generator).to(device, F16)
        weight = torch.randint(-3, 4, (144, 272), generator=generator).to(device, F16) / 64
        linear = Linear(weight, torch.randn(144, generator=generator).to(device, F16) if bias else None)
        assert torch.equal(few_row_gated_linear(x, linear), silu_and_mul(few_row_linear(x, linear)))


@pytest.mark.parametrize("rows", LAUNCH_ROWS)
def test_a_row_gets_the_same_bits_alone_and_beside_any_others_of_its_tile(device: str, rows: int) -> None:
    """With integers, because the interpreter multiplies with NumPy."""
    generator = seeded_generator()
    x = torch.randint(-3, 4, (rows, 512), generator=generator).to(device, F16)
    weight = torch.randint(-3, 4, (64, 512), generator=generator).to(device, F16) / 64
    linear, least = Linear(weight), rows // 2 + 1 if rows > LAUNCH_ROWS[0] else 1
    assert tile_of(least) == tile_of(rows)
    for product in (few_row_linear, few_row_gated_linear):
        want = product(x, linear)
        assert torch.equal(product(x[:least], linear), want[:least])
        for what in (torch.nan, torch.inf, POISON):
            others = torch.full_like(x, what)
            others[least - 1] = x[least - 1]
            assert torch.equal(product(others, linear)[least - 1], want[least - 1])


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the rows of each launch."""
    found: list[int] = []

    def noting(name: str) -> None:
        real = getattr(few_rows, name)

        def note(x: Tensor, linear: Linear) -> Tensor:
            found.append(len(x))
            result: Tensor = real(x, linear)
            return result

        monkeypatch.setattr(few_rows, name, note)

    noting("few_row_linear")
    noting("few_row_gated_linear")
    return found


def test_more_rows_other_types_and_what_is_not_contiguous_or_aligned_go_to_torch(
    device: str, launched: list[int]
) -> None:
    x, linear = case(FEW_ROWS + 1, 64, 48)
    x, linear = x.to(device), moved(linear, device)
    wide = torch.cat((x, x), dim=1)
    single = Linear(linear.weight.float())
    narrower = Linear(linear.weight[:, :56].contiguous())
    wide_gated_linear = TRITON.gated_linear
    assert wide_gated_linear is not None
    for given, by in (
        (x, linear),
        (x[:0], linear),
        (wide[:5, :64], linear),
        (x[:5].float(), single),
        (x[:5, :56].contiguous(), narrower),
    ):
        for product, size in ((wide_linear, 48), (wide_gated_linear, 24)):
            assert product(given, by).shape == (len(given), size)
    few_outputs = Linear(linear.weight[: few_rows.LEAST_OUTPUTS - 1].contiguous())
    assert wide_linear(x[:1], few_outputs).shape == (1, few_rows.LEAST_OUTPUTS - 1)
    assert launched == []
    got, gated = wide_linear(x[:FEW_ROWS], linear), wide_gated_linear(x[:FEW_ROWS], linear)
    assert launched == [FEW_ROWS, FEW_ROWS]
    tolerance = TOLERANCE[F16]
    assert_close(got, wide_linear(x, linear)[:FEW_ROWS], atol=tolerance, rtol=tolerance)
    assert_close(gated, wide_gated_linear(x, linear)[:FEW_ROWS], atol=2 * tolerance, rtol=2 * tolerance)


class _Adapters:
    def add(self, y: Tensor, x: Tensor, linear: Linear) -> None:
        y += 1


def pass_of(adapters: _Adapters | None = None) -> EagerPass:
    none = torch.zeros(0, dtype=torch.int64)
    return TritonPass(TRITON, token_ids=none, positions=none, slots=none, plan=None, adapters=adapters)


def test_a_pass_takes_few_rows_and_adapters_add_to_the_product_before_its_activation(
    device: str, launched: list[int]
) -> None:
    x, linear = case(4, 64, 48)
    x, linear = x.to(device), moved(linear, device)
    plain, adapted = pass_of(), pass_of(_Adapters())
    y = plain.linear(x, linear)
    assert torch.equal(adapted.linear(x, linear), y + 1)
    assert torch.equal(adapted.gated_linear(x, linear), silu_and_mul(y + 1))
    assert torch.equal(plain.gated_linear(x, linear, GELU), TRITON.gelu_and_mul(y))
    assert_close(plain.gated_linear(x, linear), silu_and_mul(y), atol=4e-3, rtol=4e-3)
    assert launched == [4] * 5
