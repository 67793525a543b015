"""Owns the contract between grammars and parsers, family by family, and is long for their number:
what a grammar of calls admits, its parser reads back as those calls.
Never trusts a grammar's author: random walks are read by the parser, and validated by the tools' schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from serve_app.grammars.check import find_fault
from serve_app.grammars.json_schema import json_schema
from serve_app.grammars.notation import GrammarRefused
from serve_app.grammars.schema_parts import subschemas
from serve_app.parsing import parameters
from serve_app.parsing.call_grammar import CallableTool, CallGrammar
from serve_app.parsing.call_grammars import CALL_GRAMMARS
from serve_app.parsing.deltas import Parsed, collect
from serve_app.parsing.tools import TOOL_PARSERS
from tests.support.grammar_walks import Walker
from tests.support.json_mutants import mutant
from tests.support.json_schemas import random_schema

FAMILIES = sorted(CALL_GRAMMARS)
BY_PARAMETER = ("glm45", "pythonic", "qwen3_coder")
MARKERS = sorted({marker for parser in TOOL_PARSERS.values() for marker in parser.markers})
WALKERS = {"text": Walker(), "special": Walker(MARKERS)}
"""To some tokenizers the tags of a family are characters, to others tokens of their own."""

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"type": "string", "enum": ["c", "f", 'a "b"\n']},
        "note": {"anyOf": [{"type": "string", "minLength": 2, "maxLength": 9}, {"type": "null"}]},
        "exact": {"type": "boolean"},
        "height": {"type": "number"},
        "where": {"$ref": "#/$defs/place"},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+$"}, "maxItems": 3},
    },
    "required": ["city", "unit", "where"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"lat": {"type": "integer"}, "next": {"$ref": "#/$defs/place"}},
            "required": ["lat"],
            "additionalProperties": False,
        }
    },
}
MOVE = {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"], "additionalProperties": False}
TOOLS = [("weather", WEATHER), ("now", None), ("move.to", MOVE)]
VALIDATORS = {name: Draft202012Validator(schema or {"maxProperties": 0}) for name, schema in TOOLS}


def grammar_of(
    family: str,
    walker: Walker,
    tools: Sequence[tuple[str, Any]] = TOOLS,
    *,
    parallel: bool = True,
    free: Sequence[str] = (),
) -> CallGrammar:
    callable_tools = [CallableTool(name, schema, f"tools.{name}", name in free) for name, schema in tools]
    return CALL_GRAMMARS[family](callable_tools, walker.specials, parallel=parallel)


def read(family: str, text: str, tools: Sequence[tuple[str, Any]] = TOOLS) -> Parsed:
    told = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in tools]
    parser = TOOL_PARSERS[family](told)
    return collect([*parser.push(text), *parser.flush()])


def check_calls(family: str, text: str) -> int:
    """Check that a text is nothing but calls; return how many."""
    found = read(family, text)
    assert found.content == ""
    for call in found.calls:
        VALIDATORS[call.name].validate(json.loads(call.arguments))
    return len(found.calls)


def test_every_parser_has_a_grammar() -> None:
    assert set(CALL_GRAMMARS) == set(TOOL_PARSERS)


@pytest.mark.parametrize("kind", WALKERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_calls_that_must_be_made_are_read_back_as_calls_by_the_schemas(family: str, kind: str) -> None:
    walker = WALKERS[kind]
    text = grammar_of(family, walker).calls().text()
    assert not find_fault(text)
    counts = [check_calls(family, walker.walk(text, (family, kind, seed))) for seed in range(20)]
    assert min(counts) == 1
    assert max(counts) > 1


@pytest.mark.parametrize("kind", WALKERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_without_parallel_calls_there_is_exactly_one(family: str, kind: str) -> None:
    walker = WALKERS[kind]
    text = grammar_of(family, walker, parallel=False).calls().text()
    assert {check_calls(family, walker.walk(text, (family, kind, seed))) for seed in range(10)} == {1}


def grammar_or_refusal(family: str, tools: Sequence[tuple[str, Any]]) -> str | GrammarRefused:
    try:
        return grammar_of(family, WALKERS["text"], tools).calls().text()
    except GrammarRefused as refused:
        return refused


@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_schema_is_kept_by_a_family_or_refused_by_the_tools_name(family: str) -> None:
    kept, seeds = 0, 80 if family in BY_PARAMETER else 25  # other families write a schema's JSON in the same way
    for seed in range(seeds):
        tools = [("act", random_schema(seed, depth=2))]
        text = grammar_or_refusal(family, tools)
        if isinstance(text, GrammarRefused):
            assert family in BY_PARAMETER, text.text
            assert text.place.startswith("tools.act")
            continue
        kept += 1
        assert not find_fault(text), text
        found = read(family, answer := WALKERS["text"].walk(text, seed), tools)
        assert found.content == "", answer
        assert found.calls
        for call in found.calls:
            Draft202012Validator(tools[0][1]).validate(json.loads(call.arguments))
    assert kept == seeds if family not in BY_PARAMETER else kept > 10


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ONE: list[tuple[str, Any]] = [("weather", CITY | {"additionalProperties": False})]
_SECTION, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
OSLO = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "weather", "parameters": {"city": "Oslo"}}',
    "pythonic": '[weather(city="Oslo")]',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]',
    "openai": ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}',
    "deepseek_v3": f"{_SECTION}<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    f'weather\n```json\n{{"city": "Oslo"}}\n```{_END}',
    "deepseek_v31": f'{_SECTION}<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{{"city": "Oslo"}}{_END}',
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>',
    "phi4_mini_json": 'functools[{"name": "weather", "arguments": {"city": "Oslo"}}]',
}
_KIMI_CALL = OSLO["kimi_k2"].removeprefix("<|tool_calls_section_begin|>").removesuffix("<|tool_calls_section_end|>")
TWICE = {
    "hermes": f"{OSLO['hermes']}\n{OSLO['hermes']}",
    "qwen3_coder": f"{OSLO['qwen3_coder']}\n{OSLO['qwen3_coder']}",
    "llama3_json": f"{OSLO['llama3_json']}; {OSLO['llama3_json']}",
    "pythonic": '[weather(city="Oslo"), weather(city="Oslo")]',
    "mistral": f"{OSLO['mistral'][:-1]}, {OSLO['mistral'][13:]}",
    "openai": f"{OSLO['openai']}<|call|><|start|>assistant{OSLO['openai']}",
    "deepseek_v3": OSLO["deepseek_v3"].replace("<｜tool▁calls▁end｜>", "\n")
    + OSLO["deepseek_v3"].removeprefix("<｜tool▁calls▁begin｜>"),
    "deepseek_v31": OSLO["deepseek_v31"].replace("<｜tool▁calls▁end｜>", "")
    + OSLO["deepseek_v31"].removeprefix("<｜tool▁calls▁begin｜>"),
    "glm45": f"{OSLO['glm45']}\n{OSLO['glm45']}",
    "kimi_k2": OSLO["kimi_k2"].replace(_KIMI_CALL, f"{_KIMI_CALL}{_KIMI_CALL.replace(':0', ':1')}"),
    "phi4_mini_json": f"{OSLO['phi4_mini_json'][:-1]}, {OSLO['phi4_mini_json'][10:]}",
}
WRONG = {
    family: [
        f"Sure. {text}",
        text.replace("weather", "wether"),
        text.replace("city", "town"),
        text.replace('{"city": "Oslo"}', "{}")
        .replace('city="Oslo"', "")
        .replace("<parameter=city>", "")
        .replace("<arg_key>", ""),
        text[:-1],
        f"{text}!",
    ]
    for family, text in OSLO.items()
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_is_admitted_as_the_models_template_writes_it_and_nothing_else_is(family: str) -> None:
    walker = WALKERS["text"]
    many, single = (grammar_of(family, walker, ONE, parallel=parallel).calls().text() for parallel in (True, False))
    assert walker.admits(many, OSLO[family])
    assert walker.admits(single, OSLO[family])
    assert walker.admits(many, TWICE[family])
    assert not walker.admits(single, TWICE[family])
    for text in WRONG[family]:
        assert not walker.admits(many, text), text


@pytest.mark.parametrize("family", FAMILIES)
def test_lazily_an_answer_is_any_text_until_it_calls(family: str) -> None:
    walker = WALKERS["text"]
    grammar = grammar_of(family, walker, ONE).lazy().text()
    for text in ("", "It rains.", "\n\nWell: <tool> (weather) \u00e9\n", OSLO[family], TWICE[family]):
        assert walker.admits(grammar, text), text
    for text in WRONG[family][1:5]:
        assert not walker.admits(grammar, text), text


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "mistral", "glm45", "deepseek_v3", "kimi_k2"])
def test_lazily_a_call_may_follow_text(family: str) -> None:
    for walker in WALKERS.values():
        grammar = grammar_of(family, walker, ONE).lazy().text()
        text = (
            OSLO[family]
            if walker is WALKERS["text"] or family != "mistral"
            else '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}'
        )
        assert walker.admits(grammar, f"Let me look.\n{text}")
        assert not walker.admits(grammar, f"Let me look.\n{text.replace('city', 'town')}")


Z = {"type": "object", "properties": {"z": {"type": "integer"}}, "required": ["z"], "additionalProperties": False}
NAMED = {"type": "object", "properties": {"name": {"type": "string"}}, "additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "answers"),
    [
        (Z, ['{"z": 1}']),
        (
            NAMED,
            ['{"name": "Ann"}', '{"name": "weather"}', '{"name": "weather", "parameters": 3}', '{"other": 1}', "{}"],
        ),
        ({"type": "object"}, ['{"name": 1}', '{"n": []}', "{}"]),
        ({"type": "array"}, ['["weather", false, null]', "[[]]", "[]"]),
        ({}, ['"weather"', "false", "null", "12"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_beside_calls_every_json_of_a_format_can_be_the_answer(
    family: str, schema: dict[str, Any], answers: list[str]
) -> None:
    """A call of Llama's began with one lexeme, `{"name": "weather", "parameters": `, and llguidance's lexer does not go
    back to `{`: with any tool to call, `{"z": 1}` could not be written."""
    walker = WALKERS["text"]
    grammar = json_schema(schema).or_else(grammar_of(family, walker, ONE).calls()).text()
    for answer in (*answers, OSLO[family], TWICE[family]):
        assert walker.admits(grammar, answer), answer
    wrong = OSLO[family].replace("city", "town")
    assert walker.admits(grammar, wrong) == (family == "llama3_json" and schema in ({}, {"type": "object"}))


def test_lazily_a_call_of_qwen3_coder_that_forgets_its_first_tag_is_constrained_too() -> None:
    walker = WALKERS["text"]
    grammar = grammar_of("qwen3_coder", walker, ONE).lazy().text()
    text = OSLO["qwen3_coder"].removeprefix("<tool_call>\n")
    assert walker.admits(grammar, text)
    assert not walker.admits(grammar, text.replace("city", "town"))


@pytest.mark.parametrize("kind", WALKERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_is_read_as_a_call_in_a_lazy_answer_is_by_the_schemas(family: str, kind: str) -> None:
    walker = WALKERS[kind]
    for parallel in (True, False):
        text = grammar_of(family, walker, parallel=parallel).lazy().text()
        for seed in range(12):
            calls = read(family, walker.walk(text, (family, kind, seed))).calls
            assert parallel or len(calls) <= 1
            for call in calls:
                VALIDATORS[call.name].validate(json.loads(call.arguments))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tool_that_is_not_strict_takes_any_arguments_and_its_neighbour_does_not(family: str) -> None:
    walker = WALKERS["text"]
    grammar = grammar_of(family, walker, [*ONE, ("now", MOVE)], free=["now"]).lazy().text()
    free = OSLO[family].replace("weather", "now").replace("city", "zone")
    assert walker.admits(grammar, free)
    assert not walker.admits(grammar, free.replace("now", "weather"))


@pytest.mark.parametrize(
    ("family", "name", "schema", "place"),
    [
        ("qwen3_coder", "f", {"properties": {"a": {"type": ["string", "integer"]}}}, "properties.a"),
        ("qwen3_coder", "f", {"properties": {"a": {"type": "string", "pattern": "^a"}}}, "properties.a"),
        ("qwen3_coder", "f", {"properties": {"a": {"enum": [1, "a"]}}}, "properties.a"),
        ("qwen3_coder", "f", {"properties": {"a": {"enum": ["</parameter>"]}}}, "properties.a"),
        ("qwen3_coder", "f", {"properties": {"a": {"$ref": "#/properties/b"}, "b": {}}}, "properties.a"),
        ("qwen3_coder", "f", {"properties": {"a<": {}}}, "properties.a<"),
        ("qwen3_coder", "f", {"properties": {"a": {}}, "minProperties": 1}, ""),
        ("qwen3_coder", "f", {"anyOf": [{"required": ["a"]}]}, ""),
        ("pythonic", "get-it", {}, ""),
        ("pythonic", "class", {}, ""),
        ("pythonic", "f", {"properties": {"a b": {}}}, "properties.a b"),
        ("pythonic", "f", {"properties": {"from": {}}}, "properties.from"),
        ("pythonic", "f", {"properties": {"a": {}}, "required": ["b"]}, ""),
        ("hermes", "f", {"type": "array"}, "type"),
        ("glm45", "f", {"properties": {"a": {"type": "string", "pattern": "^a"}}}, "properties.a"),
        ("glm45", "f", {"properties": {"a": {"enum": ["</arg_value>"]}}}, "properties.a"),
        ("kimi_k2", "f:0", {}, ""),
        ("openai", "f", {"type": "array"}, "type"),
        ("mistral", "f", {"description": "x" * 2**16}, ""),
        ("llama3_json", "f", {"properties": {"a": {"nullable": True}}}, ""),
    ],
)
def test_a_schema_that_a_family_cannot_keep_is_refused_at_its_place(
    family: str, name: str, schema: dict[str, Any], place: str
) -> None:
    with pytest.raises(GrammarRefused) as refused:
        grammar_of(family, WALKERS["text"], [(name, schema)]).calls()
    assert refused.value.place == f"tools.{name}.{place}".rstrip(".")


def test_definitions_are_read_once_however_many_parameters_refer_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each parameter walked them all: 400 of each held the event loop for seconds."""
    count = 0

    def counted(schema: Any) -> Any:
        nonlocal count
        for part in subschemas(schema):
            count += 1
            yield part

    monkeypatch.setattr(parameters, "subschemas", counted)
    size = 100
    schema = {
        "properties": {f"p{i}": {"$ref": f"#/$defs/d{i}"} for i in range(size)},
        "$defs": {f"d{i}": {"type": "integer"} for i in range(size)},
    }
    read = parameters.parameters_of(CallableTool("f", schema, "tools.f"))
    assert [parameter.schema["$defs"].keys() for parameter in read] == [schema["$defs"].keys()] * size
    assert count < 10 * size


