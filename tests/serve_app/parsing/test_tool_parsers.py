"""Owns the contract of tool parsers: what is content, what is a call, and that cutting the text changes neither.
Never tests how a parser gets there."""

from __future__ import annotations

import itertools
import json
import re
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.parsing.deltas import Arguments, CallStart, Content, Delta, Parsed, ToolCall, collect, merged
from serve_app.parsing.python_literals import MAX_CHARS
from serve_app.parsing.tools import TOOL_PARSERS, suggest_tool_parser
from tests.serve_app.parsing.cases import TOOLS, Case
from tests.serve_app.parsing.drive import cut, deltas
from tests.serve_app.parsing.more_cases import CASES

ALL_CASES = [pytest.param(name, case, id=f"{name}: {case.why}") for name, cases in CASES.items() for case in cases]
FAMILIES = sorted(TOOL_PARSERS)

# Near misses are the rule: what tags, strings and calls are made of, in any order.
FRAGMENTS = [
    *(
        "<|channel|>",
        "<|start|>",
        "<|message|>",
        "<|call|>",
        "to=functions.f",
        "commentary",
        "<arg_key>",
        "<arg_value>",
    ),
    *("</arg_key>", "</arg_value>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json"),
    *(
        "<｜tool▁call▁end｜>",
        "<|tool_call_begin|>",
        "functions.f:0",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    *("functools", "<|tool_call|>", "<|/tool_call|>", "<|python_end|>"),
    *("<tool_call>", "</tool_call>", "<tool_", "<function=", "now", "f", ">", "<parameter=", "a", "</parameter>"),
    *("</function>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", "(", ")", "=", "'", '"', "\\"),
    *('{"name": ', '"f"', '"arguments": ', '"parameters": ', "{", "}", ",", ":", ";", "1", "null", "<", " ", "\n", "é"),
]


@st.composite
def broken_cases(draw: st.DrawFn) -> str:
    """Join parts of answers of one family with fragments,
    which reach further into the grammars than fragments alone."""
    family = draw(st.sampled_from(sorted(CASES)))
    parts = []
    for case in draw(st.lists(st.sampled_from(CASES[family]), min_size=1, max_size=3)):
        start, end = sorted(draw(st.tuples(*[st.integers(0, len(case.text))] * 2)))
        parts += [case.text[start:end] if draw(st.booleans()) else case.text[:end], draw(st.sampled_from(FRAGMENTS))]
    return "".join(parts)


messy_texts = st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join) | broken_cases()
places = st.lists(st.integers(0, 1000), max_size=12)
names = st.from_regex(r"[a-z_]{1,10}", fullmatch=True)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(names, values, max_size=4)


def flat(per_piece: list[list[Delta]]) -> list[Delta]:
    return merged([delta for piece in per_piece for delta in piece])


def parsed(name: str, text: str, tools: Any = TOOLS) -> Parsed:
    return collect(flat(deltas(name, [text], tools)))


@pytest.mark.parametrize(("name", "case"), ALL_CASES)
def test_an_answer_has_the_content_and_the_calls_that_its_family_means(name: str, case: Case) -> None:
    ids = case.ids or tuple(f"call_{number}" for number in range(len(case.calls)))
    expected = tuple(ToolCall(call_id, *call) for call_id, call in zip(ids, case.calls, strict=True))
    assert parsed(name, case.text) == Parsed(case.content, expected)


@pytest.mark.parametrize(("name", "case"), ALL_CASES)
def test_the_arguments_of_a_call_that_is_whole_are_a_json_object(name: str, case: Case) -> None:
    whole = case.calls[:-1] if case.truncated else case.calls
    assert all(isinstance(json.loads(text), dict) for _, text in whole)


