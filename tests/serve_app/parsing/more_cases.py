"""Owns more answers as models write them: families whose calls have tags for every part, and the table of all families.
Never written by the code under test: every expectation is written by hand."""

from __future__ import annotations

from collections.abc import Mapping

from tests.serve_app.parsing.cases import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    NESTED,
    OSLO,
    PARIS,
    PYTHONIC,
    QWEN3_CODER,
    TAGS_INSIDE,
    Case,
)

_COMMENTARY = "<|channel|>commentary"
_JSON = "<|constrain|>json<|message|>"
_AFTER = "<|end|><|start|>assistant"

HARMONY = [
    Case("as models write it", f"{_COMMENTARY} to=functions.f {_JSON}{PARIS}<|call|>", "", (("f", PARIS),)),
    Case(
        "as the template writes it", f" to=functions.f{_COMMENTARY} json<|message|>{PARIS}<|call|>", "", (("f", PARIS),)
    ),
    Case("without an end tag, and nested", f"{_COMMENTARY} to=functions.f {_JSON}{NESTED}", "", (("f", NESTED),)),
    Case("tags in a string", f"{_COMMENTARY} to=functions.f{_JSON}{TAGS_INSIDE}<|call|>", "", (("f", TAGS_INSIDE),)),
    Case(
        "two, after text, with the recipient on either side",
        f"I look.<|start|>assistant{_COMMENTARY} to=functions.f {_JSON}{PARIS}<|call|>"
        f"<|start|>assistant to=functions.g{_COMMENTARY} json<|message|>{OSLO}<|end|>",
        "I look.",
        (("f", PARIS), ("g", OSLO)),
    ),
    Case("on another channel", "<|channel|>analysis to=functions.f<|message|>{}<|call|>", "", (("f", "{}"),)),
    Case("no arguments", f"{_COMMENTARY} to=functions.f<|message|><|call|>", "", (("f", "{}"),)),
    Case("text after", f"{_COMMENTARY} to=functions.f<|message|>{{}}<|call|> Done", " Done", (("f", "{}"),)),
    Case("text after no arguments", f"{_COMMENTARY} to=functions.f<|message|><|call|> Done", " Done", (("f", "{}"),)),
    Case("text after without an end", f"{_COMMENTARY} to=functions.f<|message|>{{}} Done", " Done", (("f", "{}"),)),
    Case("a message to the user", "<|channel|>final<|message|>Hi<|return|>", "<|channel|>final<|message|>Hi<|return|>"),
    Case("an end alone", "Hi<|end|>", "Hi<|end|>"),
    Case("a tool of its own", f"{_COMMENTARY} to=python<|message|>{{}}", f"{_COMMENTARY} to=python<|message|>{{}}"),
    Case(
        "to itself", "<|start|>functions.f to=assistant<|message|>{}", "<|start|>functions.f to=assistant<|message|>{}"
    ),
    Case("a name that is none", f"{_COMMENTARY} to=functions.{_JSON}{{}}", f"{_COMMENTARY} to=functions.{_JSON}{{}}"),
    Case("no object", f"{_COMMENTARY} to=functions.f {_JSON}[1]", f"{_COMMENTARY} to=functions.f {_JSON}[1]"),
    Case("a header that is none", "a<|start|>b!<|channel|>c\n<|message|>", "a<|start|>b!<|channel|>c\n<|message|>"),
    Case("text that begins like a recipient", "to=functions.f is no call", "to=functions.f is no call"),
    Case("a start in a start", "<|start|><|start|>assistant to=functions.f<|message|>{}", "<|start|>", (("f", "{}"),)),
    Case("cut in the header", f"{_COMMENTARY} to=functions.f <|const", f"{_COMMENTARY} to=functions.f <|const"),
    Case("no arguments and no end", f"{_COMMENTARY} to=functions.f {_JSON}", "", (("f", "{}"),)),
    Case(
        "no arguments and no end before another call",
        f"{_COMMENTARY} to=functions.f {_JSON}\n<|start|>assistant{_COMMENTARY} to=functions.g {_JSON}"
        f"{_COMMENTARY} to=functions.h {_JSON}{PARIS}",
        "",
        (("f", "{}"), ("g", "{}"), ("h", PARIS)),
    ),
    Case(
        "a channel twice",
        f"{_COMMENTARY} to=functions.f{_COMMENTARY} {_JSON}{PARIS}<|start|>assistant{_COMMENTARY}{_COMMENTARY} "
        f"to=functions.g {_JSON}{PARIS}",
        "",
        (("f", PARIS), ("g", PARIS)),
    ),
    Case("cut in the arguments", f'{_COMMENTARY} to=functions.f {_JSON}{{"a": "', "", (("f", '{"a": "'),), True),
]

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def _v3(name: str, arguments: str) -> str:
    return f"{_CALL}function{_SEP}{name}\n```json\n{arguments}\n```{_CALL_END}"