@pytest.mark.parametrize("family", FAMILIES)
def test_a_schema_that_is_none_is_refused_and_breaks_nothing(family: str) -> None:
    rng = random.Random(20261121)
    outcomes = {"kept": 0, "refused": 0}
    for _ in range(400 if family in BY_PARAMETER else 150):
        body = mutant(rng, [{"parameters": WEATHER}])
        try:
            schema = json.loads(body)["parameters"]
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        if not isinstance(schema, dict):
            continue
        text = grammar_or_refusal(family, [("act", schema)])
        is_kept = isinstance(text, str) and not find_fault(text)
        outcomes["kept" if is_kept else "refused"] += 1
    assert min(outcomes.values()) > 10, outcomes


@pytest.mark.parametrize(
    ("value", "admitted", "refused"),
    [
        ({"type": "string"}, ["Oslo", "", "two\nlines", "</parameter", '"', "null", "5"], ["a</parameter>b"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "\u00e9\U0001f99cb"], ["a", "abcd"]),
        ({"type": ["string", "null"], "enum": ["a", None]}, ["a", "null"], ["b", "None"]),
        ({"type": "integer"}, ["5", "-12"], ['"5"', "5.5", "", "5 "]),
        ({"type": "number"}, ["5", "-1.5e-3"], ["1e999", "NaN"]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["5", "null"], ["None"]),
        ({"type": "object"}, ['{"a": 1}', "{}"], ["a"]),
        ({}, ["Oslo", "5"], []),
        ({"anyOf": [{"$ref": "#/$defs/d"}, {"type": "null"}]}, ['{"e": 1}', "null"], ["a", "{}"]),
        ({}, ['{"a": 1}', "[1]", "{a"], []),
        ({"allOf": [{"$ref": "#/$defs/d"}], "description": "x"}, ['{"e": 1}'], ["a", "{}", '"a"']),
        ({"allOf": [{"$ref": "#/$defs/colour"}], "description": "x"}, ["red"], ["blue", "null"]),
        ({"anyOf": [{"$ref": "#/$defs/union"}, {"type": "null"}]}, ["5", '{"e": 1}', "null"], ["a", '"a"', "{}"]),
        ({"enum": [1, 2]}, ["1"], ["3", "a"]),
        ({"enum": ["a", None]}, ["a", "null"], ["b"]),
        ({"const": True}, ["true"], ["True", "a"]),
        ({"properties": {"e": {"type": "integer"}}}, ['{"e": 1}', "{}"], ["a", '"a"', "5", '{"e": "a"}']),
        ({"anyOf": [{"items": {}}, {"type": "null"}]}, ["[1]", "null"], ["a", '"a"', "{}"]),
        ({"type": ["number", "null"]}, ["5", "-1.5e-3", "null"], ["1e999", "a"]),
        ({"anyOf": [{"type": "number"}, {"type": "null"}], "default": None}, ["5.5", "null"], ["1e999", "a"]),
        ({"anyOf": [{"$ref": "#/$defs/size"}, {"type": "boolean"}]}, ["5.5", "true"], ["1e999", "null"]),
        ({"anyOf": [{"type": ["number", "integer"]}, {"type": "null"}]}, ["5.5", "null"], ["1e999"]),
    ],
    ids=str,
)
def test_a_parameter_of_qwen3_coder_is_read_back_with_its_type(
    value: dict[str, Any], admitted: list[str], refused: list[str]
) -> None:
    definition = {"type": "object", "properties": {"e": {"type": "integer"}}, "required": ["e"]}
    definitions = {
        "d": definition,
        "colour": {"enum": ["red", "green"], "title": "Colour"},
        "union": {"anyOf": [{"$ref": "#/$defs/d"}, {"type": "integer"}]},
        "size": {"type": "number", "title": "Size"},
    }
    schema = {"type": "object", "properties": {"a": value}, "required": ["a"], "$defs": definitions}
    walker, tools = WALKERS["text"], [("f", schema)]
    grammar = grammar_of("qwen3_coder", walker, tools).calls().text()
    frame = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    for text in admitted:
        assert walker.admits(grammar, frame.format(text)), text
        (call,) = read("qwen3_coder", frame.format(text), tools).calls
        Draft202012Validator(schema).validate(json.loads(call.arguments))
    for text in refused:
        assert not walker.admits(grammar, frame.format(text)), text


