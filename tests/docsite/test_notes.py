"""Owns the promise that every decision that is kept says why it was taken.
Never judges a decision."""

from __future__ import annotations

import re

import pytest

from docsite.hooks import BESIDE_THE_CODE, ROOT

NOTES = [name for name in BESIDE_THE_CODE if name.endswith("NOTES.md")]
PREFACE = "Each entry has the decision in bold, why it was taken, and what would change it."


@pytest.mark.parametrize("name", NOTES)
def test_an_entry_has_its_parts_labelled(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    preface, *entries = re.split(r"^(?=\*\*20\d\d-)", text, flags=re.MULTILINE)
    assert PREFACE in preface
    assert entries
    assert not re.findall(r"\S\n\*\*20\d\d-.*", text), "joined to the entry above it"
    for entry in entries:
        title, _, rest = entry.partition("**\n\n")
        assert re.match(r"\*\*20\d\d-\d\d-\d\d · \S", title), entry[:200]
        assert rest.startswith(("**Why:** ", "| ")), entry[:200]  # a table shows by itself what was found
        assert len(re.findall(r"^\*\*Would change it:\*\* ", rest, re.MULTILINE)) <= 1
        assert "Nothing so far" not in rest
