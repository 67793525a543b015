"""Owns the comparison of Triton's products with weights of 8 and 4 bits with the reference, in the interpreter.
Never compares with stored numbers: every input is random, and every output and every buffer is poisoned first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.forward import Linear
from tests.kernels.narrow_case import narrow_case
from tests.kernels.rows import seeded_generator
from tests.kernels.triton.cases import POISON, TOLERANCE, poisoned, poisoned_buffers, slow
from tests.support.distances import assert_close

from kernels.triton.linear.linear import FEW_ROWS, LAUNCH_ROWS, SOME_ROWS, narrow_linear, span_of, tile_of  # isort: skip
from kernels.triton.linear.multiply import MOST_WORDS  # isort: skip
from kernels.triton.shared.pack import Packed, pack  # isort: skip

KINDS = [
    ("int8", None, False),
    ("int8", 16, False),
    ("int8", 32, True),
    ("int8", 128, True),
    ("fp8", None, False),
    ("fp8", 128, False),
    ("int4", None, False),
    ("int4", None, True),
    ("int4", 16, True),
    ("int4", 32, False),
    ("int4", 128, True),
]
"""(kind, inputs that share a scale, whether there are zero points)"""


@pytest.fixture(autouse=True)
def _poisoned_buffers() -> Iterator[None]:
    with poisoned_buffers():
        yield


def rows_of(count: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(count, inputs, generator=seeded_generator()) / inputs**0.5).to(dtype)


def packed(linear: Linear, device: str) -> Linear:
    """Return `linear` packed on the device, with the caller's own weight left as it is."""
    tensors = {name: getattr(linear, name) for name in ("weight", "bias", "scales", "zeros")}
    there = {name: tensor.to(device, copy=True) for name, tensor in tensors.items() if tensor is not None}
    return pack(replace(linear, **there))


def large(outputs: int, inputs: int) -> Packed:
    """Return a matrix without values."""
    words = torch.empty(outputs, inputs // 2, dtype=torch.int16, device="meta")
    return Packed(words, words, None, 0, "int8", inputs)


def check(x: Tensor, linear: Linear, device: str) -> Tensor:
    out = poisoned((len(x), len(linear.weight)), x.dtype, device)
    assert narrow_linear(x.to(device), packed(linear, device), out=out) is out
    want = reference.narrow_linear(x, linear)
    assert_close(out.cpu(), want, atol=TOLERANCE[x.dtype], rtol=TOLERANCE[x.dtype])
    return out.cpu()


@pytest.mark.parametrize(("kind", "group", "zeros"), KINDS)
@pytest.mark.parametrize("rows", [1, SOME_ROWS + 1])
def test_each_kind_of_weight_matches_the_reference(
    device: str, kind: str, group: int | None, zeros: bool, rows: int
) -> None:
    check(rows_of(rows, 160), narrow_case(kind, 72, 160, group=group, zeros=zeros), device)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_activations_of_each_type_match_the_reference(device: str, kind: str, dtype: torch.dtype) -> None:
    check(rows_of(3, 64, dtype), narrow_case(kind, 48, 64, group=32, bias=dtype), device)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 64, 65, 129])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rows_at_the_edges_of_a_tile_match_the_reference(device: str, kind: str, rows: int) -> None:
    check(rows_of(rows, 96), narrow_case(kind, 40, 96, group=32, zeros=True), device)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 16), (63, 127), (64, 128), (65, 129), (130, 257), slow(300, 515)])
@pytest.mark.parametrize(("kind", "group"), [("int8", None), ("fp8", 32), ("int4", None), ("int4", 64)])
def test_outputs_and_inputs_that_fill_no_block_match_the_reference(
    device: str, kind: str, group: int | None, outputs: int, inputs: int
) -> None:
    inputs += inputs % 2 if kind == "int4" else 0
    check(rows_of(3, inputs), narrow_case(kind, outputs, inputs, group=group), device)


@pytest.mark.parametrize("group", [96, 160])
def test_groups_that_are_no_power_of_two_match_the_reference(device: str, group: int) -> None:
    for kind in ("int8", "int4"):
        check(rows_of(2, 1000), narrow_case(kind, 33, 1000, group=group, zeros=True), device)


