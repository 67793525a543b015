"""Owns the contract of the stall benchmark: its requests are the largest that are accepted, and its figures are
reported.
Never compares a time with a limit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.ingress.bodies import CASES
from benchmarks.ingress.stalls import measure, served
from serve_app.api.ingress import MAX_BODY_BYTES
from serve_app.api.openai.forms import read_chat, read_completion
from serve_app.api.requests.schema import parse_request
from serve_app.api.requests.text_schema import DetokenizeRequest, TokenizeRequest
from serve_app.api.text.tokenizer import Tokenizer

READERS = {
    "/v1/completions": read_completion,
    "/v1/chat/completions": read_chat,
    "/tokenize": lambda body: parse_request(TokenizeRequest, body),
    "/detokenize": lambda body: parse_request(DetokenizeRequest, body),
}


@pytest.mark.parametrize("name", CASES)
def test_each_request_is_as_large_as_is_taken_and_is_taken(name: str) -> None:
    case = CASES[name](Tokenizer.byte_level())
    assert len(case.body) <= MAX_BODY_BYTES
    READERS[case.path](case.body)


def test_the_waits_of_others_are_reported_with_each_answers_status(tmp_path: Path) -> None:
    Tokenizer.byte_level()._core.save(str(tmp_path / "tokenizer.json"))
    case = CASES["30k tokens"](Tokenizer.byte_level())
    with served(tmp_path, 8192) as port:
        refused = asyncio.run(measure(port, case, 2))
    with served(tmp_path, 40_000) as port:
        answered = asyncio.run(measure(port, case, 2))
    assert (refused["statuses"], answered["statuses"]) == ([400], [200])
    for found in (refused, answered):
        assert 0 < found["gap_p50_ms"] <= found["gap_max_ms"]
        assert 0 < found["health_p50_ms"] <= found["health_max_ms"]
        assert found["answer_max_ms"] > 0
