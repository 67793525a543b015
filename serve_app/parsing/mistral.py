"""Parses the calls of Mistral's models after `[TOOL_CALLS]`: a list of JSON objects, or a name and its arguments.
Never makes an id that Mistral's templates refuse."""

from __future__ import annotations

import re
import secrets
import string
from typing import ClassVar

from serve_app.parsing.cursor import SPACES, Steps
from serve_app.parsing.json_calls import JsonToolParser

_TAG, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME_LETTERS = re.compile(r"[\w.:/-]*")
_ID_LETTERS, _ID_LENGTH = string.ascii_letters + string.digits, 9
_OWN_ID = re.compile(rf"[a-zA-Z0-9]{{{_ID_LENGTH}}}")


class MistralToolParser(JsonToolParser):
    """Parses `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or for each call `[TOOL_CALLS]name[ARGS]{...}`. In
    the second form `[ARGS]` may be missing, and may be preceded by `[CALL_ID]` and the call's id."""

    markers: ClassVar[tuple[str, ...]] = (_TAG, _ID, _ARGUMENTS)

    def _new_id(self) -> str:
        """Make an id of nine letters and digits: Mistral's templates refuse all others."""
        return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))

    def _parse(self) -> Steps[None]:
        while (yield from self._until(_TAG)):
            yield from self._cursor.run(SPACES)
            character = yield from self._cursor.peek()
            if character == "[":
                yield from self._list()
            elif character == "{":
                yield from self._call()
            else:
                name = yield from self._cursor.run(_NAME_LETTERS)
                call_id = yield from self._tags_before_arguments()
                if (yield from self._named_call(name, call_id)):
                    self._cursor.drop()

    def _tags_before_arguments(self) -> Steps[str]:
        """Read the tags, and return the id among them, or the empty string."""
        call_id = ""
        yield from self._cursor.run(SPACES)
        while tag := (yield from self._cursor.literal(_ID, _ARGUMENTS)):
            yield from self._cursor.run(SPACES)
            if tag == _ID:
                call_id = yield from self._cursor.run(_NAME_LETTERS)
                yield from self._cursor.run(SPACES)
        return call_id if _OWN_ID.fullmatch(call_id) else ""