@pytest.mark.parametrize("inputs", [256, 258, 1024, 1200])
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_splits_of_few_rows_are_added_with_the_bias_once(device: str, kind: str, inputs: int) -> None:
    linear = narrow_case(kind, 70, inputs, group=128, bias=torch.float32)
    weight = packed(linear, device).weight
    for rows in LAUNCH_ROWS[:2]:
        assert span_of(rows, weight) == MOST_WORDS
        check(rows_of(rows, inputs), linear, device)
    assert span_of(LAUNCH_ROWS[2], weight) == weight.words.shape[1]


def test_every_number_of_e4m3_is_read_exactly(device: str) -> None:
    """Each number is multiplied by one and by 0 alone, so its product is the number."""
    numbers = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    numbers[[0x7F, 0xFF]] = 0  # not a number, which a checkpoint may not have
    weight = numbers.view(torch.float8_e4m3fn).view(16, 16)
    linear = packed(Linear(weight, scales=torch.ones(16)), device)
    for dtype in (torch.float32, torch.float16):
        got = narrow_linear(torch.eye(16, dtype=dtype, device=device), linear)
        assert torch.equal(got.cpu().float(), weight.float().T)


@pytest.mark.parametrize("rows", LAUNCH_ROWS)
def test_a_row_does_not_depend_on_its_neighbours(device: str, rows: int) -> None:
    """It is the same to the bit, here for integers because the interpreter multiplies with NumPy."""
    generator = seeded_generator()
    x = torch.randint(-2, 3, (rows, 64), generator=generator).float().to(device)
    linear = packed(replace(narrow_case("int8", 32, 64), scales=torch.ones(32)), device)
    alone = narrow_linear(x, linear)
    for what in (torch.nan, torch.inf, POISON):
        wide = torch.full((tile_of(rows), 64), what, device=device)
        wide[:rows] = x
        assert torch.equal(narrow_linear(wide, linear)[:rows], alone)


def test_the_order_of_sums_does_not_depend_on_the_number_of_rows_in_a_tile() -> None:
    weights = [large(4096, 14336), large(28672, 4096)]
    for first, last in ((1, FEW_ROWS), (FEW_ROWS + 1, SOME_ROWS), (SOME_ROWS + 1, 9000)):
        for weight in weights:
            launches = {(tile_of(rows), span_of(rows, weight)) for rows in (first, (first + last) // 2, last)}
            assert len(launches) == 1
    assert span_of(1, weights[0]) == 3072 / 2, "five splits for 64 blocks of outputs"
    assert span_of(1, weights[1]) == 4096 / 2, "one, as its outputs fill a GPU"


def test_rows_may_lie_in_a_wider_matrix(device: str) -> None:
    linear, x = narrow_case("int4", 20, 64, group=32), rows_of(5, 64)
    wide = torch.cat((torch.full((5, 3), torch.nan), x), dim=1).to(device)
    got = narrow_linear(wide[:, 3:], packed(linear, device)).cpu()
    assert_close(got, reference.narrow_linear(x, linear), atol=2e-5, rtol=2e-5)


def test_no_rows_are_no_launch(device: str) -> None:
    linear = packed(narrow_case("int8", 20, 64), device)
    assert narrow_linear(torch.zeros(0, 64, device=device), linear).shape == (0, 20)


@pytest.mark.parametrize(
    ("kind", "inputs", "width"), [("int8", 64, 32), ("fp8", 40, 32), ("int4", 128, 32), ("int4", 72, 32)]
)
def test_packed_weights_take_their_bits_and_stay_in_their_memory_where_runs_are_whole(
    device: str, kind: str, inputs: int, width: int
) -> None:
    linear = narrow_case(kind, 24, inputs)
    stored = linear.weight.to(device)
    found: Packed = pack(replace(linear, weight=stored)).weight
    assert found.words.shape == (24, width)
    assert (found.words.data_ptr() == stored.data_ptr()) is (inputs in (64, 128))


def test_groups_that_no_run_fills_are_refused() -> None:
    with pytest.raises(ValueError, match="A group of 24 inputs: expected a multiple of 16"):
        pack(narrow_case("int4", 20, 64, group=24))
