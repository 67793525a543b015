"""Owns what the cached prefix of a long conversation depends on: an answer that is sent back becomes the same text
again, up to its turn's end.
Never uses a model's own template, which is others' work:
the templates here write the same text (NOTES.md says of which)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from serve_app.api.requests.messages import Message
from serve_app.api.text.chat_template import ChatTemplate
from serve_app.parsing.deltas import Parsed, collect
from serve_app.parsing.reasoning_parsers import reasoning_parser, suggest_reasoning_parser
from serve_app.parsing.tools import TOOL_PARSERS, suggest_tool_parser

TEMPLATES = Path(__file__).parent / "templates"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}},
            },
        },
    }
]
ARGUMENTS = '{"city": "Århus \\"x\\"", "days": 3, "tags": ["a", null]}'
PLAIN = '{"city": "Oslo"}'


@dataclass(frozen=True)
class Turn:
    """A turn of the model. `text` is what it writes after the prompt, as it was trained to;
    `end` is what ends its turn.
    `comes_back` is what the template makes of the text when that differs, and `why`. `forgets` is the part of the
    prompt's own end that the template does not write again."""

    template: str
    what: str
    text: str
    end: str
    comes_back: str | None = None
    why: str = ""
    forgets: str = ""
    is_asked_again: bool = False
    """Whether the user speaks next, and not a tool."""
    options: Mapping[str, Any] = field(default_factory=dict)


def _qwen3(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'


_CODER = (
    '<tool_call>\n<function=weather>\n<parameter=city>\nÅrhus "x"\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
    '<parameter=tags>\n["a", null]\n</parameter>\n</function>\n</tool_call>'
)
_GLM = (
    '\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Århus "x"</arg_value>\n<arg_key>days</arg_key>\n'
    '<arg_value>3</arg_value>\n<arg_key>tags</arg_key>\n<arg_value>["a", null]</arg_value>\n</tool_call>'
)
_GLM_47 = _GLM.replace("\n", "")
_START, _ANALYSIS = "<|start|>assistant", "<|channel|>analysis<|message|>"
_TO = f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}"
_V3 = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"
_V31 = f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_EOS = "<｜end▁of▁sentence｜>"


def _kimi(number: int) -> str:
    return f"<|tool_call_begin|>functions.weather:{number}<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"


_KIMI = f"<|tool_calls_section_begin|>{_kimi(0)}{_kimi(1)}<|tool_calls_section_end|>"
DROPPED = "thoughts of turns before the user's last one are dropped"

