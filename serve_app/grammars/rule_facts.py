"""Owns what is checked of a grammar's rules as they stand: that each can end, and that no text contains a tag.
Never writes a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias, TypeVar

from serve_app.grammars.allowance import Allowance
from serve_app.grammars.character_sets import characters, has, without
from serve_app.grammars.lark_rules import Choice, Lark, Matches, Node, Refers, Repeats, Sequence, is_terminal
from serve_app.grammars.notation import GrammarRefused
from serve_app.grammars.regex_tree import Characters, Either, Row, Times, Tree

MAX_LOOKS = 2**16
"""Limits looks at parts of rules, which are repeated where rules refer to one another in circles."""

States: TypeAlias = frozenset[tuple[int, bool]]
"""How many characters of a tag the text ends with, and whether a single terminal wrote all of them."""
_Place = TypeVar("_Place")


class _Looks:
    def __init__(self) -> None:
        self._left = MAX_LOOKS

    def take(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise GrammarRefused("has too many rules that refer to one another in circles")


def check_ends(grammar: Lark) -> None:
    """
    Raises:
        GrammarRefused: a rule that is needed has no finite text.
    """
    names, looks = order(grammar), _Looks()
    ending: set[str] = set()

    def ends(node: Node) -> bool:
        looks.take()
        match node:
            case Refers(name):
                return is_terminal(name) or name in ending
            case Sequence(items):
                return all(map(ends, items))
            case Choice(options):
                return any(map(ends, options))
            case Repeats(item, times):
                return times in ("?", "*") or times.startswith("{0") or ends(item)
        return True

    def look_again() -> bool:
        num_known = len(ending)
        for name in names:
            if name not in ending and ends(grammar.rules[name]):
                ending.add(name)
        return len(ending) > num_known

    while look_again():
        pass
    if endless := next((name for name in names if name not in ending), None):
        raise GrammarRefused(f"{grammar.told(endless)} never ends")


def check_never_inside(tag: str, grammar: Lark, tree: Callable[[Matches | Refers], Tree], allowance: Allowance) -> None:
    """Check that no text of the grammar contains the tag. Assumes that no single terminal writes it.

    Raises:
        GrammarRefused: several terminals together can write it, or it is too much work to decide.
    """
    walk = _Walk(tag, grammar, tree, allowance)
    while walk.look_again():
        pass
    if names := walk.writers():
        text = f"can write {tag!r}, which ends a text in this model's format of calls"
        raise GrammarRefused(f"{grammar.told(names[0])} {text}")


def order(grammar: Lark) -> list[str]:
    """Return the rules that are needed, each after those that it refers to, except in circles.

    Raises:
        GrammarRefused: one is missing.
    """
    found: dict[str, None] = {}
    met, waiting = {"start"}, [("start", _rules_in(_rule(grammar, "start")))]
    while waiting:
        name, inner = waiting[-1]
        if (other := next(inner, None)) is None:
            waiting.pop()
            found[name] = None
        elif other not in met:
            met.add(other)
            waiting.append((other, _rules_in(_rule(grammar, other))))
    return list(found)


def _rule(grammar: Lark, name: str) -> Node:
    if name not in grammar.rules:
        raise GrammarRefused(f"has no rule {name[:50]!r}")
    return grammar.rules[name]


def _rules_in(node: Node) -> Iterator[str]:
    match node:
        case Refers(name) if not is_terminal(name):
            yield name
        case Sequence(inner) | Choice(inner):
            for one in inner:
                yield from _rules_in(one)
        case Repeats(item):
            yield from _rules_in(item)


class _Walk:
    """Walks through all texts at once, tracking how much of the tag they end with."""

    def __init__(self, tag: str, grammar: Lark, tree: Callable[[Matches | Refers], Tree], allowance: Allowance) -> None:
        self._tag = tag
        self._grammar = grammar
        self._tree = tree
        self._order = order(grammar)
        self._known = {(name, before): frozenset[int]() for name in self._order for before in range(len(tag) + 1)}
        """For a rule and how much of the tag stands before it: how much may stand after it."""
        self._looks = _Looks()
        self._allowance = allowance
        self._read: dict[tuple[Matches | Refers, int], frozenset[int]] = {}

    def look_again(self) -> bool:
        """Look at every rule once more. Return whether that led to anything new."""
        has_grown = False
        for name, before in self._known:
            after = self._after(self._grammar.rules[name], frozenset({before}))
            has_grown |= after != self._known[name, before]
            self._known[name, before] = after
        return has_grown

    def writers(self) -> list[str]:
        """Return the rules that write the tag, the innermost first, or an empty list if no text has it."""
        whole = len(self._tag)
        if whole not in self._known["start", 0]:
            return []
        return [name for name in self._order if whole in self._known[name, 0]]

    def _after(self, node: Node, before: frozenset[int]) -> frozenset[int]:
        self._looks.take()
        match node:
            case Refers(name) if not is_terminal(name):
                return frozenset().union(*(self._known[name, one] for one in before))
            case Matches() | Refers():
                return self._after_terminal(node, self._after_ignored(before))
            case Sequence(items):
                for item in items:
                    before = self._after(item, before)
                return before
            case Choice(options):
                return frozenset().union(*(self._after(option, before) for option in options))
            case Repeats(item):
                return _closure(before, lambda one: self._after(item, one))

    def _after_ignored(self, before: frozenset[int]) -> frozenset[int]:
        ignored = Choice(tuple(self._grammar.ignored))
        return _closure(before, lambda one: self._after_bare(ignored, one)) if self._grammar.ignored else before

    def _after_bare(self, node: Node, before: frozenset[int]) -> frozenset[int]:
        """Follow an ignored node. Nothing is skipped between its parts."""
        match node:
            case Matches() | Refers():
                return self._after_terminal(node, before)
            case Sequence(items):
                for item in items:
                    before = self._after_bare(item, before)
                return before
            case Choice(options):
                return frozenset().union(*(self._after_bare(option, before) for option in options))
            case Repeats(item):
                return _closure(before, lambda one: self._after_bare(item, one))

    def _after_terminal(self, node: Matches | Refers, before: frozenset[int]) -> frozenset[int]:
        found = frozenset[int]()
        for one in before:
            if (node, one) not in self._read:
                read = self._after_characters(self._tree(node), frozenset({(one, False)}))
                self._read[node, one] = frozenset(place for place, _ in read)
            found |= self._read[node, one]
        return found

    def _after_characters(self, tree: Tree, before: States) -> States:
        self._allowance.take_steps(2)
        match tree:
            case Characters(found):
                self._allowance.take_steps(2 * len(before) * len(found))  # each is looked at twice
                return frozenset(after for one in before for after in self._step(tree, *one))
            case Row(parts):
                for part in parts:
                    before = self._after_characters(part, before)
                return before
            case Either(options):
                return frozenset().union(*(self._after_characters(option, before) for option in options))
            case Times(part, least, most):
                if most == 0:
                    return before
                after = _closure(before, lambda one: self._after_characters(part, one))
                return after if least == 0 else self._after_characters(part, after)

    def _step(self, read: Characters, place: int, is_own: bool) -> Iterator[tuple[int, bool]]:
        """Read one character. The tag's first character occurs only once in it. No terminal alone writes the tag: its
        lexemes exclude it."""
        tag = self._tag
        if place == len(tag):
            yield place, False
            return
        if has(read.found, tag[place]):
            is_own = is_own or not place
            if place + 1 < len(tag) or not is_own:
                yield place + 1, is_own
        if place and has(read.found, tag[0]):
            yield 1, True
        if without(read.found, characters((tag[0], tag[place]))):
            yield 0, True


def _closure(before: frozenset[_Place], step: Callable[[frozenset[_Place]], frozenset[_Place]]) -> frozenset[_Place]:
    """Return `before` and whatever any number of steps leads to."""
    found = before
    while not (after := step(found)) <= found:
        found |= after
    return found
