"""Parses Qwen3-Coder's calls: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.
Never ends a value at a tag that its text may contain, as long as the call can go on."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import ClassVar

from serve_app.parsing.cursor import LETTER, SPACES, Steps
from serve_app.parsing.python_literals import dump_json
from serve_app.parsing.tagged_values import Ahead, TaggedValueToolParser
from serve_app.parsing.tool_parser import is_name
from serve_app.parsing.typed_values import ParameterTypes

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME_LETTERS = re.compile(r"[^<>\n]*")


class Qwen3CoderToolParser(TaggedValueToolParser):
    """Sends arguments parameter by parameter. One that is cut off by the end of the text is also cut off in the JSON.

    These models forget tags. Without `<tool_call>`, the function must be one of the tools; `</tool_call>` also ends a
    function.
    """

    markers: ClassVar[tuple[str, ...]] = (_CALL, _CALL_END)
    _next_call: ClassVar[str] = f"{_CALL}\n{_FUNCTION}"

    def _parse(self) -> Steps[None]:
        while tag := (yield from self._until(_CALL, _FUNCTION)):
            if tag == _CALL:
                yield from self._cursor.run(SPACES)
                if not (yield from self._cursor.literal(_FUNCTION)):
                    self._give_back()
                    continue
            yield from self._functions(framed=tag == _CALL)

    def _functions(self, framed: bool) -> Steps[None]:
        """Read a function and those that follow it directly; the cursor holds the first one's tags."""
        while True:
            name = yield from self._name()
            if not is_name(name) or not (framed or name in self._schemas):
                self._give_back()
                return
            self._start_call(name)
            yield from self._parameters(self._types_of(name))
            self._end_call()
            self._cursor.hold()
            yield from self._cursor.run(SPACES)
            tag = yield from self._cursor.literal(_CALL_END, _FUNCTION)
            if tag != _FUNCTION:
                break
        if tag:
            self._cursor.drop()
        else:
            self._give_back()

    def _name(self) -> Steps[str]:
        """Read the rest of a tag such as `<function=name>`; return the empty string if it is not such a tag."""
        name = yield from self._cursor.run(_NAME_LETTERS)
        closed = yield from self._cursor.literal(">")
        return name.strip() if closed else ""

    def _parameters(self, types: ParameterTypes) -> Steps[None]:
        """Read up to the end of the function."""
        before = "{"
        keys = types.names
        while (yield from self._cursor.peek()):
            self._cursor.hold()
            yield from self._cursor.run(SPACES)
            tag = yield from self._cursor.literal(_PARAMETER, _FUNCTION_END, _CALL_END)
            if tag in (_FUNCTION_END, _CALL_END):
                self._arguments("{}" if before == "{" else "}")
                self._cursor.drop()
                return
            name = (yield from self._name()) if tag else ""
            if not name:
                self._cursor.take(LETTER)
                yield from self._stray()
                continue
            self._cursor.drop()
            key: str | None = name
            while key:
                self._arguments(f"{before}{dump_json(key)}: ")
                keys.discard(key)
                key = yield from self._value(types.types(key), _PARAMETER_END, keys, frame="\n")
                before = ", "
            if key is not None:
                self._arguments("}")
                return

    def _ahead(self, keys: Collection[str], *, in_line: bool) -> Steps[Ahead]:
        tag = yield from self._cursor.literal(_PARAMETER, _FUNCTION_END, _CALL_END)
        if tag == _PARAMETER:
            name = yield from self._cursor.run(_NAME_LETTERS)
            closed = yield from self._cursor.literal(">")
            is_next = closed and not in_line and name.strip() in keys
            return Ahead(f"{tag}{name}{closed}", name.strip() if is_next else None)
        if tag == _FUNCTION_END:
            tag += yield from self._cursor.run(SPACES)
            end = yield from self._cursor.literal(_CALL_END)
            tag += end
            if not end:
                return Ahead(tag)
        return (yield from self._past_end(tag, in_line=in_line)) if tag else Ahead("")
