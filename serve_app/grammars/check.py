"""Owns the check that llguidance takes a grammar, made before an engine gets it, and a small cache of the results.
Never keeps a grammar, only its digest."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from threading import Lock

from llguidance import LLMatcher

MAX_KEPT = 4096
"""Each tool's schema is an entry, and agents bring a thousand. An entry takes 32 bytes and a text of at most MAX_CHARS.
"""
MAX_CHARS = 300

_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_kept: OrderedDict[bytes, str] = OrderedDict()
_lock = Lock()


def find_fault(grammar: str) -> str:
    """Return why llguidance refuses a grammar, in words for its author, or an empty string if it is accepted.
    Takes milliseconds, and a few seconds at worst, because llguidance bounds its own work. Thread-safe.
    """
    key = hashlib.sha256(grammar.encode()).digest()
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key]
    fault = _ask(grammar)
    with _lock:
        _kept[key] = fault
        while len(_kept) > MAX_KEPT:
            _kept.popitem(last=False)
    return fault


def _ask(grammar: str) -> str:
    try:
        is_fault, told = LLMatcher.validate_grammar_with_warnings(grammar)
    except BaseException as error:
        # Seen with 1.9.1: it cuts a message inside a four-byte character. The panic is not an Exception, and would end
        # the thread.
        if type(error).__name__ != "PanicException":
            raise
        return "it cannot be read"
    return readable(told[0]) if is_fault else ""


def readable(told: str) -> str:
    """Put llguidance's message on one line, without the lines of the grammar that it repeats."""
    if match := _UNIMPLEMENTED.search(told):
        return f"the schema's keywords are not all supported: {match[1]}"[:MAX_CHARS]
    lines = [line.strip() for line in told.splitlines()]
    shown = [line for line in lines if line and not re.match(r"\d+ \||\^+$", line)]
    text = " ".join(shown)
    if len(text) <= MAX_CHARS:
        return text
    # A refused regex is repeated whole, and the reason comes after it.
    return f"{text[: MAX_CHARS // 2]} … {text[3 - MAX_CHARS // 2 :]}"
