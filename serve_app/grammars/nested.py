"""Owns Lark grammars whose rules nest, for text inside a call: rules stay rules, and terminals are rewritten.
Never approximates: what cannot be kept is refused by the name of its rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from serve_app.grammars.allowance import Allowance
from serve_app.grammars.automaton import START, Automaton, Runs, automaton_of
from serve_app.grammars.character_sets import Ranges, characters, has
from serve_app.grammars.encodings import Encoding
from serve_app.grammars.lark_rules import Choice, Lark, Matches, Node, Refers, Repeats, Sequence, is_terminal
from serve_app.grammars.notation import GrammarRefused, escaped
from serve_app.grammars.regex_tree import Characters, Either, Row, Times, Tree, read_regex, regex_of
from serve_app.grammars.regular import Expansion
from serve_app.grammars.rule_facts import check_ends, check_never_inside

MAX_CHARS = 128 * 2**10
"""Limits the characters of the rules that one grammar becomes."""


def nested_rules(grammar: Lark, encoding: Encoding) -> str:
    """Write what stands for a text of the grammar in a rule.

    Raises:
        GrammarRefused: a rule or a terminal cannot be kept.
    """
    allowance = Allowance()
    terminals = Terminals(grammar, allowance)
    check_ends(grammar)
    if encoding.end:
        check_never_inside(encoding.end, grammar, terminals.tree, allowance)
    return f"%lark {{\n{_Writer(grammar, terminals, encoding, allowance).text()}}}"


class Terminals:
    """Reads the trees of a grammar's terminals, each once."""

    def __init__(self, grammar: Lark, allowance: Allowance) -> None:
        self._grammar = grammar
        self._allowance = allowance
        self._expansion = Expansion(grammar)
        self._trees: dict[Matches | Refers, Tree] = {}

    def tree(self, node: Matches | Refers) -> Tree:
        """
        Raises:
            GrammarRefused: it has something that is not known here.
        """
        if node not in self._trees:
            self._trees[node] = self._read(node)
        return self._trees[node]

    def _read(self, node: Matches | Refers) -> Tree:
        if isinstance(node, Matches):
            return read_regex(node.regex, self._allowance)
        try:
            return read_regex(self._expansion.regex(node.name), self._allowance)
        except GrammarRefused as refused:
            told = self._grammar.told(node.name)
            raise refused if told in refused.text else GrammarRefused(f"{told}: {refused.text}") from refused


class _Writer:
    def __init__(self, grammar: Lark, terminals: Terminals, encoding: Encoding, allowance: Allowance) -> None:
        self._grammar = grammar
        self._terminals = terminals
        self._encoding = encoding
        self._units = characters(encoding.units)
        self._allowance = allowance
        self._names: dict[str, str] = {}
        """The new names of the rules that are referred to."""
        self._waiting: list[str] = []
        """The rules among them that are still to be written."""
        self._written: dict[Matches | Refers, str] = {}
        self._lexemes: dict[str, str] = {}
        self._lines: list[str] = []
        self._num_chars = 0

    def text(self) -> str:
        start, after = self._rule("start"), self._skipped
        while self._waiting:
            name = self._waiting.pop()
            self._line(f"{self._names[name]}: {self._body(name)}")
        self._line(f"start: {start} {after}")
        for regex, lexeme in self._lexemes.items():
            self._line(f"{lexeme}: {regex}")
        return "".join(self._lines)

    def _line(self, text: str) -> None:
        self._num_chars += len(text) + 1
        if self._num_chars > MAX_CHARS:
            raise GrammarRefused(f"should become rules of at most {MAX_CHARS} characters, but they have more")
        self._lines.append(f"{text}\n")

    def _rule(self, name: str) -> str:
        if name not in self._names:
            self._names[name] = f"r{len(self._names)}"
            self._waiting.append(name)
        return self._names[name]

    def _body(self, name: str) -> str:
        try:
            return self._text(self._grammar.rules[name])
        except GrammarRefused as refused:
            if refused.text.startswith(("line ", "%ignore")):
                raise
            raise GrammarRefused(f"{self._grammar.told(name)}: {refused.text}") from refused

    def _text(self, node: Node) -> str:
        match node:
            case Refers(name) if not is_terminal(name):
                return self._rule(name)
            case Matches() | Refers():
                written = self._terminal(node)
                return f"{self._skipped} {written}" if self._grammar.ignored else written
            case Sequence(items):
                return " ".join(map(self._text, items)) or '""'
            case Choice(options):
                return f"({' | '.join(map(self._text, options))})"
            case Repeats(item, times):
                return f"({self._text(item)}){times}"

    @cached_property
    def _skipped(self) -> str:
        """Write what may stand before any terminal, and after the last one."""
        if not self._grammar.ignored:
            return '""'
        try:
            ignored = " | ".join(map(self._ignored, self._grammar.ignored))
        except GrammarRefused as refused:
            raise GrammarRefused(f"%ignore: {refused.text}") from refused
        self._line(f"skipped: ({ignored})*")
        return "skipped"

    def _ignored(self, node: Node) -> str:
        """Write an ignored node. Nothing is skipped between its parts."""
        match node:
            case Matches() | Refers():
                return self._terminal(node)
            case Sequence(items):
                return f"({' '.join(map(self._ignored, items))})"
            case Choice(options):
                return f"({' | '.join(map(self._ignored, options))})"
            case Repeats(item, times):
                return f"({self._ignored(item)}){times}"

    def _terminal(self, node: Matches | Refers) -> str:
        if node not in self._written:
            tree = self._terminals.tree(node)
            is_split = _may_read(tree, self._units)
            self._written[node] = self._split(tree) if is_split else self._lexeme(regex_of(tree))
        return self._written[node]

    def _lexeme(self, regex: str, besides: str = "") -> str:
        if not regex:
            return '""'
        return self._lexemes.setdefault(f"/{regex}/{besides}", f"L{len(self._lexemes)}")

    def _split(self, tree: Tree) -> str:
        name = f"t{len(self._written)}"
        automaton = automaton_of(tree, self._allowance)
        ways = _Ways(name, automaton, self._units, self._encoding, self._allowance).found()
        for state, options in ways.items():
            written = " | ".join(self._way(before, *lexeme) for before, lexeme in options)
            self._line(f"{state}: {written}")
        return name

    def _way(self, before: str, regex: str, besides: str) -> str:
        return f"{before} {self._lexeme(regex, besides)}" if regex else before or '""'


