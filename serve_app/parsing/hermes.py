"""Parses the calls of Hermes, Qwen2.5 and Qwen3: a JSON object between `<tool_call>` and `</tool_call>`.
Never looks for the end tag inside the object, where a string may contain it."""

from __future__ import annotations

from typing import ClassVar

from serve_app.parsing.cursor import SPACES, Steps
from serve_app.parsing.json_calls import JsonToolParser


class HermesToolParser(JsonToolParser):
    """Parses calls. The end tag may be missing, and so may the object's last brace: models forget both."""

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")

    def _parse(self) -> Steps[None]:
        while (yield from self._until("<tool_call>")):
            yield from self._cursor.run(SPACES)
            before = self.calls
            yield from self._call()
            if self.calls > before:
                self._cursor.hold()
                yield from self._close("</tool_call>")
