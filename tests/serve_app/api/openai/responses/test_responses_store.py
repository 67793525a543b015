"""Owns the contract of kept responses: what the model later reads of them, for whom, and which fields say so.
Never tests how long they are kept or how much room they take: tests of serve_app.store do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.protocol import EngineError, ErrorCode, FinishReason
from serve_app.api.ingress import create_app
from serve_app.api.requests.messages import MAX_TOOLS
from serve_app.api.text.chat_template import ChatTemplate
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.metrics.store_counts import StoreCounts
from serve_app.settings.responses_store import ResponsesStoreSettings
from serve_app.store.bounded import BoundedStore
from serve_app.store.entry import Entry
from serve_app.store.memory import LocalMemory
from tests.serve_app.api.generation.test_tools import CALL, TEMPLATE, THINKER, prompt_of, saying
from tests.serve_app.api.openai.responses.test_responses import ASK, TOOLS, events, together, valid
from tests.serve_app.auth.test_auth import ANNS, BOBS, KEYS
from tests.serve_app.harness import TIMEOUT_S, Answer, Exchange, ScriptedClient, failed, scheduled, tokens
from tests.serve_app.store.test_bounded import Clock

pytestmark = pytest.mark.anyio

MODEL = replace(THINKER, max_model_len=2**20)
SETTINGS = ResponsesStoreSettings(max_mib=1, max_age_s=600)
THINKING = f"<think>\nHm.\n</think>\n\nYes.{CALL}"
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "sunny"}
BOTH_WAYS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


class Server:
    """A server that lives for many requests, each answered by its own script."""

    def __init__(self, *, is_on: bool = True, clock: Clock | None = None, **options: Any) -> None:
        self.counts = StoreCounts()
        store = BoundedStore(SETTINGS.max_bytes, SETTINGS.max_age_s, clock or Clock())
        self.memory = LocalMemory(SETTINGS, self.counts, store) if is_on else None
        self.options = options

    def app(self, client: ScriptedClient) -> Any:
        tokenizer = Tokenizer.byte_level()
        tokenizer._chat_template = ChatTemplate(TEMPLATE, {})
        return create_app(client, tokenizer, MODEL, memory=self.memory, **self.options)

    async def ask(self, says: str | ScriptedClient = "x", key: str | None = None, **fields: Any) -> Answer:
        client = saying(says) if isinstance(says, str) else says
        return await Exchange(self.app(client), "POST", "/v1/responses", as_body(**fields), headers_of(key)).finish()

    async def answered(self, says: str | ScriptedClient = "x", **fields: Any) -> dict[str, Any]:
        answer = await self.ask(says, **fields)
        assert answer.status == 200, answer.json
        return together(events(answer)) if fields.get("stream") else valid(answer.json)

    async def read(self, **fields: Any) -> str:
        """Return what the model reads."""
        client = saying("x")
        await self.answered(client, **fields)
        return prompt_of(client)

    async def refused(self, **fields: Any) -> tuple[int, str, str, str]:
        client = saying("x")
        answer = await self.ask(client, **fields)
        assert not client.submissions
        return answer.status, answer.error["code"], answer.error["param"], answer.error["message"]

    async def request(self, method: str, path: str, key: str | None = None) -> Answer:
        return await Exchange(self.app(saying("x")), method, path, headers=headers_of(key)).finish()


def as_body(**fields: Any) -> bytes:
    return json.dumps(ASK | fields).encode()


def headers_of(key: str | None) -> list[tuple[str, str]]:
    return [("content-type", "application/json"), *([("authorization", f"Bearer {key}")] if key else [])]


def references(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "item_reference", "id": item["id"]} for item in items]


def user(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_text", "text": text}]} | fields


@BOTH_WAYS
@pytest.mark.parametrize("store", [{}, {"store": True}, {"store": None}], ids=str)
async def test_a_loop_of_tools_goes_on_by_references_as_the_ai_sdk_sends_them(
    stream: bool, store: dict[str, Any]
) -> None:
    """Its `store` is true by default: each step refers to everything that the model wrote before."""
    server = Server(strict=True)
    asked: dict[str, Any] = {"tools": TOOLS, "stream": stream, **store}
    first = await server.answered(THINKING, input=[user("hi")], **asked)
    assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call"]
    assert first["store"] is True
    given = [user("hi"), *references(first["output"]), OUTPUT]
    client = saying(CALL)
    second = await server.answered(client, input=given, **asked)
    assert prompt_of(client).endswith("[user:hi][assistant:Yes.?Hm.!weatherOslo][tool:sunny]>")
    third = await server.read(input=[*given, *references(second["output"]), OUTPUT], **asked)
    sent = [user("hi"), *first["output"], OUTPUT, *second["output"], OUTPUT]
    assert third == await Server(is_on=False).read(input=sent, tools=TOOLS)
    assert (server.counts.queries, server.counts.hits, server.counts.num_entries) == (2, 2, 3)


@BOTH_WAYS
async def test_a_conversation_goes_on_from_the_response_before(stream: bool) -> None:
    server = Server(strict=True)
    first = await server.answered(THINKING, input="one", instructions="be kind", stream=stream, tools=TOOLS)
    assert first["previous_response_id"] is None
    second = await server.answered("Two.", previous_response_id=first["id"], input=[OUTPUT, user("two")], stream=stream)
    assert second["previous_response_id"] == first["id"]
    assert second["instructions"] is None
    read = await server.read(previous_response_id=second["id"], input="three", instructions="be brief")
    said = "[user:one][assistant:Yes.?Hm.!weatherOslo][tool:sunny][user:two][assistant:Two.][user:three]>"
    assert read == f"[system:be brief]{said}"


async def test_tools_that_an_item_adds_last_as_long_as_its_conversation() -> None:
    server = Server()
    item = {"type": "additional_tools", "role": "developer", "tools": TOOLS}
    user = {"role": "user", "content": "hi"}
    first = await server.answered(CALL, input=[item, user])
    assert [output["type"] for output in first["output"]] == ["function_call"]
    told = await server.read(input="more", previous_response_id=first["id"])
    assert told == await server.read(input=[item, user, *first["output"], user | {"content": "more"}])
    assert '"weather"' in told


async def test_two_answers_may_go_on_from_one() -> None:
    server = Server()
    first = await server.answered("A", input="1")
    for text in ("2", "3"):
        await server.answered("B", previous_response_id=first["id"], input=text)
    assert await server.read(previous_response_id=first["id"], input="4") == "[user:1][assistant:A][user:4]>"


async def test_what_was_cut_off_is_kept_as_far_as_it_went() -> None:
    server = Server()
    first = await server.answered(saying("Half", reason=FinishReason.LENGTH), input="1")
    assert (first["status"], first["store"]) == ("incomplete", True)
    assert await server.read(previous_response_id=first["id"]) == "[user:1][assistant:Half][user:hi]>"
    assert await server.read(input=references(first["output"])) == "[assistant:Half]>"


@BOTH_WAYS
async def test_with_store_false_nothing_is_kept(stream: bool) -> None:
    server = Server(strict=True)
    first = await server.answered("A", store=False, stream=stream)
    assert first["store"] is False
    assert server.counts.num_entries == 0
    status, code, param, _ = await server.refused(previous_response_id=first["id"])
    assert (status, code, param) == (400, "previous_response_not_found", "previous_response_id")
    status, code, param, _ = await server.refused(input=[user("hi"), *references(first["output"])])
    assert (status, code, param) == (400, "item_not_found", "input.1")


async def test_a_response_that_is_not_kept_may_go_on_from_one_that_is() -> None:
    server = Server()
    first = await server.answered("A", input="1")
    second = await server.answered("B", previous_response_id=first["id"], store=False)
    assert (second["store"], second["previous_response_id"]) == (False, first["id"])


async def test_a_stream_says_at_its_beginning_that_it_is_to_be_kept() -> None:
    begun = [event["response"]["store"] for event in events(await Server().ask(stream=True))[:2]]
    assert begun == [True, True]


class Full(LocalMemory):
    async def put(self, tenant: str, entry: Entry) -> bool:
        return False


@BOTH_WAYS
async def test_a_response_that_could_not_be_kept_says_so(stream: bool) -> None:
    server = Server()
    server.memory = Full(SETTINGS)
    assert (await server.answered(stream=stream))["store"] is False


async def test_a_failed_response_is_not_kept() -> None:
    server = Server()
    error = EngineError(ErrorCode.STEP_FAILED, "broken")
    answer = await server.ask(ScriptedClient([scheduled()], tokens("A"), [failed(error)]), stream=True)
    last = events(answer)[-1]
    assert (last["type"], last["response"]["store"]) == ("response.failed", False)
    assert server.counts.num_entries == 0


class Slow(LocalMemory):
    """Keeps nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__(SETTINGS)
        self.is_asked, self.may_keep = asyncio.Event(), asyncio.Event()

    async def put(self, tenant: str, entry: Entry) -> bool:
        self.is_asked.set()
        await self.may_keep.wait()
        return await super().put(tenant, entry)


