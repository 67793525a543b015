"""Owns the states of a regex, and the regexes of what leads from one state to another by certain characters alone.
Never makes them deterministic: a parser tries all ways."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field

from serve_app.grammars.allowance import Allowance
from serve_app.grammars.character_sets import Ranges, as_class, without
from serve_app.grammars.notation import GrammarRefused
from serve_app.grammars.regex_tree import Characters, Either, Row, Times, Tree

START = 0
_FIRST_SHORT = 0xF0000  # for private use; none of them stands in what is written here
_SHORTS = re.compile("([\U000f0000-\U000ffffd])\\1*")


@dataclass(slots=True)
class Automaton:
    """Holds the states of a regex. A state is a place in the regex where a character has been read. `sets` has the
    characters that each state reads; the start state reads none."""

    sets: list[Ranges] = field(default_factory=lambda: [()])
    following: list[set[int]] = field(default_factory=lambda: [set()])
    ends: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Part:
    """Holds the states with which a part of a regex may begin and end."""

    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()
    may_be_empty: bool = True


def automaton_of(tree: Tree, allowance: Allowance) -> Automaton:
    """
    Raises:
        GrammarRefused: it has too many states.
    """
    made = Automaton()
    whole = _Builder(made, allowance).part(tree)
    made.following[START] |= whole.first
    made.ends |= whole.last | ({START} if whole.may_be_empty else set())
    return made


class _Builder:
    def __init__(self, made: Automaton, allowance: Allowance) -> None:
        self._made = made
        self._allowance = allowance

    def part(self, tree: Tree) -> _Part:
        match tree:
            case Characters(found):
                return self._characters(found)
            case Row(parts):
                return self._row(map(self.part, parts))
            case Either(options):
                built = [self.part(option) for option in options]
                self._allowance.take_steps(sum(len(one.first) + len(one.last) for one in built))
                return _Part(
                    frozenset().union(*(one.first for one in built)),
                    frozenset().union(*(one.last for one in built)),
                    any(one.may_be_empty for one in built),
                )
            case Times(part, least, most):
                return self._row(self._repeated(part, least, most))

    def _characters(self, found: Ranges) -> _Part:
        self._allowance.take_state()
        self._allowance.take_steps(len(found))
        if not found:
            raise GrammarRefused("a regex has a class of no characters")
        state = len(self._made.sets)
        self._made.sets.append(found)
        self._made.following.append(set())
        return _Part(frozenset({state}), frozenset({state}), False)

    def _row(self, parts: Iterator[_Part]) -> _Part:
        whole = _Part()
        for part in parts:
            self._join(whole.last, part.first)
            self._allowance.take_steps(len(whole.first) * whole.may_be_empty + len(whole.last) * part.may_be_empty)
            whole = _Part(
                whole.first | part.first if whole.may_be_empty else whole.first,
                whole.last | part.last if part.may_be_empty else part.last,
                whole.may_be_empty and part.may_be_empty,
            )
        return whole

    def _repeated(self, tree: Tree, least: int, most: int | None) -> Iterator[_Part]:
        for _ in range(least - (most is None and least > 0)):
            yield self.part(tree)
        if most is not None:
            yield self._up_to(tree, most - least)
            return
        one = self.part(tree)
        self._join(one.last, one.first)
        yield _Part(one.first, one.last, one.may_be_empty or not least)

    def _up_to(self, tree: Tree, count: int) -> _Part:
        """Repeat a tree at most `count` times. Only the last repetitions can be left out, so few states follow each."""
        whole, before = _Part(), frozenset[int]()
        for _ in range(count):
            one = self.part(tree)
            self._join(before, one.first)
            self._allowance.take_steps(len(whole.last))
            whole = _Part(whole.first or one.first, whole.last | one.last)
            before = one.last
        return whole

    def _join(self, last: Set[int], first: Set[int]) -> None:
        self._allowance.take_steps(len(last) * len(first))
        for state in last:
            self._made.following[state] |= first


class Runs:
    """Writes regexes for what an automaton reads without certain characters, the `units`."""

    def __init__(self, automaton: Automaton, units: Ranges, allowance: Allowance) -> None:
        self._automaton = automaton
        self._plain = [without(characters, units) for characters in automaton.sets]
        self._allowance = allowance
        self._shorts: dict[Ranges, str] = {}
        self._classes: list[str] = []

    def regexes(self, begin: int, ends: Set[int]) -> Iterator[tuple[int, str]]:
        """Yield each end that a run of at least one character can reach from `begin`, with the regex of such runs.

        Raises:
            GrammarRefused: the regexes are too long.
        """
        reached = self._reached(begin)
        found = self._in_one_pass(begin, reached)
        for end in sorted(ends & reached):
            short = self._regex(begin, end, self._leading_to(end, reached)) if found is None else found[end]
            yield end, self._expanded(short)

    def _in_one_pass(self, begin: int, states: Set[int]) -> Mapping[int, str] | None:
        """Return the regex to each state, or None if a run returns to any state other than the one it is in."""
        before: dict[int, list[int]] = {state: [] for state in states}
        for state in states:
            self._look_on_from(state)
            for after in self._next(state):
                if after < state:  # states are in the regex's order, except where it repeats
                    return None
                before[after].append(state)
        direct, found = set(self._next(begin)), dict[int, str]()
        for state in sorted(states):
            short = self._short(self._plain[state])
            ways = [f"{found[one]}{short}" for one in before[state] if one != state] + [short] * (state in direct)
            found[state] = ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"
            found[state] += f"(?:{short})*" * (state in before[state])
            self._allowance.take_chars(len(found[state]))
        return found

    def _look_on_from(self, state: int) -> None:
        self._allowance.take_steps(1 + len(self._automaton.following[state]))

    def _next(self, state: int) -> Iterator[int]:
        return (after for after in self._automaton.following[state] if self._plain[after])

    def _reached(self, begin: int) -> set[int]:
        found, waiting = set[int](), list(self._next(begin))
        while waiting:
            if (state := waiting.pop()) not in found:
                self._look_on_from(state)
                found.add(state)
                waiting += self._next(state)
        return found

    def _leading_to(self, end: int, states: Set[int]) -> set[int]:
        before: dict[int, list[int]] = {state: [] for state in states}
        for state in states:
            self._look_on_from(state)
            for after in self._next(state):
                before[after].append(state)
        found, waiting = {end}, [end]
        while waiting:
            new = [state for state in before[waiting.pop()] if state not in found]
            found.update(new)
            waiting += new
        return found

    def _regex(self, begin: int, end: int, states: Set[int]) -> str:
        """Eliminate the states one after another, and write what each stood for on the ways around it."""
        ways = {place: self._steps(state, states) for place, state in ((-1, begin), *((one, one) for one in states))}
        for state in sorted(states - {end}):
            self._take_away(state, ways)
        again = ways[end].get(end)
        return ways[-1][end] + (f"(?:{again})*" if again is not None else "")

    def _steps(self, state: int, states: Set[int]) -> dict[int, str]:
        return {after: self._short(self._plain[after]) for after in self._next(state) if after in states}

    def _short(self, found: Ranges) -> str:
        """Return the character that stands in for a class until the regex is complete."""
        if found not in self._shorts:
            self._shorts[found] = chr(_FIRST_SHORT + len(self._shorts))
            self._classes.append(as_class(found))
        return self._shorts[found]

    def _expanded(self, regex: str) -> str:
        def written(repeated: re.Match[str]) -> str:
            count = len(repeated[0])
            return self._classes[ord(repeated[1]) - _FIRST_SHORT] + (f"{{{count}}}" if count > 1 else "")

        expanded = _SHORTS.sub(written, regex)
        self._allowance.take_chars(len(expanded))
        return expanded

    def _take_away(self, state: int, ways: dict[int, dict[int, str]]) -> None:
        out = ways.pop(state)
        again = out.pop(state, None)
        loop = f"(?:{again})*" if again is not None else ""
        self._allowance.take_steps(len(ways))
        for before in ways.values():
            if (way := before.pop(state, None)) is None:
                continue
            self._allowance.take_steps(len(out))
            for after, rest in out.items():
                other = before.get(after)
                joined = f"{way}{loop}{rest}"
                before[after] = joined if other is None else f"(?:{other}|{joined})"
                self._allowance.take_chars(len(before[after]))
