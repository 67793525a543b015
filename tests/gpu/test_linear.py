"""Owns the comparison of Triton's matrix products on a GPU with the reference: edges and real shapes.
Never compares with stored numbers: inputs are random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.execution.device import Device
from kernels import reference
from kernels.choice import TRITON_TABLE
from kernels.eager.ops import NarrowOps
from kernels.forward import Linear
from tests.kernels.narrow_case import narrow_case
from tests.kernels.rows import seeded_generator
from tests.support.distances import assert_close

pytestmark = pytest.mark.gpu

SHAPES = {"8b": (4096, 4096), "0.6b": (1024, 3072), "odd": (72, 1200)}
"""(outputs, inputs)"""
KINDS: dict[str, dict[str, Any]] = {
    "int8": {},
    "int8 groups": {"group": 32, "zeros": True},
    "fp8": {},
    "fp8 blocks": {"group": 128},
    "int4": {"group": 128, "zeros": True},
    "int4 small groups": {"group": 32},
}
ROWS = (1, 16, 17, 64, 65, 300)


@pytest.fixture
def narrow(device: Device) -> NarrowOps:
    found: NarrowOps = import_module(TRITON_TABLE).TRITON.narrow
    return found


def case_of(kind: str, shape: str, device: Device, bias: torch.dtype | None = None) -> Linear:
    outputs, inputs = SHAPES[shape]
    linear = narrow_case(kind.split()[0], outputs, inputs, bias=bias, **KINDS[kind])
    tensors = {name: getattr(linear, name) for name in ("weight", "bias", "scales", "zeros")}
    return replace(linear, **{name: x.to(device.torch_device) for name, x in tensors.items() if x is not None})


def rows_of(count: int, shape: str, device: Device, dtype: torch.dtype) -> Tensor:
    inputs = SHAPES[shape][1]
    return (torch.randn(count, inputs, generator=seeded_generator()) / inputs**0.5).to(device.torch_device, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_reference(
    device: Device, narrow: NarrowOps, kind: str, shape: str, dtype: torch.dtype
) -> None:
    linear = case_of(kind, shape, device, bias=dtype)
    cases = [rows_of(rows, shape, device, dtype) for rows in ROWS]
    wanted = [reference.narrow_linear(x, linear) for x in cases]
    packed = narrow.pack(linear)
    tolerance = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    for x, want in zip(cases, wanted, strict=True):
        assert_close(narrow.linear(x, packed), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("scale", [0.0, 0.02])
@pytest.mark.parametrize("kind", ["fp8", "fp8 blocks"])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_rounded_rows_are_those_of_the_reference(
    device: Device, narrow: NarrowOps, shape: str, kind: str, scale: float
) -> None:
    """A GPU divides approximately, so that a few numbers are rounded to e4m3's next one."""
    if torch.cuda.get_device_capability(device.torch_device) < narrow.fp8_from:
        pytest.skip("this GPU does not multiply fp8")
    given = torch.tensor([scale], device=device.torch_device)
    linear = replace(case_of(kind, shape, device, bias=torch.bfloat16), input_scale=given)
    cases = [rows_of(rows, shape, device, torch.bfloat16) for rows in (65, 300)]
    wanted = [reference.fp8_linear(x, linear) for x in cases]
    packed = narrow.pack(linear)
    for x, want in zip(cases, wanted, strict=True):
        assert_close(narrow.linear(x, packed), want, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_gets_the_same_bits_beside_any_others_of_its_launch(device: Device, narrow: NarrowOps, kind: str) -> None:
    packed = narrow.pack(case_of(kind, "8b", device))
    for least, most in ((1, 16), (17, 64), (65, 300)):
        x = rows_of(most, "8b", device, torch.bfloat16)
        assert torch.equal(narrow.linear(x[:least], packed), narrow.linear(x, packed)[:least])


@pytest.mark.parametrize("kind", ["int8", "fp8 blocks", "int4"])
def test_a_replay_computes_with_what_is_there_then(device: Device, narrow: NarrowOps, kind: str) -> None:
    packed, x = narrow.pack(case_of(kind, "8b", device)), rows_of(16, "8b", device, torch.bfloat16)
    narrow.linear(x, packed)  # compiles, and chooses configurations
    graph, place = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        out = narrow.linear(place, packed)
    for rows in (x.flip(0), -x, x):
        place.copy_(rows)
        graph.replay()
        assert torch.equal(out, narrow.linear(rows, packed))


# --- few rows, with weights in the activations' type ------------------------------------------------------------------

WIDE = {
    "8b qkv": (6144, 4096),
    "8b output": (4096, 4096),
    "8b gate and up": (28672, 4096),
    "8b down": (4096, 14336),
    "0.6b output": (1024, 2048),
    "0.6b down": (1024, 3072),
    "0.6b gate and up": (6144, 1024),
    "odd": (72, 1200),
    "unaligned": (70, 1199),
}
"""(outputs, inputs)"""
FEW = (64, 33, 17, 16, 1)


Product = Callable[[Tensor, Linear], Tensor]


@pytest.fixture
def products(device: Device) -> tuple[Product, Product]:
    """Return the product of few rows, and the gated one."""
    found = import_module("kernels.triton.linear.few_rows")
    return found.few_row_linear, found.few_row_gated_linear


def wide_case(shape: str, device: Device, dtype: torch.dtype) -> tuple[Tensor, Linear]:
    """Return FEW[0] rows and a matrix, both made on the device: the largest would take seconds on the CPU."""
    (outputs, inputs), where = WIDE[shape], device.torch_device
    generator = torch.Generator(where).manual_seed(len(shape))
    x = torch.randn(FEW[0], inputs, generator=generator, device=where).to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator, device=where) / inputs**0.5
    return x, Linear(weight.to(dtype), torch.randn(outputs, generator=generator, device=where).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", WIDE)
def test_products_of_few_rows_are_those_of_float64(
    device: Device, products: tuple[Product, Product], shape: str, dtype: torch.dtype
) -> None:
    (x, linear), tolerance = wide_case(shape, device, dtype), {torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    want = torch.nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    gated, gated_alone = (
        torch.nn.functional.silu(gate) * up
        for gate, up in (each.to(dtype).double().chunk(2, dim=1) for each in (want, want - linear.bias.double()))
    )
    for rows in FEW:
        for biased in (True, False):
            given = linear if biased else replace(linear, bias=None)
            got = products[0](x[:rows], given)
            missing = 0 if biased else linear.bias.double()
            assert_close(got.double(), want[:rows] - missing, atol=tolerance, rtol=tolerance)
            got = products[1](x[:rows], given)
            wanted = gated if biased else gated_alone
            assert_close(got.double(), wanted[:rows], atol=2 * tolerance, rtol=2 * tolerance)


@pytest.mark.parametrize("shape", ["8b qkv", "8b down", "0.6b down", "unaligned"])
def test_few_rows_get_the_same_bits_beside_any_others_of_their_tile(
    device: Device, products: tuple[Product, Product], shape: str
) -> None:
    x, linear = wide_case(shape, device, torch.bfloat16)
    for product in products:
        for least, most in ((1, 16), (17, 32), (33, 64)):
            assert torch.equal(product(x[:least], linear), product(x[:most], linear)[:least])
            others = torch.cat((x[:least], torch.full_like(x[least:most], torch.nan)))
            assert torch.equal(product(others, linear)[:least], product(x[:least], linear))


def test_a_product_in_a_capture_waits_for_what_it_reads(device: Device, products: tuple[Product, Product]) -> None:
    """Overlapping launches start before the one ahead has ended. Ballast keeps that one from ending at once."""
    where = device.torch_device
    x, (first, second) = wide_case("8b output", device, torch.bfloat16)[0][:16], _chain(device)
    place, ballast = torch.zeros_like(x), torch.zeros(1 << 26, device=where)
    now = x.clone()

    def run() -> tuple[Tensor, Tensor]:
        ballast.add_(1)
        place.copy_(now * 2)
        gated = products[1](place, first)
        return gated, products[0](gated, second)

    run()  # compiles, and chooses configurations
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for rows in (x.flip(0), -x, x, x / 2, x * 3):
        now.copy_(rows)
        graph.replay()
        torch.cuda.synchronize()
        gated = products[1]((rows * 2).contiguous(), first)
        torch.cuda.synchronize()
        for got, want in zip(captured, (gated, products[0](gated, second)), strict=True):
            assert torch.equal(got, want)


def _chain(device: Device) -> tuple[Linear, Linear]:
    """Return a gated product's weight, and that of the product of its result, whose inputs are split."""
    generator = torch.Generator(device.torch_device).manual_seed(1)

    def weight(outputs: int, inputs: int) -> Linear:
        drawn = torch.randn(outputs, inputs, generator=generator, device=device.torch_device) / inputs**0.5
        return Linear(drawn.to(torch.bfloat16))

    return weight(2 * 2048, 4096), weight(1024, 2048)


@pytest.mark.parametrize("shape", ["8b output", "8b gate and up"])
def test_a_replay_multiplies_the_few_rows_that_are_there_then(
    device: Device, products: tuple[Product, Product], shape: str
) -> None:
    x, linear = wide_case(shape, device, torch.bfloat16)
    x = x[:16]
    for product in products:
        product(x, linear)  # compiles, and chooses configurations
        graph, place = torch.cuda.CUDAGraph(), x.clone()
        with torch.cuda.graph(graph):
            out = product(place, linear)
        for rows in (x.flip(0), -x, x):
            place.copy_(rows)
            graph.replay()
            assert torch.equal(out, product(rows, linear))
