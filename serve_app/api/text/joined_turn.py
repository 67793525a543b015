"""Joins several turns of a conversation to one.
Never decides which turns to join."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve_app.api.text.template_form import Message

_THOUGHTS, _CALLS = "reasoning_content", "tool_calls"


class JoinedTurn:
    def __init__(self, message: Message) -> None:
        self.message = message
        """The first message, with the fields that only the others have."""
        self._num_turns = 0
        self._contents: list[Any] = []
        self._thoughts: list[str] = []
        self._calls: list[Any] = []
        self._separator = ""
        self._take(message)

    def add(self, message: Message, separator: str) -> None:
        """Add a turn. `separator`: stands between all texts."""
        self.message = {**message, **self.message}
        self._take(message)
        self._separator = separator

    def joined(self) -> Message:
        """Build the message. Texts are joined only here, because a conversation may have tens of thousands of turns."""
        if self._num_turns == 1:
            return self.message
        message = {**self.message, "content": self._content()}
        if self._thoughts:
            message[_THOUGHTS] = self._separator.join(self._thoughts)
        if self._calls:
            message[_CALLS] = self._calls
        return message

    def _take(self, message: Message) -> None:
        """Collect a turn's parts. Empty contents, such as a call's, are left out, so that no separator surrounds
        them."""
        self._num_turns += 1
        self._contents += [message["content"]] if message["content"] else []
        self._thoughts += [message[_THOUGHTS]] if message.get(_THOUGHTS) else []
        self._calls += message.get(_CALLS) or ()

    def _content(self) -> Any:
        if all(isinstance(content, str) for content in self._contents):
            return self._separator.join(self._contents)
        return [part for one in self._contents for part in parts_of(one)]


def parts_of(content: Any) -> Sequence[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
