"""Owns answers as models write them, family by family, with the content and calls of each. Long, because it is a table.
Never written by the code under test: every expectation is written by hand."""

from __future__ import annotations

from dataclasses import dataclass

Calls = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Case:
    """An answer. `calls` has each call's name and the text of its arguments."""

    why: str
    text: str
    content: str
    calls: Calls = ()
    truncated: bool = False
    """Whether the answer ends inside the arguments of the last call, which are then no JSON."""
    ids: tuple[str, ...] | None = None
    """The ids that the model gave its calls."""


def tool(name: str, **properties: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [
    tool("get_weather", city={"type": "string"}, days={"type": "integer"}),
    tool("now"),
    tool("f"),
    tool("files.read"),
    tool(
        "write_file",
        path={"type": "string"},
        text={"type": "string"},
        mode={"type": "integer"},
        size={"type": "number"},
        force={"type": "boolean"},
        owner={"anyOf": [{"type": "string"}, {"type": "null"}]},
        tags={"type": "array"},
        options={"type": "object"},
    ),
]

PARIS = '{"city": "Paris"}'
OSLO = '{"city": "Oslo", "days": 3}'
NESTED = '{"a": {"b": [1, {"c": "}]"}]}, "d": "\\"{\\" \\\\"}'
TAGS_INSIDE = '{"text": "</tool_call> <tool_call>{ [TOOL_CALLS] <|python_tag|>;"}'

HERMES = [
    Case(
        "as Qwen2.5 writes it",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>',
        "",
        (("get_weather", PARIS),),
    ),
    Case(
        "text before, and two calls",
        "I will look.\n\n"
        f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>\n',
        "I will look.",
        (("get_weather", PARIS), ("get_weather", OSLO)),
    ),
    Case(
        "text after",
        '<tool_call>{"name":"now","arguments":{}}</tool_call>\n\nDone. <b>\n',
        "\n\nDone. <b>\n",
        (("now", "{}"),),
    ),
    Case(
        "nested JSON, braces and quotes in strings",
        f'<tool_call>{{"name": "f", "arguments": {NESTED}}}</tool_call>',
        "",
        (("f", NESTED),),
    ),
    Case(
        "tags in a string",
        f'<tool_call>{{"name": "f", "arguments": {TAGS_INSIDE}}}</tool_call>',
        "",
        (("f", TAGS_INSIDE),),
    ),
    Case(
        "unicode, escaped and not",
        '<tool_call>{"name": "fo\\u006f", "arguments": {"t": "\\u00e9 é \\ud83d\\ude00 😀"}}</tool_call>',
        "",
        (("foo", '{"t": "\\u00e9 é \\ud83d\\ude00 😀"}'),),
    ),
    Case(
        "arguments before the name",
        f'<tool_call>{{"arguments": {PARIS}, "name": "get_weather"}}</tool_call>',
        "",
        (("get_weather", PARIS),),
    ),
    Case(
        "no arguments mean none, and other keys mean nothing",
        '<tool_call>{"type": "function", "name": "now"}</tool_call>'
        '<tool_call>{"id": 7, "name": "now", "arguments": {}, "why": ["}"]}</tool_call>',
        "",
        (("now", "{}"), ("now", "{}")),
    ),
    Case(
        "keys after the arguments",
        '<tool_call>{"name": "f", "arguments": {}, "name": 5, "parameters": [1]}</tool_call>',
        "",
        (("f", "{}"),),
    ),
    Case("text on both sides", 'So \n<tool_call>{"name": "f"}</tool_call>\nand', "So\nand", (("f", "{}"),)),
    Case("a name that no tool has", '<tool_call>{"name":"x.y-z","arguments":{}}</tool_call>', "", (("x.y-z", "{}"),)),
    Case("the last brace is missing", '<tool_call>{"name":"f","arguments":{}\n</tool_call> ', "", (("f", "{}"),)),
    Case("the end tag is missing", '<tool_call>{"name":"f","arguments":{}}\n', "", (("f", "{}"),)),
    Case(
        "the next call follows a missing end tag",
        '<tool_call>{"name":"f","arguments":{}}\n<tool_call>{"name":"g","arguments":{}}',
        "",
        (("f", "{}"), ("g", "{}")),
    ),
    Case("a brace too many", '<tool_call>{"name":"f","arguments":{}}}</tool_call>', "}</tool_call>", (("f", "{}"),)),
    Case("no object", "Use <tool_call> for a call.\n", "Use <tool_call> for a call.\n"),
    Case("a tag in a tag", '<tool_<tool_call>{"name":"f"}</tool_call>', "<tool_", (("f", "{}"),)),
    Case("no name", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>'),
    Case("a name that is none", '<tool_call>{"name": "a b"}</tool_call>', '<tool_call>{"name": "a b"}</tool_call>'),
    Case("a name that is a number", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>'),
    Case("a list as arguments", '<tool_call>{"name":"f","arguments":[1]}', '<tool_call>{"name":"f","arguments":[1]}'),
    Case("another key first", '<tool_call>{"city": "x", "name": "f"}', '<tool_call>{"city": "x", "name": "f"}'),
    Case("a bad escape in the name", '<tool_call>{"name": "\\q"}', '<tool_call>{"name": "\\q"}'),
    Case("cut in the tag", "Let me see. <tool_", "Let me see. <tool_"),
    Case("cut after the tag", "Let me see. <tool_call>\n", "Let me see. <tool_call>\n"),
    Case("cut in the name", '<tool_call>\n{"name": "get_w', '<tool_call>\n{"name": "get_w'),
    Case("cut before the arguments", '<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum'),
    Case("cut in the arguments", '<tool_call>{"name": "f", "arguments": {"a": "b', "", (("f", '{"a": "b'),), True),
    Case("cut after the arguments", '<tool_call>{"name": "f", "arguments": {"a": 1}', "", (("f", '{"a": 1}'),)),
    Case("cut in the end tag", '<tool_call>{"name": "f"}\n</tool', "\n</tool", (("f", "{}"),)),
]

LLAMA3_JSON = [
    Case("one call", f'{{"name": "get_weather", "parameters": {PARIS}}}', "", (("get_weather", PARIS),)),
    Case(
        "the tag, and `arguments` instead of `parameters`",
        f'<|python_tag|>{{"name": "get_weather", "arguments": {PARIS}}}',
        "",
        (("get_weather", PARIS),),
    ),
    Case(
        "several, by semicolons",
        f'{{"name": "get_weather", "parameters": {PARIS}}}; {{"name": "get_weather", "parameters": {OSLO}}}\n;'
        '{"name": "now", "parameters": {}}',
        "",
        (("get_weather", PARIS), ("get_weather", OSLO), ("now", "{}")),
    ),
    Case(
        "text before the tag, and a tag between calls",
        'I look. <|python_tag|>{"name": "f", "parameters": {}}<|python_tag|>{"name": "g", "parameters": {}}',
        "I look.",
        (("f", "{}"), ("g", "{}")),
    ),
    Case("text after", '{"name": "f", "parameters": {}}\nThat is all; yes.', "\nThat is all; yes.", (("f", "{}"),)),
    Case("a type first", '{"type": "function", "name": "f", "parameters": {}}', "", (("f", "{}"),)),
    Case("nested", f'\n{{"name": "f", "parameters": {NESTED}}}', "", (("f", NESTED),)),
    Case("tags in a string", f'{{"name": "f", "parameters": {TAGS_INSIDE}}}', "", (("f", TAGS_INSIDE),)),
    Case("an answer in JSON", ' {"answer": 42, "name": "x"} ', ' {"answer": 42, "name": "x"} '),
    Case(
        "an answer in JSON that names no tool",
        '{"name": "Ann", "parameters": {"age": 5}}',
        '{"name": "Ann", "parameters": {"age": 5}}',
    ),
    Case(
        "a tag before a name that no tool has",
        '<|python_tag|>{"name": "Ann", "parameters": {}}',
        "",
        (("Ann", "{}"),),
    ),
    Case(
        "a name that no tool has after a call",
        '{"name": "f", "parameters": {}}; {"name": "Ann", "parameters": {}}',
        "",
        (("f", "{}"), ("Ann", "{}")),
    ),
    Case("an answer in JSON that has a name", '{"name": "Ann", "age": 5}', '{"name": "Ann", "age": 5}'),
    Case("a name alone", '{"name": "Ann"}', '{"name": "Ann"}'),
    Case("an object within text", 'So: {"name": "f", "parameters": {}}', 'So: {"name": "f", "parameters": {}}'),
    Case("code", "<|python_tag|>print('hi')\n", "<|python_tag|>print('hi')\n"),
    Case("no call after the semicolon", '{"name": "f", "parameters": {}}; yes', "; yes", (("f", "{}"),)),
    Case("a tag that is none", "<|pyt<|python_tag|>x", "<|pyt<|python_tag|>x"),
    Case(
        "as Llama 4's template writes it",
        f'I look.<|python_end|>{{"name": "f", "parameters": {PARIS}}}{{"name": "g", "parameters": {{}}}}',
        "I look.",
        (("f", PARIS), ("g", "{}")),
    ),
    Case("Llama 4's tag after calls", '{"name": "f", "parameters": {}}<|python_end|>Done', "Done", (("f", "{}"),)),
    Case("no call without a semicolon", '{"name": "f", "parameters": {}} {"a": 1}', ' {"a": 1}', (("f", "{}"),)),
    Case("cut in the tag", "<|python_", "<|python_"),
    Case("cut in the key", '{"name": "f", "para', '{"name": "f", "para'),
    Case("cut in the arguments", '{"name": "f", "parameters": {"a": [', "", (("f", '{"a": ['),), True),
    Case("cut in the second call", '{"name": "f", "parameters": {}}; {"na', '; {"na', (("f", "{}"),)),
]

MISTRAL = [
    Case(
        "a list",
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "now", "arguments": {{}}}}]',
        "",
        (("get_weather", PARIS), ("now", "{}")),
    ),
    Case(
        "a list with spaces, ids and text before",
        f'I look.[TOOL_CALLS] [ {{"name": "f", "arguments": {NESTED}, "id": "VvvODy9mT"}} ]',
        "I look.",
        (("f", NESTED),),
    ),
    Case(
        "name and arguments",
        f"[TOOL_CALLS]get_weather{PARIS}[TOOL_CALLS]get_weather{OSLO}",
        "",
        (("get_weather", PARIS), ("get_weather", OSLO)),
    ),
    Case("with tags between", f"[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{PARIS}", "", (("f", PARIS),), ids=("a1B2c3D4e",)),
    Case(
        "an id that no template takes, and one twice",
        "[TOOL_CALLS]f[CALL_ID]7[ARGS]{}[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}",
        "",
        (("f", "{}"),) * 3,
        ids=("call_0", "a1B2c3D4e", "call_1"),
    ),
    Case("with the tag and a space", "[TOOL_CALLS]f [ARGS] {}", "", (("f", "{}"),)),
    Case("one object", f'[TOOL_CALLS]{{"name": "f", "arguments": {PARIS}}}', "", (("f", PARIS),)),
    Case("tags in a string", f"[TOOL_CALLS]f{TAGS_INSIDE}", "", (("f", TAGS_INSIDE),)),
    Case("text after", '[TOOL_CALLS][{"name": "now"}] Done.', " Done.", (("now", "{}"),)),
    Case("text after a named call", "[TOOL_CALLS]now{} Done.", " Done.", (("now", "{}"),)),
    Case("an empty list", "[TOOL_CALLS][]", "[TOOL_CALLS][]"),
    Case("brackets before the tag", "a [1] [[TOOL_CALLS]f{}", "a [1] [", (("f", "{}"),)),
    Case("no call in the list", '[TOOL_CALLS][{"name": "f"}, 5]', ", 5]", (("f", "{}"),)),
    Case("no comma", '[TOOL_CALLS][{"name": "f"} {"name": "g"}]', ' {"name": "g"}]', (("f", "{}"),)),
    Case("a call after a tag without one", "[TOOL_CALLS]x [TOOL_CALLS]f{}", "[TOOL_CALLS]x", (("f", "{}"),)),
    Case("only text after the tag", "[TOOL_CALLS] none needed", "[TOOL_CALLS] none needed"),
    Case("no name", "[TOOL_CALLS][ARGS]{}", "[TOOL_CALLS][ARGS]{}"),
    Case("cut in the tag", "x[TOOL_", "x[TOOL_"),
    Case("cut in the name", "[TOOL_CALLS]get_wea", "[TOOL_CALLS]get_wea"),
    Case("cut in the second tag", "[TOOL_CALLS]f[AR", "[TOOL_CALLS]f[AR"),
    Case("cut in the arguments", '[TOOL_CALLS]f{"a": "[', "", (("f", '{"a": "['),), True),
    Case("cut before the end of the list", '[TOOL_CALLS][{"name": "f", "arguments": {}}', "", (("f", "{}"),)),
]

