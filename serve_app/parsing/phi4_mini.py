"""Parses the calls of Phi-4-mini, and of other models that write its form: a list of JSON objects after a tag.
Never takes the word `functools` for a call unless a list of calls follows it."""

from __future__ import annotations

from typing import ClassVar

from serve_app.parsing.cursor import SPACES, Steps
from serve_app.parsing.json_calls import JsonToolParser

WORD, TAG, TAG_END = "functools", "<|tool_call|>", "<|/tool_call|>"


class Phi4MiniToolParser(JsonToolParser):
    """Parses `functools[{"name": ..., "arguments": {...}}, ...]`, or the list, or one object, between two tags."""

    markers: ClassVar[tuple[str, ...]] = (TAG, TAG_END)

    def _parse(self) -> Steps[None]:
        while tag := (yield from self._until(WORD, TAG)):
            yield from self._cursor.run(SPACES)
            before = self.calls
            character = yield from self._cursor.peek()
            if character == "[":
                yield from self._list()
            elif character == "{" and tag == TAG:
                yield from self._call()
            else:
                self._give_back()
            if self.calls > before:
                self._cursor.hold()
                yield from self._close(TAG_END)
