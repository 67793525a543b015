"""Implements what the parsers of all model families share: pieces of text in, deltas out, and the handling of white
space.
Never knows a family's grammar."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from serve_app.parsing.cursor import ANYTHING, LETTER, Cursor, Steps
from serve_app.parsing.deltas import Arguments, CallStart, Content, Delta, merged, new_call_id

Tool = Mapping[str, Any]
"""A tool as in a request: `{"type": "function", "function": {"name": ..., "parameters": <JSON schema>}}`."""

_NAME = re.compile(r"[\w.:/-]{1,128}")
_TRAILING = " \t\r\n"


def _ignore(content: str) -> None:
    """The default of `on_content`: most readers get content from the deltas."""


class ToolParser(ABC):
    """Reads one answer. Used once.

    Text that is not part of a call is content, unchanged, except that white space next to a call is dropped: templates
    write it again around the call.

    A call is announced when its name is known and only its arguments can follow. From then on it stays a call: if the
    text ends early, or the arguments are not valid, they are passed on as the model wrote them, and may not be JSON.

    A name that is not among the tools is passed on, as in vLLM, because the client can tell the model. Only if no tag
    frames the call, and no tool has its name, is it content: it may be an answer in JSON.
    """

    markers: ClassVar[tuple[str, ...]]
    """Tags that must be in the text even if they are special tokens, which answers usually do not show."""
    frames_content: ClassVar[bool] = False
    """Whether the family writes tags around content, too."""

    def __init__(self, tools: Sequence[Tool] = (), make_id: Callable[[], str] | None = None) -> None:
        functions = [tool.get("function", tool) for tool in tools]
        self._schemas: dict[str, Any] = {
            function["name"]: function.get("parameters") for function in functions if "name" in function
        }
        self._make_id = make_id or self._new_id
        self._ids: set[str] = set()
        self._cursor = Cursor()
        self._steps = self._parse()
        self._deltas: list[Delta] = []
        self._space: list[str] = []
        self._after_call = False
        self.on_content: Callable[[str], object] = _ignore
        """Called with each piece of content, including white space, when it is certain to be content."""
        self.calls = 0
        """The number of calls announced so far."""
        self.is_in_call = False
        """Whether content is between the parts of a call: further arguments of the last call may follow it."""

    @property
    def num_held(self) -> int:
        """How many characters at the end of the received text may still belong either to a call or to content."""
        return self._cursor.num_held

    @property
    def num_waiting(self) -> int:
        """How many are in no delta yet: these, and white space that a call would drop."""
        return self._cursor.num_held + sum(map(len, self._space))

    def push(self, piece: str) -> list[Delta]:
        """Read a piece, and return the deltas that it makes certain."""
        self._cursor.feed(piece, self._steps)
        return self._take_deltas()

    def end_message(self) -> list[Delta]:
        """Return the deltas that the end of a message makes certain, in a family whose answers are messages. No call
        goes on in the next one."""
        self._cursor.end(self._steps)
        self._cursor.restart()
        self._steps = self._parse()
        return self._take_deltas()

    def flush(self) -> list[Delta]:
        """Return the remaining deltas, because the answer has ended."""
        self._cursor.end(self._steps)
        if not self._after_call and (space := "".join(self._space)):
            self._deltas.append(Content(space))
        self._space = []
        return self._take_deltas()

    def _new_id(self) -> str:
        """Make an id for a call without one. Some families' templates only accept ids of their own form."""
        return new_call_id()

    @abstractmethod
    def _parse(self) -> Steps[None]:
        """Implement the family's grammar: read the cursor to the end of the text."""

    def _take_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return merged(deltas)

    def _content(self, text: str) -> None:
        self.on_content(text)
        shown = text.rstrip(_TRAILING)
        if shown:
            self._deltas.append(Content("".join(self._space) + shown))
            self._space, self._after_call = [], False
        self._space.append(text[len(shown) :])

    def _give_back(self) -> None:
        """Pass held text on as content, because it is not a call."""
        self._content(self._cursor.release())

    def _start_call(self, name: str, call_id: str = "") -> None:
        """Announce a call, and drop the held text, which belongs to it. `call_id`: the model's own id, which its
        template writes again; an id that the model repeats is replaced."""
        self._cursor.drop()
        self._drop_space()
        if not call_id or call_id in self._ids:
            call_id = self._make_id()
        self._ids.add(call_id)
        self._deltas.append(CallStart(self.calls, call_id, name))
        self.calls += 1

    def _arguments(self, text: str) -> None:
        self._drop_space()
        if text:
            self._deltas.append(Arguments(self.calls - 1, text))

    def _is_offered(self, name: str) -> bool:
        """Whether a tool has this name; without tools, any name is accepted."""
        return not self._schemas or name in self._schemas

    def _drop_space(self) -> None:
        self._space, self._after_call = [], True

    def _until(self, *tags: str) -> Steps[str]:
        """Read content up to one of the tags, hold the tag, and return it; the empty string at the end of the text."""
        before = re.compile(f"[^{re.escape(''.join({tag[0] for tag in tags}))}]*")
        while True:
            self._content(self._cursor.take(before))
            if not (yield from self._cursor.peek()):
                return ""
            self._cursor.hold()
            if tag := (yield from self._cursor.literal(*tags)):
                return tag
            self._cursor.take(LETTER)
            self._give_back()

    def _rest(self) -> Steps[None]:
        """Pass everything that follows on as content."""
        while (yield from self._cursor.peek()):
            self._content(self._cursor.take(ANYTHING))


def is_name(text: str) -> bool:
    """Whether the text can be a function's name. OpenAI allows fewer characters; models are less strict."""
    return _NAME.fullmatch(text) is not None
