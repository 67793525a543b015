"""Owns the libraries that do a task against the scripted model, each by a script in its own language.
Never says how a library is used; ai_sdk.mjs and the files that tasks.py imports do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.clients.parts import (
    BEFORE,
    by_code,
    by_code_in_json,
    by_forced_function,
    by_functions,
    by_functions_and_thanks,
    by_functions_asked_again,
    by_functions_at_once,
    by_functions_without_thoughts,
    by_handoff,
    by_reasons_and_actions,
    by_report,
    by_sight,
    by_text,
    by_tools_in_text,
)
from tests.clients.props import draw
from tests.clients.running import PYTHON_ENV, Program
from tests.clients.scripted_model import Part

PROVIDERS = ("openai", "openai-chat", "anthropic", "compatible")


def ai_sdk(provider: str, mode: str, part: Callable[[Path], Part], **fields: Any) -> Program:
    command = ("node", str(Path(__file__).parent / "ai_sdk.mjs"), provider, mode, "{url}", "{model}")
    return Program(command=command, part=part, **fields)


_WITH_ITEMS = {
    f"ai-sdk-{provider}-{mode}": ai_sdk(provider, mode, part, **fields)
    for provider in PROVIDERS
    for mode, part, fields in (
        ("generate", by_functions, {}),
        ("stream", by_functions, {}),
        ("object", by_report, {"leaves": BEFORE, "grows": False}),
        ("image", by_sight, {"leaves": BEFORE, "prepare": draw}),
    )
}

_WITH_REFERENCES = {
    f"ai-sdk-openai-stored-{mode}": ai_sdk("openai-stored", mode, by_functions, is_recorded=False)
    for mode in ("generate", "stream")
}
"""They refer to what the server keeps: each request has ids of its server's answers."""

AI_SDK = _WITH_ITEMS | _WITH_REFERENCES

BY_FUNCTIONS = """
openai_chat openai_chat_whole openai_responses openai_responses_whole anthropic_messages anthropic_messages_whole
litellm_openai litellm_hosted_vllm litellm_anthropic litellm_responses litellm_bridge
openai_agents_responses openai_agents_chat
langchain_openai_chat langchain_openai_chat_whole langchain_openai_responses langchain_anthropic
langchain_anthropic_whole
pydantic_ai_chat pydantic_ai_chat_streamed pydantic_ai_responses pydantic_ai_anthropic
llama_index
"""

PARTS: dict[str, Callable[[Path], Part]] = {
    **dict.fromkeys(BY_FUNCTIONS.split(), by_functions),
    "instructor_actions": by_forced_function,
    **dict.fromkeys(("openai_chat_parallel", "anthropic_parallel"), by_functions_at_once),
    "langchain_forced_tool": by_functions_without_thoughts,
    "litellm_router": by_functions,
    "llama_index_react": by_reasons_and_actions,
    "smolagents_tools": by_tools_in_text,
    "smolagents_code": by_code,
    "smolagents_structured_code": by_code_in_json,
}

TEAMS: dict[str, Callable[[Path], Part]] = {
    "openai_responses_turns": by_functions_and_thanks,
    "openai_agents_handoff": by_handoff,
    "openai_agents_guardrail": by_functions_and_thanks,
    "pydantic_ai_retries": by_functions_asked_again,
    "smolagents_planning": by_tools_in_text,
}
"""Tasks with more than one conversation, or with more than one request of the user."""

REPORTS = """
openai_parse openai_parse_streamed openai_json_object openai_forced_function openai_responses_parse
anthropic_parse anthropic_forced_tool
litellm_response_format litellm_response_format_hosted_vllm litellm_response_format_anthropic
langchain_json_schema langchain_function_calling langchain_json_mode langchain_anthropic_report
langchain_anthropic_json_schema
pydantic_ai_tool_output pydantic_ai_native_output pydantic_ai_prompted_output pydantic_ai_responses_output
pydantic_ai_anthropic_output
instructor_tools_strict instructor_json instructor_markdown instructor_json_schema instructor_responses
instructor_partial instructor_anthropic
llama_index_report
openai_agents_output
"""

WITHOUT_EDITS: dict[str, Callable[[Path], Part]] = {
    **dict.fromkeys(REPORTS.split(), by_report),
    **dict.fromkeys(("openai_completions", "litellm_text_completion"), by_text),
    **dict.fromkeys(
        ("openai_chat_image", "openai_responses_image", "anthropic_image", "langchain_image", "litellm_image"), by_sight
    ),
}


def library(name: str, part: Callable[[Path], Part], **fields: Any) -> Program:
    command = (str(PYTHON_ENV / "bin" / "python"), str(Path(__file__).parent / "tasks.py"), name, "{url}", "{model}")
    return Program(command=command, part=part, **fields)


LIBRARIES = {
    **{name: library(name, part) for name, part in PARTS.items()},
    **{name: library(name, part, leaves=BEFORE, grows=False) for name, part in WITHOUT_EDITS.items()},
    **{name: library(name, part, grows=False) for name, part in TEAMS.items()},
    "anthropic_tool_runner": library("anthropic_tool_runner", by_functions, refused="thread"),
}
