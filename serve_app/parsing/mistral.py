"""Owns the calls of Mistral's models after `[TOOL_CALLS]`: a list of JSON objects, or a name and its arguments.
Never uses the call ids that some of these models write: ids are the server's."""

from __future__ import annotations

import re
from typing import ClassVar

from serve_app.parsing.cursor import SPACES, Steps
from serve_app.parsing.json_calls import JsonToolParser
from serve_app.parsing.tool_parser import is_name

_TAG, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME_LETTERS = re.compile(r"[\w.:/-]*")


class MistralToolParser(JsonToolParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or for each call `[TOOL_CALLS]name[ARGS]{...}`, in which
    the second tag may be absent and `[CALL_ID]...` may precede it."""

    markers: ClassVar[tuple[str, ...]] = (_TAG, _ID, _ARGUMENTS)

    def _parse(self) -> Steps[None]:
        while (yield from self._until(_TAG)):
            yield from self._cursor.run(SPACES)
            letter = yield from self._cursor.peek()
            if letter == "[":
                yield from self._list()
            elif letter == "{":
                yield from self._call()
            else:
                yield from self._named_call()

    def _list(self) -> Steps[None]:
        yield from self._cursor.literal("[")
        yield from self._cursor.run(SPACES)
        while (yield from self._call()):
            self._cursor.hold()
            yield from self._cursor.run(SPACES)
            separator = yield from self._cursor.literal(",", "]")
            if separator == "]":
                self._cursor.drop()
                return
            if not separator:
                self._give_back()
                return
            yield from self._cursor.run(SPACES)

    def _named_call(self) -> Steps[None]:
        name = yield from self._cursor.run(_NAME_LETTERS)
        yield from self._tags_before_arguments()
        if not is_name(name) or (yield from self._cursor.peek()) != "{":
            self._give_back()
            return
        self._start_call(name)
        yield from self._stream_arguments()
        self._cursor.drop()

    def _tags_before_arguments(self) -> Steps[None]:
        yield from self._cursor.run(SPACES)
        while tag := (yield from self._cursor.literal(_ID, _ARGUMENTS)):
            yield from self._cursor.run(SPACES)
            if tag == _ID:
                yield from self._cursor.run(_NAME_LETTERS)
                yield from self._cursor.run(SPACES)
