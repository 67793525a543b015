"""Owns the contract of tools whose input is text of a regex: the regex means the same in each format of calls.
Never tests how a call is read back."""

from __future__ import annotations

import pytest

from tests.serve_app.api.openai.responses.test_responses_tools import (
    FAMILIES,
    FORCED,
    PATCH,
    WALKER,
    grammar_of,
    written,
)

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("pattern", "taken", "others"),
    [
        ("^a$", ["a"], ["", "aa", "^a$"]),
        (r"\Aab|c\z", ["ab", "c"], ["abc", "a"]),
        (r"a\$", ["a$"], ["a", "a\\"]),
        (r"a\\$", ["a\\"], ["a", "a$"]),
        ("(?i)é+b", ["ÉéB"], ["b"]),
        (r"\p{L}\d[[:punct:]]", ["é1!"], ["é٣!", "11!"]),
        ("a*?b", ["aab"], ["aa"]),
        ('(?s)."', ['\n"'], ["\n"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_regex_means_the_same_in_each_format(
    family: str, pattern: str, taken: list[str], others: list[str]
) -> None:
    """Anchors at the ends of a regex add nothing: it always matches the whole text."""
    tool = PATCH | {"format": {"type": "grammar", "syntax": "regex", "definition": pattern}}
    grammar = await grammar_of(family, tools=[tool], tool_choice=FORCED)
    assert [text for text in taken if not WALKER.admits(grammar, written(family, text))] == []
    assert [text for text in others if WALKER.admits(grammar, written(family, text))] == []
