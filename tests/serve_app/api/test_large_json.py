"""Owns the contract of large JSON: written in steps, it is what one call writes; and a body that would keep the parser
busy for long is refused by counting its parts."""

from __future__ import annotations

import json
import random
import threading
import tracemalloc
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from engine.protocol import Scheduled
from serve_app.api.generation.chat_reader import ChatReader, Read
from serve_app.api.http import json_text
from serve_app.api.http.json_text import json_bytes, json_response, written
from serve_app.api.openai import sse
from serve_app.api.requests.json_size import KEY_ITEMS, MAX_ITEMS, check_size, count
from serve_app.api.requests.schema import CompletionRequest, parse_request
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.errors.api_error import ApiError
from tests.serve_app.api.generation.test_tools import THINKER
from tests.serve_app.api.openai.responses import test_responses as responses
from tests.serve_app.harness import (
    CHAT,
    MODEL,
    Exchange,
    ScriptedClient,
    app_for,
    chat,
    complete,
    finished,
    post,
    tokens,
)

pytestmark = pytest.mark.anyio

ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
TEXTS = ("", "a", '"', "\\", "é\u2028", ",", "[{:", '\\"', "👍")


def random_json(draw: random.Random, depth: int) -> Any:
    kind = draw.randrange(8 if depth else 5)
    if kind < 5:
        return draw.choice([None, True, False, draw.randint(-9, 10**9), draw.random(), draw.choice(TEXTS)])
    length = draw.choice([0, 1, 3, 64, 65, 130])
    if kind == 5:
        return {f"{draw.choice(TEXTS)}{i}": random_json(draw, depth - 1) for i in range(length % 67)}
    values = [random_json(draw, depth - 1 if length < 65 else 0) for _ in range(length)]
    return values if kind == 6 else tuple(values)


def test_what_is_written_in_steps_is_what_one_call_writes() -> None:
    draw = random.Random(7)
    values = [random_json(draw, 3) for _ in range(400)]
    values += [
        list(range(5000)),
        {"a": [[]] * 3000, "b": [{"c": list(range(2049))}] * 2},
        [[1] * 1024] * 3,
        [None] * 1025,
    ]
    assert sum(len(ENCODE(value)) > 2000 for value in values) > 50, "too few long ones"
    for value in values:
        assert written(value, ENCODE) == ENCODE(value)
    with pytest.raises(ValueError, match="not JSON compliant"):
        written([float("nan")] * 100, ENCODE)


@pytest.mark.parametrize("length", [0, 1, 64, 65, 3000])
def test_an_array_of_numbers_is_written_as_a_list_of_them(length: int) -> None:
    draw = random.Random(length)
    vectors = [[draw.gauss(0, 1) for _ in range(length)] for _ in range(3)]
    for value in (vectors[0], vectors, {"data": [{"embedding": vector, "index": 1} for vector in vectors]}):
        compact = _compact(value)
        assert compact != value or not length
        assert written(compact, ENCODE) == ENCODE(value)
        assert json_bytes(compact) == ENCODE(value).encode()


def _compact(value: Any) -> Any:
    """Return the value with arrays instead of its lists of numbers."""
    if isinstance(value, dict):
        return {key: _compact(inner) for key, inner in value.items()}
    if not isinstance(value, list):
        return value
    is_vector = all(isinstance(one, float) for one in value)
    return array("d", value) if is_vector else [_compact(one) for one in value]


def test_large_json_is_never_in_memory_twice() -> None:
    """Regression: 2,048 vectors of 4,096 numbers took a gigabyte."""
    value = {"embedding": array("d", [0.1234567890123456] * 200_000)}
    json_bytes({})
    tracemalloc.start()
    try:
        size = len(json_bytes(value))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * size