@pytest.mark.parametrize("root", [{"$ref": "#/$defs/r"}, {"allOf": [{"$ref": "#/$defs/r"}]}], ids=str)
@pytest.mark.parametrize("family", BY_PARAMETER)
def test_a_tools_schema_may_be_a_reference_to_a_definition(family: str, root: dict[str, Any]) -> None:
    """A model that contains itself is one, as pydantic writes it."""
    integer = {"type": "integer"}
    definition = {"type": "object", "properties": {"days": integer}, "required": ["days"], "description": "x"}
    schema = root | {"$defs": {"r": definition}, "title": "y"}
    walker, tools = WALKERS["text"], [("f", schema)]
    for seed in range(3):
        (call,) = read(
            family, walker.walk(grammar_of(family, walker, tools, parallel=False).calls().text(), seed), tools
        ).calls
        Draft202012Validator(schema).validate(json.loads(call.arguments))


@pytest.mark.parametrize("family", ["qwen3_coder", "glm45", "pythonic", "hermes"])
def test_a_reference_as_litellm_writes_it_is_one_to_the_schema_itself(family: str) -> None:
    def schema(mark: str) -> dict[str, Any]:
        whole: dict[str, Any] = {"type": "object", "properties": {"a": {"$ref": f"{mark}/$defs/d"}}, "required": ["a"]}
        point = {"type": "object", "properties": {"e": {"$ref": f"{mark}/$defs/n"}}, "required": ["e"]}
        return whole | {"$defs": {"d": point, "n": {"type": "integer"}}}

    asked = schema("")
    assert grammar_or_refusal(family, [("f", asked)]) == grammar_or_refusal(family, [("f", schema("#"))])
    assert isinstance(grammar_or_refusal(family, [("f", asked)]), str)
    assert asked == schema(""), "the client's own is as it was"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_keyword_that_constrains_nothing_is_kept_by_every_family(family: str) -> None:
    plain = {"properties": {"a": {"type": "string"}, "b": {"type": "object"}}}
    told = {"properties": {"a": {"type": "string", "format": "path"}, "b": {"type": "object", "propertyNames": {}}}}
    asked = grammar_or_refusal(family, [("f", told | {"propertyNames": {"type": "string"}})])
    assert asked == grammar_or_refusal(family, [("f", plain)])
    assert isinstance(asked, str)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3_coder", "a\n<parameter=days>\n3"),
        ("qwen3_coder", "a\n</tool_call>\n<tool_call>\n<function=now>"),
        ("qwen3_coder", "a\n</function>\n</tool_call>\n<tool_call>\n<function=now>"),
        ("glm45", "a\n<arg_key>days</arg_key>\n<arg_value>3"),
        ("glm45", "a\n</tool_call>\n<tool_call>now"),
    ],
)
def test_a_constrained_text_has_nothing_that_the_parser_would_end_it_at(family: str, text: str) -> None:
    """The parser ends a text there if its own end tag was forgotten, and cannot know that it was not."""
    walker = WALKERS["text"]
    grammar = grammar_of(family, walker, ONE).calls().text()
    assert walker.admits(grammar, OSLO[family].replace("Oslo", text.replace("\n", " ")))
    assert not walker.admits(grammar, OSLO[family].replace("Oslo", text))