DEEPSEEK_V3 = [
    Case("one call", f"{_CALLS}{_v3('f', PARIS)}{_CALLS_END}", "", (("f", PARIS),)),
    Case(
        "two, after text",
        f"I look.{_CALLS}{_v3('f', PARIS)}\n{_v3('g', NESTED)}{_CALLS_END}",
        "I look.",
        (("f", PARIS), ("g", NESTED)),
    ),
    Case("no section", f"{_v3('f', TAGS_INSIDE)}", "", (("f", TAGS_INSIDE),)),
    Case("text after", f"{_CALLS}{_v3('f', '{}')}{_CALLS_END} Done.", " Done.", (("f", "{}"),)),
    Case("no fence", f"{_CALLS}{_CALL}function{_SEP}f\n{{}}{_CALL_END}{_CALLS_END}", "", (("f", "{}"),)),
    Case("no end", f"{_CALLS}{_CALL}function{_SEP}f\n```json\n{{}}\n", "", (("f", "{}"),)),
    Case("another fence", f"{_CALL}function{_SEP}f\n```js\n{{}}", f"{_CALL}function{_SEP}f\n```js\n{{}}"),
    Case("a section alone", f"{_CALLS} {_CALLS_END}", f"{_CALLS} {_CALLS_END}"),
    Case("a call after a section without one", f"{_CALLS}x{_CALLS}{_v3('f', '{}')}", f"{_CALLS}x", (("f", "{}"),)),
    Case("no arguments", f"{_CALL}function{_SEP}f\n```json\n5", f"{_CALL}function{_SEP}f\n```json\n5"),
    Case("cut in the tag", f"a{_CALLS[:-3]}", f"a{_CALLS[:-3]}"),
    Case("cut in the name", f"{_CALLS}{_CALL}function{_SEP}get_w", f"{_CALLS}{_CALL}function{_SEP}get_w"),
    Case("cut in the fence", f"{_CALL}function{_SEP}f\n```js", f"{_CALL}function{_SEP}f\n```js"),
    Case("cut in the arguments", f'{_CALL}function{_SEP}f\n```json\n{{"a": [', "", (("f", '{"a": ['),), True),
    Case("cut in the second call", f"{_v3('f', '{}')}\n{_CALL}fun", f"\n{_CALL}fun", (("f", "{}"),)),
]

DEEPSEEK_V31 = [
    Case("one call", f"{_CALLS}{_CALL}f{_SEP}{PARIS}{_CALL_END}{_CALLS_END}", "", (("f", PARIS),)),
    Case(
        "two, after text",
        f"I look.{_CALLS}{_CALL}f{_SEP}{PARIS}{_CALL_END}{_CALL}g{_SEP}{OSLO}{_CALL_END}{_CALLS_END}",
        "I look.",
        (("f", PARIS), ("g", OSLO)),
    ),
    Case("tags in a string", f"{_CALL}f{_SEP}{TAGS_INSIDE}{_CALL_END}", "", (("f", TAGS_INSIDE),)),
    Case("a function named function", f"{_CALL}function{_SEP}{{}}{_CALL_END}", "", (("function", "{}"),)),
    Case("no end", f"{_CALLS}{_CALL}f{_SEP}{{}}\n Done.", "\n Done.", (("f", "{}"),)),
    Case("no name", f"{_CALLS}{_CALL}{_SEP}{{}}", f"{_CALLS}{_CALL}{_SEP}{{}}"),
    Case("ends alone", f"{_CALL_END}{_CALLS_END}", f"{_CALL_END}{_CALLS_END}"),
    Case("no separator", f"{_CALLS}{_CALL}f{{}}", f"{_CALLS}{_CALL}f{{}}"),
    Case("cut in the separator", f"{_CALLS}{_CALL}f{_SEP[:4]}", f"{_CALLS}{_CALL}f{_SEP[:4]}"),
    Case("cut in the arguments", f'{_CALL}f{_SEP}{{"a', "", (("f", '{"a'),), True),
]

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_ID, _ARGUMENTS, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def _kimi(call_id: str, arguments: str) -> str:
    return f"{_ID}{call_id}{_ARGUMENTS}{arguments}{_KIMI_END}"