TURNS = [
    Turn(
        "qwen3",
        "thoughts, text and calls",
        f"<think>\nHm.\n</think>\n\nI look.\n{_qwen3(ARGUMENTS)}\n{_qwen3(PLAIN)}",
        "<|im_end|>\n",
    ),
    Turn(
        "qwen3",
        "calls alone",
        f"{_qwen3(ARGUMENTS)}",
        "<|im_end|>\n",
        options={"enable_thinking": False},
        comes_back=_qwen3(ARGUMENTS),
        why="the closed block that turns thinking off is not written for a turn in the past",
        forgets="<think>\n\n</think>\n\n",
    ),
    Turn("qwen3", "an answer", "<think>\nHm.\n</think>\n\nParis.", "<|im_end|>\n", "Paris.", DROPPED, "", True),
    Turn("qwen3_5", "thoughts, text and calls", f"Hm.\n</think>\n\nI look.\n\n{_CODER}\n{_CODER}", "<|im_end|>\n"),
    Turn("qwen3_5", "thoughts and a call", f"Hm.\n</think>\n\n{_CODER}", "<|im_end|>\n"),
    Turn("qwen3_5", "an answer", "Hm.\n</think>\n\nParis.", "<|im_end|>\n", "Paris.", DROPPED, "<think>\n", True),
    Turn("smollm3", "an answer", "Paris.", "<|im_end|>\n", is_asked_again=True),
    Turn("smollm3", "a call", _qwen3(ARGUMENTS), "<|im_end|>\n", "", "the template writes no calls of the past"),
    Turn("llama3", "a call", f'{{"name": "weather", "parameters": {ARGUMENTS}}}', "<|eot_id|>"),
    Turn("llama3", "an answer", "Paris.", "<|eot_id|>", is_asked_again=True),
    Turn("llama4", "calls", '[weather(city="Oslo"), weather(city="Bergen")]', "<|eot|>"),
    Turn(
        "llama4",
        "a number",
        "[weather(days=3)]",
        "<|eot|>",
        '[weather(days="3")]',
        "the template writes every value between quotes",
    ),
    Turn("gemma3", "calls", '[weather(city="Oslo"), weather()]', "<end_of_turn>\n"),
    Turn(
        "gemma3",
        "two arguments",
        '[weather(city="Oslo", days=3)]',
        "<end_of_turn>\n",
        '[weather(city="Oslo"days=3)]',
        "the template forgets the comma between arguments",
    ),
    Turn(
        "mistral_small_3_2",
        "calls",
        f"[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{ARGUMENTS}[TOOL_CALLS]weather[CALL_ID]F6g7H8i9J[ARGS]{PLAIN}",
        "</s>",
    ),
    Turn(
        "mistral_small_3_2",
        "text and a call",
        f"I look.[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{PLAIN}",
        "</s>",
        f"[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{PLAIN}",
        "the template writes no text beside calls",
    ),
    Turn(
        "ministral_3",
        "thoughts, text and calls",
        f"[THINK]Hm.[/THINK]I look.[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]weather[ARGS]{PLAIN}",
        "</s>",
    ),
    Turn("ministral_3", "an answer", "[THINK]Hm.[/THINK]Paris.", "</s>", is_asked_again=True),
    Turn("gpt_oss", "a call as the template writes it", f"{_ANALYSIS}Hm.<|end|>{_START}{_TO}", "<|call|>"),
    Turn("gpt_oss", "a call without thoughts", _TO, "<|call|>"),
    Turn(
        "gpt_oss",
        "a call as the model writes it",
        f"{_ANALYSIS}Hm.<|end|>{_START}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        f"{ARGUMENTS}",
        "<|call|>",
        f"{_ANALYSIS}Hm.<|end|>{_START}{_TO}",
        "the template has the recipient before the channel",
    ),
    Turn(
        "gpt_oss",
        "a preamble",
        f"{_ANALYSIS}Hm.<|end|>{_START}<|channel|>commentary<|message|>I look.<|end|>{_START}{_TO}",
        "<|call|>",
        f"{_ANALYSIS}Hm.\nI look.<|end|>{_START}{_TO}",
        "the template has no preamble, and writes it as what was thought",
    ),
    Turn(
        "gpt_oss",
        "an answer",
        f"{_ANALYSIS}Hm.<|end|>{_START}<|channel|>final<|message|>Paris.",
        "<|end|>",
        "<|channel|>final<|message|>Paris.",
        DROPPED,
        "",
        True,
    ),
    Turn("gpt_oss", "an answer without thoughts", "<|channel|>final<|message|>Paris.", "<|end|>", is_asked_again=True),
    Turn("deepseek_v3", "text and calls", f"I look.{_SECTION}{_V3}\n{_V3}{_SECTION_END}", _EOS),
    Turn("deepseek_v3", "thoughts", "<think>\nHm.\n</think>\n\nParis.", _EOS, "Paris.", DROPPED, "", True),
    Turn("deepseek_v3_1", "text and calls", f"I look.{_SECTION}{_V31}{_V31}{_SECTION_END}", _EOS),
    Turn(
        "deepseek_v3_1",
        "thoughts",
        "Hm.</think>Paris.",
        _EOS,
        "</think>Paris.",
        DROPPED,
        "<think>",
        True,
        {"thinking": True},
    ),
    Turn("glm_4_6", "thoughts, text and calls", f"\n<think>Hm.</think>\nI look.{_GLM}{_GLM}", "<|observation|>"),
    Turn("glm_4_6", "calls without thoughts", _GLM, "<|observation|>", options={"enable_thinking": False}),
    Turn(
        "glm_4_6",
        "an answer",
        "\n<think>Hm.</think>\nParis.",
        "<|user|>",
        "\n<think></think>\nParis.",
        DROPPED,
        "",
        True,
    ),
    Turn("glm_4_7", "thoughts, text and calls", f"Hm.</think>I look.{_GLM_47}{_GLM_47}", "<|observation|>"),
    Turn("glm_4_7", "a call without thoughts", _GLM_47, "<|observation|>", options={"enable_thinking": False}),
    Turn("glm_4_7", "an answer", "Hm.</think>Paris.", "<|user|>", "</think>Paris.", DROPPED, "<think>", True),
    Turn(
        "glm_4_7",
        "an answer whose thoughts are kept",
        "Hm.</think>Paris.",
        "<|user|>",
        is_asked_again=True,
        options={"clear_thinking": False},
    ),
    Turn("kimi_k2", "thoughts, text and calls", f"<think>Hm.</think>I look.{_KIMI}", "<|im_end|>"),
    Turn("kimi_k2", "an answer", "<think>Hm.</think>Paris.", "<|im_end|>", "<think></think>Paris.", DROPPED, "", True),
    Turn(
        "phi4_mini",
        "text and calls",
        f'I look.<|tool_call|>{{"name": "weather", "arguments": {ARGUMENTS}}}<|/tool_call|>'
        '<|tool_call|>{"name": "weather", "arguments": {}}<|/tool_call|>',
        "<|end|>",
    ),
]


