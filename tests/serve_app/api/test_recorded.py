"""Owns the contract that requests of real clients are served:
recorded by `python -m tests.clients.record`, replayed here.
Never runs a client; `make test-clients` does."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.build.engine import FAKE_IMAGES
from serve_app.api.ingress import create_app
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.images.intake import ImageIntake
from serve_app.settings.images import ImageSettings
from tests.serve_app.harness import MODEL, Exchange, ScriptedClient, finished, scheduled, tokens

pytestmark = pytest.mark.anyio

RECORDED = Path(__file__).parent / "recorded"
MOST_BYTES = 2**20
FILES = sorted(RECORDED.glob("*.jsonl"))
SERVED = replace(
    MODEL,
    id="qwen3-scripted",
    max_model_len=131_072,
    tool_parser="hermes",
    reasoning_parser="qwen3",
    images=ImageIntake(FAKE_IMAGES, ImageSettings()),
)


def requests_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
async def test_what_a_client_sent_is_served(file: Path) -> None:
    for number, request in enumerate(requests_of(file)):
        client = ScriptedClient([scheduled()], tokens("<think>\nHm.\n</think>\n\nOslo."), [finished()])
        app = create_app(client, Tokenizer.byte_level(images=True), SERVED)
        body = b"" if request["body"] is None else json.dumps(request["body"]).encode()
        exchange = Exchange(app, request["method"], request["path"], body, list(request["headers"].items()))
        answer = await exchange.finish()
        told = b"".join(answer.parts).decode()
        assert answer.status == 200, f"request {number}: {told}"
        assert '"error"' not in re.sub(r'"error": ?null', "", told), f"request {number}: {told}"


def test_the_recordings_are_many_and_small() -> None:
    sizes = [file.stat().st_size for file in FILES]
    assert sum(sizes) < MOST_BYTES
    assert sum(len(requests_of(file)) for file in FILES) >= 200


def test_the_recordings_have_no_long_text_and_no_place_of_a_machine() -> None:
    def strings(value: Any) -> list[str]:
        if isinstance(value, str):
            return [value]
        nested = value if isinstance(value, list) else [*value, *value.values()] if isinstance(value, dict) else []
        return [text for each in nested for text in strings(each)]

    for file in FILES:
        for text in (text for request in requests_of(file) for text in strings(request["body"])):
            assert len(text) <= 200, file
            assert not re.search(r"/(tmp|root|home/(?!user)|Users)\b|@(?!example\.com)\w+\.\w|127\.0\.0\.1", text), text
