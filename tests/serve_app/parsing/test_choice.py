"""Owns the contract of `auto`: the text of the template chooses the parser, and one line of the log says why."""

from __future__ import annotations

import logging

import pytest

from serve_app.parsing.choice import chosen_parser
from serve_app.parsing.reasoning_parsers import REASONING_PARSERS, suggest_reasoning_parser
from serve_app.parsing.tools import suggest_tool_parser

HERMES = "{{ '<tool_call>\\n' }}{{ '<think>' }}{{ '</think>' }}"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    logger = logging.getLogger("serve_app")
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, logger="serve_app")
    return caplog


def test_the_log_says_which_parser_the_template_chose_and_why(lines: pytest.LogCaptureFixture) -> None:
    assert chosen_parser("tool_parser", "auto", HERMES, suggest_tool_parser) == "hermes"
    assert chosen_parser("reasoning_parser", "auto", HERMES, suggest_reasoning_parser) == "qwen3"
    assert lines.messages == [
        "tool_parser is auto: hermes, because the chat template writes '<tool_call>'.",
        "reasoning_parser is auto: qwen3, because the chat template writes '</think>'.",
    ]


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_without_a_known_format_there_is_none(template: str | None, lines: pytest.LogCaptureFixture) -> None:
    assert chosen_parser("tool_parser", "auto", template, suggest_tool_parser) is None
    assert len(lines.messages) == 1


def test_a_parser_that_is_named_is_taken_whatever_the_template_writes(lines: pytest.LogCaptureFixture) -> None:
    assert chosen_parser("tool_parser", "mistral", HERMES, suggest_tool_parser) == "mistral"
    assert chosen_parser("tool_parser", "none", HERMES, suggest_tool_parser) is None
    assert lines.messages == []


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking }}", "openai_gptoss"),
        ("{{ '[THINK]' + block.thinking + '[/THINK]' }}", "mistral"),
        ("<think>{{ rc }}</think>{{ '<|tool_calls_section_begin|>' }}", "kimi_k2"),
        ("{{ content.split('</think>')[-1] }}", "qwen3"),
        ("{{ '<|Assistant|><think>\\n' }}", "qwen3"),
        ("{{ '<|im_start|>assistant\\n' }}", None),
    ],
)
def test_a_template_that_shows_thoughts_tells_which_parser_reads_them(template: str, expected: str | None) -> None:
    found = suggest_reasoning_parser(template)
    assert (found and found.parser) == expected
    assert found is None or found.parser in REASONING_PARSERS
