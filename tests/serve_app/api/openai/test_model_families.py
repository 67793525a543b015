"""Owns the proof that every model family works: a request over HTTP gets the tokens that transformers generates.
Never leaves an engine behind, and never downloads: checkpoints are tiny and made here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.async_engine import AsyncEngine
from engine.build.executor import create_executor
from engine.config import EngineConfig, SchedulerConfig, SpeculativeConfig
from engine.core.core import EngineCore
from engine.step import DRAFT_TOKEN, ScheduledRequest
from serve_app.api.ingress import create_app
from serve_app.api.text.tokenizer import Tokenizer
from tests.golden.test_draft_model import save_tokenizer
from tests.serve_app.harness import MODEL, LocalClient, joined_choice, post
from tests.support.tiny_models import DISTINCT_FAMILIES, HYBRIDS, VOCAB, greedy_answer, save_model

pytestmark = pytest.mark.anyio

PROMPT = torch.randint(0, VOCAB, (60,), generator=torch.Generator().manual_seed(9)).tolist()
NEW_TOKENS = 6


@pytest.mark.parametrize("kind", DISTINCT_FAMILIES)
async def test_a_completion_has_the_tokens_of_transformers_whole_streamed_and_from_the_prefix_cache(
    kind: str, tmp_path: Path
) -> None:
    want = greedy_answer(save_model(kind, tmp_path), PROMPT, NEW_TOKENS)
    config = EngineConfig(
        dtype="float32",
        num_kv_blocks=32,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        num_threads=1,
        scheduler=SchedulerConfig(state_snapshot_tokens=16 if kind in HYBRIDS else 0),
    )
    engine = AsyncEngine(EngineCore(*create_executor(tmp_path, config)))
    try:
        app = create_app(LocalClient(engine), Tokenizer.byte_level(), MODEL)
        asked = {"model": MODEL.id, "prompt": PROMPT, "temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
        whole = await post(app, "/v1/completions", asked | {"return_token_ids": True})
        assert whole.status == 200, whole.json
        assert whole.json["choices"][0]["token_ids"] == want
        assert whole.json["usage"]["prompt_tokens"] == len(PROMPT)
        streamed = await post(app, "/v1/completions", asked | {"stream": True})
        assert joined_choice(streamed)["text"] == whole.json["choices"][0]["text"]
        again = await post(app, "/v1/completions", asked | {"return_token_ids": True})
        assert again.json["choices"][0]["token_ids"] == want
        assert again.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 48, "whole blocks of the prompt"
    finally:
        engine.shutdown()


@pytest.mark.parametrize("kind", ["llama", *HYBRIDS[:2]])
async def test_a_draft_model_changes_no_token_and_saves_steps_where_it_is_right(kind: str, tmp_path: Path) -> None:
    """For Llama, the draft model is the model itself: every draft is right, though none would pay off alone. For a
    hybrid, it is an unrelated model: almost no draft is right, and states are rolled back each time."""
    model, draft = tmp_path / kind, tmp_path / "llama"
    for name in {kind, "llama"}:
        save_model(name, tmp_path / name)
        save_tokenizer(tmp_path / name)
    found = []
    drafting = SpeculativeConfig(method="draft_model", model=str(draft), adaptive=False)
    for speculative in (SpeculativeConfig(method="none"), drafting):
        config = EngineConfig(
            dtype="float32",
            num_kv_blocks=32,
            max_num_batched_tokens=64,
            max_num_seqs=4,
            num_threads=1,
            speculative=speculative,
        )
        executor, resolved = create_executor(model, config)
        rows: list[ScheduledRequest] = []
        launch = executor.launch
        executor.launch = lambda plan, run=launch, seen=rows: (seen.extend(plan.rows), run(plan))[1]  # type: ignore
        engine = AsyncEngine(EngineCore(executor, resolved))
        try:
            app = create_app(LocalClient(engine), Tokenizer.byte_level(), MODEL)
            asked = {"model": MODEL.id, "prompt": PROMPT, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
            answer = await post(app, "/v1/completions", asked | {"return_token_ids": True})
            assert answer.status == 200, answer.json
            found.append((answer.json["choices"][0]["token_ids"], engine.load().num_steps))
            assert any(DRAFT_TOKEN in row.token_ids for row in rows) is (speculative is drafting)
        finally:
            engine.shutdown()
    (plain, plain_steps), (drafted, drafted_steps) = found
    assert drafted == plain
    assert drafted_steps < 0.7 * plain_steps or kind != "llama"


@pytest.mark.parametrize("kind", ["qwen3_5_vl", "qwen3_5_moe_vl"])
async def test_a_vision_language_model_that_is_served_for_text_says_so_when_it_is_shown_an_image(
    kind: str, tmp_path: Path
) -> None:
    save_model(kind, tmp_path)
    config = EngineConfig(dtype="float32", num_kv_blocks=32, max_num_batched_tokens=16, max_num_seqs=4, num_threads=1)
    executor, resolved = create_executor(tmp_path, config)
    assert resolved.inputs == (), "which is what an ingress makes its reading of images of"
    engine = AsyncEngine(EngineCore(executor, resolved))
    try:
        app = create_app(LocalClient(engine), Tokenizer.byte_level(), MODEL)
        shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        asked = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, shown]}]
        told = await post(app, "/v1/chat/completions", {"model": MODEL.id, "messages": asked})
        assert (told.status, told.error["param"]) == (400, "messages.0.content.1.image_url")
        assert told.error["message"] == f"The model {MODEL.id} takes no images: it is served for text alone."
        assert engine.load().num_steps == 0
    finally:
        engine.shutdown()
