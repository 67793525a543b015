"""Owns the task as done by libraries that run tools by themselves, or nearly.
Never imports one before its task is run."""

from __future__ import annotations

import asyncio
from typing import Any

from task_tools import FUNCTIONS, KEY, MOST_TURNS, TASK, result_of


def openai_agents(url: str, model: Any, settings: Any = None, *, streamed: bool = False) -> str:
    import agents

    agents.set_tracing_disabled(True)
    tools = [agents.function_tool(each) for each in FUNCTIONS.values()]
    agent = agents.Agent(
        name="coder",
        instructions="You edit files.",
        model=model,
        tools=tools,
        model_settings=settings or agents.ModelSettings(),
    )
    if not streamed:
        return str(agents.Runner.run_sync(agent, TASK).final_output)

    async def run() -> str:
        result = agents.Runner.run_streamed(agent, TASK)
        async for _ in result.stream_events():
            pass
        return str(result.final_output)

    return asyncio.run(run())


def openai_agents_responses(url: str, model: str) -> str:
    import agents
    import openai
    from openai.types.shared import Reasoning

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    settings = agents.ModelSettings(
        reasoning=Reasoning(effort="high", summary="auto"),
        truncation="auto",
        verbosity="low",
        store=False,
        response_include=["reasoning.encrypted_content"],
    )
    return openai_agents(url, agents.OpenAIResponsesModel(model, client), settings, streamed=True)


def openai_agents_chat(url: str, model: str) -> str:
    import agents
    import openai

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    return openai_agents(url, agents.OpenAIChatCompletionsModel(model, client))


def langchain_loop(chat: Any, *, streamed: bool = True) -> str:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    bound = chat.bind_tools([tool(each) for each in FUNCTIONS.values()])
    messages: list[Any] = [HumanMessage(TASK)]
    for _ in range(MOST_TURNS):
        message = None
        for chunk in bound.stream(messages) if streamed else [bound.invoke(messages)]:
            message = chunk if message is None else message + chunk
        assert message is not None
        messages.append(message)
        if not message.tool_calls:
            return str(message.text)
        for call in message.tool_calls:
            messages.append(ToolMessage(result_of(call["name"], call["args"]), tool_call_id=call["id"]))
    raise AssertionError("the task did not end")


def langchain_openai_chat(url: str, model: str) -> str:
    from langchain_openai import ChatOpenAI

    return langchain_loop(ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=KEY, max_retries=0))


def langchain_openai_chat_whole(url: str, model: str) -> str:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=KEY, max_retries=0, reasoning_effort="low")
    return langchain_loop(chat, streamed=False)


def langchain_openai_responses(url: str, model: str) -> str:
    from langchain_openai import ChatOpenAI

    options: Any = {"use_responses_api": True, "reasoning": {"effort": "low", "summary": "auto"}, "store": False}
    options["include"] = ["reasoning.encrypted_content"]
    return langchain_loop(ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=KEY, max_retries=0, **options))


def langchain_anthropic(url: str, model: str) -> str:
    from langchain_anthropic import ChatAnthropic

    options: Any = {"max_tokens": 8000, "thinking": {"type": "enabled", "budget_tokens": 2000}}
    return langchain_loop(ChatAnthropic(model=model, base_url=url, api_key=KEY, max_retries=0, **options))


def langchain_anthropic_whole(url: str, model: str) -> str:
    from langchain_anthropic import ChatAnthropic

    chat = ChatAnthropic(model=model, base_url=url, api_key=KEY, max_retries=0, max_tokens=8000)
    return langchain_loop(chat, streamed=False)


def pydantic_ai(model: Any, *, streamed: bool = False) -> str:
    from pydantic_ai import Agent

    agent = Agent(model, tools=list(FUNCTIONS.values()))
    if not streamed:
        return str(agent.run_sync(TASK).output)

    async def run() -> str:
        async with agent.run_stream(TASK) as result:
            return str(await result.get_output())

    return asyncio.run(run())


def pydantic_ai_chat(url: str, model: str) -> str:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return pydantic_ai(OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)))


def pydantic_ai_chat_streamed(url: str, model: str) -> str:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    served = OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))
    return pydantic_ai(served, streamed=True)


def pydantic_ai_responses(url: str, model: str) -> str:
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return pydantic_ai(OpenAIResponsesModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)))


def pydantic_ai_anthropic(url: str, model: str) -> str:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    return pydantic_ai(AnthropicModel(model, provider=AnthropicProvider(base_url=url, api_key=KEY)))


def instructor_actions(url: str, model: str) -> str:
    """Each action is an object that the library has the model write by forcing a function."""
    import instructor
    import openai
    from pydantic import BaseModel

    class Action(BaseModel):
        tool: str
        arguments: dict[str, str]

    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0))
    messages: list[Any] = [{"role": "user", "content": TASK}]
    for turn in range(MOST_TURNS):
        action = client.chat.completions.create(model=model, messages=messages, response_model=Action, max_retries=0)
        if action.tool == "answer":
            return action.arguments["text"]
        call = {"id": f"call_{turn}", "type": "function"}
        call |= {"function": {"name": "Action", "arguments": action.model_dump_json()}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        content = result_of(action.tool, action.arguments)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    raise AssertionError("the task did not end")


def smolagents_tools(url: str, model: str) -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    served = OpenAIServerModel(model_id=model, api_base=f"{url}/v1", api_key=KEY)
    agent = ToolCallingAgent(tools=[tool(each) for each in FUNCTIONS.values()], model=served, max_steps=MOST_TURNS)
    return str(agent.run(TASK))


def smolagents_code(url: str, model: str) -> str:
    from smolagents import CodeAgent, OpenAIServerModel, tool

    served = OpenAIServerModel(model_id=model, api_base=f"{url}/v1", api_key=KEY)
    agent = CodeAgent(tools=[tool(each) for each in FUNCTIONS.values()], model=served, max_steps=MOST_TURNS)
    return str(agent.run(TASK))


def llama_index(url: str, model: str) -> str:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=model,
        api_base=f"{url}/v1",
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=131_072,
        max_retries=0,
    )

    async def run() -> str:
        return str(await FunctionAgent(tools=list(FUNCTIONS.values()), llm=llm).run(TASK))

    return asyncio.run(run())
