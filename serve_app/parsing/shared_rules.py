"""Owns rules that the calls of many tools share: each schema of a value, or text up to a tag, stands in a grammar once.
Never decides what a rule admits."""

from __future__ import annotations

from collections.abc import Callable

from serve_app.grammars.json_schema import json_rule
from serve_app.grammars.notation import Json


class SharedRules:
    """Writes each rule of one grammar once. llguidance takes 65,525 symbols, and a rule for each parameter of each tool
    is most of them."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._rules: list[str] = []

    def json(self, schema: Json) -> str:
        """The rule of the JSON of a value. `schema` was checked."""
        written = json_rule(schema)
        return self.named(written, lambda name: f"{name}: {written}\n")

    def named(self, key: str, rules: Callable[[str], str]) -> str:
        """The name of the rule for `key`; `rules` writes it, once, given its name."""
        if key not in self._names:
            self._names[key] = name = f"shared_{len(self._names)}"
            self._rules.append(rules(name))
        return self._names[key]

    def text(self) -> str:
        return "".join(self._rules)