async def test_a_response_is_kept_after_its_last_item_and_before_its_client_knows_that_it_is_whole() -> None:
    """The client may refer to it at once, on another connection and at another replica."""
    server = Server()
    server.memory = memory = Slow()
    exchange = Exchange(server.app(saying("A")), "POST", "/v1/responses", as_body(stream=True))
    await asyncio.wait_for(memory.is_asked.wait(), TIMEOUT_S)
    seen = b""
    while b"response.output_item.done" not in seen:
        seen += (await exchange.next()).get("body", b"")
    assert exchange.silent
    memory.may_keep.set()
    assert b"response.completed" in (await exchange.next())["body"]
    assert memory.counts.num_entries == 1
    await exchange.task


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"previous_response_id": "resp_0"},
            ("previous_response_not_found", "previous_response_id", "Previous response with id 'resp_0' not found."),
        ),
        (
            {"input": [user("a"), {"type": "item_reference", "id": "msg_0_0"}]},
            ("item_not_found", "input.1", "Item with id 'msg_0_0' not found."),
        ),
        ({"input": [{"type": "item_reference", "id": ""}]}, ("item_not_found", "input.0", "Item with id '' not found")),
    ],
    ids=["response", "item", "no-id"],
)
@pytest.mark.parametrize("strict", [False, True])
async def test_what_is_not_there_is_refused_by_what_the_store_is(
    strict: bool, fields: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    status, code, param, message = await Server(strict=strict).refused(**fields)
    assert (status, code, param) == (400, *expected[:2])
    assert message.startswith(expected[2])
    assert "in memory until 600 s after their last use, as far as 1 MiB allow, and not over its restart" in message
    assert "`store: false`" in message


async def test_without_a_store_what_would_be_in_it_is_refused_and_the_answer_says_that_it_is_not_kept() -> None:
    server = Server(is_on=False)
    for stream in (False, True):
        assert (await server.answered(store=True, stream=stream))["store"] is False
    status, code, param, message = await server.refused(previous_response_id="resp_0")
    assert (status, code, param) == (400, "unsupported_parameter", "previous_response_id")
    assert "responses_store.max_mib is 0" in message
    status, code, param, message = await server.refused(input=[user("a"), {"type": "item_reference", "id": "msg_0"}])
    assert (status, code, param) == (400, "unsupported_parameter", "input.1")
    assert "set `store: false` (AI SDK: providerOptions.openai.store)" in message
    assert (await server.request("GET", "/v1/responses/resp_0")).status == 404


async def test_an_item_of_the_request_comes_before_one_that_is_kept() -> None:
    server = Server()
    first = await server.answered("A", input="1")
    own = first["output"][0] | {"content": [{"type": "output_text", "text": "B"}]}
    assert await server.read(input=[own, *references([own])]) == "[assistant:B][assistant:B]>"


async def test_an_item_that_is_kept_is_repeated_once_at_most_too() -> None:
    server = Server()
    (item,) = (await server.answered("A"))["output"]
    status, code, param, message = await server.refused(input=references([item, item]))
    assert (status, code, param) == (400, "unsupported_parameter", "input.1")
    assert "referred to again" in message


async def test_another_tenants_response_is_as_unknown_as_any() -> None:
    server = Server(keys=KEYS)
    first = (await server.ask("A", key=ANNS)).json
    unknown = first | {"id": "resp_" + "0" * 32}
    for asked in (first, unknown):
        answer = await server.ask(key=BOBS, previous_response_id=asked["id"])
        assert (answer.status, answer.error["code"]) == (400, "previous_response_not_found")
        for method, path in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
            answer = await server.request(method, f"/v1/responses/{asked['id']}{path}", key=BOBS)
            assert (answer.status, answer.error["code"]) == (404, "response_not_found")
    answer = await server.ask(key=BOBS, input=references(first["output"]))
    assert (answer.status, answer.error["code"]) == (400, "item_not_found")
    assert (await server.ask(key=ANNS, previous_response_id=first["id"])).status == 200
    assert (await server.request("GET", f"/v1/responses/{first['id']}")).status == 401


async def test_an_answer_is_unknown_once_its_time_is_over() -> None:
    clock = Clock()
    server = Server(clock=clock)
    first = await server.answered("A")
    clock.now = SETTINGS.max_age_s
    assert (await server.refused(previous_response_id=first["id"]))[1] == "previous_response_not_found"


async def test_a_conversation_with_a_gap_says_which_response_is_missing() -> None:
    server = Server()
    first = await server.answered("A")
    second = await server.answered("B", previous_response_id=first["id"])
    assert (await server.request("DELETE", f"/v1/responses/{first['id']}")).status == 200
    _, code, _, message = await server.refused(previous_response_id=second["id"])
    assert code == "previous_response_not_found"
    assert message.startswith(f"Previous response with id '{first['id']}' not found, which '{second['id']}' goes on")
    listed = await server.request("GET", f"/v1/responses/{second['id']}/input_items")
    assert (listed.status, listed.error["code"]) == (404, "response_not_found")
    assert f"'{first['id']}', which '{second['id']}' goes on from, not found" in listed.error["message"]


async def test_what_is_recalled_counts_towards_the_size_of_a_body() -> None:
    server = Server(max_body_bytes=2000)
    first = await server.answered("A" * 10, input="1" * 900)
    assert len(await server.read(previous_response_id=first["id"], input="2")) < 1000
    told = await server.refused(previous_response_id=first["id"], input="2" * 900)
    assert told[:2] == (413, "body_too_large")
    assert "larger than 2000 bytes, with what is kept of it" in told[3]
    own = await server.answered("B" * 900, input="1")
    assert (await server.refused(input=[user("2" * 900), *references(own["output"])]))[:2] == (413, "body_too_large")


async def test_references_do_not_multiply_a_conversation_beyond_a_body() -> None:
    """Each response has the content of the previous one twice: by its id, and by references to all of its items."""
    server = Server(max_body_bytes=20_000)
    last = await server.answered("A" * 500)
    kept = list(last["output"])
    for _ in range(20):
        fields = {"previous_response_id": last["id"], "input": references(kept)}
        answer = await server.ask(saying("B"), **fields)
        if answer.status != 200:
            break
        last = answer.json
        kept += last["output"]
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")


async def test_what_is_recalled_counts_towards_the_values_of_a_body() -> None:
    """Each half is within the limit of a body."""
    server, half = Server(), 17_000
    server.memory = LocalMemory(ResponsesStoreSettings(max_mib=64))
    text = b'{"role":"user","content":""}'
    assert await server.memory.put("", Entry("resp_a", None, (text,) * half, {}, (b"{}",)))
    fields = {"previous_response_id": "resp_a", "input": [json.loads(text)] * half}
    assert (await server.refused(**fields))[:2] == (400, "too_many_values")
    assert await server.read(previous_response_id="resp_a") == "[user:]" * half + "[user:hi]>"
    assert await server.read(input=fields["input"], store=False) == "[user:]" * half + ">"


async def test_calls_of_a_turn_are_bounded_with_those_that_are_recalled() -> None:
    server = Server()
    called = [{"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}]
    first = await server.answered("A", input=[user("1"), *called * 2], tools=TOOLS)
    status, _, param, _ = await server.refused(previous_response_id=first["id"], input=called * MAX_TOOLS)
    assert (status, param) == (400, f"input.{MAX_TOOLS - 2}")
