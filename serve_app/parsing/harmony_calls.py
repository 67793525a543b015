"""Parses the calls of gpt-oss: messages to `functions.name` with the arguments as their text.
Never changes other messages: the reasoning parser removes their headers."""

from __future__ import annotations

from typing import ClassVar

from serve_app.parsing.cursor import SPACES, Steps
from serve_app.parsing.harmony import CHANNEL, ENDS, START, TAGS, TO, read_header
from serve_app.parsing.json_calls import JsonToolParser
from serve_app.parsing.tool_parser import is_name


class HarmonyToolParser(JsonToolParser):
    """Parses calls. The recipient stands before the channel, as templates write it, or after it, as the models do."""

    markers: ClassVar[tuple[str, ...]] = TAGS
    frames_content: ClassVar[bool] = True

    def _parse(self) -> Steps[None]:
        self._cursor.hold()
        yield from self._cursor.run(SPACES)
        if (yield from self._cursor.literal(TO)):
            yield from self._message(TO)
        else:
            self._give_back()
        while tag := (yield from self._until(START, CHANNEL)):
            yield from self._message(tag)

    def _message(self, tag: str) -> Steps[None]:
        """Read a message. If it is not a call, the held text is content."""
        header = yield from read_header(self._cursor, tag)
        name = header.function if header else ""
        yield from self._cursor.run(SPACES)
        if is_name(name) and (yield from self._ends()):
            self._start_call(name)
            self._arguments("{}")
        elif (yield from self._named_call(name)):
            yield from self._close(*ENDS)

    def _ends(self) -> Steps[bool]:
        """Whether the message ends here: at its tag, which may not be in the text, at the next message or with the
        text."""
        if (yield from self._cursor.literal(*ENDS)) or not (yield from self._cursor.peek()):
            return True
        return (yield from self._cursor.follows(START)) or (yield from self._cursor.follows(CHANNEL))