def _template(name: str) -> ChatTemplate:
    return ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(), {"bos_token": "<s>", "eos_token": _eos(name)})


def _eos(name: str) -> str:
    return "</s>" if "mistral" in name or "ministral" in name else "<eos>"


def _read(template: ChatTemplate, prompt: str, text: str) -> tuple[str, Parsed]:
    """Return the thoughts, and the rest, as read by the parsers that the template itself chooses."""
    thoughts = suggest_reasoning_parser(template.source)
    content = text
    reasoning = ""
    if thoughts is not None:
        reader = reasoning_parser(thoughts.parser, prompt[-100:])
        splits = [reader.push(text), reader.flush()]
        reasoning, content = ("".join(parts) for parts in zip(*[(s.reasoning, s.content) for s in splits], strict=True))
    calls = suggest_tool_parser(template.source)
    assert calls is not None, "the template shows no format of calls"
    parser = TOOL_PARSERS[calls.parser](TOOLS)
    return reasoning, collect([*parser.push(content), *parser.flush()])


def _next_messages(turn: Turn, reasoning: str, parsed: Parsed) -> list[dict[str, Any]]:
    """Return the messages with which a client sends the answer back."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in parsed.calls
    ]
    answer = {"role": "assistant", "content": parsed.content or None, "reasoning_content": reasoning or None}
    sent = [answer | ({"tool_calls": calls} if calls else {})]
    sent += [{"role": "tool", "content": "fine", "tool_call_id": call.id} for call in parsed.calls]
    if turn.is_asked_again:
        sent.append({"role": "user", "content": "And then?"})
    return [Message.model_validate(message).for_template() for message in sent]


@pytest.mark.parametrize("turn", TURNS, ids=lambda turn: f"{turn.template}: {turn.what}")
def test_an_answer_that_comes_back_is_the_same_text_or_differs_as_its_template_has_it(turn: Turn) -> None:
    template = _template(turn.template)
    asked = [{"role": "user", "content": "How is the weather?"}]
    prompt = template.render(asked, tools=TOOLS, **turn.options)
    reasoning, parsed = _read(template, prompt, turn.text)
    assert bool(parsed.calls) is not turn.is_asked_again
    later = template.render([*asked, *_next_messages(turn, reasoning, parsed)], tools=TOOLS, **turn.options)
    if turn.comes_back is None:
        assert later.startswith(prompt + turn.text + turn.end)
        return
    assert turn.why
    assert not later.startswith(prompt + turn.text), "the template does not differ any more: say so"
    assert prompt.endswith(turn.forgets)
    assert later.startswith(prompt.removesuffix(turn.forgets) + turn.comes_back + turn.end)


def test_every_template_has_a_turn_and_every_parser_a_template() -> None:
    names = {path.stem for path in TEMPLATES.glob("*.jinja")}
    assert names == {turn.template for turn in TURNS}
    chosen = [suggest_tool_parser(_template(name).source) for name in names]
    assert {one.parser for one in chosen if one} == set(TOOL_PARSERS)


@pytest.mark.parametrize("name", sorted({turn.template for turn in TURNS}))
def test_tools_can_be_given_to_every_template(name: str) -> None:
    template = _template(name)
    assert "tools" in template.variables
    assert "weather" in template.render([{"role": "user", "content": "a"}], tools=TOOLS)