@pytest.mark.parametrize("kind", WALKERS)
def test_a_call_of_harmony_may_have_its_recipient_on_either_side_and_follow_messages(kind: str) -> None:
    walker, grammars = WALKERS[kind], grammar_of("openai", WALKERS[kind], ONE)
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}'
    before = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    assert walker.admits(grammars.calls().text(), call)
    assert not walker.admits(grammars.calls().text(), f"{before}{call}")
    lazy = grammars.lazy().text()
    for text in (f"{before}{call}", f"{before}{OSLO['openai']}", before.partition("<|end|>")[0]):
        assert walker.admits(lazy, text)
    for wrong in (call.replace("city", "town"), call.replace("weather", "now"), OSLO["openai"].replace("city", "town")):
        assert not walker.admits(lazy, f"{before}{wrong}")


def test_a_call_of_mistral_may_have_an_id_of_nine_characters() -> None:
    walker = WALKERS["special"]
    grammar = grammar_of("mistral", walker, ONE).calls().text()
    for call_id in ("", "[CALL_ID]a1B2c3D4e"):
        assert walker.admits(grammar, f'[TOOL_CALLS]weather{call_id}[ARGS]{{"city": "Oslo"}}')
    assert not walker.admits(grammar, '[TOOL_CALLS]weather[CALL_ID]call_0[ARGS]{"city": "Oslo"}')


