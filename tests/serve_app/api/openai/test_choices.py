"""Owns the contract of responses with several choices: `n`, lists of prompts, and what they share. Long: a rule each.
Never uses Ray: engines are scripted, or run in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai.lib.streaming.chat._completions import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from engine.async_engine import AsyncEngine
from engine.build.engine import build_engine
from engine.config import EngineConfig, FakeConfig
from engine.protocol import (
    ErrorCode,
    Event,
    FinishReason,
    PromptLogprobs,
    RequestRejected,
    Scheduled,
    Submission,
    TokenLogprobs,
)
from serve_app.admission.gate import Gate
from serve_app.api.ingress import create_app
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import StreamRecord
from serve_app.settings.limits import GatePolicy
from tests.serve_app.harness import (
    CHAT,
    MODEL,
    PROMPT,
    TIMEOUT_S,
    Answer,
    Exchange,
    LocalClient,
    ScriptedClient,
    Step,
    failed,
    finished,
    make_time_pass,
    post,
    scheduled,
    tokens,
)

pytestmark = pytest.mark.anyio

LONG_PROMPT = "Once upon a time there was a parrot who could count to a hundred."
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


class ByChoice(ScriptedClient):
    """Plays each choice's script; the last script serves all further choices."""

    def __init__(self, *scripts: list[Step]) -> None:
        super().__init__()
        self._scripts = scripts
        self.num_closed = 0

    async def stream(
        self, submission: Submission, *, session: str | None = None, record: StreamRecord | None = None
    ) -> AsyncGenerator[list[Event], None]:
        _, _, suffix = submission.request_id.rpartition("-")
        script = self._scripts[min(int(suffix) if len(suffix) < 4 else 0, len(self._scripts) - 1)]
        self.submissions.append(submission)
        self.sessions.append(session)
        try:
            async for item in ScriptedClient(*script).stream(submission):
                yield item
        finally:
            self.num_closed += 1


def app_of(client: Any, **options: Any) -> Any:
    return create_app(client, Tokenizer.byte_level(), MODEL, **options)


def says(text: str, reason: FinishReason = FinishReason.STOP) -> list[Step]:
    return [[scheduled()], tokens(text), [finished(reason, prompt=7, completion=len(text) + 1)]]


