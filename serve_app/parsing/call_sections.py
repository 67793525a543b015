"""Parses calls in a section of their own: a tag, calls between tags, and a tag (DeepSeek V3 and V3.1, Kimi K2).
Never requires the section's tags, because models forget them."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import ClassVar

from serve_app.parsing.cursor import SPACES, Steps
from serve_app.parsing.json_calls import JsonToolParser

_NAME_LETTERS = re.compile(r"[\w.:/-]*")


class SectionToolParser(JsonToolParser):
    section: ClassVar[tuple[str, str]]
    call: ClassVar[tuple[str, str]]
    """The tags at the beginning and at the end of a section and of a call."""

    @abstractmethod
    def _head(self) -> Steps[tuple[str, str]]:
        """Read up to the arguments. Return the name, empty if there is none, and the model's id, if it gives one."""

    def _tail(self) -> Steps[None]:
        """Read what the family writes between the arguments and the end of the call."""
        yield from self._cursor.run(SPACES)

    def _parse(self) -> Steps[None]:
        while tag := (yield from self._until(self.section[0], self.call[0])):
            if tag == self.section[0]:
                yield from self._cursor.run(SPACES)
                if not (yield from self._cursor.literal(self.call[0])):
                    self._give_back()
                    continue
            yield from self._calls()

    def _calls(self) -> Steps[None]:
        """Read a call and those that follow it; the cursor holds the first one's tags."""
        while True:
            name, call_id = yield from self._head()
            if not (yield from self._named_call(name, call_id)):
                return
            yield from self._tail()
            yield from self._close(self.call[1])
            self._cursor.hold()
            yield from self._cursor.run(SPACES)
            tag = yield from self._cursor.literal(self.call[0], self.section[1])
            if tag != self.call[0]:
                break
        if tag:
            self._cursor.drop()
        else:
            self._give_back()


class DeepSeekToolParser(SectionToolParser):
    """Parses both forms. V3 and R1 write `function<｜tool▁sep｜>name`, and the arguments in a fence on lines of their
    own. V3.1 writes `name<｜tool▁sep｜>{...}`. The text itself shows which form it is."""

    section: ClassVar[tuple[str, str]] = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call: ClassVar[tuple[str, str]] = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    separator: ClassVar[str] = "<｜tool▁sep｜>"
    markers: ClassVar[tuple[str, ...]] = (*section, *call, separator)

    def _head(self) -> Steps[tuple[str, str]]:
        name = yield from self._cursor.run(_NAME_LETTERS)
        if not (yield from self._cursor.literal(self.separator)):
            return "", ""
        yield from self._cursor.run(SPACES)
        if (yield from self._cursor.peek()) == "{":
            return name, ""
        name = yield from self._cursor.run(_NAME_LETTERS)
        yield from self._cursor.run(SPACES)
        yield from self._cursor.literal("```json")
        yield from self._cursor.run(SPACES)
        return name, ""

    def _tail(self) -> Steps[None]:
        yield from self._cursor.run(SPACES)
        yield from self._cursor.literal("```")


class KimiK2ToolParser(SectionToolParser):
    """A call has an id such as `functions.get_weather:0`, which the model writes. Its result is returned under this id,
    and templates write it again."""

    section: ClassVar[tuple[str, str]] = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call: ClassVar[tuple[str, str]] = ("<|tool_call_begin|>", "<|tool_call_end|>")
    arguments: ClassVar[str] = "<|tool_call_argument_begin|>"
    markers: ClassVar[tuple[str, ...]] = (*section, *call, arguments)

    def _head(self) -> Steps[tuple[str, str]]:
        yield from self._cursor.run(SPACES)
        call_id = yield from self._cursor.run(_NAME_LETTERS)
        yield from self._cursor.run(SPACES)
        if not (yield from self._cursor.literal(self.arguments)):
            return "", ""
        yield from self._cursor.run(SPACES)
        return re.sub(r":[0-9]*\Z", "", call_id.removeprefix("functions.")), call_id