@pytest.mark.parametrize("line", ["", "\n"])
def test_a_call_of_glm_may_have_a_line_for_each_tag_or_none(line: str) -> None:
    walker = WALKERS["text"]
    grammar = grammar_of("glm45", walker, ONE).calls().text()
    assert walker.admits(grammar, OSLO["glm45"].replace("\n", line))


@pytest.mark.parametrize("space", ["", " ", "\n", " \t\r\n"])
def test_a_call_of_phi_is_constrained_after_white_space_too(space: str) -> None:
    """The parser reads `functools [` as a call, and the arguments of a strict tool, or the name of a tool that is not
    allowed, were free there."""
    walker = WALKERS["text"]
    grammar = grammar_of("phi4_mini_json", walker, ONE).lazy().text()
    call = OSLO["phi4_mini_json"].replace("functools", f"I use functools{space}")
    assert [found.name for found in read("phi4_mini_json", call).calls] == ["weather"]
    assert walker.admits(grammar, call)
    for wrong in (call.replace("city", "town"), call.replace("weather", "now")):
        assert not walker.admits(grammar, wrong)
    assert walker.admits(grammar, f"functools{space}(x)")


def test_a_call_of_phi_stands_between_tags_where_the_tokenizer_has_them() -> None:
    walker = WALKERS["special"]
    grammar = grammar_of("phi4_mini_json", walker, ONE).calls().text()
    assert walker.admits(grammar, f"<|tool_call|>{OSLO['phi4_mini_json'].removeprefix('functools')}<|/tool_call|>")
