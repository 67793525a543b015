"""Owns the promise that turns as agents and frameworks write them are taken, where OpenAI's types do not allow them.
Never runs one; tests/clients does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serve_app.api.http.hint_header import HEADER
from serve_app.api.ingress import create_app
from serve_app.api.text.tokenizer import Tokenizer
from tests.serve_app.harness import CHAT, MODEL, ScriptedClient, finished, post

pytestmark = pytest.mark.anyio

CALLER = replace(MODEL, max_model_len=2000, tool_parser="hermes")
USER = {"role": "user", "content": "Look."}


async def sent(*messages: dict[str, Any], path: str = "/v1/chat/completions", **fields: Any) -> Any:
    """Return the answer, the prompt's text, and what stands in the prompt besides text."""
    client, tokenizer = ScriptedClient([finished()]), Tokenizer.byte_level()
    answer = await post(create_app(client, tokenizer, CALLER), path, CHAT | {"messages": list(messages)} | fields)
    submission = client.submissions[0] if client.submissions else None
    prompt = "" if submission is None else tokenizer.decode(submission.prompt_token_ids)
    return answer, prompt, () if submission is None else submission.inputs


async def test_names_of_parts_are_labels() -> None:
    """LangChain gives each text an id of its own, and keeps the index that a stream's block had."""
    named = {"type": "text", "text": "Look.", "id": "lc_3f2c", "index": 0}
    answer, prompt, _ = await sent({"role": "user", "content": [named]})
    assert (answer.status, answer.headers.get(HEADER)) == (200, None), answer.json
    assert prompt == (await sent(USER))[1]


# An answer as @openai/agents 0.20 sends it back: the rest of the message stands in its text, too.
CALLS = [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}]
COPIES = {"role": "assistant", "refusal": None, "annotations": [], "reasoning": "Hm.", "reasoning_content": "Hm."}


@pytest.mark.parametrize("copies", [COPIES, COPIES | {"tool_calls": CALLS}, {"annotations": []}], ids=len)
async def test_an_answer_may_repeat_its_message_in_its_text(copies: dict[str, Any]) -> None:
    """Regression: every agent of @openai/agents failed at its second request by chat, whole or streamed."""
    answered = {"role": "assistant", "content": "Let me see.", "reasoning": "Hm.", "tool_calls": CALLS}
    told = {"role": "tool", "tool_call_id": "c", "content": "sunny"}
    part = {"type": "text", "text": "Let me see.", **copies}
    answer, prompt, _ = await sent(USER, answered | {"content": [part]}, told)
    assert (answer.status, answer.headers.get(HEADER)) == (200, None), answer.json
    assert prompt == (await sent(USER, answered, told))[1]


async def test_only_an_answer_repeats_its_message() -> None:
    answer, _, _ = await sent({"role": "user", "content": [{"type": "text", "text": "Look.", "reasoning": "Hm."}]})
    assert (answer.status, answer.error["param"]) == (400, "messages.0.content.0.reasoning")
