"""Owns a client's regex: what it becomes in llguidance's notation, with ASCII classes.
Never reads what a regex means; `regex_tree` does."""

from __future__ import annotations

import json
import re

from llguidance import LLMatcher

from serve_app.grammars.notation import Grammar, GrammarRefused, lark

MAX_BYTES = 64 * 2**10
"""Limits a text that a client writes."""


def regex(pattern: str) -> Grammar:
    r"""Constrain the whole answer to the pattern. Its `\d` and `\w` are ASCII, as in a schema's patterns.

    Raises:
        GrammarRefused: it is too long, or ends too early.
    """
    check_size(pattern)
    if _ENDS_EARLY.search(pattern):  # llguidance would leave the backslash out
        raise GrammarRefused("ends with a backslash that has nothing behind it")
    (entry,) = json.loads(LLMatcher.grammar_from_regex(with_ascii_classes(pattern)))["grammars"]
    return lark(entry["lark_grammar"])


_ENDS_EARLY = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")
_CLASS_PARTS = re.compile(r"\\[\s\S]|\[\^?\]?|\]")
_ASCII = {r"\d": "0-9", r"\w": "0-9A-Za-z_"}


def with_ascii_classes(pattern: str) -> str:
    r"""Make `\d` and `\w` ASCII. Rust's `\d` is a digit of any script, and a small model picks the oddest."""
    depth = 0

    def written(match: re.Match[str]) -> str:
        nonlocal depth
        part = match[0]
        if not part.startswith("\\"):
            depth = max(depth + (1 if part.startswith("[") else -1), 0)
            return part
        if (characters := _ASCII.get(part.lower())) is None or (part[1].isupper() and depth):
            return part
        return characters if depth else f"[{'^' * part[1].isupper()}{characters}]"

    return _CLASS_PARTS.sub(written, pattern)


def check_size(text: str, limit: int = MAX_BYTES) -> None:
    """
    Raises:
        GrammarRefused: the text is too long.
    """
    if (size := len(text.encode())) > limit:
        raise GrammarRefused(f"should have at most {limit} bytes, but it has {size}")
