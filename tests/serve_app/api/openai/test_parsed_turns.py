"""Owns the promise that what `parse()` of OpenAI's SDK returns can be sent back as the next request's turn.
Never tests the parsing: that is the SDK's."""

from __future__ import annotations

from typing import Any

import openai
import pydantic
import pytest

from serve_app.api.http.hint_header import HEADER
from tests.serve_app.api.generation.test_tools import CALL, CALLER, app_of, saying
from tests.serve_app.api.test_end_to_end import openai_client
from tests.serve_app.harness import CHAT, MODEL, post

pytestmark = pytest.mark.anyio


class City(pydantic.BaseModel):
    city: str


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the SDK's, which dumps what it has parsed
@pytest.mark.parametrize("said", ['{"city": "Oslo"}', CALL], ids=["answer", "call"])
async def test_what_openais_client_has_parsed_can_be_sent_back(said: str) -> None:
    """Its own message has `parsed` and `parsed_arguments`, and was refused in the next turn."""
    client = saying(said)
    weather = openai.pydantic_function_tool(City, name="weather")
    asked: Any = {"model": MODEL.id, "tools": [weather]}
    async with openai_client(app_of(client, CALLER)) as sdk:
        first = await sdk.chat.completions.parse(messages=CHAT["messages"], response_format=City, **asked)
        message = first.choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "cold"} for call in message.tool_calls or []]
        for told in (message, message.model_dump()):
            turns: Any = [*CHAT["messages"], told, *results]
            again = await sdk.chat.completions.with_raw_response.create(messages=turns, **asked)
            assert HEADER not in again.headers
            assert "parsed" not in bytes(client.submissions[-1].prompt_token_ids).decode()


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("said", ['{"city": "Oslo"}', CALL], ids=["answer", "call"])
async def test_what_openais_client_has_parsed_of_a_response_can_be_sent_back(said: str) -> None:
    client = saying(said)
    weather: Any = openai.pydantic_function_tool(City, name="weather")["function"]
    asked: Any = {"model": MODEL.id, "tools": [weather | {"type": "function"}]}
    async with openai_client(app_of(client, CALLER)) as sdk:
        first = await sdk.responses.parse(input="hi", text_format=City, **asked)
        for told in (first.output, [item.model_dump() for item in first.output]):
            turns: Any = [{"role": "user", "content": "hi"}, *told, {"role": "user", "content": "And?"}]
            again = await sdk.responses.with_raw_response.create(input=turns, **asked)
            assert HEADER not in again.headers


async def test_only_the_assistants_words_are_parsed() -> None:
    message = {"role": "user", "content": "a", "parsed": {"city": "Oslo"}}
    error = (await post(app_of(saying("x"), CALLER), "/v1/chat/completions", CHAT | {"messages": [message]})).error
    assert error["param"] == "messages.0.parsed"
