"""Owns what all families of tool calls share: pieces of text in, deltas out, and which white space is shown.
Never knows a family's grammar."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from serve_app.parsing.cursor import ANYTHING, LETTER, Cursor, Steps
from serve_app.parsing.deltas import Arguments, CallStart, Content, Delta, merged, new_call_id

Tool = Mapping[str, Any]
"""As in a request's `tools`: `{"type": "function", "function": {"name": ..., "parameters": <JSON schema>}}`."""

_NAME = re.compile(r"[\w.:/-]{1,128}")
_TRAILING = " \t\r\n"


def _ignore(content: str) -> None:
    """Most readers see what is content by the deltas."""


class ToolParser(ABC):
    """Reads one answer. Used once.

    What is no call is content, letter for letter; of white space that touches a call nothing is shown, because
    templates write it again around the call.
    A call is announced when its name is known and what follows can only be its arguments. From then on it stays a
    call: text that ends early, or is wrong inside the arguments, leaves them as the model wrote them, not always JSON.
    A name that is not among the tools is passed on, as vLLM does: it is the client that can say so to the model. A text
    that no tag frames, and whose name no tool has, is content: it may be an answer in JSON.
    """

    markers: ClassVar[tuple[str, ...]]
    """Tags that must be in the text even where the tokenizer calls them special tokens, which answers do not show."""
    frames_content: ClassVar[bool] = False
    """The family writes tags around content, too."""

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
        """Is told what is content, white space and all, when that is certain."""
        self.calls = 0
        """How many calls were announced so far."""

    @property
    def num_held(self) -> int:
        """How many letters at the end of what came may still be a call's, or content."""
        return self._cursor.num_held

    def push(self, piece: str) -> list[Delta]:
        """Return what this piece makes certain."""
        self._cursor.feed(piece, self._steps)
        return self._take_deltas()

    def flush(self) -> list[Delta]:
        """Return the rest: the answer has ended."""
        self._cursor.end(self._steps)
        if not self._after_call and (space := "".join(self._space)):
            self._deltas.append(Content(space))
        return self._take_deltas()

    def _new_id(self) -> str:
        """For a call that the model gives none. Some templates take no others than their family's."""
        return new_call_id()

    @abstractmethod
    def _parse(self) -> Steps[None]:
        """The family's grammar: reads the cursor to the end of the text."""

    def _take_deltas(self) -> list[Delta]:
        found, self._deltas = self._deltas, []
        return merged(found)

    def _content(self, text: str) -> None:
        self.on_content(text)
        shown = text.rstrip(_TRAILING)
        if shown:
            self._deltas.append(Content("".join(self._space) + shown))
            self._space, self._after_call = [], False
        self._space.append(text[len(shown) :])

    def _give_back(self) -> None:
        """What was held is no call."""
        self._content(self._cursor.release())

    def _start_call(self, name: str, call_id: str = "") -> None:
        """Nothing that is held can become content any more. `call_id`: the model's own, which its template writes
        again; one that it gives twice is replaced."""
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
        """Whether a tool has this name; without tools, any."""
        return not self._schemas or name in self._schemas

    def _drop_space(self) -> None:
        self._space, self._after_call = [], True

    def _until(self, *tags: str) -> Steps[str]:
        """Read content and one of the tags, and hold the tag.

        The empty string: the text has ended.
        """
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
        """All that follows is content."""
        while (yield from self._cursor.peek()):
            self._content(self._cursor.take(ANYTHING))


def is_name(text: str) -> bool:
    """Whether this can be a function's name. OpenAI allows fewer letters; models are not that strict."""
    return _NAME.fullmatch(text) is not None
