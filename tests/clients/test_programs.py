"""Owns the proof that the programs and libraries that agents are made of finish a task here; `make test-clients`.
Never lets one reach another host, nor any home directory but its own."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.clients.parts import FINAL
from tests.clients.programs import ALL, NEEDS_NODE
from tests.clients.running import NPM_ENV, PYTHON_ENV, perform
from tests.clients.scripted_model import THOUGHT

pytestmark = pytest.mark.clients

KNOWN_FAILURES: dict[str, str] = {}
"""What the output of a program that is known to fail says. Every other program has to finish its task."""

KEEPS_NONE = "OpenAI's chat has no field for them, and this client knows no other server's"
NO_THOUGHTS = {
    "ai-sdk-openai-chat-generate": KEEPS_NONE,
    "ai-sdk-openai-chat-stream": KEEPS_NONE,
    "openai_agents_chat": KEEPS_NONE,
    "langchain_openai_chat": KEEPS_NONE,
    "langchain_openai_chat_whole": KEEPS_NONE,
    "llama_index": KEEPS_NONE,
    "opencode-openai": "it asks for sealed thoughts only where it knows that the model thinks",
}
"""Why a program brings no thoughts back. Every other program does, where the model's script has any."""


@pytest.mark.parametrize("name", ALL)
def test_a_program_reads_edits_runs_and_answers(name: str, tmp_path: Path) -> None:
    needed = NPM_ENV if name in NEEDS_NODE else PYTHON_ENV
    if not (needed / "installed").exists():
        pytest.skip(f"needs {needed.name}, which `make test-clients` makes where node is installed")
    outcome = perform(ALL[name], tmp_path)
    if name in KNOWN_FAILURES:
        assert KNOWN_FAILURES[name] in outcome.stdout + outcome.stderr, outcome.story
        return
    assert outcome.refused == [], outcome.story
    assert outcome.file == ALL[name].leaves, outcome.story
    assert FINAL in outcome.stdout, outcome.story
    assert outcome.returncode == 0, outcome.story
    prompts = outcome.prompts
    if not ALL[name].grows:
        return
    assert all(after.startswith(before) for before, after in pairwise(prompts)), "a prompt was changed behind its end"
    if outcome.thinks:
        brought_back = [prompt.count(THOUGHT) for prompt in prompts]
        assert brought_back == ([0] * len(prompts) if name in NO_THOUGHTS else list(range(len(prompts))))
