"""Owns llguidance's notation: quoting, references to special tokens, and grammars composed of others.
Never decides what an answer may be."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
Specials = Mapping[str, int]
"""The ids of tokens that no text matches, special ones and others in angle brackets: a grammar names them by id."""

MAX_GRAMMAR_BYTES = 1023 * 2**10
"""Limits what a request's constraint becomes, with the schemas of all its tools. Thoughts before it take some more.
Engines take 1 MiB unless their `max_grammar_bytes` says otherwise."""

MAX_UNASKED_BYTES = 255 * 2**10
"""Limits the schemas of tools that do not say whether they are strict. Beyond it, none of them is."""


class GrammarRefused(ValueError):
    """What was asked for cannot be honoured. `place`: the place inside the field, as a dotted name; may be empty."""

    def __init__(self, text: str, place: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.place = place


@dataclass(frozen=True, slots=True)
class Grammar:
    """`entries`: the text begins with the first, which refers to the others as `@name`."""

    entries: tuple[Json, ...]

    def text(self) -> str:
        """Write the grammar for the engine."""
        return json.dumps({"grammars": list(self.entries)}, ensure_ascii=False, separators=(",", ":"))

    def bounded_text(self) -> str:
        """Write the grammar for the engine.

        Raises:
            GrammarRefused: it is too long.
        """
        text = self.text()
        if (size := len(text.encode())) > MAX_GRAMMAR_BYTES:
            raise GrammarRefused(f"should give a grammar of at most {MAX_GRAMMAR_BYTES} bytes, but it gives {size}")
        return text

    def within(self, rules: str) -> Grammar:
        """Return `rules` with this grammar as their `@answer`."""
        return Grammar((lark(rules).entries[0], named("answer", self), *self.entries[1:]))

    def or_else(self, other: Grammar) -> Grammar:
        """Return a grammar of this one or the other. Only one of them may refer to further entries."""
        first, second = named("one", self), named("two", other)
        start = {"name": "start", "lark_grammar": "start: @one | @two"}
        return Grammar((start, first, second, *self.entries[1:], *other.entries[1:]))


def lark(rules: str) -> Grammar:
    return Grammar(({"name": "start", "lark_grammar": rules},))


def named(name: str, grammar: Grammar) -> Json:
    return grammar.entries[0] | {"name": name}


def quoted(text: str) -> str:
    """Quote a text so that it is matched verbatim."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False))


_CONTROL = re.compile("[\x7f-\x9f]")  # JSON leaves them as they are, and Lark does not read them


def literal(text: str, specials: Specials) -> str:
    """Write a text with its special tokens as tokens, as in a prompt."""
    found = [one for one in specials if one and one in text]
    if not found:
        return quoted(text)
    longest_first = "|".join(re.escape(one) for one in sorted(found, key=len, reverse=True))
    parts = [part for part in re.split(f"({longest_first})", text) if part]
    return " ".join(f"<[{specials[part]}]>" if part in specials else quoted(part) for part in parts)


_META = frozenset(r"\.+*?()|[]{}^$#&-~/")
_WHITE = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\f": r"\f", "\v": r"\v"}


def escaped(text: str) -> str:
    """Escape a text for use inside a regex."""
    return "".join(f"\\{character}" if character in _META else _WHITE.get(character, character) for character in text)


def any_of(*texts: str) -> str:
    """Return the regex of any one of these texts. For `without`, one such regex is much cheaper than one per text."""
    return f"({'|'.join(map(escaped, texts))})"


ANY = "(?s:.*)"


def until(tag: str, specials: Specials, name: str, text: str = ANY, besides: str = "") -> str:
    """Write the rules by which `name` is a text that the regex `text` matches, through the first occurrence of the tag.

    `besides`: a further suffix of the rule's regex, from `without`.
    """
    rule = name.upper()
    if tag in specials:
        return f"{name}: {rule} <[{specials[tag]}]>\n{rule}: /{text}/{without(escaped(tag))}{besides}\n"
    return f"{name}[lazy]: {rule}\n{rule}: /{text}{escaped(tag)}/{besides}\n"


def without(*patterns: str) -> str:
    """Return the suffix of a rule's regex that keeps these regexes from matching anywhere in the text."""
    return "".join(f" & ~/{ANY}{pattern}{ANY}/" for pattern in patterns)


def heads(tags: Sequence[str], specials: Specials) -> str:
    """Write the rules of free text (`TEXT`), and of free text up to one of the tags (`head_0` and so on).

    A tag that is a special token must not be spelled out, because a reader of the text could not tell the two apart.
    Any other tag is its spelling.
    """
    besides = without(*(escaped(tag) for tag in tags if tag in specials))
    rules = [until(tag, specials, f"head_{number}", besides=besides) for number, tag in enumerate(tags)]
    return f"TEXT: /{ANY}/{besides}\n{''.join(rules)}"
