"""Owns what is taken out of a recorded request before it is kept: people, places, dates, ids, and other people's texts.
Never changes its structure: keys, kinds, enumerations, names of tools and short values stay."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_CHARS = 200
"""The length up to which a string is kept. Longer ones are programs' prompts and files, which are not ours to keep."""
FILLER = "Text that was here. "
ANY_TEXT = "start: /(.|\\n)+/"
"""What replaces a Lark grammar."""

_TAG = re.compile(r"<([a-z][\w-]*)>")
_HEX = r"[0-9a-f]"
_PATTERNS = (
    (re.compile(rf"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}"), "00000000-0000-4000-8000-{:012}"),
    (re.compile(r"\b(?:call|chatcmpl|cmpl|ctc|fc|msg|req|resp|rs|ses|toolu|tooluse)_?[0-9a-zA-Z]{12,}\b"), "id_{}"),
    (re.compile(rf"\b{_HEX}{{16,}}\b"), "{:016x}"),
    (re.compile(r"\b1[5-9]\d{11}\b"), "1700000000000"),
    (re.compile(r"\b20[2-9]\d-[01]\d-[0-3]\d(?:T[\d:.]+(?:Z|[+-]\d\d:\d\d)?)?"), "2026-01-01"),
    (re.compile(r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*,? [A-Z][a-z]{2,8} \d{1,2},? 20\d\d\b"), "Thu Jan 01 2026"),
    (re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.]+\b"), "somebody@example.com"),
)


@dataclass(slots=True)
class Scrubber:
    """Scrubs the requests of one run. Equal ids stay equal, so that results still name their calls."""

    places: Mapping[str, str]
    """Path or address of this machine -> what is kept of it; the first that matches counts."""
    _numbers: dict[str, int] = field(default_factory=dict)

    def value(self, value: Any, key: str = "") -> Any:
        match value:
            case dict():
                return {self._short(name): self.value(each, name) for name, each in value.items()}
            case list():
                return [self.value(each, key) for each in value]
            case str():
                return self.text(value, key)
            case _:
                return value

    def text(self, text: str, key: str = "") -> str:
        if key in ("description", "title"):
            return f"A {key}."
        if key == "definition":
            return ANY_TEXT
        if key == "encrypted_content":
            return "sealed"
        text = self._short(text)
        if len(text) <= MOST_CHARS:
            return text
        tag = _TAG.match(text)
        return f"<{tag[1]}>{FILLER * 3}</{tag[1]}>" if tag and len(tag[1]) < 40 else FILLER * 5

    def _short(self, text: str) -> str:
        for place, kept in self.places.items():
            text = text.replace(place, kept)
        for pattern, kept in _PATTERNS:
            text = pattern.sub(lambda found, kept=kept: kept.format(self._number(found[0])), text)  # type: ignore[misc]
        return text

    def _number(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers) + 1)
