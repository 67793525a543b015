"""Parses the calls of Llama 3.2 and 4, ToolACE and others: a Python list of calls, `[f(a=1, b="x"), g()]`.
Never takes a list in the middle of a text for calls, and never evaluates one."""

from __future__ import annotations

import ast
import re
from typing import ClassVar

from serve_app.parsing.cursor import SPACES, Steps
from serve_app.parsing.extent import Extent
from serve_app.parsing.python_literals import arguments_json, parse_expression
from serve_app.parsing.tool_parser import ToolParser, is_name

_NAME_LETTERS = re.compile(r"[\w.]*")


class PythonicToolParser(ToolParser):
    """A call is sent when its name and arguments are complete, because only then it is certain to be a call.

    Arguments are literals with names; a call with other arguments is content, and so is everything after it. The first
    name must be a tool's, because only the list itself shows that these are calls.
    """

    markers: ClassVar[tuple[str, ...]] = ()

    def _parse(self) -> Steps[None]:
        self._cursor.hold()
        yield from self._cursor.run(SPACES)
        if (yield from self._cursor.literal("[")):
            yield from self._calls()
        else:
            self._give_back()
        yield from self._rest()

    def _calls(self) -> Steps[None]:
        """Read calls and commas up to the closing bracket; the cursor holds what came before them."""
        while (yield from self._call()):
            self._cursor.hold()
            yield from self._cursor.run(SPACES)
            separator = yield from self._cursor.literal(",", "]")
            if separator == "]":
                self._cursor.drop()
                return
            if not separator:
                break
        self._give_back()

    def _call(self) -> Steps[bool]:
        yield from self._cursor.run(SPACES)
        name = yield from self._cursor.run(_NAME_LETTERS)
        is_call = is_name(name) and (self.calls > 0 or self._is_offered(name))
        if not is_call or (yield from self._cursor.peek()) != "(":
            return False
        parts = [name]
        extent = Extent("python")
        while not extent.done:
            if not (yield from self._cursor.peek()):
                return False
            parts.append(self._cursor.take_to(extent.find_end))
        return self._send("".join(parts), name)

    def _send(self, text: str, name: str) -> bool:
        try:
            call = parse_expression(text)
            if not isinstance(call, ast.Call):
                return False
            arguments = arguments_json(call)
        except ValueError:
            return False
        self._start_call(name)
        self._arguments(arguments)
        return True
