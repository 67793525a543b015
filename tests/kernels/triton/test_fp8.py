"""Owns the comparison of Triton's products of fp8 by fp8 with the reference, in the interpreter.
Never compares with stored numbers: every input is random, and every output and every buffer is poisoned first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.forward import Linear
from tests.kernels.narrow_case import narrow_case, shuffled
from tests.kernels.rows import seeded_generator
from tests.kernels.triton.cases import TOLERANCE, poisoned, poisoned_buffers, slow
from tests.support.distances import assert_close

from kernels.triton.linear.fp8 import BLOCK, TILE, multiplies_fp8, round_rows  # isort: skip
from kernels.triton.linear.linear import SOME_ROWS, narrow_linear  # isort: skip
from kernels.triton.shared.pack import pack  # isort: skip

OWN = 0.0
"""An input_scale that leaves each row its own."""
MANY = SOME_ROWS + 1


@pytest.fixture(autouse=True)
def _poisoned_buffers() -> Iterator[None]:
    with poisoned_buffers():
        yield


def rows_of(count: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return rows of magnitudes that differ by far more than one scale for all could express."""
    generator = seeded_generator()
    sizes = torch.logspace(-6, 3, count, base=2)[torch.randperm(count, generator=generator)]
    return (torch.randn(count, inputs, generator=generator) * sizes[:, None] / inputs**0.5).to(dtype)


def check(x: Tensor, linear: Linear, device: str, scale: float = OWN) -> Tensor:
    given = replace(linear, input_scale=torch.tensor([scale]))
    names = ("weight", "bias", "scales", "order", "input_scale")
    tensors = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    packed = pack(replace(given, **{name: tensor.to(device, copy=True) for name, tensor in tensors.items()}))
    out = poisoned((len(x), len(linear.weight)), x.dtype, device)
    assert narrow_linear(x.to(device), packed, out=out) is out
    want = reference.fp8_linear(x, given)
    # Where two roundings of float32 differ, a number of a row may be the next one of e4m3.
    unit = want.double().abs().amax(dim=1, keepdim=True).clamp(min=1e-6)
    assert_close(out.cpu() / unit, want / unit, atol=TOLERANCE[x.dtype], rtol=TOLERANCE[x.dtype])
    return out.cpu()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("group", [None, 32, 128])
def test_products_of_rounded_rows_match_the_reference(device: str, group: int | None, dtype: torch.dtype) -> None:
    check(rows_of(MANY, 160, dtype), narrow_case("fp8", 72, 160, group=group, bias=dtype), device)


@pytest.mark.parametrize("rows", [MANY, TILE - 1, TILE, TILE + 1])
def test_rows_at_the_edges_of_a_tile_match_the_reference(device: str, rows: int) -> None:
    check(rows_of(rows, 96), narrow_case("fp8", 40, 96, group=32), device)


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 16), (127, 31), (128, 33), (129, 129), (10, BLOCK + 1), slow(300, 2 * BLOCK + 3)]
)
@pytest.mark.parametrize("group", [None, 64])
def test_outputs_and_inputs_that_fill_no_block_match_the_reference(
    device: str, group: int | None, outputs: int, inputs: int
) -> None:
    check(rows_of(MANY, inputs), narrow_case("fp8", outputs, inputs, group=group), device)


def test_groups_of_a_hundred_and_sixty_inputs_match_the_reference(device: str) -> None:
    check(rows_of(MANY, 500), narrow_case("fp8", 33, 500, group=160), device)


def test_a_checkpoints_scale_is_that_of_all_rows_and_cuts_off_what_is_beyond_it(device: str) -> None:
    x = rows_of(MANY, 64)
    scale = float(x.abs().max()) / 448 / 4
    assert (x.abs() / scale).max() > 448
    cut = check(x, narrow_case("fp8", 24, 64), device, scale)
    own = check(x, narrow_case("fp8", 24, 64), device)
    assert not torch.equal(cut, own)


def test_rows_are_rounded_to_the_numbers_of_torch_in_the_order_of_packed_weights(device: str) -> None:
    x = rows_of(5, 70).to(device)
    rounded, scales = torch.empty(5, 96, dtype=torch.float8_e4m3fn, device=device), torch.empty(5, device=device)
    places = rounded.view(torch.uint8)
    round_rows[(5,)](x, torch.zeros(1, device=device), places, scales, x.stride(0), 70, 96, BLOCK)
    unit = x.abs().amax(dim=1) / 448
    torch.testing.assert_close(scales, unit, rtol=1e-6, atol=0)
    want = torch.nn.functional.pad((x / scales[:, None]).to(torch.float8_e4m3fn).float(), (0, 26))
    by_run = rounded.float().view(5, 3, 16, 2).transpose(2, 3).flatten(1)
    assert torch.equal(by_run, want)


def test_every_number_of_e4m3_and_what_lies_between_is_rounded_as_torch_does(device: str) -> None:
    """To the nearest, and of two as near to the even one, also where a carry changes the exponent."""
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat((numbers, middles, middles.nextafter(numbers[1:]), middles.nextafter(numbers[:-1])))
    x = torch.cat((near, -near, torch.tensor([1000.0, -1e30, torch.inf, torch.nan]))).view(1, -1).to(device)
    width = -(-x.shape[1] // 32) * 32
    places, scales = torch.full((1, width), 0x55, dtype=torch.uint8, device=device), torch.empty(1, device=device)
    round_rows[(1,)](x, torch.ones(1, device=device), places, scales, x.stride(0), x.shape[1], width, BLOCK)
    got = places.view(torch.float8_e4m3fn).float().view(1, -1, 16, 2).transpose(2, 3).flatten(1)[:, : x.shape[1]]
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_a_row_of_zeros_stays_zero_and_one_of_no_numbers_spoils_no_other(device: str) -> None:
    x = rows_of(MANY, 64)
    x[3], x[7] = 0.0, torch.nan
    linear = replace(narrow_case("fp8", 24, 64), input_scale=torch.zeros(1))
    got = narrow_linear(x.to(device), pack(replace(linear, weight=linear.weight.clone()))).cpu()
    others = [row for row in range(MANY) if row != 7]
    want = reference.fp8_linear(x[others], linear)
    assert_close(got[others], want, atol=1e-4, rtol=1e-4)
    assert not got[3].any()
    assert got[7].isnan().all()


def test_inputs_in_another_order_match_the_reference(device: str) -> None:
    check(rows_of(MANY, 96), shuffled(narrow_case("fp8", 40, 96, group=32)), device)


def test_few_rows_keep_their_type(device: str) -> None:
    linear = replace(narrow_case("fp8", 40, 96), input_scale=torch.zeros(1))
    x = rows_of(SOME_ROWS, 96)
    got = narrow_linear(x.to(device), pack(replace(linear, weight=linear.weight.clone()))).cpu()
    assert_close(got, reference.narrow_linear(x, linear), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("kind", "group", "rounds"), [("fp8", 16, False), ("fp8", 48, False), ("int8", None, False)])
def test_weights_of_other_layouts_keep_the_type_of_activations(
    device: str, kind: str, group: int | None, rounds: bool
) -> None:
    linear = replace(narrow_case(kind, 40, 96, group=group), input_scale=torch.zeros(1))
    packed, x = pack(replace(linear, weight=linear.weight.clone())), rows_of(MANY, 96)
    assert multiplies_fp8(packed.weight) is rounds
    assert_close(narrow_linear(x.to(device), packed).cpu(), reference.narrow_linear(x, linear), atol=1e-4, rtol=1e-4)
