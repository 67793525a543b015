"""Owns the task done in other ways than one call after another: handoffs, guardrails, plans, retries, images, calls at
once.
Never imports a library before its task is run."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from pixels import PIXELS
from task_tools import (
    ANTHROPIC_TOOLS,
    FUNCTION_TOOLS,
    FUNCTIONS,
    KEY,
    MOST_TURNS,
    RESPONSES_TOOLS,
    TASK,
    chat_loop,
    messages_loop,
    responses_loop,
    result_of,
)

PICTURE = f"data:image/png;base64,{PIXELS}"
THANKS = "Thank you. Say it once more, please."


# --- openai ----------------------------------------------------------------------------------------------------------


def openai_chat_parallel(url: str, model: str) -> str:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    asked: Any = {"model": model, "tools": FUNCTION_TOOLS, "tool_choice": "auto", "parallel_tool_calls": True}

    def complete(messages: list[Any]) -> Any:
        return client.chat.completions.create(messages=messages, **asked).choices[0].message

    return chat_loop(complete)


def openai_chat_image(url: str, model: str) -> str:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    picture = {"type": "image_url", "image_url": {"url": PICTURE, "detail": "low"}}
    content: Any = [{"type": "text", "text": TASK}, picture]
    answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": content}])
    return str(answer.choices[0].message.content)


def openai_responses_image(url: str, model: str) -> str:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    picture = {"type": "input_image", "image_url": PICTURE, "detail": "auto"}
    content: Any = [{"type": "input_text", "text": TASK}, picture]
    return str(client.responses.create(model=model, input=[{"role": "user", "content": content}]).output_text)


def openai_responses_turns(url: str, model: str) -> str:
    """Hold a conversation with developer turns and hosted tools on offer, and then ask one more question."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    before = [{"role": "developer", "content": "You edit files."}]
    tools = [*RESPONSES_TOOLS, {"type": "web_search"}]
    asked: Any = {"model": model, "tools": tools, "parallel_tool_calls": False, "prompt_cache_key": "turns"}
    items: list[Any] = []

    def respond(given: list[Any]) -> Any:
        items[:] = given
        return client.responses.create(input=[*before, *given], max_tool_calls=20, **asked)

    said = responses_loop(respond)
    items.append({"role": "assistant", "content": [{"type": "output_text", "text": said, "annotations": []}]})
    items.append({"role": "user", "content": THANKS})
    again = client.responses.create(input=[*before, *items], tool_choice="none", **asked)
    return str(again.output_text)


# --- anthropic -------------------------------------------------------------------------------------------------------


def anthropic_parallel(url: str, model: str) -> str:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    system = [{"type": "text", "text": "You edit files.", "cache_control": {"type": "ephemeral"}}]
    asked: Any = {"model": model, "tools": ANTHROPIC_TOOLS, "max_tokens": 2000, "system": system}
    return messages_loop(lambda turns: client.messages.create(messages=turns, tool_choice={"type": "auto"}, **asked))


def anthropic_image(url: str, model: str) -> str:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXELS}}
    content: Any = [picture, {"type": "text", "text": TASK, "cache_control": {"type": "ephemeral"}}]
    answer = client.messages.create(model=model, max_tokens=500, messages=[{"role": "user", "content": content}])
    return "".join(block.text for block in answer.content if block.type == "text")


def anthropic_tool_runner(url: str, model: str) -> str:
    """Use the SDK's own loop, in beta, with context editing turned on."""
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    runner = client.beta.messages.tool_runner(
        model=model,
        max_tokens=4000,
        tools=[anthropic.beta_tool(each) for each in FUNCTIONS.values()],
        messages=[{"role": "user", "content": TASK}],
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        betas=["context-management-2025-06-27"],
    )
    return "".join(block.text for block in runner.until_done().content if block.type == "text")


# --- openai-agents ---------------------------------------------------------------------------------------------------


def agents_model(url: str, model: str) -> Any:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    return agents.OpenAIResponsesModel(model, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0))


def openai_agents_handoff(url: str, model: str) -> str:
    """The first agent hands over to one that edits."""
    import agents

    served = agents_model(url, model)
    tools = [agents.function_tool(each) for each in FUNCTIONS.values()]
    coder = agents.Agent(name="coder", instructions="You edit files.", model=served, tools=tools)
    triage = agents.Agent(name="triage", instructions="You hand over.", model=served, handoffs=[coder])
    return str(agents.Runner.run_sync(triage, TASK).final_output)


def openai_agents_guardrail(url: str, model: str) -> str:
    """Another agent judges the input, answering in a form of its own, and a session keeps the turns for one more
    question."""
    import agents
    from form_tasks import Report

    served = agents_model(url, model)
    judge = agents.Agent(name="judge", instructions="You judge.", model=served, output_type=Report)

    @agents.input_guardrail(run_in_parallel=False)
    async def harmless(context: Any, agent: Any, given: Any) -> Any:
        judged = await agents.Runner.run(judge, "Judge this request.", context=context.context)
        tripped = judged.final_output.mood == "cross"
        return agents.GuardrailFunctionOutput(output_info=judged.final_output, tripwire_triggered=tripped)

    tools = [agents.function_tool(each) for each in FUNCTIONS.values()]
    coder = agents.Agent(
        name="coder", instructions="You edit files.", model=served, tools=tools, input_guardrails=[harmless]
    )
    session = agents.SQLiteSession("session")
    agents.Runner.run_sync(coder, TASK, session=session)
    return str(agents.Runner.run_sync(coder, THANKS, session=session).final_output)