KIMI_K2 = [
    Case(
        "one call",
        f"{_SECTION}{_kimi('functions.f:0', PARIS)}{_SECTION_END}",
        "",
        (("f", PARIS),),
        ids=("functions.f:0",),
    ),
    Case(
        "two, after text, with spaces",
        f"I look. {_SECTION} {_ID} functions.f:3 {_ARGUMENTS} {PARIS} {_KIMI_END} {_kimi('functions.a.b:4', OSLO)}"
        f" {_SECTION_END}",
        "I look.",
        (("f", PARIS), ("a.b", OSLO)),
        ids=("functions.f:3", "functions.a.b:4"),
    ),
    Case(
        "one id twice",
        _kimi("functions.f:0", "{}") * 2,
        "",
        (("f", "{}"), ("f", "{}")),
        ids=("functions.f:0", "call_0"),
    ),
    Case("tags in a string", _kimi("f", TAGS_INSIDE), "", (("f", TAGS_INSIDE),), ids=("f",)),
    Case("text after", f"{_SECTION}{_kimi('f:0', '{}')}{_SECTION_END}\nDone.", "\nDone.", (("f", "{}"),), ids=("f:0",)),
    Case("no end", f"{_ID}f:0{_ARGUMENTS}{{}}", "", (("f", "{}"),), ids=("f:0",)),
    Case("no name", _kimi("functions.:0", "{}"), _kimi("functions.:0", "{}")),
    Case("no arguments", f"{_ID}f:0{_ARGUMENTS}5", f"{_ID}f:0{_ARGUMENTS}5"),
    Case("a section alone", f"{_SECTION}x{_SECTION_END}", f"{_SECTION}x{_SECTION_END}"),
    Case("cut in the id", f"{_SECTION}{_ID}functions.f", f"{_SECTION}{_ID}functions.f"),
    Case("cut in the arguments", f'{_ID}f:0{_ARGUMENTS}{{"a', "", (("f", '{"a'),), True, ids=("f:0",)),
]


def _glm(name: str, *parameters: tuple[str, str], line: str = "\n") -> str:
    pairs = [f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}" for key, value in parameters]
    return f"<tool_call>{name}{line}{''.join(pairs)}</tool_call>"


