"""Owns the reader of Lark grammars: rules become trees of texts, references, sequences, choices and repetitions.
Never says what they match. Reads what describes the language, and refuses everything else by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import TypeAlias

from serve_app.grammars.notation import GrammarRefused, escaped

MAX_DEPTH = 32
"""Bounds nested brackets: the reader recurses."""
_LIBRARY = "common."


@dataclass(frozen=True, slots=True)
class Matches:
    """Matches what a regex does."""

    regex: str


@dataclass(frozen=True, slots=True)
class Refers:
    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeats:
    """`times`: as in a regex."""

    item: Node
    times: str


Node: TypeAlias = Matches | Refers | Sequence | Choice | Repeats
Rules = Mapping[str, Node]


@dataclass(frozen=True, slots=True)
class Lark:
    """`ignored`: what may stand before and after each terminal of a rule; `lines`: where rules begin."""

    rules: Rules
    ignored: tuple[Node, ...] = ()
    lines: Mapping[str, int] = field(default_factory=dict)

    def told(self, name: str) -> str:
        """Describe a rule or terminal, for a refusal."""
        line = f"line {self.lines[name]}: " if name in self.lines else ""
        kind = "terminal" if is_terminal(name) else "rule"
        return f"{line}the {kind} {name.removeprefix(_LIBRARY)[:50]!r}"


def is_terminal(name: str) -> bool:
    """Return whether the name is a terminal's. Nothing is ignored inside a terminal."""
    return name.removeprefix(_LIBRARY).lstrip("_")[:1].isupper()


_TOKENS = re.compile(
    r"""
      (?P<space>\s+|(?://|\#)[^\n]*)
    | (?P<rule>(?:(?<=\n)|\A)[ \t]*
        (?:[?!]*(?P<name>[A-Za-z_]\w*)[ \t]*(?P<marks>[^\s:"/|()]*)[ \t]*:|(?P<ignore>%ignore)\b))
    | (?P<import>%import[ \t]+common[ \t]*(?:\.[ \t]*(?P<one>\w+)(?:[ \t]*->[ \t]*(?P<alias>\w+))?|\((?P<many>[^)]*)\)))
    | (?P<string>"(?:\\.|[^"\\\n])*"i?)
    | (?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)
    | (?P<as>->[ \t]*\w+)
    | (?P<word>[A-Za-z_]\w*)
    | (?P<times>~[ \t]*(?P<least>\d+)(?:[ \t]*\.\.[ \t]*(?P<most>\d+))?|\{\d*(?:,\d*)?\}|[?*+])
    | (?P<range>\.\.)
    | (?P<mark>[()\[\]|])
    """,
    re.VERBOSE,
)

_COMMON = r"""
DIGIT: "0".."9"
HEXDIGIT: "a".."f" | "A".."F" | DIGIT
INT: DIGIT+
SIGNED_INT: ["+" | "-"] INT
DECIMAL: INT "." INT? | "." INT
_EXP: ("e" | "E") SIGNED_INT
FLOAT: INT _EXP | DECIMAL _EXP?
SIGNED_FLOAT: ["+" | "-"] FLOAT
NUMBER: FLOAT | INT
SIGNED_NUMBER: ["+" | "-"] NUMBER
ESCAPED_STRING: /"([^"\\\n]|\\.)*"/
LCASE_LETTER: "a".."z"
UCASE_LETTER: "A".."Z"
LETTER: UCASE_LETTER | LCASE_LETTER
WORD: LETTER+
CNAME: ("_" | LETTER) ("_" | LETTER | DIGIT)*
WS_INLINE: (" " | /\t/)+
WS: /[ \t\f\r\n]/+
CR: /\r/
LF: /\n/
NEWLINE: (CR? LF)+
"""
"""What `%import common.` can name."""


def read_lark(text: str) -> Lark:
    """
    Raises:
        GrammarRefused: it has something that does not describe a language, or that this reader does not know.
    """
    reader = _Reader(text)
    try:
        return reader.lark()
    except GrammarRefused as refused:
        raise GrammarRefused(f"line {reader.line}: {refused.text}") from refused


@cache
def _common() -> Rules:
    return MappingProxyType(dict(_Reader(_COMMON).lark().rules))


@cache
def _library() -> Rules:
    """Return the common rules under the names that they have among a grammar's own."""
    return MappingProxyType({f"{_LIBRARY}{name}": _renamed(body) for name, body in _common().items()})


