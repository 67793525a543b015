"""Owns the cases of tests/kernels/triton on a GPU: compiled, in sizes of real models, against the reference.
Never compares with stored numbers: inputs are made and judged on the CPU, and every output is poisoned first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.execution.device import Device
from kernels.forward import HeadShape
from kernels.rows.sampled_row import SampledRow
from tests.kernels.rows import paged_case, seeded_generator
from tests.kernels.triton import narrow_kv_case
from tests.kernels.triton.cases import (
    POISON,
    TOLERANCE,
    Text,
    attend,
    captured_plan,
    check_attention,
    check_logprobs,
    check_norm,
    check_rotation,
    check_sampling,
    check_silu_and_mul,
    check_write_cache,
    place,
)

from kernels.triton.attention.attention import attention  # isort: skip

pytestmark = pytest.mark.gpu

VOCAB = 151936
SPLIT = 128


@pytest.fixture
def where(device: Device) -> str:
    return str(device.torch_device)


def random_logits(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(rows, VOCAB, generator=seeded_generator()) * 3).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 1, 100])
def test_attention_at_the_edges_of_a_split(where: str, window: int | None, dtype: torch.dtype) -> None:
    decodes = [0, 14, 15, 16, SPLIT - 2, SPLIT - 1, SPLIT, 2 * SPLIT]
    chunks = [(0, 20), (48, 33), (33, 1), (2 * SPLIT - 9, 9), (2 * SPLIT - 8, 9), (1000, 40)]
    for rows in ((decodes, []), ([5, 300], chunks)):
        check_attention(paged_case(*rows, head_dim=64, dtype=dtype), where, window=window, split=SPLIT)


def test_a_captured_launch_computes_the_rows_that_each_replay_finds(where: str) -> None:
    """Few long ones, many short ones, a suffix of a long prefix: each to the last bit as in a step of its own."""
    shape = {"block_size": 16, "kv_heads": 2, "group": 4, "head_dim": 64, "dtype": torch.float16}
    steps = (([3000], [(2900, 50), (0, 300)]), ([40] * 60, [(0, 7)]), ([], [(3900, 9)]), ([5], []))
    plan = captured_plan(64, 256, where, block_size=16)
    q = torch.zeros(400, 8, 64, dtype=torch.float16, device=where)
    k, v = (torch.zeros(1024, 16, 2, 64, dtype=torch.float16, device=where) for _ in "kv")
    out, scale = torch.empty_like(q), 64**-0.5
    cases = [paged_case(*step, **shape) for step in steps]
    alone = [attend(case, where) for case in cases]  # kernels are compiled and chosen before the capture
    place(cases[0], plan)
    attention(q, k, v, replace(plan), scale, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention(q, k, v, replace(plan), scale, out=out)
    for case, want in zip(cases, alone, strict=True):
        place(case, plan)
        tokens, blocks = len(case.q), len(case.k_cache)
        q[:tokens], k[:blocks], v[:blocks] = case.q.to(where), case.k_cache.to(where), case.v_cache.to(where)
        out.fill_(POISON)
        graph.replay()
        assert torch.equal(out[:tokens].cpu(), want)
        assert (out[tokens:] == POISON).all()


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_attention_in_blocks_of_any_size(where: str, block_size: int) -> None:
    check_attention(paged_case([0, 140], [(5, 11)], block_size=block_size), where, split=SPLIT)


@pytest.mark.parametrize(
    ("normed", "dtype"), [*((False, dtype) for dtype in TOLERANCE), (True, torch.float32), (True, torch.float16)]
)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("tokens", [1, 65])
def test_rotation_and_cache_writes(where: str, tokens: int, head_dim: int, normed: bool, dtype: torch.dtype) -> None:
    """The reference rounds between norm and rotation, but the launch does not;
    in bfloat16 that exceeds the tolerance."""
    shape = HeadShape(num_heads=40, num_kv_heads=8, head_dim=head_dim)
    check_rotation(shape, where, dtype=dtype, tokens=tokens, normed=normed)


@pytest.mark.parametrize("kept_in", narrow_kv_case.NARROW)
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    # Triton unrolls float32 products: of larger heads, they compile for half a minute.
    [(size, dtype) for size in (64, 80, 128) for dtype in TOLERANCE if size == 64 or dtype != torch.float32],
)
def test_attention_over_keys_and_values_in_8_bits(
    where: str, head_dim: int, kept_in: torch.dtype, dtype: torch.dtype
) -> None:
    decodes = [0, 15, 16, SPLIT - 1, 2 * SPLIT]
    for rows in ((decodes, []), ([5, 300], [(0, 20), (33, 1), (1000, 40)])):
        case = paged_case(*rows, head_dim=head_dim, group=4, dtype=dtype)
        narrow_kv_case.check_attention(case, kept_in, where, split=SPLIT)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kept_in", narrow_kv_case.NARROW)
def test_keys_and_values_are_rounded_to_8_bits_as_on_a_cpu(
    where: str, kept_in: torch.dtype, dtype: torch.dtype
) -> None:
    narrow_kv_case.check_write(kept_in, dtype, where)
    for normed in (False, True):
        heads = HeadShape(num_heads=40, num_kv_heads=8, head_dim=128)
        narrow_kv_case.check_rotation(heads, kept_in, where, tokens=65, normed=normed)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, 576, 1025, 4096, 8192])
def test_the_norm_with_its_residual(where: str, size: int, dtype: torch.dtype) -> None:
    check_norm(size, dtype, where)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, 1536, 14336])
def test_silu_and_mul(where: str, size: int, dtype: torch.dtype) -> None:
    check_silu_and_mul(size, dtype, where)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_cache_writes_alone(where: str, dtype: torch.dtype) -> None:
    check_write_cache(dtype, where)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_of_every_filter_and_control_draw_the_references_token(where: str, dtype: torch.dtype) -> None:
    """In 16 bits many logits of so large a vocabulary are equal."""
    filters: list[dict[str, float]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"top_k": 1},
        {"top_k": 50, "temperature": 0.7},
        {"top_k": VOCAB - 1},
        {"top_p": 0.9},
        {"top_p": 1e-9},
        {"min_p": 0.05, "temperature": 1.3},
        {"top_k": 200, "top_p": 0.8, "min_p": 0.01},
    ]
    rows = [
        SampledRow(**{"temperature": 1.0} | each, seed=seed, position=seed)  # type: ignore[arg-type]
        for seed, each in enumerate(filters)
    ]
    rows += [
        SampledRow(temperature=0.0, banned=range(0, VOCAB, 2)),
        SampledRow(temperature=1.0, allowed=(1, 2, VOCAB - 1), repetition_penalty=1.3),
        SampledRow(temperature=0.8, bias=((3, 9.0), (5, -2.0)), frequency_penalty=0.4, presence_penalty=0.2),
        SampledRow(temperature=0.0, bias=((8, 100.0), (9, 50.0)), banned_after=((VOCAB - 1, 8),)),
    ]
    texts = [Text((7, 7, 256), (3, 4, 3, VOCAB - 1), num_late=1) for _ in rows]
    check_sampling(random_logits(len(rows), dtype), rows, where, texts)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("count", [0, 1, 20])
def test_logprobs_are_the_engines(where: str, count: int, dtype: torch.dtype) -> None:
    logits = random_logits(5, dtype)
    logits[2, 7] = torch.nan
    logits[3] = -torch.inf
    check_logprobs(logits, [0, VOCAB - 1, 3, 4, 8], count, where)