class _Ways:
    """Builds a terminal's rules: what it has read in each of its states. They recurse on the left, so that a parser
    keeps few items."""

    def __init__(
        self, name: str, automaton: Automaton, units: Ranges, encoding: Encoding, allowance: Allowance
    ) -> None:
        self._name = name
        self._automaton = automaton
        self._units = units
        self._encoding = encoding
        self._allowance = allowance
        self._runs = Runs(automaton, units, allowance)
        self._run_ends = {
            state for state in range(len(automaton.sets)) if state in automaton.ends or self._after(state)
        }
        self._found: dict[str, list[tuple[str, tuple[str, str]]]] = {}
        """For each rule, its options: the rule of what was read before, and a lexeme."""

    def found(self) -> Mapping[str, list[tuple[str, tuple[str, str]]]]:
        waiting = [(START, "")]
        known = {(START, "")}
        ends = [("", ("", ""))] if START in self._automaton.ends else []
        while waiting:
            state, kind = waiting.pop()
            before = "" if state == START else self._rule(state, kind)
            if before and state in self._automaton.ends:
                ends.append((before, ("", "")))
            for after, after_kind, lexeme in self._steps(state, kind):
                self._allowance.take_ways(1)
                self._found.setdefault(self._rule(after, after_kind), []).append((before, lexeme))
                if (after, after_kind) not in known:
                    known.add((after, after_kind))
                    waiting.append((after, after_kind))
        self._allowance.take_ways(len(ends))
        return self._found | {self._name: ends}

    def _rule(self, state: int, kind: str) -> str:
        return f"{self._name}_{state}{kind}"

    def _steps(self, state: int, kind: str) -> Iterator[tuple[int, str, tuple[str, str]]]:
        """`kind`: how the state was reached: by a run (`r`), by the first character of the end (`e`), by another unit
        (`u`). A run is as long as its lexeme can be, so no run follows a run."""
        for after, unit, regex in self._after(state):
            yield after, unit, (regex, "")
        if kind != "r":
            besides = f" & ~/{escaped(self._encoding.end[1:])}(?s:.*)/" if kind == "e" else ""
            runs = self._runs.regexes(state, self._run_ends)
            for after, regex in runs:
                yield after, "r", (regex, besides)

    def _after(self, state: int) -> list[tuple[int, str, str]]:
        """Return the states that a unit leads to, with the unit's kind and the regex of the units that lead there."""
        found = []
        self._allowance.take_steps(1 + len(self._automaton.following[state]))
        for after in sorted(self._automaton.following[state]):
            units = [unit for unit in self._encoding.units if has(self._automaton.sets[after], unit)]
            for kind in "eu":
                written = [
                    self._encoding.units[one] for one in units if (one == self._encoding.end[:1]) == (kind == "e")
                ]
                if written:
                    found.append((after, kind, f"(?:{'|'.join(written)})"))
        return found


def _may_read(tree: Tree, found: Ranges) -> bool:
    match tree:
        case Characters(one):
            return any(first <= code <= last for first, last in one for code, _ in found) or any(
                first <= code <= last for first, last in found for code, _ in one
            )
        case Row(parts) | Either(parts):
            return any(_may_read(part, found) for part in parts)
        case Times(part):
            return _may_read(part, found)
