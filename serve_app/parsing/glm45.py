"""Parses the calls of GLM-4.5 and later: `<tool_call>name`, keys and values between tags of their own, `</tool_call>`.
Never requires line breaks between the tags: GLM-4.7 writes none."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import ClassVar

from serve_app.parsing.cursor import LETTER, SPACES, Steps
from serve_app.parsing.python_literals import dump_json
from serve_app.parsing.tagged_values import Ahead, TaggedValueToolParser
from serve_app.parsing.tool_parser import is_name
from serve_app.parsing.typed_values import ParameterTypes

CALL, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
_NAME_LETTERS = re.compile(r"[\w.:/-]*")
_KEY_LETTERS = re.compile(r"[^<>\n]*")


class Glm45ToolParser(TaggedValueToolParser):
    """A call is announced with its first key, or at its end."""

    markers: ClassVar[tuple[str, ...]] = (CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END)
    _next_call: ClassVar[str] = CALL

    def _parse(self) -> Steps[None]:
        while (yield from self._until(CALL)):
            yield from self._cursor.run(SPACES)
            name = yield from self._cursor.run(_NAME_LETTERS)
            yield from self._cursor.run(SPACES)
            tag = yield from self._cursor.literal(KEY, CALL_END)
            key = (yield from self._key()) if tag == KEY else ""
            if not is_name(name) or not (key or tag == CALL_END):
                self._give_back()
                continue
            self._start_call(name)
            yield from self._parameters(self._types_of(name), key)
            self._end_call()

    def _key(self) -> Steps[str]:
        """Read the rest of a key, up to the beginning of its value; return the empty string if it is not a key."""
        key = yield from self._cursor.run(_KEY_LETTERS)
        if not (yield from self._cursor.literal(KEY_END)):
            return ""
        yield from self._cursor.run(SPACES)
        return key.strip() if (yield from self._cursor.literal(VALUE)) else ""

    def _parameters(self, types: ParameterTypes, key: str) -> Steps[None]:
        """Read up to the end of the call. `key`: the first key, with a value that begins here; empty at a call's
        end."""
        before, tag = "{", KEY if key else CALL_END
        keys = types.names
        while tag != CALL_END:
            if key:
                self._cursor.drop()
                after: str | None = key
                while after:
                    self._arguments(f"{before}{dump_json(after)}: ")
                    keys.discard(after)
                    after = yield from self._value(types.types(after), VALUE_END, keys)
                    before = ", "
                if after is not None:
                    break
            else:
                if not tag:
                    self._cursor.take(LETTER)
                yield from self._stray()
            if not (yield from self._cursor.peek()):
                return
            self._cursor.hold()
            yield from self._cursor.run(SPACES)
            tag = yield from self._cursor.literal(KEY, CALL_END)
            key = (yield from self._key()) if tag == KEY else ""
        self._arguments("{}" if before == "{" else "}")
        self._cursor.drop()

    def _ahead(self, keys: Collection[str], *, in_line: bool) -> Steps[Ahead]:
        tag = yield from self._cursor.literal(CALL_END, KEY)
        if tag == CALL_END:
            return (yield from self._past_end(tag, in_line=in_line))
        if not tag or in_line:
            return Ahead(tag)
        key = yield from self._cursor.run(_KEY_LETTERS)
        text = tag + key
        for expected in (KEY_END, VALUE):
            found = yield from self._cursor.literal(expected)
            text += found
            if not found:
                return Ahead(text)
            if expected == KEY_END:
                text += yield from self._cursor.run(SPACES)
        return Ahead(text, key.strip() if key.strip() in keys else None)
