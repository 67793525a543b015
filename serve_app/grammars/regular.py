"""Owns the language of a Lark grammar as one regex, for text inside other text such as a JSON string.
Never approximates. A rule that refers to itself other than as a repetition is not regular, and is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from collections.abc import Sequence as Sequences

from serve_app.grammars.check import find_fault
from serve_app.grammars.lark_rules import Choice, Lark, Matches, Node, Refers, Repeats, Sequence, refuse_anchors
from serve_app.grammars.notation import GrammarRefused
from serve_app.grammars.regexes import regex, with_ascii_classes
from serve_app.grammars.schema_patterns import OF_RUST, kept_pattern

MAX_REGEX_CHARS = 24 * 2**10
MAX_NESTED_RULES = 64
MAX_NESTED = 200
"""Limits rules, brackets and repetitions inside one another, because the writer recurses."""


def lark_pattern(grammar: Lark) -> str:
    """Write the texts that the grammar describes as a JSON schema's `pattern`, which matches whole texts.

    Raises:
        GrammarRefused: it has no such pattern.
    """
    if grammar.ignored:
        # It may stand between terminals and not inside them, which the regex of a single rule cannot say.
        raise GrammarRefused("has %ignore, which no single regex says")
    return whole(with_ascii_classes(Expansion(grammar).regex("start")))


def regex_pattern(definition: str) -> str:
    """Write the texts that a regex matches as a JSON schema's `pattern`.

    Raises:
        GrammarRefused: it is not a regex, or has something that is not supported here.
    """
    if fault := find_fault(regex(definition).text()):
        raise GrammarRefused(_PLACE.sub("", fault))
    if _SPACED.search(definition):
        raise GrammarRefused("a regex's flag 'x' is not supported here")
    inner = _AT_BEGIN.sub("", _AT_END.sub(r"\1", definition))
    refuse_anchors(inner)
    return whole(with_ascii_classes(inner))


def whole(pattern: str) -> str:
    return f"{OF_RUST}{pattern})$"


def of_whole(pattern: str) -> str | None:
    """Return the pattern that `whole` was given, or a client's own if it has that form; None if it has not."""
    begin = OF_RUST if pattern.startswith(OF_RUST) else _OF_CLIENT
    inner = pattern.removeprefix(begin).removesuffix(")$")
    if len(inner) != len(pattern) - len(begin) - 2 or find_fault(regex(inner).text()):
        return None
    return inner if begin == OF_RUST else kept_pattern(inner)


_OF_CLIENT = "^(?:"
_AT_BEGIN = re.compile(r"^(?:\^|\\A)")
_AT_END = re.compile(r"(?<!\\)((?:\\\\)*)(?:\$|\\z)\Z")
"""Redundant anchors: the regex matches the whole text in any case."""
_SPACED = re.compile(r"\(\?[a-wyzA-Z]*x")
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")
"""A place in the regex as llguidance has rewritten it."""


class Expansion:
    """Expands one grammar's rules and terminals to regexes."""

    def __init__(self, grammar: Lark) -> None:
        self._grammar = grammar
        self._rules = grammar.rules
        self._done: dict[str, str] = {}
        self._open: list[str] = []
        self._depth = 0

    def regex(self, name: str) -> str:
        """Return the regex of a rule or a terminal.

        Raises:
            GrammarRefused: it has none.
        """
        if name in self._done:
            return self._done[name]
        if name in self._open:
            text = "refers to itself other than as a repetition at its end or its beginning"
            raise GrammarRefused(f"{self._grammar.told(name)} {text}, which is no regular language")
        if name not in self._rules:
            raise GrammarRefused(f"has no rule {name[:50]!r}")
        if len(self._open) >= MAX_NESTED_RULES:
            raise GrammarRefused(f"should have rules nested at most {MAX_NESTED_RULES} deep, but they are deeper")
        self._open.append(name)
        self._done[name] = self._rule(name)
        self._open.pop()
        return self._done[name]

    def _rule(self, name: str) -> str:
        """Write a rule's regex. If the rule repeats itself, separate what is repeated from what ends it."""
        body, itself = self._rules[name], Refers(name)
        before: list[Node] = []
        after: list[Node] = []
        ends: list[Node] = []
        for option in body.options if isinstance(body, Choice) else (body,):
            items = option.items if isinstance(option, Sequence) else (option,)
            if len(items) > 1 and items[-1] in (itself, Repeats(itself, "?")):
                before.append(Sequence(items[:-1]))
                ends += [Sequence(items[:-1])] if items[-1] != itself else []
            elif len(items) > 1 and items[0] == itself:
                after.append(Sequence(items[1:]))
            else:
                ends.append(option)
        if not (before or after):
            return self._text(body)
        if not ends:
            raise GrammarRefused(f"{self._grammar.told(name)} never ends")
        if before and after:
            self.regex(name)  # refuses it: it is open
        written = _Written()
        written.add(self._repeated(before))
        written.add(self._text(Choice(tuple(ends))))
        written.add(self._repeated(after))
        return written.text()

    def _repeated(self, options: Sequences[Node]) -> str:
        return f"{self._text(Choice(tuple(options)))}*" if options else ""

    def _text(self, node: Node) -> str:
        self._depth += 1
        if self._depth > MAX_NESTED:
            raise GrammarRefused(f"should be nested at most {MAX_NESTED} deep, but it is deeper")
        written = _Written()
        for part in self._parts(node):
            written.add(part)
        self._depth -= 1
        return written.text()

    def _parts(self, node: Node) -> Iterator[str]:
        match node:
            case Matches(regex):
                yield regex
            case Refers(name):
                yield f"(?:{self.regex(name)})"
            case Sequence(items):
                for item in items:
                    yield self._text(item)
            case Choice(options):
                for place, option in enumerate(options):
                    yield f"{'|' if place else '(?:'}{self._text(option)}"
                yield ")"
            case Repeats(item, times):
                yield f"(?:{self._text(item)}){times}"


class _Written:
    """Collects text up to a limit, and no further: a rule may be referred to thousands of times."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._size = 0

    def add(self, text: str) -> None:
        self._size += len(text)
        if self._size > MAX_REGEX_CHARS:
            raise GrammarRefused(f"should give a regex of at most {MAX_REGEX_CHARS} characters, but it gives more")
        self._parts.append(text)

    def text(self) -> str:
        return "".join(self._parts)
