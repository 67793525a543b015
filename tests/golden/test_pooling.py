"""Owns the promise that pooled hidden states are those that transformers computes, whatever the chunks.
Never says what a vector is good for: the default model was not trained to embed."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from transformers import AutoModel

from engine.build.executor import create_executor
from engine.checkpoints.prepare import prepare_model
from engine.config import DEFAULT_MODEL, EngineConfig
from engine.core.core import EngineCore
from engine.protocol import Pooled, SamplingParams, Submission
from engine.scheduling.request import create_request
from tests.golden.models import tokenized_prompts

NO_ANSWER = SamplingParams(max_tokens=0)


@pytest.mark.parametrize("budget", [3, 16, 512])
def test_means_and_last_states_equal_those_of_transformers(budget: int) -> None:
    directory = prepare_model(DEFAULT_MODEL)
    executor, resolved = create_executor(directory, EngineConfig(dtype="float32", num_kv_blocks=64))
    chunked = replace(resolved, max_num_batched_tokens=budget, max_prefill_tokens=budget, max_num_seqs=2)
    core = EngineCore(executor, chunked)
    model = AutoModel.from_pretrained(directory, dtype=torch.float32)
    prompts = tokenized_prompts()[:2]
    vectors: dict[str, tuple[float, ...]] = {}
    arrivals = itertools.count()
    for number, prompt in enumerate(prompts):
        for pooling in ("mean", "last"):
            submission = Submission(f"{number} {pooling}", tuple(prompt), NO_ANSWER, pooling=pooling)
            core.submit(create_request(submission, core.config, next(arrivals)))
    while core.has_work:
        vectors |= {event.request_id: event.values for event in core.step() if isinstance(event, Pooled)}
    for number, prompt in enumerate(prompts):
        with torch.inference_mode():
            states = model(torch.tensor([prompt])).last_hidden_state[0]
        for pooling, want in (("mean", states.mean(dim=0)), ("last", states[-1])):
            got = torch.tensor(vectors[f"{number} {pooling}"])
            torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-3)
