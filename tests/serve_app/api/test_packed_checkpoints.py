"""Owns the proof that packed checkpoints are served:
over HTTP they give the same answers as the same weights stored plainly.
Never leaves an engine behind, and never downloads: checkpoints are tiny and made here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.async_engine import AsyncEngine
from engine.build.executor import create_executor
from engine.config import EngineConfig
from engine.core.core import EngineCore
from serve_app.api.ingress import create_app
from serve_app.api.text.tokenizer import Tokenizer
from tests.serve_app.harness import MODEL, LocalClient, post
from tests.support.packed_models import save_packed
from tests.support.tiny_models import VOCAB, greedy_answer

pytestmark = pytest.mark.anyio

PROMPT = torch.randint(0, VOCAB, (60,), generator=torch.Generator().manual_seed(9)).tolist()
NEW_TOKENS = 6


@pytest.mark.parametrize(
    "name", ["gptq_4_ordered", "awq", "int_by_output", "packed_4_zeros", "float_channel", "fp8_blocks"]
)
async def test_a_completion_has_the_tokens_of_the_same_weights_in_transformers(name: str, tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", name)
    want = greedy_answer(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), PROMPT, NEW_TOKENS)
    config = EngineConfig(dtype="float32", num_kv_blocks=32, max_num_batched_tokens=16, max_num_seqs=4, num_threads=1)
    engine = AsyncEngine(EngineCore(*create_executor(tmp_path / "packed", config)))
    try:
        app = create_app(LocalClient(engine), Tokenizer.byte_level(), MODEL)
        asked = {"model": MODEL.id, "prompt": PROMPT, "temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
        got = await post(app, "/v1/completions", asked | {"return_token_ids": True})
        assert got.status == 200, got.json
        assert got.json["choices"][0]["token_ids"] == want
    finally:
        engine.shutdown()
