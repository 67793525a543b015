"""Reads a parameter's value that a model writes as plain text up to a tag, and sends it as JSON of its declared type.
Never ends a value at another tag, unless the call ends there or goes on: code that is written to a file may contain any
tag."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, NamedTuple

from serve_app.parsing.cursor import LETTER, SPACES, Steps
from serve_app.parsing.tool_parser import Tool, ToolParser
from serve_app.parsing.typed_values import ParameterTypes, Types, begun_json, value_json

_NO_TAG = re.compile(r"[^<]*")
_LINE = "\n"


class Ahead(NamedTuple):
    """What was read at a tag inside a value. `key`: the parameter that begins there although the value's end tag is
    missing, or an empty string if the call ends there; None if the text belongs to the value."""

    text: str
    key: str | None = None


class TaggedValueToolParser(ToolParser):
    """Sends a value when it is complete. One that is cut off by the end of the text is also cut off in the JSON.

    These models forget a value's end tag now and then. Then it ends where the call does: at the call's end tag, if the
    answer ends there or another call follows. It also ends where a line begins with the tag of a parameter that the
    tool has, and that is not written yet.

    Text between the parameters of a call is content, and sent at once: where a model forgot the end of its call, it is
    the rest of the answer.
    """

    _next_call: ClassVar[str]
    """What begins the next call."""

    def __init__(self, tools: Sequence[Tool] = (), make_id: Callable[[], str] | None = None) -> None:
        super().__init__(tools, make_id)
        self._parameter_types: dict[str, ParameterTypes] = {}

    def _start_call(self, name: str, call_id: str = "") -> None:
        super()._start_call(name, call_id)
        self.is_in_call = True

    def _end_call(self) -> None:
        self.is_in_call = False

    def _stray(self) -> Steps[None]:
        """Pass the held text, and what follows it up to a tag, on as content."""
        self._give_back()
        while (yield from self._cursor.peek()) and (text := self._cursor.take(_NO_TAG)):
            self._content(text)

    @abstractmethod
    def _ahead(self, keys: Collection[str], *, in_line: bool) -> Steps[Ahead]:
        """Read what may end a value without its end tag. `in_line`: the tag does not begin a line."""

    def _types_of(self, name: str) -> ParameterTypes:
        """Return the types of a function's parameters. They are read once, however often it is called."""
        if name not in self._parameter_types:
            self._parameter_types[name] = ParameterTypes(self._schemas.get(name))
        return self._parameter_types[name]

    def _value(self, types: Types, end: str, keys: Collection[str], frame: str = "") -> Steps[str | None]:
        """Read a value up to its end. `keys`: the parameters that may follow. `frame`: the text that the template
        writes before and after a value.

        Return the next parameter's key if it has been read already, an empty string if the call's end has been, and
        None otherwise.
        """
        parts = [""]
        while (yield from self._cursor.peek()):
            if text := self._cursor.take(_NO_TAG):
                parts.append(text)
            if (yield from self._cursor.literal(end)):
                self._send("".join(parts), types, frame)
                return None
            ahead = yield from self._ahead(keys, in_line=not parts[-1].endswith(_LINE))
            if ahead.key is not None:
                self._send("".join(parts).removesuffix(_LINE if not frame else ""), types, frame)
                return ahead.key
            parts.append(ahead.text or self._cursor.take(LETTER))
        self._arguments(begun_json("".join(parts).removeprefix(frame), types))
        return None

    def _send(self, text: str, types: Types, frame: str) -> None:
        self._arguments(value_json(text.removeprefix(frame).removesuffix(frame), types))

    def _past_end(self, text: str, *, in_line: bool) -> Steps[Ahead]:
        """Read on after a call's end tag inside a value; `text` has been read already."""
        text += yield from self._cursor.run(SPACES)
        is_end = not (yield from self._cursor.peek())
        if not is_end and not in_line:
            is_end = yield from self._cursor.follows(self._next_call)
        return Ahead(text, "" if is_end else None)
