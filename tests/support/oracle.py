"""Owns what the fake executor answers, worked out from one request alone: no engine, no schedule, no memory.
Never shares code with the executor but its hash, so that an engine that agrees has computed the right thing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.fake.executor import mix64
from engine.protocol import SamplingParams, TokenLogprobs
from tests.support.engines import EOS, VOCAB


def digest_of(token_ids: Sequence[int]) -> int:
    digest = 0
    for token_id in token_ids:
        digest = mix64(digest ^ mix64(token_id))
    return digest


def logprobs_of(prefix: Sequence[int], token_id: int, count: int) -> TokenLogprobs:
    digest = digest_of(prefix)
    scores = {token: -1.0 - mix64(digest ^ mix64(token)) % 1000 / 100 for token in range(VOCAB)}
    best = sorted(scores, key=lambda token: (-scores[token], -token))[:count]
    return TokenLogprobs(token_id, scores[token_id], tuple((token, scores[token]) for token in best))


def prompt_logprobs_of(prompt: Sequence[int], count: int) -> tuple[TokenLogprobs, ...]:
    scores = (logprobs_of(prompt[:i], prompt[i], count) for i in range(1, len(prompt)))
    places = (logprobs_of(prompt[:i], prompt[i], VOCAB).top for i in range(1, len(prompt)))
    return tuple(
        replace(score, rank=[token for token, _ in place].index(score.token_id) + 1)
        for score, place in zip(scores, places, strict=True)
    )


def pooled_of(prompt: Sequence[int], pooling: str) -> list[float]:
    """Return the vector of a prompt's hidden states, which are eight numbers a position."""
    lengths = range(1, len(prompt) + 1) if pooling == "mean" else [len(prompt)]
    states = [[mix64(digest_of(prompt[:n]) ^ i) / 2**63 - 1 for i in range(8)] for n in lengths]
    return [sum(column) / len(states) for column in zip(*states, strict=True)]


def answer_of(prompt: Sequence[int], params: SamplingParams) -> tuple[list[int], bool]:
    """Return the tokens of the answer, and whether a stop token ended it."""
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    text, digest = list(prompt), digest_of(prompt)
    assert params.max_tokens is not None
    while len(text) - len(prompt) < params.max_tokens:
        early = len(text) - len(prompt) < params.min_tokens
        choices = [token for token in range(VOCAB) if not (early and token in stops)]
        seed = (params.seed or 0) if params.temperature else 0
        token = choices[mix64(digest ^ mix64(seed ^ mix64(len(text)))) % len(choices)]
        if token in stops:
            return text[len(prompt) :], True
        text.append(token)
        digest = mix64(digest ^ mix64(token))
    return text[len(prompt) :], False
