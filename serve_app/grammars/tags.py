"""Owns structural tags: free text in which a trigger begins a structure whose content a JSON schema describes.
Never knows what the structures are for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.grammars.json_schema import checked, json_rule
from serve_app.grammars.notation import Grammar, GrammarRefused, Json, Specials, heads, lark, literal


@dataclass(frozen=True, slots=True)
class Structure:
    begin: str
    schema: Json
    end: str


def structural_tags(structures: Sequence[Structure], triggers: Sequence[str], specials: Specials) -> Grammar:
    """Constrain the text after a trigger to one of the structures that begin with it. After that, it is free again.

    Raises:
        GrammarRefused: a structure begins with none of the triggers, or with two; a trigger is never used.
    """
    for number, structure in enumerate(structures):
        if sum(structure.begin.startswith(trigger) for trigger in triggers) != 1:
            text = f"should begin with exactly one of the triggers, but it is {structure.begin[:50]!r}"
            raise GrammarRefused(text, f"structures.{number}.begin")
    rules = "start: (" + " | ".join(f"head_{i} rest_{i}" for i in range(len(triggers))) + ")* TEXT\n"
    rules += heads(triggers, specials)
    for number, trigger in enumerate(triggers):
        options = [
            _rest(one, trigger, specials, f"structures.{place}.schema")
            for place, one in enumerate(structures)
            if one.begin.startswith(trigger)
        ]
        if not options:
            raise GrammarRefused(f"no structure begins with {trigger[:50]!r}", f"triggers.{number}")
        rules += f"rest_{number}: {' | '.join(options)}\n"
    return lark(rules)


def _rest(structure: Structure, trigger: str, specials: Specials, place: str) -> str:
    begin, end = structure.begin[len(trigger) :], structure.end
    try:
        checked(structure.schema)
    except GrammarRefused as refused:
        raise GrammarRefused(refused.text, place) from refused
    return f"{literal(begin, specials)} {json_rule(structure.schema)} {literal(end, specials)}"