PYTHONIC = [
    Case("one call", "[get_weather(city='Paris')]", "", (("get_weather", PARIS),)),
    Case(
        "several",
        '\n[get_weather(city="Paris"), now(),\n  get_weather(city="Oslo", days=3)]\n',
        "",
        (("get_weather", PARIS), ("now", "{}"), ("get_weather", OSLO)),
    ),
    Case(
        "all literals",
        "[f(a=-1, b=2.5, c=True, d=None, e=[1, (2,)], g={'k': {}}, h=false, i=null)]",
        "",
        (
            (
                "f",
                '{"a": -1, "b": 2.5, "c": true, "d": null, "e": [1, [2]], "g": {"k": {}}, "h": false, "i": null}',
            ),
        ),
    ),
    Case(
        "brackets, quotes and backslashes in strings",
        r"""[f(a="]) [g(", b='it\'s "x"', c="\d\\n\n", d=r"\d"), g(a="é\u00e9")]""",
        "",
        (("f", r"""{"a": "]) [g(", "b": "it's \"x\"", "c": "\\d\\n\n", "d": "\\d"}"""), ("g", '{"a": "éé"}')),
    ),
    Case("half of a surrogate pair", r"[f(a='é\ud800')]", "", (("f", r'{"a": "\u00e9\ud800"}'),)),
    Case("a dotted name", "[files.read(path='a')]", "", (("files.read", '{"path": "a"}'),)),
    Case("text after", "[now()]\nDone.", "\nDone.", (("now", "{}"),)),
    Case("text before", "I call [now()]", "I call [now()]"),
    Case("a list that names no tool", "[Link(to='a')]", "[Link(to='a')]"),
    Case("a list that is none of calls", "[1, 2, 3] and [x](y)", "[1, 2, 3] and [x](y)"),
    Case("an empty list", " [] ", " [] "),
    Case("arguments without names", "[f(1)]", "[f(1)]"),
    Case("arguments from a dict", "[f(**{'a': 1})]", "[f(**{'a': 1})]"),
    Case("an argument that must be computed", "[f(a=1 + 1)]", "[f(a=1 + 1)]"),
    Case("an argument that JSON has not", "[f(a=b'x', c={1, 2})]", "[f(a=b'x', c={1, 2})]"),
    Case("keys that JSON has not", "[f(a={1: 2})]", "[f(a={1: 2})]"),
    Case("a number beyond a double", "[f(a=1e999)]", "", (("f", '{"a": 1.7976931348623157e+308}'),)),
    Case("a call of a call", "[f()(a=1)]", "(a=1)]", (("f", "{}"),)),
    Case("no Python", "[f(a=)]", "[f(a=)]"),
    Case("something else after a call", "[f(a=1), 5]", ", 5]", (("f", '{"a": 1}'),)),
    Case("no comma between calls", "[f() g()]", " g()]", (("f", "{}"),)),
    Case("cut in the name", "[get_", "[get_"),
    Case("cut in the arguments", "[f(a='x", "[f(a='x"),
    Case("cut in the second call", "[f(), g(a=", ", g(a=", (("f", "{}"),)),
    Case("cut before the end", "[f() ", "", (("f", "{}"),)),
]

