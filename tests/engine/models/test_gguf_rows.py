"""Owns the comparison of blocks of GGUF's formats, taken apart and packed, with the gguf package's own numbers.
Never compares with a tolerance: a weight is what its format defines."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.checkpoints.gguf_convert import STORED_TYPES
from engine.models.gguf_rows import BLOCK_BYTES, GgufRows, row_bytes
from kernels.cpu.native.grouped import FORMS
from kernels.cpu.native.program import Program, StepRows, Team, pack_grouped
from tests.kernels.rows import seeded_generator
from tests.support.compiler import needs_compiler

HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}
"""Where the numbers of a block lie that are float16."""


def random_rows(kind: str, outputs: int, inputs: int, size: float = 0.1) -> GgufRows:
    """Draw blocks of any bits, with finite float16 numbers of about `size`."""
    generator = seeded_generator()
    blocks = torch.randint(
        0, 256, (outputs, inputs // FORMS[kind].run, BLOCK_BYTES[kind]), generator=generator, dtype=torch.uint8
    )
    for at in HALVES[kind]:
        drawn = (torch.randn(*blocks.shape[:2], 1, generator=generator) * size).half()
        blocks[..., at : at + 2] = drawn.view(torch.uint8)
    return GgufRows(kind, blocks.flatten(1))


def by_gguf(rows: GgufRows) -> Tensor:
    values = gguf.quants.dequantize(rows.blocks.numpy(), gguf.GGMLQuantizationType[rows.kind])
    return torch.from_numpy(np.ascontiguousarray(values))


def test_the_types_that_stay_in_a_directory_are_those_that_kernels_compute_with() -> None:
    assert list(STORED_TYPES) == list(FORMS) == list(BLOCK_BYTES)
    for kind in STORED_TYPES:
        size, block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        assert (size, block) == (FORMS[kind].run, BLOCK_BYTES[kind])


@pytest.mark.parametrize("kind", FORMS)
def test_blocks_stand_for_the_numbers_of_the_gguf_package_to_the_bit(kind: str) -> None:
    rows = random_rows(kind, 37, 768)
    assert rows.shape == (37, 768)
    assert torch.equal(rows.take(torch.arange(37)).weight(), by_gguf(rows))


@pytest.mark.parametrize("kind", FORMS)
def test_rows_are_taken_in_any_order(kind: str) -> None:
    rows, order = random_rows(kind, 37, 256), torch.tensor([5, 36, 5, 0])
    assert torch.equal(rows.take(order).weight(), by_gguf(rows)[order])


@pytest.mark.parametrize("kind", FORMS)
def test_blocks_on_a_device_are_unpacked_there(kind: str) -> None:
    """An engine on a GPU reads a prepared directory with blocks if there is no other."""
    device = torch.device("meta")
    rows = GgufRows(kind, random_rows(kind, 3, 256).blocks.to(device))
    assert rows.take(torch.arange(3, device=device)).weight().device == device


@needs_compiler
@pytest.mark.parametrize("kind", FORMS)
def test_packed_panels_hold_the_numbers_of_the_gguf_package_to_the_bit(kind: str) -> None:
    rows = random_rows(kind, 37, 768)
    program = Program(Team(2), block_size=16, capacity=37, dtype=torch.float32)
    out = program.embed(pack_grouped([rows]).weight)
    out.tensor.fill_(torch.nan)
    program.run(StepRows([list(range(37))], [0], [37], [[0, 1, 2]]))
    assert torch.equal(out.tensor, by_gguf(rows))


@needs_compiler
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("count", [1, 31, 32, 33, 80])
def test_the_library_packs_rows_in_any_order_as_panels_are_defined(kind: str, count: int) -> None:
    rows = random_rows(kind, 30, 512).above(random_rows(kind, 3, 512)).above(random_rows(kind, 4, 512))
    assert rows.shape == (37, 512)
    order = torch.randint(0, 37, (count,), generator=seeded_generator())
    want = rows.take(order).panels()
    got = torch.full_like(want, 0xAA)
    rows.pack(order, got)
    assert torch.equal(got, want)


@pytest.mark.parametrize("kind", FORMS)
def test_a_row_of_no_whole_blocks_is_refused(kind: str) -> None:
    run = FORMS[kind].run
    assert row_bytes(kind, 3 * run) == 3 * BLOCK_BYTES[kind]
    with pytest.raises(ValueError, match=f"{run + 16} inputs are no multiple of {run}, which blocks of {kind} have"):
        row_bytes(kind, run + 16)
