"""Owns the reader of regexes: a tree of sets of characters, sequences, choices and repetitions.
Never approximates: what it does not know is refused by name, even if llguidance knows it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from serve_app.grammars import character_sets
from serve_app.grammars.allowance import Allowance
from serve_app.grammars.character_sets import EVERY, Ranges, as_class, in_both_cases, inverted, num_alike, ranges
from serve_app.grammars.notation import GrammarRefused

MAX_DEPTH = 200
"""Bounds nested groups: the reader recurses, and so do the readers of the tree."""


@dataclass(frozen=True, slots=True)
class Characters:
    """Matches one character of a set."""

    found: Ranges


@dataclass(frozen=True, slots=True)
class Row:
    parts: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Either:
    options: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Times:
    """`most`: None where there is no bound."""

    part: Tree
    least: int
    most: int | None


Tree: TypeAlias = Characters | Row | Either | Times


def read_regex(text: str, allowance: Allowance) -> Tree:
    """
    Raises:
        GrammarRefused: it has something that is not known here, or is too long.
    """
    allowance.take_steps(len(text))
    return _Reader(text, allowance).tree()


def regex_of(tree: Tree) -> str:
    """Write the tree as a regex, without any character that Lark would read as another."""
    match tree:
        case Characters(found):
            return as_class(found)
        case Row(parts):
            return "".join(map(regex_of, parts))
        case Either(options):
            return f"(?:{'|'.join(map(regex_of, options))})"
        case Times(part, least, most):
            return f"(?:{regex_of(part)}){_TIMES.get((least, most)) or _counted(least, most)}"


_TIMES = {(0, 1): "?", (0, None): "*", (1, None): "+"}


def _counted(least: int, most: int | None) -> str:
    return f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"


@dataclass(frozen=True, slots=True)
class _Flags:
    caseless: bool = False
    dot_all: bool = False


_GROUP = re.compile(r"\((?:\?P?<\w+>|\?(?P<on>[a-zA-Z]*)(?:-(?P<off>[a-zA-Z]+))?(?P<end>[:)]))?")
_COUNT = re.compile(r"\*|\+|\?|\{(?P<least>\d*)(?P<range>,(?P<most>\d*))?\}")
_MAX_COUNT_DIGITS = 10
"""Python reads no number of more than 4300, and no regex has a count above 2^32."""
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[xuU]\{([0-9a-fA-F]+)\}")
_CATEGORY = re.compile(r"[pP](?:\{(\^?)(\w+)\}|(\w))")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
_CLASSES = {"d": character_sets.DIGITS, "w": character_sets.WORD, "s": character_sets.SPACE}


class _Reader:
    def __init__(self, text: str, allowance: Allowance) -> None:
        self._text = text
        self._allowance = allowance
        self._place = 0

    def tree(self) -> Tree:
        found = self._either(_Flags(), 0)
        if self._place < len(self._text):
            raise _unknown(self._text[self._place :])
        return found

    def _either(self, flags: _Flags, depth: int) -> Tree:
        if depth > MAX_DEPTH:
            raise GrammarRefused(f"should be nested at most {MAX_DEPTH} deep, but it is deeper")
        options, parts = list[Tree](), list[Tree]()
        while (character := self._peek()) not in ("", ")"):
            if character == "|":
                self._place += 1
                options.append(Row(tuple(parts)))
                parts = []
            elif (changed := self._changed(flags)) is not None:
                flags = changed
            else:
                parts.append(self._repeated(self._atom(flags, depth)))
        options.append(Row(tuple(parts)))
        return options[0] if len(options) == 1 else Either(tuple(options))

    def _changed(self, flags: _Flags) -> _Flags | None:
        """Return the flags after `(?i)` and the like, or None if none stands here."""
        group = _GROUP.match(self._text, self._place)
        if group is None or group["end"] != ")":
            return None
        self._place = group.end()
        return _flagged(flags, group)

    def _repeated(self, part: Tree) -> Tree:
        while (count := _COUNT.match(self._text, self._place)) is not None:
            self._place = count.end()
            if self._peek() == "?":
                raise GrammarRefused(f"a regex has the lazy {count[0] + '?'!r}, which is not supported here")
            part = _times(part, count)
        return part

    def _atom(self, flags: _Flags, depth: int) -> Tree:
        character = self._next()
        if character == "(":
            return self._group(flags, depth)
        if character == "[":
            return Characters(self._class(flags))
        if character == ".":
            return Characters(EVERY if flags.dot_all else inverted(character_sets.characters("\n")))
        if character in "^$":
            raise _unknown(character)
        return Characters(
            self._cased(self._escape() if character == "\\" else character_sets.characters(character), flags)
        )

    def _group(self, flags: _Flags, depth: int) -> Tree:
        self._place -= 1
        group = _GROUP.match(self._text, self._place)
        assert group is not None
        self._place = group.end()
        if self._peek() == "?":
            raise _unknown(self._text[group.start() : group.end() + 3])
        inner = self._either(_flagged(flags, group), depth + 1)
        if self._next() != ")":
            raise GrammarRefused("a regex has a group that is not closed")
        return inner

    def _class(self, flags: _Flags) -> Ranges:
        is_not = self._peek() == "^"
        self._place += is_not
        found: list[tuple[int, int]] = []
        is_first = True
        while is_first or self._peek() != "]":
            is_first = False
            first = self._member()
            if self._peek() == "-" and self._text[self._place + 1 : self._place + 2] != "]" and _is_one(first):
                self._place += 1
                last = self._member()
                if not _is_one(last):
                    raise _unknown(self._text[self._place - 4 : self._place])
                first = ((first[0][0], last[0][0]),)
            found += first
        self._place += 1
        self._allowance.take_steps(len(found))
        kept = self._cased(ranges(found), flags)
        return inverted(kept) if is_not else kept

    def _cased(self, found: Ranges, flags: _Flags) -> Ranges:
        self._allowance.take_steps(len(found) + num_alike(found) * flags.caseless)
        return in_both_cases(found) if flags.caseless else found

    def _member(self) -> Ranges:
        if (two := self._text[self._place : self._place + 2]) in ("&&", "--", "~~") or two[:1] == "[":
            raise GrammarRefused(f"a regex's {two!r} inside a class is not supported here")
        character = self._next()
        return self._escape() if character == "\\" else character_sets.characters(character)

    def _escape(self) -> Ranges:
        """Read what stands after a backslash."""
        if code := _CODE.match(self._text, self._place):
            self._place = code.end()
            return _of_code(code)
        if category := _CATEGORY.match(self._text, self._place):
            self._place = category.end()
            return _of_category(category)
        character = self._next()
        if character.lower() in _CLASSES:
            found = _CLASSES[character.lower()]
            return inverted(found) if character.isupper() else found
        if character.isalnum() and character not in _CONTROLS:
            raise _unknown(f"\\{character}")
        return character_sets.characters(_CONTROLS.get(character, character))

    def _peek(self) -> str:
        return self._text[self._place : self._place + 1]

    def _next(self) -> str:
        character = self._peek()
        if not character:
            raise GrammarRefused("a regex ends too early")
        self._place += 1
        return character


def _unknown(part: str) -> GrammarRefused:
    return GrammarRefused(f"a regex's {part[:20]!r} is not supported here")


def _is_one(found: Ranges) -> bool:
    return len(found) == 1 and found[0][0] == found[0][1]


def _flagged(flags: _Flags, group: re.Match[str]) -> _Flags:
    on, off = group["on"] or "", group["off"] or ""
    if other := (set(on) - set("isu")) | (set(off) - set("is")):
        raise GrammarRefused(f"a regex's flag {min(other)!r} is not supported here")
    return _Flags(
        (flags.caseless or "i" in on) and "i" not in off,
        (flags.dot_all or "s" in on) and "s" not in off,
    )


def _times(part: Tree, count: re.Match[str]) -> Tree:
    if count["range"] is None and count["least"] is None:
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[count[0]]
        return Times(part, least, most)
    if not count["least"] and not count["most"]:
        raise _unknown(count[0])
    if max(len(count["least"]), len(count["most"] or "")) > _MAX_COUNT_DIGITS:
        raise _unknown(count[0])
    least = int(count["least"] or 0)
    if count["range"] is None:
        return Times(part, least, least)
    return Times(part, least, int(count["most"]) if count["most"] else None)


def _of_code(escape: re.Match[str]) -> Ranges:
    code = int(next(filter(None, escape.groups())), 16)
    if code > character_sets.LAST:
        raise _unknown(f"\\{escape[0]}")
    return ((code, code),)


def _of_category(escape: re.Match[str]) -> Ranges:
    found = character_sets.of_category(escape[2] or escape[3])
    if not found:
        raise _unknown(f"\\{escape[0]}")
    return inverted(found) if (escape[0][0] == "P") != bool(escape[1]) else found
