"""Reads a parameter's value that a model writes as plain text up to a tag, and sends it as JSON of its declared type.
Never ends a value except at its own end tag: code that is written to a file may contain any other."""

from __future__ import annotations

import re
from typing import Any

from serve_app.parsing.cursor import LETTER, Steps
from serve_app.parsing.python_literals import dump_json
from serve_app.parsing.tool_parser import ToolParser
from serve_app.parsing.typed_values import is_string, value_json

_NO_TAG = re.compile(r"[^<]*")


class TaggedValueToolParser(ToolParser):
    """Sends a value when it is complete. One that is cut off by the end of the text is also cut off in the JSON."""

    def _value(self, schema: Any, end: str, frame: str = "") -> Steps[None]:
        """Read a value up to its end tag. `frame`: the text that the template writes before and after a value."""
        parts: list[str] = []
        while (yield from self._cursor.peek()):
            parts.append(self._cursor.take(_NO_TAG))
            if (yield from self._cursor.literal(end)):
                text = "".join(parts).removeprefix(frame).removesuffix(frame)
                self._arguments(value_json(text, schema))
                return
            parts.append(self._cursor.take(LETTER))
        begun = "".join(parts).removeprefix(frame)
        self._arguments(dump_json(begun)[:-1] if is_string(schema) else begun)
