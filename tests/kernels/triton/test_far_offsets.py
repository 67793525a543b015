"""Owns the proof that kernels reach all of a large GPU's memory: their offsets are beyond 32 bits, in the interpreter.
Never takes that memory: pages that nobody writes have none."""

from __future__ import annotations

import math
import mmap
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.eager.ops import REFERENCE
from kernels.forward import LowRankStack, Routing
from tests.kernels.experts_case import experts_case
from tests.kernels.low_rank_case import low_rank_case
from tests.kernels.rows import paged_case, seeded_generator
from tests.kernels.states import inputs
from tests.kernels.triton.cases import attend
from tests.kernels.triton.narrow_kv_case import NARROW, stored

from triton.runtime.interpreter import GridExecutor  # isort: skip

from kernels.triton.elementwise.cache import write_cache  # isort: skip
from kernels.triton.experts.experts import experts  # isort: skip
from kernels.triton.linear_attention.causal_conv import causal_conv  # isort: skip
from kernels.triton.linear_attention.delta_rule import delta_rule  # isort: skip
from kernels.triton.low_rank.expand import add_low_rank  # isort: skip

MAP_NORESERVE = 0x4000
"""Linux's; Python 3.11 has no name for it."""
BLOCK = 16
FAR_BYTES = 69 * 2**30
"""Half of what an H200 has for K and V, as the K of a model with one layer would take."""


@pytest.fixture(autouse=True)
def _tensors_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter copies all of a tensor back to where it came from, here onto itself."""
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *args: None)


def behind(num: int, near: Tensor) -> Tensor:
    """Return `num` entries of zeros, which take no memory, and then those of `near`."""
    size = (num + len(near)) * math.prod(near.shape[1:])
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, size * near.element_size(), flags=flags)
    far = torch.frombuffer(memory, dtype=near.dtype).view(-1, *near.shape[1:])
    far[num:] = near
    return far


def entries_before(near: Tensor) -> int:
    num = FAR_BYTES // (near[0].numel() * near.element_size())
    assert num * near[0].numel() > 2**32
    return num


def test_attention_reads_blocks_at_the_end_of_a_large_cache() -> None:
    case = paged_case([0, 15, 16, 300], [(0, 20), (50, 20)], dtype=torch.float16)
    num = entries_before(case.k_cache)
    caches = {"k_cache": behind(num, case.k_cache), "v_cache": behind(num, case.v_cache)}
    rows = replace(case.rows, block_tables=case.rows.block_tables + num)
    for split in (128, 1024):
        near = attend(case, "cpu", split=split)
        assert torch.equal(attend(replace(case, rows=rows, **caches), "cpu", split=split), near)


def test_keys_and_values_are_written_at_the_end_of_a_large_cache() -> None:
    k, v = torch.randn(2, 5, 2, 16, generator=seeded_generator()).half()
    near = torch.zeros(2, 3, 16, 2, 16, dtype=torch.float16)
    slots = torch.tensor([0, 47, -1, 20, 3])
    num = entries_before(near[0])
    far = behind(num, near[0]), behind(num, near[1])
    write_cache(k, v, near[0], near[1], slots)
    write_cache(k, v, *far, torch.where(slots < 0, slots, slots + num * 16))
    assert near.count_nonzero()
    assert all(torch.equal(cache[num:], want) for cache, want in zip(far, near, strict=True))


@pytest.mark.parametrize("kept_in", NARROW, ids=["int8", "fp8"])
def test_keys_and_values_in_8_bits_are_written_and_read_at_the_end_of_a_large_cache(kept_in: torch.dtype) -> None:
    case = paged_case([0, 300], [(50, 20)], dtype=torch.float16)
    near = stored(case, kept_in, "cpu")
    num = entries_before(near.k_cache.view(torch.int8))
    k, v = (behind(num, cache.view(torch.int8)).view(kept_in) for cache in (near.k_cache, near.v_cache))
    slots = torch.tensor([3 * BLOCK + 5, BLOCK])
    x = torch.randn(2, 2, 16, generator=seeded_generator()).half()
    write_cache(x, x, near.k_cache, near.v_cache, slots)
    write_cache(x, x, k, v, slots + num * BLOCK)
    for far, cache in ((k, near.k_cache), (v, near.v_cache)):
        assert torch.equal(far[num:].view(torch.int8), cache.view(torch.int8))
    rows = replace(case.rows, block_tables=case.rows.block_tables + num)
    got = attend(replace(near, rows=rows, k_cache=k, v_cache=v), "cpu", split=128)
    assert torch.equal(got, attend(near, "cpu", split=128))


@pytest.mark.parametrize("name", ["mixed", "decode rows"])
def test_states_at_the_end_of_a_large_memory_are_read_and_written(name: str) -> None:
    given = inputs(name, torch.float32)
    want, state = given.delta_rule(REFERENCE)
    num = entries_before(given.state)
    rows = replace(given.rows, slots=tuple(slot + num for slot in given.rows.slots), index=given.rows.index + num)
    far = behind(num, given.state)
    got = delta_rule(given.qkv, given.strength, given.step, given.rates, given.heads, far, rows)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(far[num:], state, atol=1e-4, rtol=1e-4, equal_nan=True)


def test_the_tokens_before_a_convolution_are_read_at_the_end_of_a_large_memory() -> None:
    given = inputs("mixed", torch.float32)
    want, state = given.causal_conv(REFERENCE)
    num = entries_before(given.conv_state)
    rows = replace(given.rows, slots=tuple(slot + num for slot in given.rows.slots), index=given.rows.index + num)
    far = behind(num, given.conv_state)
    got = causal_conv(given.qkv, given.conv, far, rows)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(far[num:], state, atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.slow
def test_experts_at_the_end_of_large_weights_are_read() -> None:
    """As many as a layer of a large mixture holds; the router leads past all that are not written."""
    routing = Routing(2, renormalize=True)
    case = experts_case(3, 4, hidden=1024, size=1024, favoured=(1, 3), dtype=torch.float16)
    num = 2**32 // case.gate_up[0].numel() + 1
    assert num * case.down[0].numel() >= 2**31
    far = case._replace(router=behind(num, case.router), gate_up=behind(num, case.gate_up), down=behind(num, case.down))
    torch.testing.assert_close(experts(*far, routing), experts(*case, routing), atol=1e-3, rtol=1e-3)


def test_slots_of_adapters_at_the_end_of_a_large_memory_are_read() -> None:
    case = low_rank_case([3, -1, 0, 2], inputs=512, parts=(512,), dtype=torch.float16)
    num = entries_before(case.stack.a)
    far = LowRankStack(behind(num, case.stack.a), behind(num, case.stack.b), case.stack.firsts)
    slots = [slot + num if slot >= 0 else slot for slot in case.slots]
    got = case._replace(stack=far, slots=slots).run(add_low_rank, "cpu")
    torch.testing.assert_close(got, case.want(), atol=4e-3, rtol=4e-3)