def test_what_is_nested_deep_is_looked_at_once() -> None:
    """Regression: 170 levels around 200,000 numbers, in an answer that repeats its request,
    took seconds at each event."""
    looks = 0

    class Watched(dict[str, Any]):
        def values(self) -> Any:
            nonlocal looks
            looks += 1
            return super().values()

    value: Any = Watched(long=[0] * 65)
    for _ in range(100):
        value = Watched(a=value)
    assert written(value, ENCODE) == ENCODE(value)
    assert looks == 101


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 400 + ".0"])
@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/responses", '{"input": "x", "tools": [{"parameters": {"default": N}}]}', "tools.0.parameters.default"),
        ("/v1/chat/completions", '{"messages": [{"role": "user"}], "metadata": {"a": [N]}}', "metadata.a.0"),
        ("/v1/messages", '{"messages": [], "max_tokens": 1, "temperature": N}', "temperature"),
    ],
)
async def test_a_number_that_no_float_holds_is_refused_by_its_place(
    number: str, path: str, body: str, place: str
) -> None:
    """Regression: JSON's parsers read such a number as infinite, which cannot be written again,
    so the whole answer was a 500."""
    text = body.replace("N}", f"{number}}}").replace("[N]", f"[{number}]").replace("{", f'{{"model": "{MODEL.id}", ', 1)
    answer = await Exchange(app_for(ScriptedClient()), "POST", path, text.encode()).finish()
    assert answer.status == 400
    assert place in answer.json["error"]["message"]


def test_no_call_of_the_encoder_writes_a_long_list() -> None:
    longest = []

    def encode(value: Any) -> str:
        longest.append(ENCODE(value).count(","))
        return ENCODE(value)

    content = [{"token": "a", "bytes": [1], "top_logprobs": [{"token": "b", "bytes": [2, 3]}] * 20}] * 300
    body = {"tokens": list(range(20_000)), "choices": [{"logprobs": {"content": content}}] * 3}
    assert written(body, encode) == ENCODE(body)
    assert max(longest) < 1024


def test_a_response_has_starlettes_type_and_length() -> None:
    made = json_response({"é": list(range(100))})
    assert made.headers["content-type"] == "application/json"
    assert made.body == ENCODE({"é": list(range(100))}).encode()
    assert made.headers["content-length"] == str(len(made.body))


def counted(value: Any) -> tuple[int, int]:
    """Return (items, keys). In a container each comma and the opening bracket count one item;
    an empty one has its bracket."""
    if isinstance(value, dict):
        inner = [counted(one) for one in value.values()]
        return max(len(value), 1) + sum(items for items, _ in inner), len(value) + sum(keys for _, keys in inner)
    if isinstance(value, list | tuple):
        inner = [counted(one) for one in value]
        return max(len(value), 1) + sum(items for items, _ in inner), sum(keys for _, keys in inner)
    return 0, 0


def test_items_and_keys_are_counted_outside_of_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.api.requests.json_size.MAX_ITEMS", -1)  # otherwise nothing is counted exactly
    draw = random.Random(8)
    for _ in range(300):
        value = [random_json(draw, 3), draw.choice(TEXTS) * 9, {draw.choice(TEXTS): draw.choice(TEXTS)}]
        for separators in ((",", ":"), (" , ", " : ")):
            for ascii_only in (False, True):
                text = json.dumps(value, separators=separators, ensure_ascii=ascii_only)
                assert count(text.encode()) == counted(value), text


