"""Builds the grammars of calls that are JSON objects: hermes, llama3_json, mistral and phi4_mini_json.
Never allows free white space: between tags, it must be what the models' templates write."""

from __future__ import annotations

import json
from typing import ClassVar

from serve_app.grammars.notation import ANY, Grammar, escaped, quoted, until, without
from serve_app.parsing.call_grammar import CallGrammar, TaggedCallGrammar, arguments_rule
from serve_app.parsing.cursor import SPACES
from serve_app.parsing.phi4_mini import TAG, TAG_END, WORD

_PYTHON_TAG = "<|python_tag|>"
_NO_OBJECT = r"(\s*[^\s{](?s:.*))?"


class HermesCallGrammar(TaggedCallGrammar):
    _tags: ClassVar[tuple[str, ...]] = ("<tool_call>",)

    def _all(self) -> str:
        return self._repeated(f"{self._literal('<tool_call>')} rest_0", "\n")

    def _rules(self) -> str:
        return f'rest_0: "\\n" object "\\n" {self._literal("</tool_call>")}\n' + self._objects("arguments")


class Llama3JsonCallGrammar(CallGrammar):
    """Without a tag, an answer that begins with an object consists of calls, so a lazy one cannot be another object.

    A forced format beside the calls may be JSON, too. llguidance's lexer takes the longest text it can and never goes
    back, so a call must have the same lexemes as JSON: `{"name": ` as one would hide the `{` of any other object.
    """

    def calls(self) -> Grammar:
        return self._lark(f"start: calls\n{self._rules()}")

    def lazy(self) -> Grammar:
        head = until(_PYTHON_TAG, self._specials, "head", _NO_OBJECT)
        plain = f"PLAIN: /{_NO_OBJECT}/" + without(escaped(_PYTHON_TAG))
        return self._lark(f"start: calls | head calls | PLAIN\n{plain}\n{head}{self._rules()}")

    def _rules(self) -> str:
        calls = [f"{_head(tool.name)} {arguments_rule(tool, self._shared)} {quoted('}')}" for tool in self._tools]
        return f"calls: {self._repeated('object', '; ')}\nobject: {' | '.join(calls)}\n"


def _head(name: str) -> str:
    """Write what stands in a rule for a call before its arguments."""
    return " ".join(map(quoted, ("{", '"name"', ": ", json.dumps(name), ", ", '"parameters"', ": ")))


class MistralCallGrammar(TaggedCallGrammar):
    """Models with a token for `[ARGS]` write `[TOOL_CALLS]name[ARGS]{...}` for each call, some of them with an id
    before the second tag; others write a list.

    After the calls, the answer ends.
    """

    _tags: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]",)
    _goes_on: ClassVar[bool] = False

    def _all(self) -> str:
        return f"{self._literal(self._tags[0])} rest_0"

    def _rules(self) -> str:
        if "[ARGS]" not in self._specials:
            return f'rest_0: "[" {self._repeated("object", ", ")} "]"\n' + self._objects("arguments")
        more = f" ({self._literal(self._tags[0])} call)*" if self._parallel else ""
        args = self._literal("[ARGS]")
        if "[CALL_ID]" in self._specials:
            args = f"({self._literal('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)? {args}"
        calls = [f"{quoted(tool.name)} {args} {arguments_rule(tool, self._shared)}" for tool in self._tools]
        return f"rest_0: call{more}\ncall: {' | '.join(calls)}\n"


class Phi4MiniCallGrammar(TaggedCallGrammar):
    """Models with tokens for the tags write a list between them; others write a list after the word.

    After the calls, the answer ends.
    """

    _tags: ClassVar[tuple[str, ...]] = (f"{WORD}[", TAG)
    _goes_on: ClassVar[bool] = False

    def _heads(self) -> str:
        """The parser takes white space after the word, so a call begins after it, too."""
        besides = without(escaped(TAG)) if TAG in self._specials else ""
        word = f"head_0[lazy]: HEAD_0\nHEAD_0: /{ANY}{WORD}{SPACES.pattern}\\[/{besides}\n"
        return f"TEXT: /{ANY}/{besides}\n{word}{until(TAG, self._specials, 'head_1', besides=besides)}"

    def _all(self) -> str:
        return f"{self._literal(TAG)} rest_1" if TAG in self._specials else f'"{WORD}[" rest_0'

    def _rules(self) -> str:
        calls = f'{self._repeated("object", ", ")} "]"'
        end = self._literal(TAG_END)
        return f'rest_0: {calls}\nrest_1: "[" {calls} {end}\n' + self._objects("arguments")
