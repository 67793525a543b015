"""Owns the comparison of Triton's linear attention on a GPU with the reference, in edge cases and Qwen3-Next's shape.
Never compares with stored numbers: inputs are random, and slots that no row has hold NaN."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from engine.execution.device import Device
from kernels.choice import TRITON_TABLE
from kernels.eager.ops import REFERENCE, Ops
from kernels.forward import LinearHeads
from tests.kernels.states import HEADS, STEPS, inputs
from tests.support.distances import assert_close

pytestmark = pytest.mark.gpu

QWEN3_NEXT = LinearHeads(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128)


@pytest.mark.parametrize("heads", [HEADS, QWEN3_NEXT], ids=["tiny", "qwen3-next"])
@pytest.mark.parametrize("name", STEPS)
def test_states_and_outputs_are_those_of_the_reference(device: Device, name: str, heads: LinearHeads) -> None:
    ops: Ops = import_module(TRITON_TABLE).TRITON
    given = inputs(name, torch.bfloat16, heads=heads)
    (want, wanted), (conv_want, conv_wanted) = given.delta_rule(REFERENCE), given.causal_conv(REFERENCE)
    there = given.to(device.torch_device)
    (got, after), (conv_got, conv_after) = there.delta_rule(ops), there.causal_conv(ops)
    assert_close(got.cpu(), want, atol=2e-2, rtol=2e-2)
    assert_close(after.cpu(), wanted, atol=1e-3, rtol=1e-3, equal_nan=True)
    assert_close(conv_got.cpu(), conv_want, atol=2e-2, rtol=2e-2)
    assert_close(conv_after.cpu(), conv_wanted, atol=0, rtol=0, equal_nan=True)
