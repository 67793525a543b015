"""Finds the form in which a chat template takes an assistant's thoughts and calls, from its source and by probing it.
Never looks at a model's name, and never changes the meaning of a message."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jinja2 import nodes

from serve_app.parsing.call_arguments import UNREADABLE

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str | None]
"""Renders messages; returns None if the template refuses them."""

_THOUGHTS = "thinking"
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
_ARGUMENTS = {"a": "b"}
_BROKEN = '{"a": <broken'
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": _ARGUMENTS}}
_ASKED = {"role": "user", "content": "a"}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [_CALL]}


@dataclass(frozen=True, slots=True)
class TemplateForm:
    thoughts: Literal["as_given", "field", "block"] = "as_given"
    """Where the template reads thoughts: from `reasoning_content`, from `thinking`, or from a part of the content."""
    joins_content: bool = False
    """A message with calls may have thoughts or content, but not both: gpt-oss's template writes either as thoughts."""
    arguments_as_text: bool = False
    """The template needs arguments as text: it joins them to a string (DeepSeek's), or shows objects as Python does."""
    has_short_ids: bool = False
    """The template only takes call ids of nine letters and digits, like Mistral's, which refuse other servers' ids."""

    shows_broken_arguments: bool = False
    """The template shows arguments unchanged that are not a JSON object; otherwise they are wrapped in an object."""

    @classmethod
    def of(cls, template: nodes.Template, render: Render) -> TemplateForm:
        def renders(message: Message) -> bool:
            return render([_ASKED, message]) is not None

        thoughts = _form_of_thoughts(template)
        both = {**_CALLED, "content": "a", _THOUGHTS: "b"}
        one = {**_CALLED, _THOUGHTS: "b"}
        joins = thoughts == "field" and not renders(both) and renders(one)
        called = render([_ASKED, _CALLED])
        short_ids = called is not None and not renders({**_CALLED, "tool_calls": [{**_CALL, "id": "call_0"}]})
        is_wrong = called is None or str(_ARGUMENTS) in called
        as_text = is_wrong and renders(_with_arguments(_CALLED, _as_text))
        broken = render([_ASKED, _with_arguments(_CALLED, lambda _: _BROKEN)])
        return cls(thoughts, joins, as_text, short_ids, broken is not None and _BROKEN in broken)

    def fit(self, messages: Sequence[Message]) -> Sequence[Message]:
        if not self.shows_broken_arguments:
            messages = [_with_arguments(message, _in_object) for message in messages]
        if self.is_as_given:
            return messages
        if self.has_short_ids:
            messages = [_with_short_ids(message) for message in messages]
        return [self._fit(message) if message["role"] == "assistant" else message for message in messages]

    @property
    def is_as_given(self) -> bool:
        """Whether messages are passed unchanged, except for broken arguments."""
        return self.thoughts == "as_given" and not (self.joins_content or self.arguments_as_text or self.has_short_ids)

    def _fit(self, message: Message) -> Message:
        changed, thoughts = dict(message), message.get("reasoning_content")
        if thoughts and self.thoughts == "field":
            content = changed.get("content")
            if self.joins_content and changed.get("tool_calls") and content and isinstance(content, str):
                thoughts, changed["content"] = f"{thoughts}\n{content}", ""
            changed[_THOUGHTS] = thoughts
        elif thoughts and self.thoughts == "block":
            content = changed.get("content") or []
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            changed["content"] = [{"type": _THOUGHTS, _THOUGHTS: thoughts}, *parts]
        return _with_arguments(changed, _as_text) if self.arguments_as_text else changed


def _form_of_thoughts(template: nodes.Template) -> Literal["as_given", "field", "block"]:
    names = {node.attr for node in template.find_all(nodes.Getattr)}
    names |= {node.arg.value for node in template.find_all(nodes.Getitem) if isinstance(node.arg, nodes.Const)}
    if "reasoning_content" in names or _THOUGHTS not in names:
        return "as_given"
    compared = {
        operand.expr.value
        for node in template.find_all(nodes.Compare)
        for operand in node.ops
        if operand.op == "eq" and isinstance(operand.expr, nodes.Const)
    }
    return "block" if _THOUGHTS in compared else "field"


def _with_short_ids(message: Message) -> Message:
    changed = dict(message)
    if isinstance(call_id := changed.get("tool_call_id"), str):
        changed["tool_call_id"] = _short(call_id)
    if changed.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": _short(str(call.get("id")))} for call in changed["tool_calls"]]
    return changed


def _short(call_id: str) -> str:
    """Shorten an id, always in the same way, so that a call and its result still match."""
    return call_id if _SHORT_ID.fullmatch(call_id) else hashlib.blake2s(call_id.encode()).hexdigest()[:9]


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        calls.append({**call, "function": {**function, "arguments": change(function["arguments"])}})
    return {**message, "tool_calls": calls}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _in_object(arguments: Any) -> Any:
    return {UNREADABLE: arguments} if isinstance(arguments, str) else arguments
