"""Owns short smokes of client libraries, which run in the clients' own virtual environment: smokes.py NAME URL MODEL.
Never imports anything of ours, nor a client before its smoke is run."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from typing import Any

FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
QUESTION: str = FRANCE[0]["content"]
WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ANN = "Ann is 7 years old. Who is it?"


def says_paris(text: str | None) -> None:
    assert text is not None
    assert "Paris" in text, text


def refusal_of(ask: Callable[[], Any], kind: type[Exception]) -> Any:
    """Return the error of this kind that the call raises."""
    try:
        ask()
    except kind as error:
        return error
    raise AssertionError("it was answered")


# --- openai ----------------------------------------------------------------------------------------------------------


def openai_client(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def openai_chat(url: str, model: str) -> None:
    client, asked = openai_client(url), {"messages": FRANCE, "temperature": 0, "max_tokens": 30}
    whole = client.chat.completions.create(model=model, **asked)
    says_paris(whole.choices[0].message.content)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model=model, **asked, **options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def openai_responses(url: str, model: str) -> None:
    client, asked = openai_client(url), {"input": QUESTION, "temperature": 0, "max_output_tokens": 30}
    whole = client.responses.create(model=model, **asked)
    says_paris(whole.output_text)
    with client.responses.stream(model=model, **asked) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == whole.output_text


def openai_tools_that_the_model_does_not_call(url: str, model: str) -> None:
    """The default model's chat template shows no tools: the client is told so, with the name of the field."""
    import openai

    error = refusal_of(
        lambda: openai_client(url).chat.completions.create(model=model, messages=FRANCE, tools=TOOLS),
        openai.BadRequestError,
    )
    assert error.param == "tools", error
    assert error.request_id


def openai_response_format(url: str, model: str) -> None:
    import json

    shape: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    asked: Any = {"messages": [{"role": "user", "content": ANN}], "temperature": 0, "max_tokens": 60}
    answer = openai_client(url).chat.completions.create(model=model, response_format=shape, **asked)
    person = json.loads(answer.choices[0].message.content)
    assert set(person) == {"name", "age"}
    assert isinstance(person["age"], int)


# --- litellm, langchain ----------------------------------------------------------------------------------------------


def litellm_chat(url: str, model: str) -> None:
    import litellm

    asked: Any = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "messages": FRANCE}
    asked |= {"temperature": 0, "max_tokens": 30, "num_retries": 0}
    whole = litellm.completion(**asked)
    says_paris(whole.choices[0].message.content)
    chunks = litellm.completion(**asked, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content


def litellm_context_window(url: str, model: str) -> None:
    """Frameworks shorten a prompt when they see this class of error, which litellm recognises by the message."""
    import litellm

    asked: Any = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}
    long: Any = [{"role": "user", "content": "word " * 20_000}]
    refusal_of(lambda: litellm.completion(**asked, messages=long), litellm.ContextWindowExceededError)


def langchain_chat(url: str, model: str) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        model=model,
        base_url=f"{url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=30,
        max_retries=0,
        stream_usage=True,
    )
    whole = chat.invoke(QUESTION)
    says_paris(whole.content)
    chunks = list(chat.stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    counted = [chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata]
    assert sum(counted) == whole.usage_metadata["output_tokens"]


def langchain_structured_output(url: str, model: str) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=60, max_retries=0)
    schema = {"title": "person", **PERSON}
    person = chat.with_structured_output(schema, method="json_schema").invoke(ANN)
    assert set(person) == {"name", "age"}


# --- pydantic-ai, instructor -----------------------------------------------------------------------------------------


def pydantic_ai_agent(url: str, model: str, output: Any) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    settings: Any = {"temperature": 0, "max_tokens": 60}
    return Agent(OpenAIChatModel(model, provider=provider), output_type=output, model_settings=settings, retries=0)


def pydantic_ai_text(url: str, model: str) -> None:
    agent = pydantic_ai_agent(url, model, str)
    whole = agent.run_sync(QUESTION)
    says_paris(whole.output)

    async def streamed() -> str:
        async with agent.run_stream(QUESTION) as result:
            return "".join([text async for text in result.stream_text(delta=True)])

    assert asyncio.run(streamed()) == whole.output


def pydantic_ai_native_output(url: str, model: str) -> None:
    from pydantic import BaseModel
    from pydantic_ai import NativeOutput

    class Person(BaseModel):
        name: str
        age: int

    assert isinstance(pydantic_ai_agent(url, model, NativeOutput(Person)).run_sync(ANN).output, Person)


def instructor_extracts(url: str, model: str) -> None:
    import instructor
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    client = instructor.from_openai(openai_client(url), mode=instructor.Mode.JSON_SCHEMA)
    asked: Any = {"messages": [{"role": "user", "content": ANN}], "temperature": 0, "max_tokens": 60}
    found = client.chat.completions.create(model=model, response_model=Person, max_retries=0, **asked)
    assert isinstance(found, Person)


# --- anthropic -------------------------------------------------------------------------------------------------------


def anthropic_messages(url: str, model: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)
    # The SDK no longer has `temperature`; the API still does.
    asked: Any = {"model": model, "messages": FRANCE, "max_tokens": 30, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**asked)
    says_paris(whole.content[0].text)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[0].text == whole.content[0].text
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(model=model, messages=FRANCE)
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def anthropic_errors(url: str, model: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)
    error = refusal_of(
        lambda: client.messages.create(model=f"not-{model}", messages=FRANCE, max_tokens=5), anthropic.NotFoundError
    )
    assert error.request_id
    assert error.request_id == error.body["request_id"]
    assert error.type == "not_found_error"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Try one client library against a server.")
    for each in ("name", "url", "model"):
        parser.add_argument(each)
    given = parser.parse_args()
    smoke: Callable[[str, str], None] = globals()[given.name]
    smoke(given.url, given.model)
