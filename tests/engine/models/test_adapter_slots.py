"""Owns the contract of slots: what a slot holds of an adapter adds the same to each matrix as its deltas.
Never needs a device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.execution.gpu.adapters import slots_bytes
from engine.models.adapter_files import read_adapter, read_factors
from engine.models.adapter_slots import ALIGNED, SlotLayout
from engine.models.config import read_model_config
from kernels import reference
from tests.kernels.rows import seeded_generator
from tests.support.tiny_adapters import ATTENTION, FUSED, MLP, save_adapter
from tests.support.tiny_models import save_model


@pytest.mark.parametrize(
    ("kind", "modules"),
    [
        ("llama", ATTENTION + MLP),
        ("llama", ("k_proj", "up_proj")),
        ("phi3", FUSED),  # stacked in the checkpoint, with heads that are rotated in part
        ("qwen3_moe", ATTENTION),
        ("gemma3", MLP),
    ],
)
@pytest.mark.parametrize("rank", [1, 16, 20])
def test_a_slot_adds_what_the_adapter_s_deltas_add(
    kind: str, modules: tuple[str, ...], rank: int, tmp_path: Path
) -> None:
    path = save_adapter(save_model(kind, tmp_path / "model"), tmp_path / "adapter", modules=modules, rank=rank)
    model, generator = read_model_config(tmp_path / "model"), seeded_generator()
    digest, deltas = read_adapter(path, model, torch.float32, rank)
    same_digest, factors = read_factors(path, model, torch.float32, rank)
    layout = SlotLayout(model, 20)
    memory = torch.full((3, layout.size), torch.nan)
    memory[1] = layout.pack(factors, torch.float32)
    views = layout.views(memory)
    assert digest == same_digest
    assert deltas.keys() <= views.keys()
    for place, stack in views.items():
        outputs, inputs = stack.b.shape[1], stack.a.shape[3]
        x, y = torch.randn(2, inputs, generator=generator), torch.randn(2, outputs, generator=generator)
        want = y.double()
        if (delta := deltas.get(place)) is not None:
            want = want + x.double() @ delta.a.T.double() @ delta.b.T.double()
        torch.testing.assert_close(reference.add_low_rank(y, x, stack, [1, 1]).double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("max_rank", "ranks"), [(1, 16), (16, 16), (17, 32)])
def test_ranks_are_a_multiple_of_what_a_tensor_core_multiplies(max_rank: int, ranks: int, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    assert SlotLayout(read_model_config(tmp_path), max_rank).ranks == ranks


def test_stacks_of_a_slot_are_aligned_and_do_not_overlap(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    model = read_model_config(tmp_path)
    layout = SlotLayout(model, 8)
    memory = torch.zeros(2, layout.size)
    views = [tensor for stack in layout.views(memory).values() for tensor in (stack.a, stack.b)]
    assert len(views) == 3 * 4 * 2
    for view in views:
        assert view.storage_offset() % ALIGNED == 0
        assert view[0].is_contiguous()
        view += 1
    assert set(memory.unique().tolist()) <= {0.0, 1.0}
    assert memory.sum() == sum(view.numel() for view in views)
    assert slots_bytes(model, torch.float32, num_slots=2, max_rank=8) == memory.nbytes
