"""Owns what a scripted engine answers in a task, chosen by what the prompt shows of the task so far.
Never computes a token, and never answers from what the prompt does not show: a tool's result that got lost ends the
task."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.protocol import Event, Finished, FinishReason, Scheduled, Submission, Token, Usage
from serve_app.api.text.chat_template import ChatTemplate
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import StreamRecord
from serve_app.engines.lone_engine import LoneEngine

TOKENS_AN_ITEM = 3
THOUGHT = "<think>\nThe next step"
"""The beginning of every thought."""
ASIDE = "Greeting"
"""The answer to a prompt that is no step of the task: a request for the conversation's title, for example."""

IMAGE = "<gh_stars>"
"""Stands for an image: a special token of the default model's vocabulary that none of the programs writes."""

# Qwen3's form: ChatML, functions in the system turn, calls and results in tags, and thoughts of the current turn only.
TEMPLATE = """\
{%- macro shown(content) %}
    {%- if content is string %}{{- content }}{% else %}
        {%- for part in content or [] %}{{- '<gh_stars>' if part.type == 'image' else part.text }}{% endfor %}
    {%- endif %}
{%- endmacro %}
{%- set ns = namespace(last_query=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role in ('system', 'developer') %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}
    {{- '\\n</tools>\\n\\nA call is a JSON object with name and arguments in its own tags.<|im_end|>\\n' }}
{%- elif messages[0].role in ('system', 'developer') %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- set content = shown(m.content) %}
    {%- if m.role in ('system', 'developer') %}
        {%- if not loop.first %}{{- '<|im_start|>system\\n' + content + '<|im_end|>\\n' }}{% endif %}
    {%- elif m.role == 'user' %}
        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if m.reasoning_content and loop.index0 > ns.last_query %}
            {{- '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {%- if not loop.first or content %}{{- '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""


def use_template(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with the template above in place of its own."""
    tokenizer._chat_template = ChatTemplate(TEMPLATE, {})
    return tokenizer


class Part(Protocol):
    def answer(self, prompt: str) -> str:
        """Return what the model says to a rendered prompt."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """One step of a task. `shows` is what the step's result must contain; otherwise the model gives up."""

    tool: str
    arguments: Mapping[str, Any]
    shows: str = ""

    def text(self) -> str:
        call = json.dumps({"name": self.tool, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"


Together = tuple[Call, ...]
"""Calls of one turn."""


def _calls_of(step: Call | Together) -> Together:
    return (step,) if isinstance(step, Call) else step


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """Calls one tool after another, each after the result of the one before, and then reports how it went."""

    steps: Sequence[Call | Together]
    final: str
    thinks: bool = False

    def answer(self, prompt: str) -> str:
        tools, _, talk = prompt.partition("</tools>")
        offered = [f'"name": "{_calls_of(step)[0].tool}"' in tools for step in self.steps]
        results = [part.partition("\n</tool_response>")[0] for part in talk.split("<tool_response>\n")[1:]]
        for step, is_offered in zip(self.steps, offered, strict=True):
            calls = _calls_of(step)
            told, results = results[: len(calls)], results[len(calls) :]
            for call, result in zip(calls, told, strict=False):
                if call.shows not in result:
                    return f"The result of {call.tool} does not show {call.shows!r} but: {result}"
            if len(told) < len(calls):
                names = " and ".join(call.tool for call in calls)
                calling = self._thought(f"is {names}.") + "\n".join(call.text() for call in calls)
                return calling if is_offered else ASIDE
        return self._thought("is the answer.") + self.final if any(offered) else ASIDE

    def _thought(self, text: str) -> str:
        return f"{THOUGHT} {text}\n</think>\n\n" if self.thinks else ""


@dataclass(frozen=True, slots=True)
class Texts:
    """Answers in text alone: gives the last answer whose sign the prompt shows."""

    answers: Sequence[tuple[str, str]]

    def answer(self, prompt: str) -> str:
        return next((text for sign, text in reversed(self.answers) if sign in prompt), ASIDE)


@dataclass(frozen=True, slots=True)
class Scenes:
    """One script for each of several requests: follows the last one whose sign the prompt shows, from that sign on."""

    scenes: Sequence[tuple[str, Part]]

    def answer(self, prompt: str) -> str:
        tools, mark, talk = prompt.rpartition("</tools>")
        for sign, part in reversed(self.scenes):
            _, found, after = talk.rpartition(sign)
            if found:
                return part.answer(tools + mark + after)
        return ASIDE


@dataclass(slots=True)
class ScriptedModel(LoneEngine):
    """An engine client that follows a script. It keeps to `max_tokens`, and ends with its end-of-turn token."""

    tokenizer: Tokenizer
    part: Part
    prompts: list[str] = field(default_factory=list)

    async def stream(
        self, submission: Submission, *, session: str | None = None, record: StreamRecord | None = None
    ) -> AsyncGenerator[list[Event], None]:
        name, prompt = submission.request_id, self.tokenizer.decode(submission.prompt_token_ids)
        self.prompts.append(prompt)
        answer = self.tokenizer.encode(self.part.answer(prompt), add_special_tokens=False)
        most = submission.sampling.max_tokens
        said = answer if most is None else answer[:most]
        yield [Scheduled(name, 0)]
        for start in range(0, len(said), TOKENS_AN_ITEM):
            await asyncio.sleep(0)
            yield [Token(name, token) for token in said[start : start + TOKENS_AN_ITEM]]
        usage = Usage(len(submission.prompt_token_ids), len(said), 0)
        if len(said) < len(answer):
            yield [Finished(name, FinishReason.LENGTH, usage)]
        else:
            yield [Finished(name, FinishReason.STOP, usage, self.tokenizer.eos_token_id)]
