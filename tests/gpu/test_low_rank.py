"""Owns the comparison of Triton's low-rank products on a GPU with the reference, in edge cases and real shapes.
Never compares with stored numbers: inputs are random."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from engine.execution.device import Device
from kernels.choice import TRITON_TABLE
from kernels.eager.ops import AddLowRank
from kernels.rows.adapter_tokens import NO_SLOT
from tests.kernels.low_rank_case import low_rank_case, mixed
from tests.support.distances import assert_close

pytestmark = pytest.mark.gpu

SHAPES = {
    "qkv": (4096, (4096, 1024, 1024), 16),
    "gate and up": (4096, (14336, 14336), 16),
    "down": (14336, (4096,), 64),
    "odd": (72, (40, 24, 24), 48),
}
"""(inputs, outputs of each part, ranks): those of an 8B model (Llama 3.1), and sizes that fill no block."""


@pytest.fixture
def add(device: Device) -> AddLowRank:
    found = import_module(TRITON_TABLE).TRITON.add_low_rank
    assert found is not None
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_low_rank_products_are_those_of_the_reference(
    device: Device, add: AddLowRank, shape: str, dtype: torch.dtype
) -> None:
    inputs, parts, ranks = SHAPES[shape]
    for slots in ([0], [2] * 65, mixed(70)):
        case = low_rank_case(slots, inputs=inputs, parts=parts, ranks=ranks, dtype=dtype)
        tolerance = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        assert_close(case.run(add, str(device.torch_device)), case.want(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_gets_the_same_bits_alone_and_among_others(device: Device, add: AddLowRank, shape: str) -> None:
    inputs, parts, ranks = SHAPES[shape]
    case = low_rank_case(mixed(200), inputs=inputs, parts=parts, ranks=ranks, dtype=torch.bfloat16)
    whole = case.run(add, str(device.torch_device), spare_tokens=5, spare_tiles=2)
    for token in (0, 1, 64, 199):
        alone = case._replace(x=case.x[token:][:1], y=case.y[token:][:1], slots=case.slots[token:][:1])
        assert torch.equal(alone.run(add, str(device.torch_device), spare_tiles=1)[0], whole[token])
    without = [token for token, slot in enumerate(case.slots) if slot == NO_SLOT]
    assert torch.equal(whole[without], case.y[without])
