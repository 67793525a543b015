"""Owns a turn that is made of several of a conversation's.
Never decides which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve_app.api.text.template_form import Message

_THOUGHTS, _CALLS = "reasoning_content", "tool_calls"


class JoinedTurn:
    def __init__(self, message: Message) -> None:
        self.message = message
        """The first, with what the others have besides."""
        self._num_turns = 0
        self._contents: list[Any] = []
        self._thoughts: list[str] = []
        self._calls: list[Any] = []
        self._separator = ""
        self._take(message)

    def add(self, message: Message, separator: str) -> None:
        """`separator`: between all texts."""
        self.message = {**message, **self.message}
        self._take(message)
        self._separator = separator

    def joined(self) -> Message:
        """Joined once: a conversation may have tens of thousands of turns."""
        if self._num_turns == 1:
            return self.message
        told = {**self.message, "content": self._content()}
        if self._thoughts:
            told[_THOUGHTS] = self._separator.join(self._thoughts)
        if self._calls:
            told[_CALLS] = self._calls
        return told

    def _take(self, message: Message) -> None:
        """Nothing separates an empty content, such as a call's, from another."""
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