MAX_KEYS = MAX_ITEMS // KEY_ITEMS
MANY = {
    "items": b"[" + b"1," * MAX_ITEMS + b"1]",
    "empty": b"[" + b"[]," * (MAX_ITEMS // 2) + b"1]",
    "keys": b"{" + b",".join(b'"%d":1' % i for i in range(MAX_KEYS)) + b"}",
}


@pytest.mark.parametrize("what", MANY)
def test_a_body_of_too_many_values_is_refused_with_the_limit_and_not_parsed(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("serve_app.api.requests.schema.pydantic_core")
    body = b'{"model":"m","prompt":"a","metadata":{"a":' + MANY[what] + b"}}"
    with pytest.raises(ApiError) as refused:
        parse_request(CompletionRequest, body)
    items, keys = count(body)
    assert (refused.value.status, refused.value.code) == (400, "too_many_values")
    assert items + KEY_ITEMS * keys > MAX_ITEMS
    assert f"has {items} items" in refused.value.message
    assert f"{keys} keys" in refused.value.message
    assert f"at most {MAX_ITEMS} are allowed" in refused.value.message


def test_text_is_not_counted_whatever_it_holds() -> None:
    for text in ('{"a": [1, 2]}, ' * 200_000, "\\" * 1_000_000, '"' * 1_000_000, ":" * (MAX_KEYS + 1)):
        body = json.dumps({"model": "m", "prompt": text}).encode()
        check_size(body)
        assert parse_request(CompletionRequest, body).prompt == text


async def test_biases_beyond_the_limit_are_counted_and_not_read() -> None:
    error = (await complete(ScriptedClient(), logit_bias={f"not a token {i}": 1 for i in range(1025)})).error
    assert error["param"] == "logit_bias"
    assert "at most 1024" in error["message"]
    assert "1025" in error["message"]


async def test_a_chats_messages_are_rendered_off_the_loop_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[str] = []
    render = Tokenizer.encode_chat

    def noted(self: Tokenizer, *arguments: Any, **options: Any) -> list[int]:
        rendered.append(threading.current_thread().name)
        return render(self, *arguments, **options)

    monkeypatch.setattr(Tokenizer, "encode_chat", noted)
    here = threading.current_thread().name
    await chat(ScriptedClient([finished()]))
    await chat(ScriptedClient([finished()]), messages=CHAT["messages"] * 1100)
    assert rendered[0] == here
    assert rendered[1] != here


async def test_what_repeats_a_texts_log_probabilities_is_written_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the events at the end of a response's text, and of the response, have all of them again. They stopped
    all other streams for 0.2 ms a token."""
    lengths: dict[bool, list[int]] = {True: [], False: []}
    here = threading.current_thread().name

    def noted(value: Any, encode: Any) -> str:
        text = written(value, encode)
        lengths[threading.current_thread().name == here].append(len(text))
        return text

    monkeypatch.setattr(sse, "written", noted)
    client = responses.scored("x" * 300 + responses.CALL, pieces=400)
    answer = await responses.ask(client, tools=responses.TOOLS, top_logprobs=1, stream=True)
    assert [item["type"] for item in responses.events(answer)[-1]["response"]["output"]] == ["message", "function_call"]
    assert max(lengths[True]) < 4000
    repeating = ("output_text.done", "content_part.done", "output_item.done", "completed")
    assert sum(length > 20_000 for length in lengths[False]) == len(repeating)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_response_repeats_of_a_long_request_is_written_off_the_loop(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Regression: a megabyte of tools stopped all streams for 30 ms each time that it was written, which a stream does
    three times."""
    lengths: dict[bool, list[int]] = {True: [], False: []}
    here = threading.current_thread().name

    def noted(write: Callable[..., str | bytes]) -> Callable[..., str | bytes]:
        def write_and_note(*args: Any) -> str | bytes:
            text = write(*args)
            lengths[threading.current_thread().name == here].append(len(text))
            return text

        return write_and_note

    monkeypatch.setattr(sse, "written", noted(written))
    monkeypatch.setattr(json_text, "json_bytes", noted(json_bytes))
    tools = [responses.TOOLS[0] | {"description": "d" * 30_000}]
    answer = await responses.ask(responses.saying("x"), tools=tools, tool_choice="none", store=False, stream=stream)
    assert answer.status == 200
    assert max(lengths[True], default=0) < 4000
    assert sum(length > 30_000 for length in lengths[False]) == (3 if stream else 1)


async def test_a_long_answer_that_is_not_streamed_is_read_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: 50,000 tokens of HTML stopped all streams for a tenth of a second or more, while tags were looked
    for."""
    readers: list[str] = []
    read = ChatReader.read

    def noted(self: ChatReader, text: str, *, last: bool) -> Read:
        readers.append(threading.current_thread().name)
        return read(self, text, last=last)

    monkeypatch.setattr(ChatReader, "read", noted)
    here = threading.current_thread().name
    for num_tags in (10, 2000):
        script = [Scheduled("r", 0)], tokens("<b>" * num_tags), [finished()]
        answer = await post(app_for(ScriptedClient(*script), model=THINKER), "/v1/chat/completions", CHAT)
        assert answer.json["choices"][0]["message"]["content"] == "<b>" * num_tags
    assert readers[0] == here
    assert readers[1] != here
