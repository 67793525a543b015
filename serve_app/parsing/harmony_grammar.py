"""Owns the grammar of gpt-oss's calls: messages to a function, in a text that is messages.
Never admits a message to anybody else."""

from __future__ import annotations

from serve_app.grammars.notation import ANY, Grammar, any_of, escaped, quoted, until, without
from serve_app.parsing.call_grammar import CallGrammar, arguments_rule
from serve_app.parsing.harmony import (
    ANALYSIS,
    CALL,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    END,
    FINAL,
    FUNCTIONS,
    MESSAGE,
    RETURN,
    START,
    TO,
)

_CALLED_AT_ONCE = rf"\s*{escaped(TO)}"


class HarmonyCallGrammar(CallGrammar):
    """The recipient stands before the channel or after it. `<|call|>` ends an answer: further calls follow it only
    where it does not."""

    def calls(self) -> Grammar:
        return self._lark(f"start: {self._all()}\n{self._rules()}")

    def lazy(self) -> Grammar:
        """Text, and messages to the user; the last ones may be calls."""
        header = " | ".join(self._literal(f"{CHANNEL}{name}{MESSAGE}") for name in (ANALYSIS, COMMENTARY, FINAL))
        besides = f"{without(any_of(START, CHANNEL, CALL, RETURN))} & ~/{_CALLED_AT_ONCE}{ANY}/"
        text = f"TEXT: /{ANY}/{besides}{without(escaped(END))}\n{until(END, self._specials, 'body', besides=besides)}"
        following = self._literal(f"{START}assistant")
        return self._lark(
            f"start: TEXT | (body {following})? (header body {following})* (header TEXT | {self._all()})\n"
            f"header: {header}\n{text}{self._rules()}"
        )

    def _all(self) -> str:
        more = self._literal(f"{CALL}{START}assistant")
        return f"call ({more} call)*" if self._parallel else "call"

    def _rules(self) -> str:
        """The tools stand behind what all of their calls begin with: a parser looks at each once at a time."""
        channel, to = self._literal(f"{CHANNEL}{COMMENTARY}"), self._literal(f" {TO}{FUNCTIONS}")
        kind = f"({self._literal(f' {CONSTRAIN}json')} | {self._literal(' json')}) {self._literal(MESSAGE)}"
        names = [quoted(tool.name) for tool in self._tools]
        before = " | ".join(f"{name} {channel} to_{number}" for number, name in enumerate(names))
        after = " | ".join(f"{name} to_{number}" for number, name in enumerate(names))
        each = "".join(
            f"to_{number}: kind {arguments_rule(tool, self._shared)}\n" for number, tool in enumerate(self._tools)
        )
        return f"call: {to} before | {channel} {to} after\nbefore: {before}\nafter: {after}\nkind: {kind}\n{each}"
