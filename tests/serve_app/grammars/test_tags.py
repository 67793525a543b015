"""Owns the contract of structural tags: free text up to a trigger, then one of its structures, then free text again.
Never tests tool calls, which have their own grammars."""

from __future__ import annotations

import pytest

from serve_app.grammars.check import find_fault
from serve_app.grammars.notation import GrammarRefused
from serve_app.grammars.tags import Structure, structural_tags
from tests.support.grammar_walks import Walker

NUMBER = {"type": "integer"}
STRUCTURES = [
    Structure("<f=a>", NUMBER, "</f>"),
    Structure("<f=b>", {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}, "</f>"),
    Structure("[[", NUMBER, "]]"),
]
TRIGGERS = ["<f=", "[["]


@pytest.mark.parametrize(
    ("text", "is_admitted"),
    [
        ("", True),
        ("No structure, <f and [ are text.", True),
        ("One: <f=a>12</f>.", True),
        ('<f=b>{"x": "</f>"}</f>[[3]] and <f=a>1</f>', True),
        ("<f=a>x</f>", False),
        ("<f=c>1</f>", False),
        ("<f=a>1", False),
        ("[[1]", False),
    ],
)
def test_a_trigger_begins_a_structure_and_text_around_it_is_free(text: str, is_admitted: bool) -> None:
    walker = Walker()
    assert walker.admits(structural_tags(STRUCTURES, TRIGGERS, {}).text(), text) is is_admitted


def test_a_trigger_may_be_a_special_token_which_characters_cannot_write() -> None:
    walker = Walker(["<f="])
    grammar = structural_tags(STRUCTURES, TRIGGERS, walker.specials).text()
    assert walker.admits(grammar, "One: <f=a>12</f>.")
    assert not walker.admits(grammar, "One: <f=a>x")
    assert walker.matcher(grammar).try_consume_tokens(list(b"<f=c>")) == 2


@pytest.mark.parametrize(
    ("structures", "triggers", "place"),
    [
        (STRUCTURES, ["<f="], "structures.2.begin"),
        (STRUCTURES, ["<f=", "<f", "[["], "structures.0.begin"),
        (STRUCTURES, [*TRIGGERS, "{{"], "triggers.2"),
        ([Structure("<f=a>", {"nullable": True}, "")], ["<f="], "structures.0.schema"),
    ],
)
def test_a_structure_has_one_trigger_and_a_trigger_a_structure(
    structures: list[Structure], triggers: list[str], place: str
) -> None:
    with pytest.raises(GrammarRefused) as refused:
        structural_tags(structures, triggers, {})
    assert refused.value.place == place


def test_a_schema_that_cannot_be_kept_is_a_fault() -> None:
    assert '"not"' in find_fault(structural_tags([Structure("<f=a>", {"not": {}}, "")], ["<f="], {}).text())
