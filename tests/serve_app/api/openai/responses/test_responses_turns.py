"""Owns the contract of the turns that an assistant's items form: one turn, as in a chat, with all of its thoughts.
Never tests what a single item is: test_responses and test_responses_items do."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from serve_app.api.openai.responses.items import Item, ReasoningItem
from serve_app.api.openai.responses.toolbox import Toolbox
from serve_app.api.openai.responses.turns import Turns
from tests.serve_app.api.generation.test_tools import CALL, app_of, prompt_of, saying
from tests.serve_app.api.openai.responses.test_responses import ASK, TOOLS, ask, read_by_the_model
from tests.serve_app.harness import CHAT, post

pytestmark = pytest.mark.anyio

THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "One."}]}
SEARCH = {"type": "web_search_call", "id": "w", "status": "completed"}
CALLED = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Oslo"}'}
SCORED = {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}
QUOTED = {"type": "url_citation", "start_index": 0, "end_index": 1, "url": "http://a", "title": "a"}


@pytest.mark.parametrize("between", [[], [SEARCH]], ids=["nothing", "search"])
async def test_all_thoughts_before_a_text_are_read(between: list[Any]) -> None:
    other = THOUGHT | {"content": [], "summary": [{"type": "summary_text", "text": "Two."}]}
    given = [{"role": "user", "content": "hi"}, THOUGHT, *between, other, {"role": "assistant", "content": "a"}]
    assert await read_by_the_model(input=given) == "[user:hi][assistant:a?One.\nTwo.]>"


async def test_an_answer_of_texts_and_calls_comes_back_as_one_turn_as_in_a_chat() -> None:
    said = f"Look.{CALL}And{CALL}Bye"
    output = (await ask(saying(said), tools=TOOLS)).json["output"]
    assert [item["type"] for item in output] == ["message", "function_call"] * 2 + ["message"]
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    calls = [{"id": item["call_id"], "function": function} for item in output if item["type"] == "function_call"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "cold"} for call in calls]
    client = saying("x")
    message = {"role": "assistant", "content": "Look.AndBye", "tool_calls": calls}
    await post(app_of(client), "/v1/chat/completions", CHAT | {"messages": [message, *results]})
    outputs = [{"type": "function_call_output", "call_id": call["id"], "output": "cold"} for call in calls]
    assert await read_by_the_model(input=[*output, *outputs]) == prompt_of(client)


async def test_thoughts_between_calls_stay_in_their_turn() -> None:
    given = [THOUGHT, CALLED, THOUGHT, CALLED | {"call_id": "d"}]
    assert await read_by_the_model(input=given) == "[assistant:?One.\nOne.!weatherOslo!weatherOslo]>"


async def test_a_refusal_from_another_server_is_read_as_the_assistants_words() -> None:
    parts = [{"type": "output_text", "text": "Well."}, {"type": "refusal", "refusal": "No."}]
    assert await read_by_the_model(input=[{"role": "assistant", "content": parts}]) == "[assistant:Well.\nNo.]>"
    answer = await post(app_of(saying("x")), "/v1/responses", ASK | {"input": [{"role": "user", "content": parts[1:]}]})
    assert (answer.status, answer.error["param"]) == (400, "input.0.content")


async def test_what_an_answer_says_about_its_text_comes_back_with_it() -> None:
    part = {"type": "output_text", "text": "a", "annotations": [QUOTED], "logprobs": [SCORED]}
    given = [{"type": "message", "role": "assistant", "content": [part]}]
    answer = await post(app_of(saying("x")), "/v1/responses", ASK | {"input": given})
    assert (answer.status, "x-chunkserve-ignored" in answer.headers) == (200, False)
    assert await read_by_the_model(input=given) == "[assistant:a]>"
    client = saying("x")
    messages = [
        {"role": "assistant", "content": "a", "annotations": [{"type": "url_citation", "url_citation": QUOTED}]}
    ]
    answer = await post(app_of(client), "/v1/chat/completions", CHAT | {"messages": messages})
    assert (answer.status, prompt_of(client)) == (200, "[assistant:a]>")


def test_thoughts_in_many_items_are_not_copied_at_every_item() -> None:
    """Those of 12,000 items took seconds, with one character beyond ASCII."""
    item = ReasoningItem.model_validate(THOUGHT | {"content": [{"type": "reasoning_text", "text": "a" * 100}]})
    size, num_bytes = 2000, 0

    def items() -> Iterator[tuple[str, Item]]:
        nonlocal num_bytes
        for number in range(size):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            yield f"input.{number}", item
            num_bytes += tracemalloc.get_traced_memory()[1] - before

    tracemalloc.start()
    try:
        (message,) = Turns(Toolbox(), None).messages(items())
    finally:
        tracemalloc.stop()
    assert message["reasoning_content"] == "\n".join(["a" * 100] * size)
    assert num_bytes < size * 5000, "allocated in all; a copy at each item would be 100 kB on average"
