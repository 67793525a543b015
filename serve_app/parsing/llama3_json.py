"""Parses the calls of Llama 3 and 4: JSON objects that begin the answer, or follow a tag, with or without semicolons.
Never takes an object in the middle of a text for a call."""

from __future__ import annotations

from typing import ClassVar

from serve_app.parsing.cursor import SPACES, Steps
from serve_app.parsing.json_calls import JsonToolParser

_TAG = "<|python_tag|>"
_PYTHON_END = "<|python_end|>"


class Llama3JsonToolParser(JsonToolParser):
    """An object must have a name and arguments to be a call. Without a tag before it the name must be a tool's, because
    it may be an answer in JSON.

    Llama 4's template writes `<|python_end|>` between content and calls, and its models write it after calls, too.
    """

    markers: ClassVar[tuple[str, ...]] = (_TAG, _PYTHON_END)

    def _parse(self) -> Steps[None]:
        self._cursor.hold()
        yield from self._calls(tagged=False)
        while (yield from self._until(_TAG, _PYTHON_END)):
            yield from self._calls(tagged=True)

    def _calls(self, *, tagged: bool) -> Steps[None]:
        """Read objects and semicolons as long as there are any; the cursor holds what came before them."""
        yield from self._cursor.run(SPACES)
        before = self.calls
        while (yield from self._call(bare=True, offered=not tagged and self.calls == before)):
            self._cursor.hold()
            yield from self._cursor.run(SPACES)
            separator = yield from self._cursor.literal(";", _PYTHON_END)
            if separator == _PYTHON_END:
                self._cursor.drop()
                return
            if not separator and (yield from self._cursor.peek()) != "{":
                self._give_back()
                return
            yield from self._cursor.run(SPACES)
