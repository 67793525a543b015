"""Owns the contract of a whole engine over several ranks: preemption and prefix hits change no token.
Never starts a process: the followers are threads."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.build.engine import build_engine
from engine.config import EngineConfig, SchedulerConfig
from engine.protocol import LoadSnapshot, SamplingParams, Scheduled, Token
from tests.support.thread_launcher import ThreadLauncher
from tests.support.tiny_models import save_model, save_tokenizer

pytestmark = pytest.mark.anyio

SHARED = tuple(range(5, 37))
PROMPTS = [(*SHARED, 40 + number, 41, 42) for number in range(6)]


async def answers(directory: Path, ranks: int) -> tuple[list[list[int]], int, LoadSnapshot]:
    """Return the tokens of all answers, how many prompt tokens were cached, and the load at the end."""
    engine = build_engine(
        str(directory),
        EngineConfig(
            dtype="float32",
            num_threads=1,
            num_kv_blocks=14,
            max_num_seqs=6,
            max_model_len=128,
            tensor_parallel_size=ranks,
            scheduler=SchedulerConfig(reserve_mode="prompt", watermark_blocks=0),
        ),
        launcher=ThreadLauncher(),
    )
    cached = 0

    async def answer(prompt: tuple[int, ...], **how: Any) -> list[int]:
        nonlocal cached
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, **how)
        events = [event async for event in engine.generate(prompt, params)]
        cached += sum(event.cached_tokens for event in events if isinstance(event, Scheduled))
        return [event.token_id for event in events if isinstance(event, Token)]

    try:
        first = await answer(PROMPTS[0])
        rest = await asyncio.gather(*(answer(prompt) for prompt in PROMPTS))
        return [first, *rest], cached, engine.load()
    finally:
        engine.shutdown()


async def test_preempted_requests_and_prefix_hits_have_the_tokens_of_one_rank(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    save_tokenizer(tmp_path)
    (one, _, _), (several, cached, load) = [await answers(tmp_path, ranks) for ranks in (1, 2)]
    assert several == one
    assert cached > 0
    assert load.num_preemptions > 0
