"""Owns the contract of tools whose input is text of a grammar that nests:
a forced call has such a text, and can have any.
Never judges a text by what constrained it."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from serve_app.api.openai.responses import patterns
from serve_app.api.openai.responses.input_text import arguments_of
from serve_app.grammars.tool_texts import ToolText
from tests.serve_app.api.generation.test_tools import saying
from tests.serve_app.api.openai.responses.test_responses import TOOLS, ask, whole_and_streamed
from tests.serve_app.api.openai.responses.test_responses_tools import (
    FAMILIES,
    FORCED,
    NOTE,
    PATCH,
    call,
    forced_family,
    grammar_of,
    read,
    written,
)
from tests.support.grammar_walks import Walker
from tests.support.nested_languages import ARITHMETIC, LANGUAGES, Language

pytestmark = pytest.mark.anyio

WALKER = Walker(closers=('\\"', "'", "e", "end", "end\\n", "]", ")", "}", " ", "null", "1", '"}', '"}}'))
XML = 'start: element\nelement: "<" NAME ">" (element | TEXT)* "</" NAME ">"\nTEXT: /[^<>]+/\nNAME: /[a-z_]+/\n'


def tool(definition: str, syntax: str = "lark") -> dict[str, Any]:
    return PATCH | {"format": {"type": "grammar", "syntax": syntax, "definition": definition}}


def texts_of(family: str, text: str) -> list[str]:
    calls = read(family, text)
    assert {name for name, _ in calls} == {"apply_patch"}
    return [given for _, given in calls]


async def check(family: str, language: Language, num: int, num_walks: int) -> None:
    grammar, rng = await grammar_of(family, tools=[tool(language.lark)], tool_choice=FORCED), random.Random(family)
    for _ in range(num):
        text = language.draw(rng)
        assert language.has(text), text
        assert WALKER.admits(grammar, written(family, text)), text
        assert texts_of(family, written(family, text)) == [text]
        place = rng.randrange(len(text))
        spoilt = text[:place] + rng.choice("()'\"\n[1x") + text[place + 1 :]
        assert language.has(spoilt) or not WALKER.admits(grammar, written(family, spoilt)), spoilt
    for seed in range(num_walks):
        (text,) = texts_of(family, WALKER.walk(grammar, (family, seed)))
        assert language.has(text), text


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_forced_text_nests_as_its_grammar_says(family: str, language: str) -> None:
    await check(family, LANGUAGES[language], 25, 8)


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("family", ["hermes", "qwen3_coder"])
async def test_a_thousand_texts_of_grammars_that_nest(family: str, language: str) -> None:
    await check(family, LANGUAGES[language], 1000, 200)


@pytest.mark.parametrize("family", FAMILIES)
async def test_several_calls_of_several_tools_are_each_as_their_own_grammar_says(family: str) -> None:
    tools = [tool(ARITHMETIC.lark), NOTE | {"format": tool("[a-c]+", "regex")["format"]}, *TOOLS]
    allowed = [{"type": "custom", "name": name} for name in ("apply_patch", "note")]
    choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    grammar, met = await grammar_of(family, tools=tools, tool_choice=choice), set()
    for seed in range(12):
        for name, text in read(family, WALKER.walk(grammar, (family, seed))):
            met.add(name)
            assert ARITHMETIC.has(text) if name == "apply_patch" else set(text) <= set("abc"), text
    assert met == {"apply_patch", "note"}


async def test_a_call_that_may_be_made_has_a_text_that_nests() -> None:
    grammar = await grammar_of("hermes", tools=[tool(ARITHMETIC.lark)])
    good, bad = (call("apply_patch", arguments_of(text)) for text in ("((1 +\n2)", "((1)"))
    assert WALKER.admits(grammar, "Text")
    assert WALKER.admits(grammar, call("apply_patch", arguments_of("((1 +\n2))")))
    assert not WALKER.admits(grammar, good)
    assert not WALKER.admits(grammar, bad)


async def test_a_text_that_nests_is_the_input_of_the_call() -> None:
    text = '{"a": [1,\n "\\\\ é"]}'
    assert LANGUAGES["json"].has(text)
    response = await whole_and_streamed(
        call("apply_patch", arguments_of(text)), tools=[tool(LANGUAGES["json"].lark)], tool_choice=FORCED
    )
    assert [(item["type"], item["input"]) for item in response["output"]] == [("custom_tool_call", text)]


@pytest.mark.parametrize("family", FAMILIES)
async def test_rules_that_can_write_the_tag_that_ends_a_text_are_refused_where_there_is_one(family: str) -> None:
    """No single terminal contains the tag: its characters come from several."""
    client = saying("x")
    answer = await ask(client, forced_family(family), tools=[tool(XML)], tool_choice=FORCED)
    if family not in ("qwen3_coder", "glm45"):
        assert answer.status == 200
        grammar = client.submissions[0].sampling.grammar
        assert grammar is not None
        assert WALKER.admits(grammar, written(family, "<a>x<parameter></parameter></a>"))
        return
    assert (answer.status, answer.error["param"]) == (400, "tools.0.format")
    for told in ("'apply_patch'", "line 2: the rule 'element' can write", "which ends a text in this model's format"):
        assert told in answer.error["message"]
    free = await ask(saying("x"), forced_family(family), tools=[tool(XML)])
    assert free.status == 200
    assert "tools.format" in free.headers["x-chunkserve-ignored"]


@pytest.mark.parametrize("family", ["qwen3_coder", "glm45"])
async def test_a_terminal_never_has_the_tag_that_ends_a_text(family: str) -> None:
    grammar = await grammar_of(family, tools=[tool(LANGUAGES["sql"].lark)], tool_choice=FORCED)
    tag = "</parameter>" if family == "qwen3_coder" else "</arg_value>"
    for text, is_kept in ((tag[:-1], True), (f"<{tag[:-1]}\n", True), (tag, False), (f"a\n<{tag}b", False)):
        assert WALKER.admits(grammar, written(family, f"SELECT '{text}' FROM a")) is is_kept, text
    assert WALKER.admits(grammar, written(family, "SELECT a FROM b WHERE a\n<b "))


def test_the_languages_differ_from_what_is_nearly_of_them() -> None:
    """This tests the judges of the random walks."""
    for language, text in ((ARITHMETIC, "(1"), (LANGUAGES["sql"], "SELECT a, FROM b"), (LANGUAGES["json"], "[1,]")):
        assert not language.has(text)
        assert language.has({"(1": "(1)", "[1,]": "[1]"}.get(text, "SELECT a FROM b"))


async def test_a_grammar_is_never_translated_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short its request is: the work is bounded, but still takes tens of milliseconds."""
    threads, lark_text = list[int](), patterns.lark_text

    def noted(definition: str) -> ToolText:
        threads.append(threading.get_ident())
        return lark_text(definition)

    monkeypatch.setattr(patterns, "lark_text", noted)
    await ask(saying("x"), forced_family("hermes"), tools=[tool(XML)])
    assert threads
    assert threading.get_ident() not in threads
