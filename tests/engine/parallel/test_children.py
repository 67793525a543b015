"""Owns the contract of ranks that are child processes, with weights that are packed and layers that have states.
Never has a thread for a rank: each test starts what a server starts, and so all are slow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.build.engine import check_engine
from engine.config import EngineConfig, SpeculativeConfig
from engine.observer import Verified
from engine.protocol import SamplingParams
from tests.engine.models.test_integer_rows import KEPT, save
from tests.engine.models.test_stored_matrix import converted
from tests.support import tiny_gguf
from tests.support.compiler import needs_compiler
from tests.support.rank_engine import Engine, Request, on_ranks, saved
from tests.support.tiny_models import save_tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.slow, needs_compiler]

SHARED = tuple(range(5, 37))
REQUESTS: list[Request] = [
    ((*SHARED, 40 + number), SamplingParams(temperature=0.7 * (number > 1), seed=number, max_tokens=24, logprobs=2))
    for number in range(4)
]


async def check_alike(directory: Path, **settings: Any) -> list[Verified]:
    """Compare one rank's answers with those of two, one of which is a child process. Return what became of drafts."""
    one = await on_ranks(directory, 1, REQUESTS, kernels="native", **settings)
    engine = Engine(directory, 2, kernels="native", **settings)
    try:
        several = await engine.answers(REQUESTS)
    finally:
        engine.end()
    assert [answer.tokens for answer in several] == [answer.tokens for answer in one]
    for got, want in zip(several, one, strict=True):
        found = [own.logprob for own in got.logprobs]
        assert found == pytest.approx([own.logprob for own in want.logprobs], abs=1e-4)
    assert len({tuple(answer.tokens) for answer in several}) == len(REQUESTS)
    return engine.verified


def how_weights_are_used(directory: Path) -> str:
    config = EngineConfig(quantize="stored", kernels="native", num_kv_blocks=8, tensor_parallel_size=2)
    return check_engine(str(directory), config).reasons["weights"]


async def test_a_gguf_files_blocks_are_multiplied_as_stored_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in {"hidden": 256, "inner": 512, "head_dim": 64}.items():
        monkeypatch.setitem(tiny_gguf.SHAPE, name, size)
    directory = converted(tmp_path)
    assert "kept as stored" in how_weights_are_used(directory)
    await check_alike(directory, quantize="stored")


async def test_packed_weights_of_four_bits_stay_packed_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, KEPT["gptq of 4 bits"], monkeypatch)
    save_tokenizer(tmp_path / "packed")
    assert "kept as stored" in how_weights_are_used(tmp_path / "packed")
    await check_alike(tmp_path / "packed", quantize="stored")


async def test_a_hybrid_has_its_states_in_parts_and_takes_them_back_on_every_rank(tmp_path: Path) -> None:
    """Drafts are looked up, and most are wrong."""
    drafts = SpeculativeConfig(method="ngram", min_match=1, max_match=2, adaptive=False)
    found = await check_alike(saved(tmp_path, "qwen3_next"), num_speculative_tokens=4, speculative=drafts)
    assert sum(row.num_drafted - row.num_accepted for row in found) > 10