class _Reader:
    def __init__(self, text: str) -> None:
        self._source = text
        self._tokens: list[re.Match[str]] = []
        self._place = 0
        self._rules: dict[str, Node] = {}
        self._lines: dict[str, int] = {}
        self._ignored: list[Node] = []
        self._read_to = 0

    @property
    def line(self) -> int:
        """The line that is being read, from 1."""
        return self._source.count("\n", 0, self._read_to) + 1

    def lark(self) -> Lark:
        self._split()
        while (token := self._next()) is not None:
            if token["import"]:
                self._import(token)
            elif token["ignore"]:
                self._ignored.append(self._choice(0))
            elif token["rule"]:
                self._define(token)
            else:
                raise _unreadable(token)
        return Lark(self._rules, tuple(self._ignored), self._lines)

    def _split(self) -> None:
        text = self._source
        while self._read_to < len(text):
            match = _TOKENS.match(text, self._read_to)
            if match is None:
                told = text[self._read_to : self._read_to + 20].splitlines()[0]
                raise GrammarRefused(f"{told!r} is not supported here")
            if not match["space"]:
                self._tokens.append(match)
            self._read_to = match.end()

    def _define(self, token: re.Match[str]) -> None:
        name = token["name"]
        self._lines[name] = self.line
        if token["marks"]:
            raise GrammarRefused(f"the rule {name[:50]} has {token['marks'][:50]!r}, which is not supported here")
        body = self._choice(0)
        if name in self._rules:
            raise GrammarRefused(f"has the rule {name[:50]!r} twice")
        self._rules[name] = body

    def _import(self, token: re.Match[str]) -> None:
        names = [name.strip() for name in (token["one"] or token["many"]).split(",")]
        for name in names:
            if name not in _common():
                raise GrammarRefused(f"imports common.{name[:50]}, which is not supported here")
            self._rules[token["alias"] or name] = Refers(f"{_LIBRARY}{name}")
        self._rules |= _library()

    def _choice(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise GrammarRefused(f"should be nested at most {MAX_DEPTH} deep, but it is deeper")
        options = [self._sequence(depth)]
        while (token := self._peek()) is not None and token["mark"] == "|":
            self._next()
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while (token := self._peek()) is not None and not token["rule"] and not token["import"]:
            if token["mark"] in ("|", ")", "]"):
                break
            self._next()
            if token["as"]:
                break
            items.append(self._repeated(self._atom(token, depth)))
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _repeated(self, item: Node) -> Node:
        while (token := self._peek()) is not None and token["times"]:
            self._next()
            item = Repeats(item, _times(token))
        return item

    def _atom(self, token: re.Match[str], depth: int) -> Node:
        if token["word"]:
            return Refers(token["word"])
        if token["string"]:
            return self._text(token["string"])
        if token["regex"]:
            return Matches(_regex(token["regex"]))
        if token["mark"] in ("(", "["):
            inner = self._choice(depth + 1)
            end = self._next()
            if end is None or end["mark"] != {"(": ")", "[": "]"}[token["mark"]]:
                raise GrammarRefused(f"has a {token['mark']!r} that is not closed")
            return inner if token["mark"] == "(" else Repeats(inner, "?")
        raise _unreadable(token)

    def _text(self, written: str) -> Node:
        first, following = _string(written), self._peek()
        if following is None or not following["range"]:
            return Matches(f"(?i:{escaped(first)})" if written.endswith("i") else escaped(first))
        self._next()
        last = self._next()
        end = _string(last["string"]) if last is not None and last["string"] else ""
        if len(first) != 1 or len(end) != 1 or first > end:
            raise GrammarRefused(f"has a range of characters that is none, from {first[:20]!r}")
        return Matches(f"[\\x{{{ord(first):x}}}-\\x{{{ord(end):x}}}]")

    def _peek(self) -> re.Match[str] | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def _next(self) -> re.Match[str] | None:
        token = self._peek()
        self._place += 1
        if token is not None:
            self._read_to = token.start("name") if token["name"] else token.start()
        return token


def _unreadable(token: re.Match[str]) -> GrammarRefused:
    return GrammarRefused(f"has {token[0].strip()[:50]!r} where no such thing can be")


def _renamed(node: Node) -> Node:
    """Prefix the names that a common rule refers to, as `_library` names them."""
    match node:
        case Refers(name):
            return Refers(f"{_LIBRARY}{name}")
        case Sequence(items):
            return Sequence(tuple(map(_renamed, items)))
        case Choice(options):
            return Choice(tuple(map(_renamed, options)))
        case Repeats(item, times):
            return Repeats(_renamed(item), times)
    return node


def _times(token: re.Match[str]) -> str:
    if token["least"]:
        return f"{{{token['least']},{token['most'] or token['least']}}}"
    text = token["times"]
    return text.replace("{,", "{0,")


_ESCAPE = re.compile(r"\\(x(?=[0-9a-fA-F]{2})|.)")


def _as_json(escape: re.Match[str]) -> str:
    """Translate an escape. JSON has all of Lark's but `\\x`. An escaped backslash does not begin one."""
    return r"\u00" if escape[1] == "x" else escape[0]


def _string(written: str) -> str:
    try:
        text = json.loads(_ESCAPE.sub(_as_json, written.removesuffix("i")), strict=False)
    except ValueError as error:
        raise GrammarRefused(f"has a text that cannot be read, {written[:50]}") from error
    assert isinstance(text, str)
    return text


_ESCAPE_OR_CLASS = re.compile(r"\\[\s\S]|\[\^?\]?|\]|[\^$]")


def refuse_anchors(regex: str) -> None:
    """
    Raises:
        GrammarRefused: the regex has an anchor.
    """
    depth = 0
    for part in _ESCAPE_OR_CLASS.findall(regex):
        if part[:2] in (r"\b", r"\B", r"\A", r"\z", r"\Z") or (part in "^$" and not depth):
            raise GrammarRefused(f"a regex's {part!r} is not supported here: what it means depends on its place")
        depth = max(depth + (part.startswith("[") - (part == "]")), 0)


def _regex(written: str) -> str:
    body, _, flags = written[1:].rpartition("/")
    if unknown := set(flags) - set("isu"):
        raise GrammarRefused(f"a regex's flag {min(unknown)!r} is not supported here")
    refuse_anchors(body)
    flags = "".join(sorted(set(flags) & set("is")))
    return f"(?{flags}:{body})"
