"""Parses a call that is a JSON object, `{"name": ..., "arguments": {...}}`, and passes its arguments on as they come.
Never decodes or checks the arguments: the model's text is passed on unchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.parsing.cursor import SPACES, Steps
from serve_app.parsing.extent import Extent
from serve_app.parsing.tool_parser import ToolParser, is_name

_ARGUMENTS = ("arguments", "parameters")
# An object with another first key is not a call, so that an answer in JSON streams instead of waiting for its end.
_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})
_OPENING = frozenset('"{[')
_SCALAR = re.compile(r"[\w.+-]*")


@dataclass(slots=True)
class _Call:
    """The state of the object that is being read."""

    bare: bool
    offered: bool
    name: str | None = None
    arguments: str | None = None
    """Arguments that came before the name."""
    started: bool = False


class JsonToolParser(ToolParser):
    def _call(self, *, bare: bool = False, offered: bool = False) -> Steps[bool]:
        """Read one call; the cursor holds the text that frames it. Return False if it is not complete; text that does
        not belong to it is then content.

        `bare`: only the object itself shows that it is a call, so it must have arguments; otherwise missing ones mean
        `{}`. `offered`: it is a call only if a tool has its name.
        """
        whole = yield from self._object(_Call(bare, offered))
        if whole:
            self._cursor.drop()
        else:
            self._give_back()
        return whole

    def _list(self) -> Steps[None]:
        """Read calls between brackets; the cursor holds what came before them."""
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

    def _named_call(self, name: str, call_id: str = "") -> Steps[bool]:
        """Read a call with arguments that begin here, and hold what follows them. Return False if it is not a call."""
        if not is_name(name) or (yield from self._cursor.peek()) != "{":
            self._give_back()
            return False
        self._start_call(name, call_id)
        yield from self._stream_arguments()
        return True

    def _close(self, *ends: str) -> Steps[None]:
        """Leave out one of these tags if it comes next; the cursor holds what follows the call."""
        yield from self._cursor.run(SPACES)
        if (yield from self._cursor.literal(*ends)):
            self._cursor.drop()
        else:
            self._give_back()

    def _object(self, call: _Call) -> Steps[bool]:
        if not (yield from self._cursor.literal("{")):
            return False
        while (yield from self._member(call)):
            yield from self._cursor.run(SPACES)
            separator = yield from self._cursor.literal(",", "}")
            if separator == "}" and call.name is not None and not call.started and not call.bare:
                call.arguments = "{}"
                self._start(call)
            if separator != ",":
                return bool(separator) and call.started
        return False

    def _member(self, call: _Call) -> Steps[bool]:
        """Read one key and its value. Return False if the text does not continue as a call."""
        yield from self._cursor.run(SPACES)
        key = yield from self._string()
        if key is None or (key not in _KEYS and not call.started):
            return False
        yield from self._cursor.run(SPACES)
        if not (yield from self._cursor.literal(":")):
            return False
        yield from self._cursor.run(SPACES)
        if call.started:
            return (yield from self._value(_ignore))
        return (yield from self._value_of(key, call))

    def _value_of(self, key: str, call: _Call) -> Steps[bool]:
        if key == "name":
            return (yield from self._name_of(call))
        if key in _ARGUMENTS:
            return (yield from self._arguments_of(call))
        return (yield from self._value(_ignore))

    def _name_of(self, call: _Call) -> Steps[bool]:
        name = yield from self._string()
        if name is None or not is_name(name) or (call.offered and not self._is_offered(name)):
            return False
        call.name = name
        if call.arguments is not None:
            self._start(call)
        return True

    def _arguments_of(self, call: _Call) -> Steps[bool]:
        if (yield from self._cursor.peek()) != "{":
            return False
        if call.name is None:
            parts: list[str] = []
            complete = yield from self._value(parts.append)
            call.arguments = "".join(parts)
            return complete
        self._start(call)
        return (yield from self._stream_arguments())

    def _stream_arguments(self) -> Steps[bool]:
        """Pass on the object that begins here, and hold what follows."""
        complete = yield from self._value(self._arguments)
        self._cursor.hold()
        return complete

    def _start(self, call: _Call) -> None:
        assert call.name is not None
        self._start_call(call.name)
        call.started = True
        if call.arguments is not None:
            self._arguments(call.arguments)
            self._cursor.hold()

    def _string(self) -> Steps[str | None]:
        """Read a JSON string and return its value; None if there is no string here."""
        if (yield from self._cursor.peek()) != '"':
            return None
        parts: list[str] = []
        yield from self._value(parts.append)
        try:
            value = json.loads("".join(parts))
        except ValueError:
            return None
        assert isinstance(value, str)
        return value

    def _value(self, sink: Callable[[str], None]) -> Steps[bool]:
        """Read any JSON value, and pass its text to `sink` as it comes. Return False if it is incomplete or missing."""
        if (yield from self._cursor.peek()) not in _OPENING:
            scalar = yield from self._cursor.run(_SCALAR)
            sink(scalar)
            return bool(scalar)
        extent = Extent("json")
        while not extent.done:
            if not (yield from self._cursor.peek()):
                return False
            sink(self._cursor.take_to(extent.find_end))
        return True


def _ignore(text: str) -> None:
    """Drop a value: only a call's name and arguments are shown."""
