"""Owns the calls of Llama 3: JSON objects that begin the answer, or follow `<|python_tag|>`, separated by semicolons.
Never takes an object in the middle of a text for a call."""

from __future__ import annotations

from typing import ClassVar

from serve_app.parsing.cursor import SPACES, Steps
from serve_app.parsing.json_calls import JsonToolParser

_TAG = "<|python_tag|>"


class Llama3JsonToolParser(JsonToolParser):
    """An object must have a name and arguments to be a call: without a tag around it, it may be an answer in JSON."""

    markers: ClassVar[tuple[str, ...]] = (_TAG,)

    def _parse(self) -> Steps[None]:
        self._cursor.hold()
        yield from self._calls()
        while (yield from self._until(_TAG)):
            yield from self._calls()

    def _calls(self) -> Steps[None]:
        """Objects and semicolons, as long as there are any; the cursor holds what came before them."""
        yield from self._cursor.run(SPACES)
        while (yield from self._call(bare=True)):
            self._cursor.hold()
            yield from self._cursor.run(SPACES)
            if not (yield from self._cursor.literal(";")):
                self._give_back()
                return
            yield from self._cursor.run(SPACES)
