"""Owns the comparison of whole models' forward passes on the Triton kernels with the same pass on the reference.
Never needs a GPU or a download: models are tiny and random."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.models.config import read_model_config
from engine.models.decoder import Decoder
from engine.models.kv_cache import KVCache
from engine.models.weights import load_weights
from kernels.eager.forward import EagerPass
from kernels.eager.ops import REFERENCE
from kernels.rows.step import PagedRows
from tests.kernels.rows import seeded_generator
from tests.kernels.triton.cases import close
from tests.support.tiny_models import VOCAB, save_model

from kernels.triton.forward import TritonPass  # isort: skip
from kernels.triton.ops import TRITON  # isort: skip
from kernels.triton.attention.plan import AttentionPlan, prepare_attention  # isort: skip

BLOCK = 4


@pytest.fixture(params=["qwen3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "qwen3_moe"))])
def decoder(request: pytest.FixtureRequest, tmp_path: Path) -> Decoder:
    """Load a tiny model. qwen3 normalises queries and keys per head; qwen3_moe has experts in two of three layers."""
    save_model(request.param, tmp_path)
    config = read_model_config(tmp_path)
    return Decoder(config, load_weights(tmp_path, config, torch.float32), 256)


def poisoned_cache(decoder: Decoder, num_blocks: int = 12) -> KVCache:
    cache = KVCache.allocate(decoder.config, num_blocks, BLOCK, torch.float32)
    for k, v in cache.layers:
        k.fill_(torch.nan)
        v.fill_(torch.nan)
    return cache


def windowed(decoder: Decoder, window: int | None) -> Decoder:
    """Return a decoder with the same weights, in whose layers a query sees `window` tokens."""
    layers = tuple(replace(layer, window=window) for layer in decoder.config.layers)
    return Decoder(replace(decoder.config, layers=layers), decoder.weights, 256)


def rows_of(contexts: list[int], counts: list[int], num_decode: int) -> PagedRows:
    tables = torch.tensor([[7, 2, 9], [1, 11, 4], [0, 3, 8]])[: len(counts)]
    return PagedRows(num_decode, tuple(contexts), tuple(counts), tables, BLOCK)


def tensors(rows: PagedRows, token_ids: Tensor) -> dict[str, Tensor]:
    """Return the pass's inputs for these rows. token_ids: [rows, 12], each request's tokens by position."""
    spans = [torch.arange(start, start + count) for start, count in zip(rows.contexts, rows.counts, strict=True)]
    slots = [rows.slots(row)[-count:] for row, count in enumerate(rows.counts)]
    found = [token_ids[row, span] for row, span in enumerate(spans)]
    return {"token_ids": torch.cat(found), "positions": torch.cat(spans), "slots": torch.cat(slots)}


STEPS = [([0, 0], [5, 8], 0), ([5, 8, 0], [1, 1, 7], 2), ([6, 9, 7], [1, 1, 5], 2)]
"""(contexts, counts, number of decode rows): two prompts, then a third in chunks beside their decodes."""


def test_steps_of_a_model_match_the_reference(decoder: Decoder) -> None:
    token_ids = torch.randint(VOCAB, (3, 12), generator=seeded_generator())
    caches = [poisoned_cache(decoder) for _ in range(3)]
    for contexts, counts, num_decode in STEPS:
        rows = rows_of(contexts, counts, num_decode)
        inputs = tensors(rows, token_ids)
        plan = prepare_attention(rows, decoder.config.num_kv_heads, torch.float32)
        want = decoder.forward(EagerPass(REFERENCE, plan=rows, **inputs), caches[0])
        assert want.isfinite().all()
        close(decoder.forward(TritonPass(plan=plan, **inputs), caches[1]), want)
        close(decoder.forward(EagerPass(TRITON, plan=plan, **inputs), caches[2]), want)
    for wanted, *found in zip(*(cache.layers for cache in caches), strict=True):
        for layer in found:
            for got, expected in zip(layer, wanted, strict=True):
                torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.slow
def test_a_step_padded_to_a_captured_size_computes_the_same(decoder: Decoder) -> None:
    """Padding rows and tokens change no row, and leave every cache slot as it was."""
    token_ids = torch.randint(VOCAB, (3, 12), generator=seeded_generator())
    caches = [poisoned_cache(decoder) for _ in range(2)]
    for contexts, counts, num_decode in STEPS[:1]:
        rows = rows_of(contexts, counts, num_decode)
        plan = prepare_attention(rows, decoder.config.num_kv_heads, torch.float32)
        for cache in caches:
            decoder.forward(TritonPass(plan=plan, **tensors(rows, token_ids)), cache)
    rows = rows_of([5, 8], [1, 1], 2)
    inputs = tensors(rows, token_ids)
    plan = prepare_attention(rows, decoder.config.num_kv_heads, torch.float32)
    want = decoder.forward(TritonPass(plan=plan, **inputs), caches[0])

    none = torch.zeros(3, dtype=torch.int32)
    wide = AttentionPlan(
        torch.arange(6, dtype=torch.int32),
        torch.cat((plan.lengths, none)),
        torch.cat((plan.block_tables, none.unsqueeze(1).expand(3, plan.block_tables.shape[1]))),
        decodes=torch.tensor([5], dtype=torch.int32),
        num_decode=5,
        num_chunks=0,
        max_length=BLOCK * 3,
    )
    padding = {"token_ids": 3, "positions": 0, "slots": -1}
    padded = {name: torch.cat((tensor, torch.full((3,), padding[name]))) for name, tensor in inputs.items()}
    got = decoder.forward(TritonPass(plan=wide, **padded), caches[1])
    close(got[:2], want)
    for wanted, found in zip(caches[0].layers, caches[1].layers, strict=True):
        for before, after in zip(wanted, found, strict=True):
            assert torch.equal(before.isnan(), after.isnan())


@pytest.mark.slow
def test_a_sliding_window_reaches_the_kernel(decoder: Decoder) -> None:
    """A window as long as the text changes nothing; a shorter one does."""
    token_ids = torch.randint(VOCAB, (3, 12), generator=seeded_generator())
    rows = rows_of([0], [12], 0)
    plan = prepare_attention(rows, decoder.config.num_kv_heads, torch.float32)
    inputs = tensors(rows, token_ids)
    found = [
        windowed(decoder, window).forward(TritonPass(plan=plan, **inputs), poisoned_cache(decoder))
        for window in (None, 12, 4)
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0][:4], found[2][:4])
    assert not torch.allclose(found[0][4:], found[2][4:], atol=1e-3)
