"""Owns the golden gate of prompt scoring: what the default model says of a prompt's own tokens, for any chunk size.
Never records anything: tolerances are those of the logits, and those that S3 gives for chunks against one pass."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.checkpoints.prepare import prepare_model
from engine.config import DEFAULT_MODEL
from engine.execution.executor import TorchExecutor
from engine.protocol import TokenLogprobs
from tests.golden.models import make_executor, tokenized_prompts
from tests.golden.scoring import Score, check, transformers_logits
from tests.support.plans import greedy_text, prompt_scores

BLOCKS = range(12)


def scores(executor: TorchExecutor, tokens: list[int], chunk_size: int | None) -> list[TokenLogprobs]:
    size = chunk_size or len(tokens)
    ends = [min(start + size, len(tokens)) for start in range(0, len(tokens), size)]
    found = prompt_scores(executor, tokens, BLOCKS, ends, num_logprobs=1)
    assert [each.token_id for each in found] == tokens[1:]
    return found


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def default_model(request: pytest.FixtureRequest) -> tuple[str, TorchExecutor]:
    return request.param, make_executor(prepare_model(DEFAULT_MODEL), request.param)[0]


@pytest.fixture(scope="module")
def reference() -> list[tuple[list[int], torch.Tensor]]:
    """Yield each prompt with transformers' float32 log-probabilities, [len(tokens), vocab]."""
    model = AutoModelForCausalLM.from_pretrained(prepare_model(DEFAULT_MODEL), dtype=torch.float32)
    prompts = tokenized_prompts()
    logits = transformers_logits(model, prompts)
    return [(tokens, each.log_softmax(-1)) for tokens, each in zip(prompts, logits, strict=True)]


@pytest.mark.parametrize("chunk_size", [16, None])
def test_a_prompts_log_probabilities_are_as_close_to_transformers_as_its_logits_are(
    default_model: tuple[str, TorchExecutor], reference: list[tuple[list[int], torch.Tensor]], chunk_size: int | None
) -> None:
    dtype, executor = default_model
    deltas, regrets = [], []
    for tokens, want in reference:
        for got, logprobs in zip(scores(executor, tokens, chunk_size), want, strict=False):
            deltas.append(abs(got.logprob - logprobs[got.token_id].item()))
            regrets.append((logprobs.max() - logprobs[got.top[0][0]]).item())
    delta = torch.tensor(deltas)
    mean, regret = delta.mean().item(), sum(regrets) / len(regrets)
    check(f"default_model.{dtype}", Score(regret, mean, delta.quantile(0.99).item(), delta.max().item()))


@pytest.mark.parametrize("default_model", ["bfloat16"], indirect=True)
def test_chunks_of_four_score_a_prompt_as_one_pass_does(default_model: tuple[str, TorchExecutor]) -> None:
    """S3-B9: the text is a prompt with its own continuation, which makes distributions peaked. In float32 the same
    bounds leave a thousand times more room."""
    _, executor = default_model
    prompt = tokenized_prompts()[0]
    tokens = prompt + greedy_text(executor, prompt, BLOCKS, 32)
    pairs = zip(scores(executor, tokens, 4), scores(executor, tokens, None), strict=True)
    delta = torch.tensor([abs(chunked.logprob - whole.logprob) for chunked, whole in pairs])
    print(f"mean {delta.mean():.2e}, max {delta.max():.2e}")
    assert delta.mean() <= 0.04
    assert delta.max() <= 0.50
