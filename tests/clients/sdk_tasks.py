"""Owns the task as done by SDKs without a loop of their own (openai, anthropic, litellm), whole and streamed.
Never imports one before its task is run."""

from __future__ import annotations

import asyncio
from typing import Any

from task_tools import (
    ANTHROPIC_TOOLS,
    FUNCTION_TOOLS,
    KEY,
    RESPONSES_TOOLS,
    chat_loop,
    messages_loop,
    responses_loop,
)


def openai_chat(url: str, model: str, *, streamed: bool = True) -> str:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    asked: Any = {"model": model, "tools": FUNCTION_TOOLS, "reasoning_effort": "medium"}

    def complete(messages: list[Any]) -> Any:
        if not streamed:
            return client.chat.completions.create(messages=messages, **asked).choices[0].message
        with client.chat.completions.stream(messages=messages, **asked) as stream:
            return stream.get_final_completion().choices[0].message

    return chat_loop(complete)


def openai_chat_whole(url: str, model: str) -> str:
    return openai_chat(url, model, streamed=False)


def openai_responses(url: str, model: str, *, streamed: bool = True) -> str:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    asked: Any = {"model": model, "tools": RESPONSES_TOOLS, "store": False, "include": ["reasoning.encrypted_content"]}
    asked |= {"reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "low"}}

    def respond(items: list[Any]) -> Any:
        if not streamed:
            return client.responses.create(input=items, **asked)
        with client.responses.stream(input=items, **asked) as stream:
            return stream.get_final_response()

    return responses_loop(respond)


def openai_responses_whole(url: str, model: str) -> str:
    return openai_responses(url, model, streamed=False)


def anthropic_messages(url: str, model: str, *, streamed: bool = True) -> str:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    asked: Any = {"model": model, "tools": ANTHROPIC_TOOLS, "max_tokens": 20_000}
    asked["thinking"] = {"type": "enabled", "budget_tokens": 4000}

    def create(turns: list[Any]) -> Any:
        if not streamed:
            return client.messages.create(messages=turns, **asked)
        with client.messages.stream(messages=turns, **asked) as stream:
            return stream.get_final_message()

    return messages_loop(create)


def anthropic_messages_whole(url: str, model: str) -> str:
    return anthropic_messages(url, model, streamed=False)


def litellm_loop(url: str, provider: str, model: str, **options: Any) -> str:
    import litellm

    asked: Any = {"model": f"{provider}/{model}", "api_base": url, "api_key": KEY, "num_retries": 0, "max_retries": 0}
    asked |= {"tools": FUNCTION_TOOLS, **options}

    def complete(messages: list[Any]) -> Any:
        answer = litellm.completion(messages=messages, **asked)
        if asked.get("stream"):
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        return answer.choices[0].message

    return chat_loop(complete)


def litellm_openai(url: str, model: str) -> str:
    return litellm_loop(f"{url}/v1", "openai", model, max_tokens=1000)


def litellm_hosted_vllm(url: str, model: str) -> str:
    return litellm_loop(f"{url}/v1", "hosted_vllm", model, reasoning_effort="low", stream=True)


def litellm_anthropic(url: str, model: str) -> str:
    thinking = {"type": "enabled", "budget_tokens": 2000}
    return litellm_loop(url, "anthropic", model, max_tokens=8000, thinking=thinking, allowed_openai_params=["thinking"])


def litellm_responses(url: str, model: str) -> str:
    import litellm

    asked: Any = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": KEY, "tools": RESPONSES_TOOLS}
    return responses_loop(lambda items: litellm.responses(input=items, max_retries=0, **asked))


def litellm_bridge(url: str, model: str) -> str:
    """Speak Anthropic's API to the caller and chat to the server, as a proxy of litellm's does for Claude Code."""
    import anthropic
    import litellm

    asked: Any = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": KEY, "tools": ANTHROPIC_TOOLS}
    asked |= {"max_tokens": 8000, "thinking": {"type": "adaptive"}, "allowed_openai_params": ["reasoning_effort"]}

    def create(turns: list[Any]) -> Any:
        answer = asyncio.run(litellm.anthropic.messages.acreate(messages=turns, **asked))
        return anthropic.types.Message.model_validate(answer)

    return messages_loop(create)
