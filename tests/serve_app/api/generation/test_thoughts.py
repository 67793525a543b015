"""Owns the contract of reasoning tokens in usage: what is counted as thought, whole, streamed and in every chunk.
Never tests how thoughts are marked: tests/serve_app/parsing does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engine.protocol import FinishReason
from serve_app.api.generation.thoughts import ThoughtCounter
from serve_app.parsing.reasoning_parsers import reasoning_parser
from tests.serve_app.api.generation.test_tools import CALLER, THINKER, app_of, saying
from tests.serve_app.harness import CHAT, PROMPT, Answer, ScriptedClient, finished, post, scheduled, tokens
from tests.support.strict_openai import strict

pytestmark = pytest.mark.anyio

THOUGHTS = "<think>\nHm.\n</think>\n\n"
ANSWER = f"{THOUGHTS}Yes."  # the byte-level tokenizer's tokens are characters
URL = "/v1/chat/completions"


async def usage_of(client: ScriptedClient, **fields: Any) -> dict[str, Any]:
    body = (await post(app_of(client, THINKER), URL, CHAT | fields)).json
    strict(ChatCompletion).model_validate(body)
    return dict(body["usage"])


def told(usage: dict[str, Any]) -> int:
    return int(usage["completion_tokens_details"]["reasoning_tokens"])


async def test_tokens_before_the_content_are_reasoning_and_the_marks_are_among_them() -> None:
    assert told(await usage_of(saying(ANSWER))) == len(THOUGHTS)


async def test_what_is_not_shown_is_counted_all_the_same() -> None:
    assert told(await usage_of(saying(ANSWER), include_reasoning=False)) == len(THOUGHTS)


@pytest.mark.parametrize("text", ["Yes.", "\n <thin ice>", "Yes. <think>Hm.</think>"])
async def test_an_answer_without_thoughts_has_no_reasoning_tokens(text: str) -> None:
    assert told(await usage_of(saying(text))) == 0


async def test_an_answer_that_continues_a_text_has_no_thoughts() -> None:
    model = replace(THINKER, reasoning_parser="deepseek_r1")
    messages = [*CHAT["messages"], {"role": "assistant", "content": [{"type": "text", "text": "Well,"}]}]
    fields = {"messages": messages, "continue_final_message": True, "stop": ["STOP"]}
    for more, text in (({}, " yes."), ({"structured_outputs": {"choice": [" yes."]}}, " yes.")):
        client = saying(f"{text}STOP")
        body = (await post(app_of(client, model), URL, CHAT | fields | more)).json
        message = body["choices"][0]["message"]
        assert (message["content"], message["reasoning"], told(body["usage"])) == (text, None, 0)
        assert "think" not in (client.submissions[0].sampling.grammar or "")


async def test_thoughts_that_fill_the_answer_are_all_of_its_tokens_and_a_stop_token_too() -> None:
    text = "<think>Hm. Hm."
    cut_off = ScriptedClient([scheduled()], tokens(text), [finished(FinishReason.LENGTH, completion=len(text))])
    assert told(await usage_of(cut_off)) == len(text)
    stopped = ScriptedClient([scheduled()], tokens(text), [finished(completion=len(text) + 1)])
    usage = await usage_of(stopped)
    assert told(usage) == usage["completion_tokens"] == len(text) + 1


@pytest.mark.parametrize("pieces", [1, 3, len(ANSWER)])
async def test_a_stream_counts_what_the_whole_answer_counts_however_it_comes(pieces: int) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = await post(app_of(saying(ANSWER, pieces), THINKER), URL, CHAT | options)
    for frame in answer.frames:
        strict(ChatCompletionChunk).model_validate(frame)
    assert told(answer.frames[-1]["usage"]) == len(THOUGHTS)


async def test_every_chunk_that_tells_usage_tells_the_reasoning_so_far() -> None:
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    answer: Answer = await post(app_of(saying(ANSWER, len(ANSWER)), THINKER), URL, CHAT | options)
    pairs = [(frame["usage"]["completion_tokens"], told(frame["usage"])) for frame in answer.frames[:-1]]
    assert all(reasoning == min(generated, len(THOUGHTS)) for generated, reasoning in pairs[:-1] if generated >= 7)
    assert {reasoning for generated, reasoning in pairs[:-1] if generated < 7} == {0}, "it may still be no mark"
    assert pairs[-1][1] == len(THOUGHTS)


async def test_several_answers_are_added_up() -> None:
    assert told(await usage_of(saying(ANSWER), n=3)) == 3 * len(THOUGHTS)


async def test_a_prompt_that_closed_the_thoughts_has_no_reasoning_tokens() -> None:
    assert told(await usage_of(saying("<think> is a tag."), chat_template_kwargs={"enable_thinking": False})) == 0


async def test_where_thoughts_are_not_told_apart_nothing_is_said_of_them() -> None:
    chat = await post(app_of(saying(ANSWER), CALLER), URL, CHAT)
    completion = await post(app_of(saying(ANSWER), THINKER), "/v1/completions", PROMPT)
    for answer in (chat, completion):
        assert "completion_tokens_details" not in answer.json["usage"]


async def test_a_model_that_always_thinks_is_counted_from_its_first_token() -> None:
    model = replace(CALLER, reasoning_parser="deepseek_r1")
    answer = await post(app_of(saying("Hm.</think>Yes."), model), URL, CHAT)
    assert told(answer.json["usage"]) == len("Hm.</think>")


def test_a_token_that_ends_the_thoughts_and_begins_the_content_is_content() -> None:
    counter = ThoughtCounter(reasoning_parser("qwen3", ""))
    counts = []
    for text in ("<think>", "Hm", ".</think>Yes", " indeed", "<think>"):
        counter.push(text)
        counts.append(counter.count)
    assert counts == [1, 2, 2, 2, 2]