class Recorded(LocalClient):
    """Keeps the events of each request."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(engine)
        self.submissions: list[Submission] = []
        self.cached: list[int] = []

    async def stream(
        self, submission: Submission, *, session: str | None = None, record: StreamRecord | None = None
    ) -> AsyncGenerator[list[Event], None]:
        self.submissions.append(submission)
        async for events in super().stream(submission):
            self.cached += [event.cached_tokens for event in events if isinstance(event, Scheduled)]
            yield events


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[tuple[Any, Recorded]]:
    engine = build_engine(MODEL.id, EngineConfig(executor="fake", fake=FakeConfig(), block_size=8, **settings))
    client = Recorded(engine)
    try:
        yield app_of(client), client
    finally:
        engine.shutdown()


# --- what a response has --------------------------------------------------------------------------------------------


async def test_each_answer_is_a_choice_and_the_prompt_counts_once() -> None:
    client = ByChoice(says("one"), says("three", FinishReason.LENGTH))
    body = (await post(app_of(client), CHATS, CHAT | {"n": 3})).json
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in body["choices"]] == ["one", "three", "three"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length", "length"]
    assert body["usage"]["prompt_tokens"] == 7
    assert body["usage"]["completion_tokens"] == 4 + 6 + 6


async def test_answers_to_several_prompts_follow_one_another() -> None:
    async with running() as (app, client):
        fields = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
        body = (await post(app, COMPLETIONS, PROMPT | fields | {"prompt": ["first", "second"], "n": 2})).json
        alone = [
            (await post(app, COMPLETIONS, PROMPT | fields | {"prompt": prompt})).json["choices"][0]["text"]
            for prompt in ("first", "second")
        ]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == [alone[0], alone[0], alone[1], alone[1]]
    assert body["usage"] == {
        "prompt_tokens": 11,
        "completion_tokens": 20,
        "total_tokens": 31,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert len({submission.request_id for submission in client.submissions}) == 6


@pytest.mark.parametrize("prompt", [["first", "second"], [[102, 105], [115]]])
async def test_lists_of_texts_and_of_token_ids_are_prompts_each(prompt: Any) -> None:
    client = ByChoice(says("x"))
    body = (await post(app_of(client), COMPLETIONS, PROMPT | {"prompt": prompt})).json
    assert len(body["choices"]) == 2
    assert [s.prompt_token_ids[0] for s in client.submissions] == [102, 115]


async def test_a_stream_interleaves_choices_and_each_has_its_opening_and_its_end() -> None:
    client = ByChoice(says("one"), says("two"))
    answer = await post(
        app_of(client), CHATS, CHAT | {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
    )
    for index, text in enumerate(["one", "two"]):
        own = [c for frame in answer.frames for c in frame["choices"] if c["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in own) == text
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]
    assert answer.frames[-1]["usage"]["completion_tokens"] == 8
    assert all(frame["usage"] is None for frame in answer.frames[:-1])


async def test_usage_can_be_reported_in_every_chunk() -> None:
    client = ByChoice([[scheduled(3)], tokens("a"), tokens("bc"), [finished(completion=4)]])
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    answer = await post(app_of(client), COMPLETIONS, PROMPT | options)
    assert [frame["usage"]["completion_tokens"] for frame in answer.frames] == [1, 3, 4, 4]
    assert all(frame["usage"]["prompt_tokens_details"] == {"cached_tokens": 3} for frame in answer.frames[:-2])


@pytest.mark.parametrize(("path", "body"), [(CHATS, CHAT), (COMPLETIONS, PROMPT)])
async def test_usage_in_every_chunk_needs_a_usage_at_the_end(path: str, body: dict[str, Any]) -> None:
    """As with vLLM."""
    options = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    answer = await post(app_of(ByChoice(says("ab"))), path, body | options)
    assert all("usage" not in frame for frame in answer.frames)


async def test_the_chunk_with_the_role_counts_no_token_of_its_choice() -> None:
    client = ByChoice([[scheduled(3), *tokens("ab")], [finished(completion=3)]])
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    answer = await post(app_of(client), CHATS, CHAT | options)
    assert [frame["usage"]["completion_tokens"] for frame in answer.frames] == [0, 2, 3, 3]


@pytest.mark.parametrize(("path", "body"), [(CHATS, CHAT), (COMPLETIONS, PROMPT | {"return_token_ids": True})])
async def test_usage_in_every_chunk_never_goes_back(path: str, body: dict[str, Any]) -> None:
    """Regression: chunks of one choice counted the tokens of another that had not begun in the stream, and its first
    chunk did not."""
    first = [[scheduled()], *map(tokens, "abcdefgh"), [finished(completion=9)]]
    client = ByChoice(first, [[scheduled(), *tokens("xyz")], [finished(completion=4)]])
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await post(app_of(client), path, body | {"n": 2, "stream": True, "stream_options": options})
    *frames, done, _ = b"".join(answer.parts).decode().split("\n\n")  # a choice's first chunks leave together
    assert done == "data: [DONE]"
    spent = [json.loads(frame.removeprefix("data: "))["usage"]["completion_tokens"] for frame in frames]
    assert spent == sorted(spent)
    assert spent[-1] == 13


async def test_token_ids_are_shown_where_asked_for() -> None:
    client = ByChoice(says("ab"))
    whole = (await post(app_of(client), COMPLETIONS, PROMPT | {"return_token_ids": True})).json["choices"][0]
    assert (whole["prompt_token_ids"], whole["token_ids"]) == ([104, 105], [97, 98, 256])
    assert whole["logprobs"] is None
    streamed = await post(app_of(client), COMPLETIONS, PROMPT | {"return_token_ids": True, "stream": True})
    choices = [frame["choices"][0] for frame in streamed.frames]
    assert choices[0]["prompt_token_ids"] == [104, 105]
    assert [token for choice in choices[1:] for token in choice["token_ids"]] == [97, 98, 256]
    chat = (await post(app_of(client), CHATS, CHAT | {"return_token_ids": True})).json
    assert chat["prompt_token_ids"][:2] == [259, 104]
    assert chat["choices"][0]["token_ids"] == [97, 98, 256]
    chunks = (await post(app_of(client), CHATS, CHAT | {"return_token_ids": True, "stream": True})).frames
    assert chunks[0]["prompt_token_ids"] == chat["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])


async def test_chat_shows_log_probabilities_with_each_tokens_bytes() -> None:
    parrot = "🦜".encode()
    events = [tokens(parrot)]
    scored = [
        type(event)("r", event.token_id, TokenLogprobs(event.token_id, -0.5, ((97, -0.25), (event.token_id, -0.5))))
        for event in events[0]
    ]
    client = ByChoice([[scheduled()], scored, [finished(FinishReason.LENGTH)]])
    body = (await post(app_of(client), CHATS, CHAT | {"logprobs": True, "top_logprobs": 2})).json
    content = body["choices"][0]["logprobs"]["content"]
    assert [item["bytes"] for item in content] == [[byte] for byte in parrot]
    assert content[0]["token"] == "bytes:\\xf0"
    assert content[0]["logprob"] == -0.5
    assert content[0]["top_logprobs"][0] == {"token": "a", "logprob": -0.25, "bytes": [97]}
    assert body["choices"][0]["logprobs"]["refusal"] is None
    assert client.submissions[0].sampling.logprobs == 2
    streamed = await post(app_of(client), CHATS, CHAT | {"logprobs": True, "top_logprobs": 2, "stream": True})
    chunks = [frame["choices"][0]["logprobs"] for frame in streamed.frames]
    assert [item for chunk in chunks if chunk for item in chunk["content"]] == content


async def test_the_prompts_log_probabilities_are_shown_where_asked_for() -> None:
    scores = (TokenLogprobs(105, -0.5, ((97, -0.25),)), TokenLogprobs(98, -0.75, ((98, -0.75),)))
    client = ByChoice([[scheduled(), PromptLogprobs("r", scores)], *says("a")[1:]])
    shown = [
        None,
        {
            "97": {"logprob": -0.25, "rank": 1, "decoded_token": "a"},
            "105": {"logprob": -0.5, "rank": None, "decoded_token": "i"},
        },
        {"98": {"logprob": -0.75, "rank": 1, "decoded_token": "b"}},
    ]
    completion = (await post(app_of(client), COMPLETIONS, PROMPT | {"prompt_logprobs": 1})).json["choices"][0]
    assert (completion["prompt_logprobs"], completion["logprobs"], completion["text"]) == (shown, None, "a")
    chat = (await post(app_of(client), CHATS, CHAT | {"prompt_logprobs": 1})).json
    assert chat["prompt_logprobs"] == shown
    assert [submission.sampling.prompt_logprobs for submission in client.submissions] == [1, 1]


# --- what choices share ---------------------------------------------------------------------------------------------


async def test_answers_to_one_prompt_share_its_blocks() -> None:
    async with running() as (app, client):
        answer = await post(app, COMPLETIONS, PROMPT | {"prompt": LONG_PROMPT, "n": 4, "max_tokens": 3})
        assert answer.status == 200
    full_blocks = (len(LONG_PROMPT) - 1) // 8 * 8
    assert client.cached == [0, full_blocks, full_blocks, full_blocks]
    assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("session", [None, "mine"])
async def test_answers_to_one_prompt_go_to_one_engine(session: str | None) -> None:
    client = ByChoice(says("x"))
    headers = [("content-type", "application/json"), *([("X-Session-ID", session)] if session else [])]
    body = json.dumps(PROMPT | {"n": 3}).encode()
    await Exchange(app_of(client), "POST", COMPLETIONS, body, headers).finish()
    assert len(set(client.sessions)) == 1
    assert client.sessions[0] == session if session else client.sessions[0]


async def test_choice_i_uses_the_seed_plus_i() -> None:
    async with running() as (app, _):
        fields = PROMPT | {"max_tokens": 8, "ignore_eos": True}
        several = (await post(app, COMPLETIONS, fields | {"seed": 2**63 - 1, "n": 2})).json["choices"]
        alone = [
            (await post(app, COMPLETIONS, fields | {"seed": seed})).json["choices"][0]["text"]
            for seed in (2**63 - 1, -(2**63))
        ]
    assert [choice["text"] for choice in several] == alone
    assert alone[0] != alone[1]


# --- places, failures, and clients that leave -----------------------------------------------------------------------


async def test_each_answer_takes_a_place_with_the_engines_and_gives_it_back_when_it_ends() -> None:
    gate, go_on = Gate(GatePolicy(dispatch_per_engine=3)), asyncio.Event()
    client = ByChoice(says("a"), [[scheduled()], tokens("b"), go_on, [finished()]])
    app = app_of(client, gate=gate)
    exchange = Exchange(app, "POST", COMPLETIONS, json.dumps(PROMPT | {"n": 2}).encode())
    async with asyncio.timeout(TIMEOUT_S):
        while client.num_closed < 1 or gate.snapshot().num_dispatched != 1:
            await asyncio.sleep(0)
    go_on.set()
    assert (await exchange.finish()).status == 200
    assert gate.snapshot().num_dispatched == 0


async def test_one_answer_that_fails_fails_the_response_and_ends_the_others() -> None:
    never = asyncio.Event()
    broken = RequestRejected(ErrorCode.STEP_FAILED, "broken")
    client = ByChoice(says("a"), [[scheduled()], [failed(broken)]], [[scheduled()], tokens("c"), never])
    answer = await post(app_of(client), COMPLETIONS, PROMPT | {"n": 3})
    assert (answer.status, answer.error["code"]) == (500, "step_failed")
    assert client.num_closed == 3
    streamed = await post(app_of(client), COMPLETIONS, PROMPT | {"n": 3, "stream": True})
    assert streamed.frames[-1]["error"]["code"] == "step_failed"
    assert client.num_closed == 6


async def test_a_prompt_that_is_refused_refuses_the_stream_before_its_first_byte() -> None:
    refusal = RequestRejected(ErrorCode.KV_CAPACITY_EXCEEDED, "too much", "prompt", 10, 20)
    client = ByChoice([[scheduled()], tokens("a"), [finished()]], [refusal])
    answer = await post(app_of(client), COMPLETIONS, PROMPT | {"prompt": ["a", "b"], "stream": True})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert client.num_closed == 2


async def test_a_client_that_leaves_ends_all_of_its_answers() -> None:
    never = asyncio.Event()
    client = ByChoice([[scheduled()], tokens("a"), never])
    gate = Gate()
    body = json.dumps(PROMPT | {"n": 3, "stream": True}).encode()
    exchange = Exchange(app_of(client, gate=gate), "POST", COMPLETIONS, body)
    async with asyncio.timeout(TIMEOUT_S):
        while len(client.submissions) < 3:
            await asyncio.sleep(0)
        exchange.disconnect()
        await exchange.task
    assert client.num_closed == 3
    assert gate.snapshot().num_live == 0


async def test_a_deadline_ends_all_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    never = asyncio.Event()
    late = make_time_pass(6, monkeypatch)
    client = ByChoice([[scheduled()], tokens("a"), never], [[scheduled()], tokens("a"), late, never])
    answer = await post(app_of(client), COMPLETIONS, PROMPT | {"n": 2, "timeout_ms": 5000})
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
    assert client.num_closed == 2
    assert all(submission.timeout_s for submission in client.submissions)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 65, "prompt": ["a", "b"]}, "n"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt.1"),
        ({"prompt": ["a", ""]}, "prompt.1"),
        ({"prompt": [[1], [262]]}, "prompt.1"),
        ({"prompt": [[1], "a"]}, "prompt.1"),
        ({"prompt": ["a", "b" * 300]}, "prompt.1"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "logprobs": 2, "echo": True}, "prompt_logprobs"),
    ],
)
async def test_a_wrong_prompt_or_count_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    client = ByChoice(says("x"))
    answer: Answer = await post(app_of(client), COMPLETIONS, PROMPT | fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert not client.submissions


class Queued(ByChoice):
    """Lets each choice but the first wait until the choice after it has begun."""

    def __init__(self, *scripts: list[Step]) -> None:
        super().__init__(*scripts)
        self._begun = [asyncio.Event() for _ in range(len(scripts) + 1)]
        self._begun[-1].set()

    async def stream(
        self, submission: Submission, *, session: str | None = None, record: StreamRecord | None = None
    ) -> AsyncGenerator[list[Event], None]:
        number = len(self.submissions)
        self.submissions.append(submission)
        if number:
            await self._begun[number + 1].wait()
        async for item in ScriptedClient(*self._scripts[number]).stream(submission):
            yield item
            self._begun[number].set()


async def test_a_streams_choices_open_in_order_whichever_begins_first() -> None:
    """OpenAI's SDK appends a new choice to its list, and then looks for it at its index."""
    client = Queued(says("A"), says("BB"), says("CCC"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = CHAT | {"n": 3, "stream": True, "stream_options": options}
    answer = await post(app_of(client), CHATS, body)
    opened: list[int] = []
    state = ChatCompletionStreamState()
    for frame in answer.frames:
        state.handle_chunk(ChatCompletionChunk.model_validate(frame))
        opened += [choice["index"] for choice in frame["choices"] if "role" in choice["delta"]]
    assert opened == [0, 1, 2]
    assert [choice.message.content for choice in state.get_final_completion().choices] == ["A", "BB", "CCC"]
    spent = [frame["usage"]["completion_tokens"] for frame in answer.frames]
    assert spent == sorted(spent)
