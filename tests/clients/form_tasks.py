"""Owns tasks that ask for a report: an answer of a given form, which each library has its own way to ask for. Nothing
is edited.
Never imports a library before its task is run, except pydantic, which most of them are built on."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field
from task_tools import KEY, TASK


class Note(BaseModel):
    line: int = Field(ge=1)
    says: str


class Report(BaseModel):
    """What was done."""

    text: str = Field(description="One sentence.")
    mood: Literal["calm", "cross"]
    words: list[str]
    note: Note | None = None


ASKED: list[Any] = [
    {"role": "system", "content": "You report what was done."},
    {"role": "user", "content": [{"type": "text", "text": f"Report on this: {TASK}"}]},
]


# --- openai ----------------------------------------------------------------------------------------------------------


def openai_client(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def openai_parse(url: str, model: str) -> str:
    options: Any = {"seed": 7, "temperature": 0.2, "top_p": 0.9, "user": "somebody", "safety_identifier": "somebody"}
    answer = openai_client(url).chat.completions.parse(
        model=model, messages=ASKED, response_format=Report, max_completion_tokens=500, **options
    )
    return str(answer.choices[0].message.parsed.text)


def openai_parse_streamed(url: str, model: str) -> str:
    asked: Any = {"messages": ASKED, "response_format": Report, "stream_options": {"include_usage": True}}
    with openai_client(url).chat.completions.stream(model=model, verbosity="low", **asked) as stream:
        return str(stream.get_final_completion().choices[0].message.parsed.text)


def openai_json_object(url: str, model: str) -> str:
    options: Any = {"frequency_penalty": 0.1, "presence_penalty": 0.1, "logit_bias": {"5": -1}, "stop": ["\n\n\n"]}
    options |= {"n": 1, "metadata": {"task": "report"}, "store": False, "service_tier": "auto"}
    answer = openai_client(url).chat.completions.create(
        model=model, messages=ASKED, response_format={"type": "json_object"}, **options
    )
    return Report.model_validate_json(answer.choices[0].message.content).text


def openai_forced_function(url: str, model: str) -> str:
    import openai

    forced: Any = {"type": "function", "function": {"name": "Report"}}
    answer = openai_client(url).chat.completions.parse(
        model=model,
        messages=ASKED,
        tools=[openai.pydantic_function_tool(Report)],
        tool_choice=forced,
        parallel_tool_calls=False,
    )
    return str(answer.choices[0].message.tool_calls[0].function.parsed_arguments.text)


def openai_responses_parse(url: str, model: str) -> str:
    answer = openai_client(url).responses.parse(
        model=model,
        instructions="You report what was done.",
        input=[{"role": "user", "content": [{"type": "input_text", "text": TASK}]}],
        text_format=Report,
        max_output_tokens=500,
        metadata={"task": "report"},
        prompt_cache_key="reports",
    )
    return str(answer.output_parsed.text)


def openai_completions(url: str, model: str) -> str:
    """Ask by the old API, whole and streamed."""
    client, asked = openai_client(url), {"prompt": TASK, "max_tokens": 60, "temperature": 0, "seed": 1, "stop": ["\n"]}
    whole = client.completions.create(model=model, **asked).choices[0].text
    chunks = client.completions.create(model=model, stream=True, **asked)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole
    return str(whole)


# --- anthropic -------------------------------------------------------------------------------------------------------


def anthropic_client(url: str) -> Any:
    import anthropic

    return anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)


def anthropic_parse(url: str, model: str) -> str:
    answer = anthropic_client(url).messages.parse(
        model=model,
        max_tokens=500,
        system=[{"type": "text", "text": "You report.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        messages=[{"role": "user", "content": TASK}],
        output_format=Report,
        metadata={"user_id": "somebody"},
        stop_sequences=["\n\n\n"],
    )
    return str(answer.parsed_output.text)


def anthropic_forced_tool(url: str, model: str) -> str:
    tool: Any = {"name": "Report", "description": "Reports.", "input_schema": Report.model_json_schema()}
    tool["cache_control"] = {"type": "ephemeral"}
    client = anthropic_client(url)
    asked: Any = {"model": model, "messages": [{"role": "user", "content": TASK}], "tools": [tool]}
    assert client.messages.count_tokens(**asked).input_tokens > 10
    forced: Any = {"type": "tool", "name": "Report", "disable_parallel_tool_use": True}
    answer = client.messages.create(max_tokens=500, tool_choice=forced, **asked)
    return Report.model_validate(answer.content[0].input).text


# --- litellm ---------------------------------------------------------------------------------------------------------


def litellm_report(url: str, provider: str, model: str, **options: Any) -> str:
    import litellm

    answer = litellm.completion(
        model=f"{provider}/{model}", api_base=url, api_key=KEY, messages=ASKED, num_retries=0, max_retries=0, **options
    )
    return Report.model_validate_json(answer.choices[0].message.content).text


def litellm_response_format(url: str, model: str) -> str:
    return litellm_report(f"{url}/v1", "openai", model, response_format=Report, temperature=0)


def litellm_response_format_hosted_vllm(url: str, model: str) -> str:
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "top_k": 20, "min_p": 0.05}
    return litellm_report(f"{url}/v1", "hosted_vllm", model, response_format=Report, extra_body=extra)


def litellm_response_format_anthropic(url: str, model: str) -> str:
    return litellm_report(url, "anthropic", model, response_format=Report, max_tokens=500)


def litellm_text_completion(url: str, model: str) -> str:
    import litellm

    asked: Any = {"model": f"text-completion-openai/{model}", "api_base": f"{url}/v1", "api_key": KEY}
    return str(litellm.text_completion(prompt=TASK, max_tokens=60, num_retries=0, **asked).choices[0].text)


# --- langchain -------------------------------------------------------------------------------------------------------


def langchain_report(chat: Any, **options: Any) -> str:
    found = chat.with_structured_output(Report, **options).invoke(f"Report on this, in JSON: {TASK}")
    return Report.model_validate(found).text


def langchain_openai_report(url: str, model: str, **options: Any) -> str:
    from langchain_openai import ChatOpenAI

    return langchain_report(ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=KEY, max_retries=0), **options)


def langchain_json_schema(url: str, model: str) -> str:
    return langchain_openai_report(url, model, method="json_schema", strict=True)


def langchain_function_calling(url: str, model: str) -> str:
    return langchain_openai_report(url, model, method="function_calling")


def langchain_json_mode(url: str, model: str) -> str:
    return langchain_openai_report(url, model, method="json_mode")


def langchain_anthropic_report(url: str, model: str) -> str:
    from langchain_anthropic import ChatAnthropic

    return langchain_report(ChatAnthropic(model=model, base_url=url, api_key=KEY, max_retries=0, max_tokens=500))


def langchain_anthropic_json_schema(url: str, model: str) -> str:
    from langchain_anthropic import ChatAnthropic

    chat = ChatAnthropic(model=model, base_url=url, api_key=KEY, max_retries=0, max_tokens=500)
    return langchain_report(chat, method="json_schema")


# --- pydantic-ai -----------------------------------------------------------------------------------------------------


def pydantic_ai_chat_model(url: str, model: str) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))


def pydantic_ai_report(served: Any, output: Any) -> str:
    from pydantic_ai import Agent

    return str(Agent(served, output_type=output, instructions="You report.").run_sync(TASK).output.text)


def pydantic_ai_tool_output(url: str, model: str) -> str:
    return pydantic_ai_report(pydantic_ai_chat_model(url, model), Report)


def pydantic_ai_native_output(url: str, model: str) -> str:
    from pydantic_ai import NativeOutput

    return pydantic_ai_report(pydantic_ai_chat_model(url, model), NativeOutput(Report))


def pydantic_ai_prompted_output(url: str, model: str) -> str:
    from pydantic_ai import PromptedOutput

    return pydantic_ai_report(pydantic_ai_chat_model(url, model), PromptedOutput(Report))


def pydantic_ai_responses_output(url: str, model: str) -> str:
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    served = OpenAIResponsesModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))
    return pydantic_ai_report(served, Report)


def pydantic_ai_anthropic_output(url: str, model: str) -> str:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    return pydantic_ai_report(AnthropicModel(model, provider=AnthropicProvider(base_url=url, api_key=KEY)), Report)


# --- instructor ------------------------------------------------------------------------------------------------------


def instructor_report(url: str, model: str, mode: str) -> str:
    import instructor

    client = instructor.from_openai(openai_client(url), mode=instructor.Mode[mode])
    found = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": TASK}], response_model=Report, max_retries=0
    )
    return str(found.text)


def instructor_tools_strict(url: str, model: str) -> str:
    return instructor_report(url, model, "TOOLS_STRICT")


def instructor_json(url: str, model: str) -> str:
    return instructor_report(url, model, "JSON")


def instructor_markdown(url: str, model: str) -> str:
    return instructor_report(url, model, "MD_JSON")


def instructor_json_schema(url: str, model: str) -> str:
    return instructor_report(url, model, "JSON_SCHEMA")


def instructor_responses(url: str, model: str) -> str:
    return instructor_report(url, model, "RESPONSES_TOOLS")


def instructor_partial(url: str, model: str) -> str:
    """Ask for the object as it is written, part by part."""
    import instructor

    client = instructor.from_openai(openai_client(url))
    asked: Any = {"model": model, "messages": [{"role": "user", "content": TASK}]}
    found = list(client.chat.completions.create_partial(response_model=Report, max_retries=0, **asked))
    return str(found[-1].text)


def instructor_anthropic(url: str, model: str) -> str:
    import instructor

    client = instructor.from_anthropic(anthropic_client(url), mode=instructor.Mode.ANTHROPIC_TOOLS)
    asked: Any = {"model": model, "max_tokens": 500, "messages": [{"role": "user", "content": TASK}]}
    return str(client.chat.completions.create(response_model=Report, max_retries=0, **asked).text)


# --- llama-index -----------------------------------------------------------------------------------------------------


def llama_index_report(url: str, model: str) -> str:
    from llama_index.core.prompts import PromptTemplate
    from llama_index.llms.openai_like import OpenAILike

    options: Any = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 131_072}
    llm = OpenAILike(model=model, api_base=f"{url}/v1", api_key=KEY, max_retries=0, **options)
    return str(llm.structured_predict(Report, PromptTemplate("Report on this: {task}"), task=TASK).text)


# --- openai-agents ---------------------------------------------------------------------------------------------------


def openai_agents_output(url: str, model: str) -> str:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    agent = agents.Agent(name="reporter", model=agents.OpenAIChatCompletionsModel(model, client), output_type=Report)
    return str(agents.Runner.run_sync(agent, TASK).final_output.text)