# --- pydantic-ai -----------------------------------------------------------------------------------------------------


def pydantic_ai_retries(url: str, model: str) -> str:
    """A tool sends the model's first call back, and the turns are kept for one more question."""
    from form_tasks import pydantic_ai_chat_model
    from pydantic_ai import Agent, ModelRetry

    refused: list[str] = []

    def read_file(path: str) -> str:
        """Read a file."""
        if not refused:
            refused.append(path)
            raise ModelRetry("hello, but ask again")
        return FUNCTIONS["read_file"](path)

    others = [each for name, each in FUNCTIONS.items() if name != "read_file"]
    agent = Agent(pydantic_ai_chat_model(url, model), tools=[read_file, *others], instructions="You edit files.")
    first = agent.run_sync(TASK)
    assert refused
    return str(agent.run_sync(THANKS, message_history=first.all_messages()).output)


# --- langchain -------------------------------------------------------------------------------------------------------


def langchain_image(url: str, model: str) -> str:
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=KEY, max_retries=0, logprobs=False, n=1)
    picture = {"type": "image", "base64": PIXELS, "mime_type": "image/png"}
    content: Any = [{"type": "text", "text": TASK}, picture]
    return str(chat.invoke([SystemMessage("You look."), HumanMessage(content)]).text)


def langchain_forced_tool(url: str, model: str) -> str:
    """The first call is forced, one at a time, and the rest is free."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=KEY, max_retries=0, temperature=0, max_tokens=1000)
    tools = [tool(each) for each in FUNCTIONS.values()]
    messages: list[Any] = [HumanMessage(TASK)]
    for turn in range(MOST_TURNS):
        options: Any = {"strict": True, "parallel_tool_calls": False}
        bound = chat.bind_tools(tools, tool_choice="auto" if turn else "read_file", **options)
        messages.append(bound.invoke(messages))
        if not messages[-1].tool_calls:
            return str(messages[-1].text)
        for call in messages[-1].tool_calls:
            messages.append(ToolMessage(result_of(call["name"], call["args"]), tool_call_id=call["id"]))
    raise AssertionError("the task did not end")


# --- smolagents ------------------------------------------------------------------------------------------------------


def smolagents_planning(url: str, model: str) -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    served = OpenAIServerModel(model_id=model, api_base=f"{url}/v1", api_key=KEY)
    tools = [tool(each) for each in FUNCTIONS.values()]
    agent = ToolCallingAgent(tools=tools, model=served, max_steps=MOST_TURNS, planning_interval=2, stream_outputs=True)
    return str(agent.run(TASK))


def smolagents_structured_code(url: str, model: str) -> str:
    """Thought and code come as JSON, which `response_format` asks for."""
    from smolagents import CodeAgent, OpenAIServerModel, tool

    served = OpenAIServerModel(model_id=model, api_base=f"{url}/v1", api_key=KEY)
    tools = [tool(each) for each in FUNCTIONS.values()]
    agent = CodeAgent(tools=tools, model=served, max_steps=MOST_TURNS, use_structured_outputs_internally=True)
    return str(agent.run(TASK))


# --- llama-index -----------------------------------------------------------------------------------------------------


def llama_index_react(url: str, model: str) -> str:
    """Calls are written in text."""
    from llama_index.core.agent.workflow import ReActAgent
    from llama_index.llms.openai_like import OpenAILike

    options: Any = {"is_chat_model": True, "context_window": 131_072, "max_retries": 0}
    llm = OpenAILike(model=model, api_base=f"{url}/v1", api_key=KEY, **options)

    async def run() -> str:
        return str(await ReActAgent(tools=list(FUNCTIONS.values()), llm=llm).run(TASK))

    return asyncio.run(run())


# --- litellm ---------------------------------------------------------------------------------------------------------


def litellm_image(url: str, model: str) -> str:
    import litellm

    picture = {"type": "image_url", "image_url": {"url": PICTURE}}
    content: Any = [{"type": "text", "text": TASK}, picture]
    asked: Any = {"model": f"anthropic/{model}", "api_base": url, "api_key": KEY, "max_tokens": 500}
    answer = litellm.completion(messages=[{"role": "user", "content": content}], **asked)
    return str(answer.choices[0].message.content)


def litellm_router(url: str, model: str) -> str:
    """Go through its router, with an effort, a seed and what providers add."""
    import litellm

    params = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": KEY}
    router = litellm.Router(model_list=[{"model_name": "coder", "litellm_params": params}], num_retries=0)
    asked: Any = {"tools": FUNCTION_TOOLS, "tool_choice": "auto", "seed": 3, "user": "somebody"}
    asked |= {"allowed_openai_params": ["reasoning_effort"], "reasoning_effort": "high"}
    asked |= {"extra_body": {"metadata": {"task": json.dumps("edit")}}}
    return chat_loop(lambda messages: router.completion(model="coder", messages=messages, **asked).choices[0].message)