@pytest.mark.parametrize(("name", "case"), ALL_CASES)
def test_character_by_character_an_answer_is_the_same(name: str, case: Case) -> None:
    assert flat(deltas(name, case.text, TOOLS)) == flat(deltas(name, [case.text], TOOLS))


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None)
@given(data=st.data())
def test_no_way_of_cutting_an_answer_changes_it(name: str, data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(CASES[name]))
    pieces = cut(case.text, data.draw(places))
    assert flat(deltas(name, pieces, TOOLS)) == flat(deltas(name, [case.text], TOOLS))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("qwen3_coder", "<tool_call>\n<function=now>\n<parameter=a>\n5\n</parameter>\n"),
        ("glm45", "<tool_call>now\n<arg_key>a</arg_key>\n<arg_value>5</arg_value>\n"),
    ],
)
def test_text_after_a_call_that_the_model_did_not_end_is_sent_at_once(name: str, call: str) -> None:
    """It waited for the end of the call, and so the rest of a streamed answer came in one piece at its end."""
    parser = TOOL_PARSERS[name](TOOLS)
    parser.push(call)
    assert [parser.push(piece) for piece in ("I", " called", " it")] == [
        [Content("\nI")],
        [Content(" called")],
        [Content(" it")],
    ]


@pytest.mark.parametrize(("name", "case"), ALL_CASES)
def test_a_parser_tells_whether_arguments_may_follow_content(name: str, case: Case) -> None:
    assert tells_whether_a_call_goes_on(name, list(case.text))


def tells_whether_a_call_goes_on(name: str, pieces: list[str]) -> bool:
    """Whether no arguments follow a content after which the parser was in no call. Answers in blocks rely on it."""
    parser = TOOL_PARSERS[name](TOOLS)
    has_said = has_ended = False
    for piece in [*pieces, None]:
        for delta in parser.flush() if piece is None else parser.push(piece):
            if has_ended and isinstance(delta, Arguments):
                return False
            has_said = isinstance(delta, Content) or (has_said and not isinstance(delta, CallStart))
            has_ended = has_ended and not isinstance(delta, CallStart)
        has_ended = has_said and not parser.is_in_call
    return not parser.is_in_call


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None)
@given(text=messy_texts | st.text(), at=places)
def test_any_text_is_read_without_an_error_and_alike_however_it_is_cut(name: str, text: str, at: list[int]) -> None:
    whole = flat(deltas(name, [text], TOOLS))
    assert flat(deltas(name, cut(text, at), TOOLS)) == whole
    assert tells_whether_a_call_goes_on(name, cut(text, at))
    if not any(isinstance(delta, CallStart) for delta in whole):
        assert collect(whole).content == text


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None)
@given(text=messy_texts, at=places)
def test_the_start_of_a_call_comes_first_and_once_and_no_delta_is_empty(name: str, text: str, at: list[int]) -> None:
    started = 0
    for delta in (delta for piece in deltas(name, cut(text, at), TOOLS) for delta in piece):
        match delta:
            case CallStart(index, call_id, _):
                assert index == started
                assert call_id
                started += 1
            case Arguments(index, fragment):
                assert fragment
                assert index == started - 1
            case Content(content):
                assert content


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None)
@given(text=st.text(st.characters(exclude_characters="<[{", codec="utf-8")), at=places)
def test_text_without_a_call_comes_back_character_for_character(name: str, text: str, at: list[int]) -> None:
    assert collect(flat(deltas(name, cut(text, at)))) == Parsed(text, ())


