"""Owns the comparison of the native conversion of blocks to 8 bits with torch's, bit by bit, in the kernels' own order.
Never assumes that order: what the kernels write into a cache is looked at first."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from kernels.cpu.narrow_blocks import BlockForm, narrow_vectors, widen_vectors
from kernels.cpu.native.blocks import NativeBlocks
from kernels.cpu.native.program import LANES, Program, Team
from kernels.forward import HeadShape
from tests.kernels.cpu.block_case import DTYPES, NARROW, block_of
from tests.kernels.cpu.native.test_program import record
from tests.kernels.rows import seeded_generator
from tests.support.compiler import needs_compiler

pytestmark = needs_compiler

KINDS = [pytest.param(dtype, kept, id=f"{dtype}-{kept}") for dtype in DTYPES for kept in NARROW]


def in_order(tensor: Tensor, dtype: torch.dtype, *, keys: bool) -> Tensor:
    """Put a tensor of a block into the order of cache.h. tensor: [tokens, heads, head_dim]. # flat"""
    tokens, heads, head_dim = tensor.shape
    pair = 1 if dtype == torch.float32 else 2
    if keys:
        return tensor.view(-1, LANES, heads, head_dim // pair, pair).permute(2, 0, 3, 1, 4).flatten()
    return tensor.view(tokens // pair, pair, heads, head_dim).permute(2, 0, 3, 1).flatten()


def bytes_of(block: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a block as the kernels have it. block: [tensors, tokens, heads, head_dim]. # [tensors, bytes] uint8"""
    return torch.stack([in_order(tensor, dtype, keys=i % 2 == 0) for i, tensor in enumerate(block)]).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_write_a_block_in_this_order(team: Team, dtype: torch.dtype) -> None:
    heads = HeadShape(num_heads=3, num_kv_heads=3, head_dim=32)
    x = torch.randn(32, 3, 32, generator=seeded_generator()).to(dtype)
    keys, values = (torch.zeros(1, 32, 3, 32, dtype=dtype) for _ in "kv")
    table = torch.cat([torch.zeros_like(x), x, -x], 1).flatten(1)

    def model(program: Program) -> object:
        qkv = program.embed(table)
        return program.rotate_and_cache(qkv, program.rotations(torch.zeros(16), 1.0), heads, (keys, values), None, 0.0)

    record(team, dtype, model, block_size=32)([(list(range(32)), 0, [0])])  # type: ignore[arg-type]
    assert torch.equal(keys.flatten(), in_order(x, dtype, keys=True))
    assert torch.equal(values.flatten(), in_order(-x, dtype, keys=False))


@pytest.mark.parametrize(("dtype", "kept_in"), KINDS)
@pytest.mark.parametrize(("tensors", "tokens", "heads", "head_dim"), [(2, 16, 1, 16), (6, 32, 3, 48), (4, 16, 2, 256)])
def test_a_row_has_the_bytes_that_the_definition_gives_and_comes_back_as_it_does(
    tensors: int, tokens: int, heads: int, head_dim: int, dtype: torch.dtype, kept_in: torch.dtype
) -> None:
    """Each token's vector of each head by its own scale, also in memory of which the block is a part."""
    form = BlockForm(tensors, tokens, heads, head_dim, dtype, kept_in)
    block = block_of(form)
    by_head = block.transpose(1, 2).contiguous()  # [tensors, heads, tokens, head_dim]
    numbers, scales = narrow_vectors(by_head, kept_in)
    own = bytes_of(block, dtype)
    memory = torch.full((tensors, 3, own.shape[1]), 7, dtype=torch.uint8)
    memory[:, 1] = own
    row = memoryview(bytearray(form.row_bytes + 1))[1:]
    NativeBlocks(form).narrow(memory[:, 1], row)
    found = torch.frombuffer(row, dtype=torch.uint8).view(tensors, -1)
    for i, tensor in enumerate(numbers.transpose(1, 2)):
        want = in_order(tensor, dtype, keys=i % 2 == 0)
        assert torch.equal(found[i, : form.vectors * head_dim].view(torch.int8), want), f"numbers of tensor {i}"
    assert torch.equal(found[:, form.vectors * head_dim :], scales.view(torch.uint8).view(tensors, -1))

    memory[:, 1] = 9
    NativeBlocks(form).widen(row, memory[:, 1])
    wide = widen_vectors(numbers, scales, kept_in, dtype).transpose(1, 2)
    assert torch.equal(memory[:, 1], bytes_of(wide, dtype))
    assert memory[:, [0, 2]].eq(7).all(), "a neighbour was written to"


@pytest.mark.parametrize(("dtype", "kept_in"), KINDS)
def test_every_number_and_every_tie_is_rounded_as_torch_does(dtype: torch.dtype, kept_in: torch.dtype) -> None:
    """The largest of each vector is what the largest becomes, so that the scale is one."""
    every = torch.arange(256, dtype=torch.uint8).view(kept_in).float()
    every = every[every.isfinite()].unique()
    ties = (every[1:] + every[:-1]) / 2
    x = torch.cat([every, ties, ties * 1.001, ties * 0.999])
    x = x[x.abs() <= every.max()]
    x = torch.nn.functional.pad(x, (0, -len(x) % (15 * LANES))).view(-1, 15)
    x = torch.cat([torch.full((len(x), 1), float(every.max())), x], 1).to(dtype)
    form = BlockForm(2, len(x), 1, 16, dtype, kept_in)
    block, row = x[None, :, None].expand(2, -1, -1, -1).contiguous(), memoryview(bytearray(form.row_bytes))
    NativeBlocks(form).narrow(bytes_of(block, dtype), row)
    numbers, scales = narrow_vectors(x, kept_in)
    assert scales.eq(1).all()
    found = torch.frombuffer(row, dtype=torch.int8).view(2, -1)[:, : len(x) * 16]
    for i in (0, 1):
        assert torch.equal(found[i], in_order(numbers[:, None], dtype, keys=i == 0))


def test_other_threads_run_during_a_conversion() -> None:
    """ctypes gives the interpreter's lock up for the calls of such a library."""
    library = NativeBlocks(BlockForm(2, 16, 1, 16, torch.float32, torch.int8))._library
    assert type(library) is ctypes.CDLL


def test_a_block_or_a_row_of_another_size_is_refused() -> None:
    form = BlockForm(2, 16, 1, 16, torch.float32, torch.int8)
    block, row = torch.zeros(2, 1024, dtype=torch.uint8), memoryview(bytearray(form.row_bytes))
    NativeBlocks(form).narrow(block, row)
    for other, short in ((block[:, 1:], row), (block[:1], row), (block, row[1:])):
        with pytest.raises(ValueError, match=r"expected \[2, 1024\] and 640"):
            NativeBlocks(form).narrow(other, short)
        with pytest.raises(ValueError, match="expected"):
            NativeBlocks(form).widen(short, other)