_CALL, _END = "<tool_call>\n<function=", "</function>\n</tool_call>"

QWEN3_CODER = [
    Case(
        "one call",
        f"{_CALL}get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n{_END}",
        "",
        (("get_weather", OSLO),),
    ),
    Case(
        "text before, and two calls",
        f"I look.\n\n{_CALL}now>\n{_END}\n{_CALL}get_weather>\n<parameter=city>Paris</parameter>\n{_END}\n",
        "I look.",
        (("now", "{}"), ("get_weather", PARIS)),
    ),
    Case(
        "values by their declared types",
        f"{_CALL}write_file>\n<parameter=mode>\n7\n</parameter>\n<parameter=size>\n2.50\n</parameter>\n"
        "<parameter=force>\nTrue\n</parameter>\n<parameter=owner>\nnull\n</parameter>\n"
        '<parameter=tags>\n["a", 1]\n</parameter>\n<parameter=options>\n{"k": [true]}\n</parameter>\n'
        f"<parameter=path>\n5\n</parameter>\n<parameter=unknown>\n5\n</parameter>\n{_END}",
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
        "a value of several lines with tags in it",
        f'{_CALL}write_file>\n<parameter=text>\n\n  if a < "b":\n</function></tool_call><parameter=x>\n\n'
        f"</parameter>\n{_END}",
        "",
        (("write_file", '{"text": "\\n  if a < \\"b\\":\\n</function></tool_call><parameter=x>\\n"}'),),
    ),
    Case(
        "no end of the last value",
        f"{_CALL}get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n{_END}\n",
        "",
        (("get_weather", OSLO),),
    ),
    Case(
        "no end of a value before another call",
        f"{_CALL}write_file>\n<parameter=options>\n{{\n}}\n{_END}\n{_CALL}get_weather>\n<parameter=city>\nParis\n{_END}",
        "",
        (("write_file", '{"options": {\n}}'), ("get_weather", PARIS)),
    ),
    Case(
        "no end of a value before the next parameter",
        f"{_CALL}get_weather>\n<parameter=city>\nOslo\n<parameter=days>\n3\n</parameter>\n{_END}",
        "",
        (("get_weather", OSLO),),
    ),
    Case(
        "no end of the only value, and none of the function",
        f"{_CALL}get_weather>\n<parameter=city>\nParis\n</tool_call>",
        "",
        (("get_weather", PARIS),),
    ),
    Case(
        "tags that begin a line of a value, and end no value",
        f"{_CALL}get_weather>\n<parameter=city>\n</tool_call>\n<parameter=city>\n<parameter=x>\n</function>\n</para\n"
        f"</tool_call>\n<tool_call>\nEnd\n</parameter>\n{_END}",
        "",
        (
            (
                "get_weather",
                '{"city": "</tool_call>\\n<parameter=city>\\n<parameter=x>\\n</function>\\n</para\\n</tool_call>\\n'
                '<tool_call>\\nEnd"}',
            ),
        ),
    ),
    Case("a name that no tool has", f"{_CALL}rm>\n<parameter=n>1</parameter>{_END}", "", (("rm", '{"n": "1"}'),)),
    Case("no begin tag", "Yes.\n<function=now>\n</function>\n</tool_call>", "Yes.", (("now", "{}"),)),
    Case("no begin tag and no tool", "Yes. <function=x></function>", "Yes. <function=x></function>"),
    Case("no end tag", "<tool_call><function=now></function>", "", (("now", "{}"),)),
    Case(
        "a call after a missing end tag, and after a tag without a call",
        "<tool_call><function=f></function>\n<tool_call> <tool_call><function=g></function></tool_call>",
        "\n<tool_call>",
        (("f", "{}"), ("g", "{}")),
    ),
    Case("no end of the function", "<tool_call><function=now>\n</tool_call>\n", "", (("now", "{}"),)),
    Case("two functions in a call", f"{_CALL}f></function>\n<function=g>{_END}", "", (("f", "{}"), ("g", "{}"))),
    Case("text after", f"{_CALL}now>{_END}\nDone <b>.", "\nDone <b>.", (("now", "{}"),)),
    Case("text between parameters", f"{_CALL}f>so<parameter=a>é</parameter>{_END}", "so", (("f", '{"a": "é"}'),)),
    Case(
        "other tags between parameters",
        f"{_CALL}f><b>so</b> <parameter=>\n<parameter=a>1</parameter>{_END}",
        "<b>so</b> <parameter=>",
        (("f", '{"a": "1"}'),),
    ),
    Case(
        "an end tag of a value twice",
        f"{_CALL}get_weather>\n<parameter=city>\nOslo\n</parameter>\n</parameter>\n<parameter=days>\n3\n</parameter>\n{_END}",
        "\n</parameter>",
        (("get_weather", OSLO),),
    ),
    Case("cut in a text between parameters", f"{_CALL}now>\nNow I\nthink ", "\nNow I\nthink ", (("now", ""),), True),
    Case(
        "a function after one without a begin tag",
        "<function=now></function><function=x>",
        "<function=x>",
        (("now", "{}"),),
    ),
    Case("a tag in a tag", f"<tool_call<tool_call><function=f>{_END}", "<tool_call", (("f", "{}"),)),
    Case("no function", "Use <tool_call> now", "Use <tool_call> now"),
    Case("a name that is none", "<tool_call><function=a b>x", "<tool_call><function=a b>x"),
    Case("cut in the tag", "<tool_call>\n<func", "<tool_call>\n<func"),
    Case("cut in the name", "<tool_call>\n<function=get_wea", "<tool_call>\n<function=get_wea"),
    Case("cut before the parameters", "<tool_call>\n<function=f>\n", "", (("f", ""),), True),
    Case(
        "cut in a string",
        f'{_CALL}f>\n<parameter=a>\nx\n</parameter>\n<parameter=b>\nsay "y\n</para',
        "",
        (("f", '{"a": "x", "b": "say \\"y\\n</para'),),
        True,
    ),
    Case("cut in a number", f"{_CALL}get_weather>\n<parameter=days>\n1", "", (("get_weather", '{"days": 1'),), True),
    Case("cut before a number", f"{_CALL}get_weather>\n<parameter=days>\n", "", (("get_weather", '{"days": '),), True),
    Case("cut in the end", f"{_CALL}now>\n</function>\n</tool_", "\n</tool_", (("now", "{}"),)),
]