def written(family: str, name: str, given_arguments: dict[str, Any]) -> str:
    as_json = json.dumps(given_arguments)
    match family:
        case "hermes":
            return f'<tool_call>\n{{"name": "{name}", "arguments": {as_json}}}\n</tool_call>'
        case "llama3_json":
            return f'<|python_tag|>{{"name": "{name}", "parameters": {as_json}}}'
        case "mistral":
            return f"[TOOL_CALLS]{name}[ARGS]{as_json}"
        case "pythonic":
            return f"[{name}({', '.join(f'{key}={value!r}' for key, value in given_arguments.items())})]"
        case "openai":
            return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{as_json}<|call|>"
        case "deepseek_v3":
            return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{as_json}\n```<｜tool▁call▁end｜>"
        case "deepseek_v31":
            return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json}<｜tool▁call▁end｜>"
        case "kimi_k2":
            call_id = f"functions.{name}:0"
            return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{as_json}<|tool_call_end|>"
        case "phi4_mini_json":
            return f'functools[{{"name": "{name}", "arguments": {as_json}}}]'
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given_arguments.items()}
    if family == "glm45":
        pairs = [f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in texts.items()]
        return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"
    parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def declared(given_arguments: dict[str, Any]) -> dict[str, Any]:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return {key: {"type": kinds.get(type(value), "null")} for key, value in given_arguments.items()}


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None)
@given(called=arguments, at=places)
def test_any_arguments_that_a_model_writes_arrive_as_they_were_meant(
    family: str, called: dict[str, Any], at: list[int]
) -> None:
    if family == "pythonic":
        called = {f"x_{key}": value for key, value in called.items()}  # `if=1` is not valid Python
    tools = [{"type": "function", "function": {"name": "run", "parameters": {"properties": declared(called)}}}]
    found = collect(flat(deltas(family, cut(written(family, "run", called), at), tools)))
    assert [call.name for call in found.calls] == ["run"]
    assert (found.content, json.loads(found.calls[0].arguments)) == ("", called)


@pytest.mark.parametrize(
    ("family", "begin", "first"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {', "{"),
        ("llama3_json", '{"name": "f", "parameters": {', "{"),
        ("mistral", "[TOOL_CALLS]f{", "{"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>1</parameter>", '{"a": "1"'),
        ("openai", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{", "{"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{", "{"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{", "{"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>", '{"a": "1"'),
        ("phi4_mini_json", 'functools[{"name": "f", "arguments": {', "{"),
    ],
)
def test_a_name_is_sent_before_the_arguments_are_complete_and_these_as_they_come(
    family: str, begin: str, first: str
) -> None:
    parser = TOOL_PARSERS[family]([], lambda: "id")
    assert parser.push(begin) == [CallStart(0, "id", "f"), Arguments(0, first)]
    assert parser.calls == 1


def test_a_call_of_kimi_is_announced_under_the_models_own_id() -> None:
    parser = TOOL_PARSERS["kimi_k2"]()
    begin = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"
    assert parser.push(begin) == [CallStart(0, "functions.f:0", "f"), Arguments(0, "{")]


@pytest.mark.parametrize("family", FAMILIES)
def test_content_is_sent_at_once_up_to_what_may_belong_to_a_call(family: str) -> None:
    assert deltas(family, ["Hello", " wor", "ld \n", "!"]) == [
        *([Content("Hello")], [Content(" wor")], [Content("ld")], [Content(" \n!")]),
        [],
    ]


def test_an_answer_in_json_streams_where_calls_are_json_too() -> None:
    parser = TOOL_PARSERS["llama3_json"]()
    assert parser.push('{"city": ') == [Content('{"city":')]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_whose_tags_were_not_decoded_is_another_one(name: str) -> None:
    texts = [case.text for case in CASES[name]]
    for marker in TOOL_PARSERS[name].markers:
        assert any(parsed(name, text.replace(marker, "")) != parsed(name, text) for text in texts), marker


def test_ids_are_unique_and_look_like_those_of_openai() -> None:
    found = collect(TOOL_PARSERS["pythonic"]().push("[f(), g()]")).calls
    assert all(re.fullmatch("call_[0-9a-f]{24}", call.id) for call in found)
    assert len({call.id for call in found}) == 2


def test_the_ids_of_mistrals_calls_are_such_as_its_templates_take() -> None:
    found = collect(TOOL_PARSERS["mistral"]().push("[TOOL_CALLS]f{}[TOOL_CALLS]g[CALL_ID]0[ARGS]{}")).calls
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", call.id) for call in found)
    assert len({call.id for call in found}) == 2


def test_tools_may_have_no_parameters_and_no_function_around_them() -> None:
    bare = parsed("qwen3_coder", "<function=g>\n</function>", [{"type": "function", "name": "g"}])
    assert [call.name for call in bare.calls] == ["g"]
    assert parsed("qwen3_coder", "<function=g>\n</function>", [{"type": "web_search"}]).calls == ()


@pytest.mark.parametrize(
    "expression", ["-" * 30_000 + "1", "1+" * 30_000 + "1", "[" * 30_000 + "]" * 30_000, "9" * 30_000, '"\\ud800"']
)
@pytest.mark.parametrize("frame", ["[f(a={})]", "<tool_call><function=f><parameter=a>{}</parameter></function>"])
def test_a_value_that_python_cannot_read_raises_nothing(frame: str, expression: str) -> None:
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": ["array", "integer"]}}}}}]
    text = frame.format(expression)
    for name in ("pythonic", "qwen3_coder"):
        found = parsed(name, text, tools)
        assert found.content == text or json.loads(found.calls[0].arguments).keys() == {"a"}


def test_a_python_call_that_takes_too_long_to_read_is_content() -> None:
    text = f'[f(a="{"x" * MAX_CHARS}")]'
    assert parsed("pythonic", text) == Parsed(text, ())


def work(name: str, text: str, size: int) -> int:
    """Count the function calls that it takes: a measure of work that no other process disturbs."""
    counted = itertools.count()

    def count(frame: object, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            next(counted)

    parser = TOOL_PARSERS[name](TOOLS)
    sys.setprofile(count)
    try:
        for start in range(0, len(text), size):
            parser.push(text[start : start + size])
        parser.flush()
    finally:
        sys.setprofile(None)
    return next(counted)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("name", FAMILIES)
def test_work_grows_with_the_text_and_not_with_its_square(name: str, size: int) -> None:
    hard = {
        "many tags that are none": "<tool_ [TOOL_ <|py <|channel|>a func <tool_call>f ",
        "many strings": '"\\"{[" ',
        "one call": 'a\\"}<b',
    }
    begins = {
        "hermes": '<tool_call>{"name": "f", "arguments": {"a": "',
        "llama3_json": '{"name": "f", "parameters": {"a": "',
        "mistral": '[TOOL_CALLS]f{"a": "',
        "pythonic": '[f(a="',
        "qwen3_coder": "<tool_call><function=f><parameter=a>",
        "openai": '<|channel|>commentary to=functions.f<|message|>{"a": "',
        "deepseek_v3": '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "',
        "deepseek_v31": '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "',
        "glm45": "<tool_call>f<arg_key>a</arg_key><arg_value>",
        "kimi_k2": '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"a": "',
        "phi4_mini_json": 'functools[{"name": "f", "arguments": {"a": "',
    }
    for why, repeated in hard.items():
        begin = begins[name] if why == "one call" else ""
        once, twice = (work(name, begin + repeated * times, size) for times in (150, 300))
        assert twice < 2.2 * once, why


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}", "qwen3_coder"),
        ('For each function call, return {"name": <function-name>} within <tool_call></tool_call>', "hermes"),
        ("{{- '[TOOL_CALLS]' + call.name + '[ARGS]' + arguments }}", "mistral"),
        ("{{- '<|python_tag|>' + tool_call.name + '.call(' }}", "llama3_json"),
        ('Respond in the format {"name": function name, "parameters": dictionary}.', "llama3_json"),
        ("You SHOULD use the format [func_name1(params_name1=params_value1, ...), func_name2(params)]", "pythonic"),
        ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}", None),
        ("{% if tools %}{{ tools[0].parameters | tojson }}{% endif %}", None),
        ("{{ 'functions.' + call.name + '<|channel|>commentary json<|message|>' + arguments }}", "openai"),
        ("{{ '<tool_call>' + name }}\n<arg_key>{{ key }}</arg_key>", "glm45"),
        ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + name + '```json' }}", "deepseek_v3"),
        ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' }}", "deepseek_v31"),
        ("<|tool_calls_section_begin|>{% for call in calls %}<|tool_call_begin|>{{ call.id }}", "kimi_k2"),
        ('generated as functools[{"name": [function name], "arguments": [arguments]}, ...]', "phi4_mini_json"),
        ('respond in this format: <|tool_call|>{"name": "foo"}<|/tool_call|>', "phi4_mini_json"),
    ],
)
def test_a_template_that_shows_its_calls_tells_which_parser_reads_them(template: str, expected: str | None) -> None:
    found = suggest_tool_parser(template)
    assert (found and found.parser) == expected
    assert found is None or (found.parser in TOOL_PARSERS and all(text in template for text in found.written))
