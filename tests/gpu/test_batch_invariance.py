"""Owns what batch-invariant kernels promise on a GPU: a row has the same bits alone, in any batch and in any chunk.
Never allows a tolerance. The interpreter's tests show which sums kernels make, and a card how it adds them up."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

import engine.models
from engine.build.executor import create_executor
from engine.config import EngineConfig
from engine.execution.device import Device
from engine.protocol import SamplingParams
from kernels.choice import TRITON_TABLE
from kernels.eager.ops import Ops
from kernels.forward import Linear, Routing
from kernels.rows.step import PagedRows
from tests.golden.bench import Bench
from tests.kernels.narrow_case import narrow_case
from tests.kernels.rows import paged_case, seeded_generator

pytestmark = pytest.mark.gpu

SHAPES = Path(engine.models.__file__).parent / "shapes"
ROWS = (1, 2, 16, 17, 33, 64, 65, 128, 129, 257)
TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
LENGTH = 2600
CUTS = ([1, 63, 64, 1023, 1024, 1025, 2500, LENGTH - 1, LENGTH], [2048, LENGTH], [LENGTH - 50, LENGTH - 1, LENGTH])


@pytest.fixture
def ops(device: Device) -> Ops:
    found: Ops = import_module(TRITON_TABLE).BATCH_INVARIANT
    return found


@TYPES
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (1024, 3072), (72, 1200)])
def test_a_row_has_the_same_product_among_any_number_of_rows(
    ops: Ops, device: Device, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    generator = seeded_generator()
    x, weight = ((torch.randn(n, inputs, generator=generator)).to(device.torch_device, dtype) for n in (257, outputs))
    for product in (ops.linear, ops.gated_linear):
        assert product is not None
        want = product(x, Linear(weight))
        for rows in ROWS:
            assert torch.equal(product(x[-rows:], Linear(weight)), want[-rows:]), rows


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("group", [None, 128])
def test_a_row_has_the_same_product_with_weights_of_fewer_bits(
    ops: Ops, device: Device, kind: str, group: int | None
) -> None:
    linear = narrow_case(kind, 1024, 4096, group=group or 128 if kind == "int4" else group)
    tensors = {name: getattr(linear, name) for name in ("weight", "scales", "zeros")}
    moved = replace(linear, **{name: x.to(device.torch_device) for name, x in tensors.items() if x is not None})
    assert ops.narrow is not None
    packed = ops.narrow.pack(moved)
    x = torch.randn(257, 4096, generator=seeded_generator()).to(device.torch_device, torch.bfloat16)
    want = ops.narrow.linear(x, packed)
    for rows in ROWS:
        assert torch.equal(ops.narrow.linear(x[-rows:], packed), want[-rows:]), rows


def test_a_token_has_the_same_mixture_of_experts_among_any_number_of_tokens(ops: Ops, device: Device) -> None:
    generator, where = seeded_generator(), device.torch_device
    shapes = ((257, 2048), (8, 2048), (8, 1536, 2048), (8, 2048, 768))
    x, router, gate_up, down = (torch.randn(shape, generator=generator).to(where) / 40 for shape in shapes)
    weights = gate_up.to(torch.bfloat16), down.to(torch.bfloat16)

    def mixed(rows: Tensor) -> Tensor:
        return ops.experts(rows.to(torch.bfloat16), router, *weights, Routing(2, renormalize=True))

    want = mixed(x)
    for rows in ROWS:
        assert torch.equal(mixed(x[-rows:]), want[-rows:]), rows


@TYPES
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_a_token_attends_with_the_same_bits_in_a_chunk_of_any_size(
    ops: Ops, device: Device, dtype: torch.dtype, window: int | None, head_dim: int
) -> None:
    case = paged_case([], [(0, LENGTH)], kv_heads=2, group=4, head_dim=head_dim, dtype=dtype, block_size=64)
    q, k, v = (tensor.to(device.torch_device) for tensor in (case.q, case.k_cache, case.v_cache))
    table = case.rows.block_tables.to(device.torch_device)

    def attend(begin: int, end: int) -> Tensor:
        rows = PagedRows(int(end - begin == 1), (begin,), (end - begin,), table, case.rows.block_size)
        plan = ops.prepare_attention(rows, 2, dtype)
        return ops.attention(q[begin:end], k, v, plan, case.scale, window=window)

    want = attend(0, LENGTH)
    assert not want.isnan().any()
    for ends in CUTS:
        assert torch.equal(torch.cat([attend(begin, end) for begin, end in pairwise([0, *ends])]), want)


def test_an_engine_starts_and_answers_have_the_same_bits_alone_together_and_from_the_cache(device: Device) -> None:
    config = EngineConfig(
        load_format="dummy",
        device="cuda",
        max_model_len=4096,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        num_kv_blocks=800,
        batch_invariant=True,
    )
    executor, resolved = create_executor(SHAPES / "qwen3-0.6b", config)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 150_000, (length,), generator=generator).tolist() for length in (3, 1100, 64, 65, 700)]
    bench, params = (
        Bench(executor, resolved, prompts),
        SamplingParams(temperature=0.9, seed=5, max_tokens=20, logprobs=1),
    )
    texts, logprobs = [], []
    for prompt in prompts:
        texts += bench.serve([prompt], params, enable_prefix_caching=False)
        logprobs += bench.logprobs
    assert (bench.serve(prompts, params, enable_prefix_caching=False), bench.logprobs) == (texts, logprobs)
    budget = {"max_num_batched_tokens": 100, "max_prefill_tokens": 100}
    assert (bench.serve(prompts, params, rounds=2, **budget), bench.logprobs) == (texts, logprobs)
    executor.shutdown()
