"""Owns the proof that the libraries users bring work with a real server of the default model; `make test-clients`.
Never shares their virtual environment: their pins contradict ours, and each other."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.server import Server
from tests.support.serve_process import serve_run

ROOT = Path(__file__).parents[2]
BIN = ROOT / os.environ.get("CLIENTS_VENV", ".venv-clients") / "bin"
MODEL = "smollm2-135m-instruct"
TIMEOUT_S = 180
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it would ask the internet for prices

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not BIN.exists(), reason="needs .venv-clients, which `make test-clients` makes"),
]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "OPENAI"))}
    return subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment | QUIET,
    )


SMOKES = [
    "openai_chat",
    "openai_responses",
    "openai_tools_that_the_model_does_not_call",
    "openai_response_format",
    "litellm_chat",
    "litellm_context_window",
    "langchain_chat",
    "langchain_structured_output",
    "pydantic_ai_text",
    "pydantic_ai_native_output",
    "instructor_extracts",
    "anthropic_messages",
    "anthropic_errors",
]


@pytest.mark.parametrize("name", SMOKES)
def test_a_client_gets_what_it_asks_for(name: str, default_server: Server) -> None:
    done = run("python", str(ROOT / "tests" / "clients" / "smokes.py"), name, default_server.url, MODEL)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def scripted_server() -> Iterator[Server]:
    """The suites check only the form of answers, and neither bound nor seed them: a small model may talk for
    minutes."""
    with serve_run({"engine": {"executor": "fake", "fake": {"reply": "Hello, Alice."}}}) as server:
        yield server


NO_IMAGES = "models here read text"
NO_CITATIONS = (
    "a text without citations has no such key, as at Anthropic; the suite demands null, which the AI SDK refuses"
)
SUITES = {
    "openai-chat": {"chat-image-input": NO_IMAGES},
    "open-responses": {"image-input": NO_IMAGES},
    "anthropic": {
        "anth-image-input": NO_IMAGES,
        **dict.fromkeys(("anth-basic-response", "anth-system-prompt", "anth-multi-turn"), NO_CITATIONS),
    },
}
"""What each suite is known to fail, and why. Everything else has to pass, or is skipped by the suite itself."""


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_of_llm_comply_fails_where_it_is_known_to_and_nowhere_else(suite: str, scripted_server: Server) -> None:
    options = ("--format", suite, "-u", f"{scripted_server.url}/v1", "-k", "none", "-m", MODEL, "--json")
    done = run("llm-comply", *options)
    results = json.loads(done.stdout)["results"]
    assert len(results) > 5
    failed = {one["id"]: one["errors"] for one in results if one["status"] == "failed"}
    assert failed.keys() == SUITES[suite].keys(), json.dumps(failed, indent=2)
