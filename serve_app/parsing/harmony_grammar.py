"""Builds the grammar of gpt-oss's calls, which are messages to a function among other messages.
Never allows a message to another recipient."""

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
    """Allows the recipient before or after the channel. `<|call|>` ends an answer, so further calls only follow if it
    is not among the stop tokens."""

    def calls(self) -> Grammar:
        return self._lark(f"start: {self._all()}\n{self._rules()}")

    def lazy(self) -> Grammar:
        """Build the grammar of text and messages to the user; the last messages may be calls."""
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
