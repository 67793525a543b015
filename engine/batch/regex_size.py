"""Owns the bound on the size of one derivative of a grammar's regexes: it counts their optional or repeated parts.
Never interprets a regex, and overcounts rather than undercounts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from engine.step import GrammarError

MAX_PARTS = 1000
"""Maximum number of such parts in one regex. llguidance bounds how many states a mask may make, but not how long one
state takes: if n consecutive parts may be left out, it looks at n alternatives of up to n parts."""
MAX_SQUARES = 4 * MAX_PARTS**2
"""Maximum of the sum, over all regexes of a grammar, of the squares of their numbers of parts."""
_MAX_COUNT = 10**6

_QUANTIFIED = re.compile(
    r"\\[\s\S]|\[\^?\]?(?:\\[\s\S]|[^\]\\])*(?:\]|\Z)"
    r"|(?P<part>(?<!\()\?|[*{]|\|(?=\s*+(?:[|)#]|\Z))"  # with the flag x, spaces and comments are empty, too
    r"|\((?:\?[\w<>-]*:?)?\s*+[|)#]|\A\s*+\|)"  # also an empty group, and a group's flags
)
_GAP = r"(?:\s|(?://|\#)[^\n]*+)*+"
_NEW = r"""(?:[?!]*+[A-Za-z_][^\s:"/|()]*+[ \t]*+:|%(?:ignore|import|declare|llguidance|override|extend)\b|\Z)"""
"""Begins what stands behind a definition."""
_LARK = re.compile(
    rf"""
      (?P<comment>(?://|\#)[^\n]*)
    | (?P<empty>"")
    | "(?:\\[\s\S]|[^"\\\n])*(?:"i?|(?=\n)|\Z|\\)
    | /(?P<regex>(?:\\[\s\S]|[^/\\\n])+)(?:/[a-z]*|(?=\n)|\Z|\\)
    | (?P<json>%json\b)
    | (?:(?<=\n)|\A)[ \t]*[?!]*(?P<rule>[A-Za-z_]\w*+)[^\s:"/|()]*+[ \t]*+:(?P<first>(?={_GAP}\|))?
    | (?P<name>[A-Za-z_]\w*)
    | (?P<part>[?*{{~\[]|\|(?={_GAP}(?:[|)]|{_NEW}))|\({_GAP}\|)
    """,
    re.VERBOSE,
)


def check_regexes(grammar: str) -> None:
    """Refuse a grammar whose regexes are too large. `grammar` is what llguidance takes: Lark, or a list in JSON.

    Raises:
        GrammarError: its regexes have too many parts that can be left out or repeated.
    """
    squares = 0
    for count in _counts(grammar):
        if count > MAX_PARTS:
            text = (
                f"a regex may have {MAX_PARTS} parts that can be left out or repeated (?, *, {{}}, empty alternatives)"
            )
            raise GrammarError(f"{text}, but one has {count if count < _MAX_COUNT else 'many more'}")
        squares += count**2
    if squares > MAX_SQUARES:
        text = "the parts of its regexes that can be left out or repeated are too many together"
        raise GrammarError(f"{text}: the sum of their squares may be {MAX_SQUARES}, but it is {squares}")


def _counts(grammar: str) -> Iterator[int]:
    if not grammar.lstrip().startswith("{"):
        yield from _of_lark(grammar)
        return
    try:
        entries = json.loads(grammar).get("grammars", [])
    except (ValueError, RecursionError):  # llguidance reports the error
        return
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and isinstance(lark := entry.get("lark_grammar"), str):
            yield from _of_lark(lark)
        elif isinstance(entry, dict):
            yield from _of_schema(entry.get("json_schema"))


def num_parts(regex: str) -> int:
    return sum(match["part"] is not None for match in _QUANTIFIED.finditer(regex))


def _of_schema(schema: Any) -> Iterator[int]:
    """Count every pattern, anywhere in the schema. A property that happens to be named `pattern` counts, too."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if isinstance(pattern := value.get("pattern"), str):
                yield num_parts(pattern)
            if isinstance(named := value.get("patternProperties"), dict):
                yield from map(num_parts, named)
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _of_lark(text: str) -> Iterator[int]:
    """Count a Lark grammar's regexes. A terminal's count includes the terminals that it refers to; in a rule, each
    regex counts separately."""
    own: dict[str, int] = {}
    inner: dict[str, list[str]] = {}
    rule, place = "", 0
    while (found := _LARK.search(text, place)) is not None:
        place = found.end()
        is_terminal = rule.lstrip("_")[:1].isupper()
        if found["json"]:
            schema, place = _schema_at(text, place)
            yield from _of_schema(schema)
        elif found["rule"]:
            rule = found["rule"]
            own[rule] = own.get(rule, 0) + (found["first"] is not None)
        elif found["regex"] and not is_terminal:
            yield num_parts(found["regex"])
        elif found["regex"]:
            own[rule] += num_parts(found["regex"])
        elif found["name"] and is_terminal:
            inner.setdefault(rule, []).append(found["name"])
        elif (found["part"] or found["empty"]) and is_terminal:
            own[rule] += 1
    yield from _summed(own, inner)


def _schema_at(text: str, place: int) -> tuple[Any, int]:
    begin = text.find("{", place)
    try:
        return json.JSONDecoder().raw_decode(text, begin) if begin >= 0 else (None, place)
    except (ValueError, RecursionError):  # llguidance reports the error
        return None, place


def _summed(own: dict[str, int], inner: dict[str, list[str]]) -> Iterator[int]:
    done: dict[str, int] = {}
    for first in inner:
        waiting = [first]
        while waiting:
            name = waiting[-1]
            if name not in done and (missing := [one for one in inner.get(name, ()) if one not in done]):
                done[name] = own.get(name, 0)  # also if it refers to itself, which a terminal may not
                waiting += missing
                continue
            waiting.pop()
            total = own.get(name, 0) + sum(done.get(one, 0) for one in inner.get(name, ()))
            done[name] = min(total, _MAX_COUNT)
    return iter([done.get(name, count) for name, count in own.items()])
