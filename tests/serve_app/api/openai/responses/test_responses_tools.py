"""Owns the contract of tools other than plain functions: namespaces, and free-form tools with their grammars.
Never judges a patch by the grammar that constrained it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from serve_app.api.openai.responses.input_text import InputReader, arguments_of, input_of
from serve_app.api.openai.responses.patterns import MAX_CHARS
from serve_app.engines.engine_client import ServedModel
from serve_app.parsing.call_grammars import CALL_GRAMMARS
from serve_app.parsing.deltas import collect
from serve_app.parsing.tools import TOOL_PARSERS
from tests.serve_app.api.generation.test_tools import CALLER, prompt_of, saying
from tests.serve_app.api.openai.responses.test_responses import TOOLS, ask, events, valid, whole_and_streamed
from tests.support import patches
from tests.support.grammar_walks import Walker

pytestmark = pytest.mark.anyio

FAMILIES = sorted(CALL_GRAMMARS)
LARK = {"type": "grammar", "syntax": "lark", "definition": patches.GRAMMAR}
PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": LARK}
NOTE: dict[str, Any] = {"type": "custom", "name": "note"}
FORCED = {"type": "custom", "name": "apply_patch"}
AGENTS: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "Others.",
    "tools": [{"type": "function", "name": "close", "parameters": {"type": "object"}, "strict": False}, NOTE],
}
WALKER = Walker(closers=("\\n*** End Patch", "*** End Patch", "\\n", '"}'))


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


# --- namespaces -----------------------------------------------------------------------------------------------------


async def test_tools_of_a_namespace_are_told_as_functions_and_called_by_both_names() -> None:
    text = call("agents__close", "{}") + call("agents__note", arguments_of("a\nb")) + call("weather", "{}")
    response = await whole_and_streamed(text, tools=[AGENTS, *TOOLS])
    called = [(item["type"], item.get("namespace"), item["name"]) for item in response["output"]]
    assert called == [
        ("function_call", "agents", "close"),
        ("custom_tool_call", "agents", "note"),
        ("function_call", None, "weather"),
    ]
    assert response["output"][1]["input"] == "a\nb"
    inner = [{name: tool[name] for name in ("type", "name")} for tool in response["tools"][0]["tools"]]
    assert inner == [{"type": "function", "name": "close"}, {"type": "custom", "name": "note"}]
    client = saying("x")
    items = [{name: value for name, value in item.items() if value is not None} for item in response["output"]]
    assert (await ask(client, input=items, tools=[AGENTS, *TOOLS])).status == 200
    assert "!agents__close!agents__note!weather" in prompt_of(client)


async def test_names_that_would_be_alike_or_too_long_are_told_apart() -> None:
    long = {"type": "namespace", "name": "n" * 70, "tools": [TOOLS[0] | {"name": "t" * 70 + end} for end in "ab"]}
    twin = TOOLS[0] | {"name": "agents__close"}
    client = saying("x")
    assert (await ask(client, tools=[twin, AGENTS, long])).status == 200
    names = [tool["function"]["name"] for tool in json.loads(prompt_of(client)[1 : prompt_of(client).index("[user")])]
    assert len(set(names)) == 5
    assert max(map(len, names)) == 128
    response = await whole_and_streamed(call(names[4], "{}"), tools=[twin, AGENTS, long])
    assert (response["output"][0]["namespace"], response["output"][0]["name"]) == ("n" * 70, "t" * 70 + "b")


async def test_any_number_of_tools_that_would_be_alike_are_told_apart_and_each_is_called() -> None:
    spaces = [{"type": "namespace", "name": name, "tools": [TOOLS[0] | {"name": "b"}]} for name in ("a", "a_", "a__")]
    shells = [{"type": "function", "name": "shell", "strict": False}, {"type": "shell"}]
    tools = [*spaces, *shells]
    told = []
    for _ in range(2):
        client = saying("x")
        assert (await ask(client, tools=tools)).status == 200
        prompt = prompt_of(client)
        told.append([tool["function"]["name"] for tool in json.loads(prompt[1 : prompt.index("[user")])])
    assert told[0] == told[1]
    assert len(set(told[0])) == 5
    response = await whole_and_streamed("".join(call(name, "{}") for name in told[0][:3]), tools=tools)
    assert [item["namespace"] for item in response["output"]] == ["a", "a_", "a__"]


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "function", "name": "close"}, "agents__close"),
        ({"type": "function", "name": "agents__close"}, "agents__close"),
        ({"type": "function", "name": "close", "namespace": "agents"}, "agents__close"),
        ({"type": "custom", "name": "note"}, "agents__note"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "note"}]}, "agents__note"),
    ],
    ids=str,
)
async def test_a_tool_of_a_namespace_can_be_chosen(choice: Any, name: str) -> None:
    client = saying("x")
    assert (await ask(client, tools=[AGENTS, *TOOLS], tool_choice=choice)).status == 200
    grammar = client.submissions[0].sampling.grammar
    assert grammar is not None
    assert f'"name": "{name}"' in WALKER.walk(grammar, 0)


@pytest.mark.parametrize(
    ("tools", "choice", "told"),
    [
        ([AGENTS], {"type": "function", "name": "note"}, "not among the tools"),
        ([AGENTS], {"type": "custom", "name": "close"}, "not among the tools"),
        ([AGENTS, AGENTS | {"name": "other"}], {"type": "function", "name": "close"}, "several namespaces"),
        ([], {"type": "custom", "name": "close"}, "not among the tools"),
    ],
    ids=str,
)
async def test_a_choice_of_nothing_or_of_two_is_refused(tools: Any, choice: Any, told: str) -> None:
    answer = await ask(saying("x"), tools=tools, tool_choice=choice)
    assert (answer.status, answer.error["param"]) == (400, "tool_choice")
    assert told in answer.error["message"]


async def test_the_grammars_of_all_tools_have_one_limit() -> None:
    doubled = "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(10))
    large = [
        PATCH | {"name": f"t{end}", "format": LARK | {"definition": f"start: a0\n{doubled}a10: /x{end}/\n"}}
        for end in range(40)
    ]
    assert (await ask(saying("x"), tools=large[:1])).status == 200
    namespace = AGENTS | {"tools": large[1:]}
    answer = await ask(saying("x"), tools=[large[0], namespace])
    assert (answer.status, answer.error["param"].rpartition(".")[2]) == (400, "format")
    assert answer.error["param"].startswith("tools.1.tools.")
    assert str(MAX_CHARS) in answer.error["message"]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"strict": True, "parameters": {"not": {}}}, "tools.1.tools.0.parameters"),
        ({"name": "a b"}, "tools.1.tools.0.name"),
        ({"type": "web_search"}, "tools.1.tools.0"),
    ],
    ids=str,
)
async def test_a_fault_of_a_tool_in_a_namespace_is_told_by_its_place(tool: Any, param: str) -> None:
    inner = [AGENTS["tools"][0] | tool]
    answer = await ask(saying("x"), tools=[{"type": "web_search"}, AGENTS | {"tools": inner}])
    assert (answer.status, answer.error["param"]) == (400, param), answer.json


# --- free text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "plain", 'a "quoted"\n\\ path\t', "🦜é\u2028\x01", patches.draw(random.Random(1))]
)
@pytest.mark.parametrize("is_ascii", [False, True])
async def test_the_input_of_a_call_is_text_however_it_was_written(text: str, is_ascii: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    response = await whole_and_streamed(call("note", arguments), tools=[NOTE])
    (item,) = response["output"]
    assert (item["type"], item["name"], item["input"], item["status"]) == (
        "custom_tool_call",
        "note",
        text,
        "completed",
    )
    assert item["id"].startswith("ctc_")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a", "more": 1}', "a"),
        ('{"why": "b", "input": "a"}', "a"),
        ('{"patch": "a"}', "a"),
        ('{ "input" :"a"}', "a"),
        ("{}", "{}"),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
        ('{"input": "a\\ud83e\\udd9c\\ud83e!"}', "a🦜\ufffd!"),
        ('{"input": "a\\x"}', "a\\x"),
        ('{"text": "\\ud800a\\ud83e\\udd9c"}', "\ufffda🦜"),
        ('{"inp', ""),
        ('{"input": "a\\', "a"),
        ('{"input": "a\\ud83e\\ud', "a"),
    ],
)
def test_arguments_that_nothing_constrained_are_read_as_far_as_they_can_be(arguments: str, text: str) -> None:
    assert input_of(arguments) == text
    reader = InputReader()
    assert "".join(map(reader.push, arguments)) + reader.finish() == text


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [("", '{"input": "a"}', "a"), ('{"input": "a"', "}", "a"), ("", "{", ""), ('{"text":', '"b"}', "b")],
)
def test_white_space_before_and_after_an_input_is_read_once(before: str, after: str, text: str) -> None:
    """Reading it again for each character would take minutes here."""
    reader = InputReader()
    found = reader.push(before) + "".join(reader.push(" ") for _ in range(400_000))
    assert found + reader.push(after) + reader.finish() == text


@pytest.mark.parametrize("name", ["input", "text"])
async def test_half_of_a_pair_is_no_failure_of_the_answer(name: str) -> None:
    response = await whole_and_streamed(call("note", f'{{"{name}": "a\\ud800"}}'), tools=[NOTE])
    assert response["output"][0]["input"] == "a\ufffd"


async def test_an_input_comes_as_it_is_written() -> None:
    """Not only once it is complete."""
    found = events(await ask(saying(call("note", arguments_of("abcdefgh" * 9)), 40), tools=[NOTE], stream=True))
    deltas = [one["delta"] for one in found if one["type"] == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 10
    assert "".join(deltas) == "abcdefgh" * 9


async def test_the_model_is_told_of_one_argument_and_of_the_grammar() -> None:
    client = saying("x")
    response = valid((await ask(client, tools=[PATCH, NOTE])).json)
    prompt = prompt_of(client)
    patch, note = (tool["function"] for tool in json.loads(prompt[1 : prompt.index("[user")]))
    assert (
        patch["description"]
        == f"Edits files.\n\nThe argument input is text of this Lark grammar:\n{patches.GRAMMAR}".strip()
    )
    assert list(patch["parameters"]["properties"]) == ["input"]
    assert "pattern" not in json.dumps(patch["parameters"])
    assert note["description"] == "Takes any text as its argument input."
    assert response["tools"] == [PATCH, NOTE]


async def test_calls_of_free_text_and_their_outputs_can_be_sent_back() -> None:
    client = saying("x")
    given = [
        {
            "type": "custom_tool_call",
            "call_id": "c",
            "name": "note",
            "input": "a\n",
            "id": "ctc_1",
            "status": "completed",
        },
        {"type": "custom_tool_call_output", "call_id": "c", "output": "kept"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "too"}]},
    ]
    assert (await ask(client, input=given)).status == 200
    assert prompt_of(client) == "[assistant:!note][tool:kept][tool:too]>"


def forced_family(family: str) -> ServedModel:
    return replace(CALLER, tool_parser=family)


async def grammar_of(family: str, **fields: Any) -> str:
    client = saying("x")
    answer = await ask(client, forced_family(family), **fields)
    assert answer.status == 200, answer.json
    grammar = client.submissions[0].sampling.grammar
    assert grammar is not None
    return grammar


def read(family: str, text: str) -> list[tuple[str, str]]:
    schema = {"type": "object", "properties": {"input": {"type": "string"}}}
    told = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("apply_patch", "note")]
    parser = TOOL_PARSERS[family](told)
    found = collect([*parser.push(text), *parser.flush()])
    assert found.content == ""
    return [(one.name, input_of(one.arguments)) for one in found.calls]


def written(family: str, text: str) -> str:
    """Write the call as a model of the family does."""
    arguments = arguments_of(text)
    deepseek = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    )
    return {
        "deepseek_v3": f"{deepseek[0]}function{deepseek[1]}apply_patch\n```json\n{arguments}\n```{deepseek[2]}",
        "deepseek_v31": f"{deepseek[0]}apply_patch{deepseek[1]}{arguments}{deepseek[2]}",
        "glm45": f"<tool_call>apply_patch\n<arg_key>input</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.apply_patch:0<|tool_call_argument_begin|>"
        f"{arguments}<|tool_call_end|><|tool_calls_section_end|>",
        "openai": f"<|channel|>commentary to=functions.apply_patch <|constrain|>json<|message|>{arguments}",
        "phi4_mini_json": f'functools[{{"name": "apply_patch", "arguments": {arguments}}}]',
        "hermes": call("apply_patch", arguments),
        "llama3_json": f'{{"name": "apply_patch", "parameters": {arguments}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "apply_patch", "arguments": {arguments}}}]',
        "pythonic": f"[apply_patch(input={json.dumps(text, ensure_ascii=False)})]",
        "qwen3_coder": "<tool_call>\n<function=apply_patch>\n<parameter=input>\n"
        f"{text}\n</parameter>\n</function>\n</tool_call>",
    }[family]


async def check_patches(family: str, num: int) -> None:
    """Check that each of `num` patches can be made as a call and is read back unchanged, and that a spoilt one can be
    made only if it is still a patch."""
    grammar, rng = await grammar_of(family, tools=[PATCH, NOTE], tool_choice=FORCED), random.Random(family)
    for _ in range(num):
        text = patches.draw(rng)
        assert patches.is_patch(text)
        assert WALKER.admits(grammar, written(family, text)), text
        assert read(family, written(family, text)) == [("apply_patch", text)]
        place = rng.randrange(len(text))
        spoilt = text[:place] + rng.choice("\n*@x") + text[place + 1 :]
        assert WALKER.admits(grammar, written(family, spoilt)) == patches.is_patch(spoilt), spoilt


async def check_walks(family: str, num: int) -> None:
    """Check that each of `num` forced answers of a model that writes at random is this call, with a patch."""
    grammar = await grammar_of(family, tools=[PATCH, NOTE], tool_choice=FORCED)
    for seed in range(num):
        text = WALKER.walk(grammar, (family, seed))
        ((name, given),) = read(family, text)
        assert name == "apply_patch"
        assert patches.is_patch(given), text


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_forced_patch_is_one_and_any_can_be_made(family: str) -> None:
    await check_patches(family, 20)
    await check_walks(family, 8)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_thousand_forced_patches(family: str) -> None:
    await check_patches(family, 1000)
    await check_walks(family, 200)


async def test_a_call_that_may_be_made_is_constrained_where_it_begins() -> None:
    grammar = await grammar_of("hermes", tools=[PATCH, NOTE])
    good, bad = (call("apply_patch", arguments_of(text)) for text in (patches.draw(random.Random(2)), "no patch"))
    assert WALKER.admits(grammar, f"Look: {good}")
    assert not WALKER.admits(grammar, bad)
    assert WALKER.admits(grammar, call("note", arguments_of("any")))


async def test_a_regex_constrains_all_of_the_text() -> None:
    tool = NOTE | {"format": {"type": "grammar", "syntax": "regex", "definition": "[a-c]+|/x"}}
    for family in FAMILIES:
        grammar = await grammar_of(family, tools=[tool], tool_choice="required", parallel_tool_calls=False)
        for seed in range(5):
            ((_, text),) = read(family, WALKER.walk(grammar, seed))
            assert text == "/x" or set(text) <= set("abc")


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ({"syntax": "lark", "definition": 'start: "(" start ")"'}, ": line 1: the rule 'start' never ends"),
        (
            {"syntax": "lark", "definition": 'start: A | "(" start ")"\n\nA: /a*?/'},
            ": line 3: the terminal 'A': a regex has",
        ),
        ({"syntax": "lark", "definition": "start: b\nb[lazy]: /a/"}, ": line 2: the rule b has '[lazy]'"),
        ({"syntax": "lark", "definition": "start: b\nb: a"}, ': line 2, column 4: unknown name: "a"'),
        ({"syntax": "regex", "definition": "("}, "unclosed group"),
        ({"syntax": "regex", "definition": "(?=a)b"}, "look-around"),
        ({"syntax": "regex", "definition": "a|^b"}, "a regex's '^' is not supported here"),
        ({"syntax": "regex", "definition": "(?m)^a$"}, "lookarounds"),
        ({"syntax": "regex", "definition": "(?x) a # b"}, "a regex's flag 'x'"),
        ({"syntax": "regex", "definition": r"\ba"}, r"\b"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "name": "note"},
        "required",
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "note"}]},
    ],
    ids=str,
)
async def test_a_grammar_that_cannot_be_kept_is_refused_where_the_call_is_forced(
    form: Any, told: str, choice: Any
) -> None:
    client = saying("x")
    tools = [*TOOLS, NOTE | {"format": {"type": "grammar"} | form}]
    answer = await ask(client, tools=tools, tool_choice=choice)
    assert (answer.status, answer.error["param"]) == (400, "tools.1.format")
    assert "the grammar of the tool 'note' cannot be kept" in answer.error["message"]
    assert told in answer.error["message"]
    assert not client.submissions
    another = await ask(saying("x"), tools=tools, tool_choice={"type": "function", "name": "weather"})
    assert another.status == 200
