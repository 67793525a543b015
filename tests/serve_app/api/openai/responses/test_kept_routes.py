"""Owns the contract of the routes to a kept response: get it, list its input items, delete it.
Never tests what a later request reads of it; test_responses_store does."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseItem
from pydantic import TypeAdapter

from serve_app.api.http.hint_header import HEADER
from serve_app.api.openai.responses.answer_schema import ResponseAnswer
from serve_app.api.openai.responses.listing import listed
from tests.serve_app.api.generation.test_tools import saying
from tests.serve_app.api.openai.responses.test_responses import TOOLS
from tests.serve_app.api.openai.responses.test_responses_store import MODEL, OUTPUT, THINKING, Server, user
from tests.serve_app.api.test_end_to_end import openai_client

pytestmark = pytest.mark.anyio

SHOWN = {"role": "user", "content": [{"type": "input_text", "text": "look"}]}
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)


async def test_a_kept_response_can_be_had_listed_and_deleted() -> None:
    server = Server()
    first = await server.answered(THINKING, input="one", tools=TOOLS, instructions="i", metadata={"a": "b"})
    second = await server.answered("B", previous_response_id=first["id"], input=[OUTPUT, user("two", id="mine")])
    for told in (first, second):
        answer = await server.request("GET", f"/v1/responses/{told['id']}")
        assert (answer.status, answer.json) == (200, told)
    for path in ("/v1/responses", "/responses"):
        answer = await server.request("GET", f"{path}/{second['id']}/input_items?order=asc")
        listed = answer.json
        kinds = [item["type"] for item in listed["data"]]
        assert kinds == ["message", "reasoning", "message", "function_call", "function_call_output", "message"]
        assert [item["role"] for item in listed["data"] if item["type"] == "message"] == ["user", "assistant", "user"]
        assert [item["id"] for item in listed["data"][1:4]] == [item["id"] for item in first["output"]]
        assert listed["data"][-1]["id"] == "mine"
        assert len({item["id"] for item in listed["data"]}) == 6
        assert (listed["object"], listed["has_more"]) == ("list", False)
    answer = await server.request("DELETE", f"/v1/responses/{first['id']}")
    assert answer.json == {"id": first["id"], "object": "response", "deleted": True}
    for method in ("GET", "DELETE"):
        answer = await server.request(method, f"/v1/responses/{first['id']}")
        assert (answer.status, answer.error["code"]) == (404, "response_not_found")
        assert answer.error["message"].startswith(f"Response with id '{first['id']}' not found.")


@pytest.mark.parametrize("name", ["compact", "input_tokens"])
@pytest.mark.parametrize("prefix", ["/v1", ""])
async def test_openais_other_operations_are_unknown_routes(name: str, prefix: str) -> None:
    """Regression: they were a 405, because their paths look like that of a kept response."""
    answer = await Server().request("POST", f"{prefix}/responses/{name}")
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    answer = await Server().request("POST", f"{prefix}/responses/{name}_1")
    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")


async def test_items_are_listed_by_pages_the_last_first() -> None:
    server = Server()
    told = await server.answered(input=[user(str(number)) for number in range(25)])

    async def page(query: str) -> dict[str, Any]:
        answer = await server.request("GET", f"/v1/responses/{told['id']}/input_items{query}")
        assert answer.status == 200, answer.json
        return dict(answer.json)

    def texts(listed: dict[str, Any]) -> list[int]:
        assert (listed["first_id"], listed["last_id"]) == (listed["data"][0]["id"], listed["data"][-1]["id"])
        return [int(item["content"][0]["text"]) for item in listed["data"]]

    first = await page("")
    assert (texts(first), first["has_more"]) == (list(range(24, 4, -1)), True)
    second = await page(f"?after={first['last_id']}")
    assert (texts(second), second["has_more"]) == (list(range(4, -1, -1)), False)
    assert texts(await page("?order=asc&limit=2")) == [0, 1]
    assert await page(f"?after={second['last_id']}") == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }


@pytest.mark.parametrize(
    ("query", "code", "param"),
    [
        ("/input_items?limit=0", "invalid_value", "limit"),
        ("/input_items?limit=101", "invalid_value", "limit"),
        ("/input_items?limit=many", "invalid_value", "limit"),
        ("/input_items?order=up", "invalid_value", "order"),
        ("/input_items?after=nobody", "invalid_value", "after"),
        ("/input_items?before=x", "unknown_parameter", "before"),
        ("?include=all", "invalid_value", "include"),
        ("?stream=true", "unsupported_parameter", "stream"),
        ("?starting_after=1", "unsupported_parameter", "starting_after"),
    ],
)
async def test_a_query_that_is_not_understood_is_refused_by_name(query: str, code: str, param: str) -> None:
    server = Server()
    told = await server.answered()
    answer = await server.request("GET", f"/v1/responses/{told['id']}{query}")
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, code, param)


async def test_what_a_query_would_include_is_a_hint() -> None:
    told = await (server := Server()).answered()
    for path in ("", "/input_items"):
        answer = await server.request("GET", f"/v1/responses/{told['id']}{path}?include[]=reasoning.encrypted_content")
        assert (answer.status, answer.headers[HEADER]) == (200, "include.reasoning.encrypted_content")


async def test_every_field_that_a_response_had_is_there_when_it_is_asked_for_again() -> None:
    told = await (server := Server()).answered("A", top_logprobs=None, tools=TOOLS, user="u")
    body = (await server.request("GET", f"/v1/responses/{told['id']}")).json
    assert sorted(body) == sorted(told)
    Response.model_validate(body)
    ResponseAnswer.model_validate(body)


async def test_openais_client_goes_on_from_a_response_and_reads_lists_and_deletes_it() -> None:
    server = Server()
    async with openai_client(server.app(saying(THINKING))) as client:
        first = await client.responses.create(model=MODEL.id, input="one", tools=TOOLS)  # type: ignore[call-overload]
        again = await client.responses.retrieve(first.id)
        assert again.to_dict() == first.to_dict()
        given = [OUTPUT, {"type": "item_reference", "id": first.output[0].id}, SHOWN]
        second = await client.responses.create(model=MODEL.id, previous_response_id=first.id, input=given)
        assert (second.previous_response_id, second.store) == (first.id, True)
        listed = [item async for item in client.responses.input_items.list(second.id, limit=2, order="asc")]
        assert [item.type for item in listed] == [
            *("message", "reasoning", "message", "function_call"),
            *("function_call_output", "reasoning", "message"),
        ]
        for item in listed:
            ITEM.validate_json(item.to_json(exclude_unset=True), strict=True)
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match=first.id):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError, match="keeps a key's responses in memory") as refused:
            await client.responses.create(model=MODEL.id, previous_response_id=first.id, input="x")
        assert refused.value.code == "previous_response_not_found"


def test_items_that_a_client_left_short_are_listed_as_openais_types_have_them() -> None:
    texts = [
        {"role": "developer", "content": "a"},
        {"role": "assistant", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "reasoning"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "d"},
        {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": ""},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "e"},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}], "id": None},
    ]
    items = listed("resp_0", [json.dumps(text).encode() for text in texts])
    assert [item["id"] for item in items] == [f"item_0_{number}" for number in range(8)]
    for item in items:
        ITEM.validate_json(json.dumps(item), strict=True)


def test_an_item_that_is_there_twice_is_listed_under_two_ids() -> None:
    text = b'{"id": "msg_1", "role": "user", "content": "a"}'
    assert [item["id"] for item in listed("resp_0", [text, text])] == ["msg_1", "item_0_1"]