GLM45 = [
    Case(
        "no end of the last value",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3\n</tool_call>\n",
        "",
        (("get_weather", OSLO),),
    ),
    Case(
        "no end of a value before another call, or before the end",
        f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris\n</tool_call>\n{_glm('now')}\n"
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</tool_call>",
        "",
        (("get_weather", PARIS), ("now", "{}"), ("get_weather", PARIS)),
    ),
    Case(
        "no end of a value before the next key",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        "",
        (("get_weather", OSLO),),
    ),
    Case(
        "tags in a value that end no value",
        _glm("get_weather", ("city", "a</tool_call><tool_call>\n</tool_call>b\n<arg_key>city</arg_key>\n<arg_key>x")),
        "",
        (
            (
                "get_weather",
                '{"city": "a</tool_call><tool_call>\\n</tool_call>b\\n<arg_key>city</arg_key>\\n<arg_key>x"}',
            ),
        ),
    ),
    Case("one call", _glm("get_weather", ("city", "Oslo"), ("days", "3")), "", (("get_weather", OSLO),)),
    Case("no lines", _glm("get_weather", ("city", "Oslo"), ("days", "3"), line=""), "", (("get_weather", OSLO),)),
    Case(
        "text before, and two calls",
        f"I look.\n{_glm('now')}\n{_glm('get_weather', ('city', 'Paris'))}\n",
        "I look.",
        (("now", "{}"), ("get_weather", PARIS)),
    ),
    Case(
        "values by their declared types",
        _glm(
            "write_file",
            *[("mode", "7"), ("size", "2.50"), ("force", "true"), ("owner", "null"), ("tags", '["a", 1]')],
            *[("options", '{"k": [true]}'), ("path", "5"), ("unknown", "5")],
        ),
        "",
        (
            (
                "write_file",
                '{"mode": 7, "size": 2.50, "force": true, "owner": null, "tags": ["a", 1], "options": {"k": [true]}, '
                '"path": "5", "unknown": "5"}',
            ),
        ),
    ),
    Case(
        "a value of several lines with tags in it, character for character",
        _glm("write_file", ("text", '\n if a < "b":\n</tool_call><arg_key>x\n')),
        "",
        (("write_file", '{"text": "\\n if a < \\"b\\":\\n</tool_call><arg_key>x\\n"}'),),
    ),
    Case("text after", f"{_glm('now')}\nDone <b>.", "\nDone <b>.", (("now", "{}"),)),
    Case(
        "text between parameters",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>so<arg_key>b</arg_key><arg_value>2</arg_value></tool_call>",
        "so",
        (("f", '{"a": "1", "b": "2"}'),),
    ),
    Case(
        "a key without a value",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key></tool_call>",
        "<arg_key>b</arg_key>",
        (("f", '{"a": "1"}'),),
    ),
    Case("no name", "<tool_call><arg_key>a</arg_key>", "<tool_call><arg_key>a</arg_key>"),
    Case("an object", '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>'),
    Case("no value at first", "<tool_call>f<arg_key>a</arg_key>1", "<tool_call>f<arg_key>a</arg_key>1"),
    Case("a tag in a tag", f"<tool_call>a b{_glm('f')}", "<tool_call>a b", (("f", "{}"),)),
    Case("cut in the name", "<tool_call>get_w", "<tool_call>get_w"),
    Case("cut in the key", "<tool_call>f\n<arg_key>ci", "<tool_call>f\n<arg_key>ci"),
    Case("cut in a string", _glm("get_weather", ("city", 'O"s'))[:-26], "", (("get_weather", '{"city": "O\\"'),), True),
    Case("cut after a value", _glm("f", ("a", "1"))[:-12], "", (("f", '{"a": "1"'),), True),
    Case("cut in the end", _glm("f", ("a", "1"))[:-2], "\n</tool_cal", (("f", '{"a": "1"'),), True),
]

PHI4_MINI = [
    Case(
        "a list after the word",
        f'functools[{{"name": "f", "arguments": {PARIS}}}, {{"name": "now", "arguments": {{}}}}]',
        "",
        (("f", PARIS), ("now", "{}")),
    ),
    Case(
        "a list between tags",
        f'I look.<|tool_call|>[{{"name": "f", "arguments": {NESTED}}}]<|/tool_call|>',
        "I look.",
        (("f", NESTED),),
    ),
    Case(
        "objects between tags",
        '<|tool_call|>{"name": "f", "arguments": {}}<|/tool_call|><|tool_call|>{"name": "g"}<|/tool_call|>',
        "",
        (("f", "{}"), ("g", "{}")),
    ),
    Case("tags in a string", f'functools[{{"name": "f", "arguments": {TAGS_INSIDE}}}]', "", (("f", TAGS_INSIDE),)),
    Case("the word in a text", "of functools, functools.wraps {} [1]", "of functools, functools.wraps {} [1]"),
    Case("the word and another list", "functools[1]", "functools[1]"),
    Case("the word and an object", 'functools{"name": "f"}', 'functools{"name": "f"}'),
    Case("text after", '<|tool_call|>{"name": "f"}<|/tool_call|> Done', " Done", (("f", "{}"),)),
    Case("no end tag", '<|tool_call|>[{"name": "f"}] Done', " Done", (("f", "{}"),)),
    Case("no call in the list", 'functools[{"name": "f"}, 5]', ", 5]", (("f", "{}"),)),
    Case("an end tag alone", "a<|/tool_call|>", "a<|/tool_call|>"),
    Case("cut in the word", "funct", "funct"),
    Case("cut in the name", 'functools[{"name": "f', 'functools[{"name": "f'),
    Case("cut in the arguments", 'functools[{"name": "f", "arguments": {"a', "", (("f", '{"a'),), True),
]

CASES: Mapping[str, list[Case]] = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "glm45": GLM45,
    "hermes": HERMES,
    "kimi_k2": KIMI_K2,
    "llama3_json": LLAMA3_JSON,
    "mistral": MISTRAL,
    "openai": HARMONY,
    "phi4_mini_json": PHI4_MINI,
    "pythonic": PYTHONIC,
    "qwen3_coder": QWEN3_CODER,
}
