"""Owns the contract of a whole engine over several ranks: its requests have the tokens of one rank, whatever they ask.
Never starts a process: the followers are threads."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.config import SchedulerConfig
from engine.protocol import ErrorCode, FinishReason, SamplingParams
from tests.support.rank_engine import Answer, Engine, Request, on_ranks, saved
from tests.support.thread_launcher import RankThread, ThreadLauncher
from tests.support.tiny_models import VOCAB

pytestmark = pytest.mark.anyio

SHARED = tuple(range(5, 37))
PROMPTS = [(*SHARED, 40 + number, 41, 42) for number in range(6)]


async def on_threads(directory: Path, ranks: int, requests: Sequence[Request], **settings: Any) -> list[Answer]:
    return await on_ranks(directory, ranks, requests, ThreadLauncher(), **settings)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("llama"), "llama")


async def test_preempted_requests_and_prefix_hits_have_the_tokens_of_one_rank(checkpoint: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    tight = SchedulerConfig(reserve_mode="prompt", watermark_blocks=0)
    found, loads = [], []
    for ranks in (1, 2):
        engine = Engine(checkpoint, ranks, ThreadLauncher(), num_kv_blocks=14, max_num_seqs=6, scheduler=tight)
        try:
            first = await engine.answer((PROMPTS[0], params))
            found.append([first, *await engine.answers((prompt, params) for prompt in PROMPTS)])
        finally:
            loads.append(engine.end())
    assert [answer.tokens for answer in found[1]] == [answer.tokens for answer in found[0]]
    assert sum(answer.cached for answer in found[1]) > 0
    assert loads[1].num_preemptions > 0


class LosingLauncher(ThreadLauncher):
    """One whose processes end when the test says so."""

    how: str | None = None

    def start(self, rank: int, specification: bytes) -> RankThread:
        thread = super().start(rank, specification)
        ended = thread.poll
        thread.poll = lambda: self.how or ended()  # type: ignore[method-assign]
        return thread


async def test_an_idle_engine_is_unhealthy_once_the_process_of_a_rank_has_ended(checkpoint: Path) -> None:
    """No step runs that would find it out."""
    launcher = LosingLauncher()
    engine = Engine(checkpoint, 2, launcher)
    try:
        await engine.answer((PROMPTS[0], SamplingParams(max_tokens=2)))
        launcher.how = "the process of rank 1 ended by signal 9"
        error = await engine.until_unhealthy()
        assert error.code is ErrorCode.ENGINE_DEAD
        assert "the process of rank 1 ended by signal 9" in str(error)
    finally:
        engine.end()


PERSON = """start: %json {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8, "pattern": "^[a-z]*$"},
        "city": {"enum": ["Oslo", "Rome"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 150}
    },
    "required": ["name", "city", "age"],
    "additionalProperties": false,
    "x-guidance": {"whitespace_flexible": false}
}"""
WORDS = "(alpha|beta|gamma)(-(alpha|beta|gamma)){2,3}"


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
async def test_an_answer_in_a_grammar_is_that_of_one_rank(kind: str, tmp_path: Path) -> None:
    """Most of each is forced and verified as drafts, after which a hybrid's ranks take their states back."""
    saved(tmp_path, kind)
    requests = [
        (PROMPTS[number], SamplingParams(temperature=temperature, seed=number, max_tokens=80, grammar=grammar))
        for grammar in (PERSON, f"start: /{WORDS}/")
        for number, temperature in enumerate((0.0, 1.0))
    ]
    one, several = [await on_threads(tmp_path, ranks, requests, num_speculative_tokens=7) for ranks in (1, 2)]
    assert [answer.tokens for answer in several] == [answer.tokens for answer in one]
    assert [answer.reason for answer in several] == [FinishReason.STOP] * 4
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    people, words = [[tokenizer.decode(answer.tokens) for answer in half] for half in (several[:2], several[2:])]
    assert all(set(json.loads(text)) == {"name", "city", "age"} for text in people)
    assert all(re.fullmatch(WORDS, text) for text in words)


async def test_what_is_drawn_and_what_changes_logits_is_as_on_one_rank(checkpoint: Path) -> None:
    """The leader alone chooses, by logits from all ranks: a column in a wrong place would change each of these."""
    drawn: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "temperature": 1.0}
    choices = [SamplingParams(**drawn, seed=7 + number) for number in range(3)]
    changed = [
        SamplingParams(**drawn, seed=7, top_k=20, top_p=0.9, min_p=0.01),
        SamplingParams(**drawn, seed=7, presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.4),
        SamplingParams(**drawn | {"temperature": 0.0}, logit_bias=((3, 2.5), (VOCAB - 2, 3.0))),
        SamplingParams(**drawn, seed=7, allowed_token_ids=(3, 100, 105, 106, 209), bad_words=((3, 100), (106,))),
    ]
    requests = [(PROMPTS[0], params) for params in (*choices, *changed)]
    one, several = [await on_threads(checkpoint, ranks, requests) for ranks in (1, 2)]
    assert [answer.tokens for answer in several] == [answer.tokens for answer in one]
    assert len({tuple(answer.tokens) for answer in several}) == len(requests), "each setting changes something"


async def test_log_probabilities_of_alternatives_and_of_a_prompt_are_as_on_one_rank(checkpoint: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True, logprobs=5, prompt_logprobs=3)
    one, several = [await on_threads(checkpoint, ranks, [(PROMPTS[1], params)]) for ranks in (1, 2)]
    (want,), (got,) = one, several
    assert len(want.logprobs) == len(PROMPTS[1]) - 1 + 12
    for own, wanted in zip(got.logprobs, want.logprobs, strict=True):
        assert (own.token_id, own.rank) == (wanted.token_id, wanted.rank)
        assert [token for token, _ in own.top] == [token for token, _ in wanted.top]
        found = [own.logprob, *(logprob for _, logprob in own.top)]
        assert found == pytest.approx([wanted.logprob, *(logprob for _, logprob in wanted.top)], abs=1e-4)
    assert {token > VOCAB // 2 for own in got.logprobs for token, _ in own.top} == {False, True}, "of both ranks"
