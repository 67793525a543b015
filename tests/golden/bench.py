"""Owns engine cores for golden tests: prompts in, texts out, with any settings.
Never judges what comes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from engine.config import ResolvedConfig
from engine.core.core import EngineCore
from engine.execution.executor import TorchExecutor
from engine.protocol import Finished, SamplingParams, Submission, Token
from engine.scheduling.request import create_request


class Bench:
    """One set of weights used by many engine cores, each with an empty block manager."""

    def __init__(
        self, executor: TorchExecutor, resolved: ResolvedConfig, prompts: list[list[int]] | None = None
    ) -> None:
        """Without `prompts`, take texts as the default model's tokenizer reads them."""
        if prompts is None:
            from tests.golden.models import tokenized_prompts  # a machine with a GPU may lack what these need

            prompts = tokenized_prompts()[:6]
        self.executor, self.resolved, self.prompts = executor, resolved, prompts
        self.cached: dict[str, int] = {}
        self.logprobs: list[list[float]] = []
        self.preemptions = self.steps = 0

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        rounds: int = 1,
        num_answer_tokens: int = 0,
        **overrides: Any,
    ) -> list[list[int]]:
        """Serve all prompts at once in each round, and return the texts of the last one. `cached` keeps its cached
        tokens, and `logprobs` the log-probabilities that `params` asks for."""
        core = EngineCore(self.executor, dataclasses.replace(self.resolved, **overrides))
        texts: dict[str, list[int]] = {}
        logprobs: dict[str, list[float]] = {}
        for _ in range(rounds):
            texts = {str(number): [] for number in range(len(prompts))}
            logprobs = {number: [] for number in texts}
            for number, prompt in enumerate(prompts):
                submission = Submission(str(number), tuple(prompt), params, num_answer_tokens=num_answer_tokens)
                assert not core.submit(create_request(submission, core.config, number))
            while core.has_work:
                for event in core.step():
                    if isinstance(event, Token):
                        texts[event.request_id].append(event.token_id)
                        if event.logprobs is not None:
                            logprobs[event.request_id].append(event.logprobs.logprob)
                    elif isinstance(event, Finished):
                        self.cached[event.request_id] = event.usage.cached_tokens
        self.logprobs = list(logprobs.values())
        self.preemptions, self.steps = core.load().num_preemptions, core.load().num_steps
        return list(texts.values())
