"""Drives a whole engine of several ranks in a test: requests in, whole answers out.
Never decides where the followers run: a launcher of the test's may, and without one they are child processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.build.engine import build_engine
from engine.config import EngineConfig
from engine.observer import StepFacts, Verified
from engine.parallel.processes import RankLauncher
from engine.protocol import (
    EngineError,
    ErrorCode,
    Event,
    Finished,
    FinishReason,
    LoadSnapshot,
    PromptLogprobs,
    SamplingParams,
    Scheduled,
    Submission,
    Token,
    TokenLogprobs,
)
from tests.support.tiny_models import VOCAB, edit_config, save_model, save_tokenizer

EOS = VOCAB - 1
WAIT_S = 60.0
Request = tuple[Sequence[int], SamplingParams]


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Those of the prompt, where asked for, and then those of the answer."""
    cached: int = 0
    reason: FinishReason | None = None


class _Drafts:
    """An engine.observer.EngineObserver that keeps what became of drafts."""

    def __init__(self) -> None:
        self.verified: list[Verified] = []

    def submitted(self, submission: Submission) -> None:
        pass

    def rejected(self, code: ErrorCode) -> None:
        pass

    def stepped(self, facts: StepFacts, events: Sequence[Event]) -> None:
        self.verified += facts.verified


class Engine:
    """An engine. launcher: see build_engine."""

    def __init__(self, directory: Path, ranks: int, launcher: RankLauncher | None = None, **settings: Any) -> None:
        defaults: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "num_kv_blocks": 64, "max_model_len": 128}
        config = EngineConfig(**defaults | {"max_num_seqs": 8} | settings, tensor_parallel_size=ranks)
        self._engine = build_engine(str(directory), config, launcher=launcher)
        self._drafts = _Drafts()
        self._engine.observe(self._drafts)

    @property
    def verified(self) -> list[Verified]:
        """What became of drafts so far."""
        return self._drafts.verified

    async def answer(self, request: Request) -> Answer:
        found = Answer()
        async for event in self._engine.generate(*request):
            match event:
                case Scheduled():
                    found.cached += event.cached_tokens
                case PromptLogprobs():
                    found.logprobs += event.logprobs
                case Token():
                    found.tokens.append(event.token_id)
                    found.logprobs += [event.logprobs] if event.logprobs is not None else []
                case Finished():
                    found.reason = event.reason
        return found

    async def answers(self, requests: Iterable[Request]) -> list[Answer]:
        """Return the answers of requests that run at the same time."""
        return list(await asyncio.gather(*map(self.answer, requests)))

    async def until_unhealthy(self) -> EngineError:
        """Return why it can run no further step, though nobody asks for one."""
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    await self._engine.check_health()
                except EngineError as error:
                    return error
                await asyncio.sleep(0.02)

    def end(self) -> LoadSnapshot:
        """Return the load at the end."""
        load = self._engine.load()
        self._engine.shutdown()
        return load


async def on_ranks(
    directory: Path, ranks: int, requests: Sequence[Request], launcher: RankLauncher | None = None, **settings: Any
) -> list[Answer]:
    """Return the answers of an engine of its own."""
    engine = Engine(directory, ranks, launcher, **settings)
    try:
        return await engine.answers(requests)
    finally:
        engine.end()


def saved(directory: Path, kind: str) -> Path:
    """Save a tiny model with a tokenizer whose last token ends an answer."""
    save_model(kind, directory)
    save_tokenizer(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    edit_config(directory, eos_token_id=EOS)
    return directory
