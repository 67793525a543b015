"""Counts the tokens that an answer's thoughts took.
Never shows text: another reader of the same answer does, and receives the text in different pieces."""

from __future__ import annotations

from serve_app.parsing.reasoning import ReasoningParser


class ThoughtCounter:
    """Counts one answer's tokens up to the one that begins its content, including the marks around the thoughts.
    The count is 0 if the answer has no thoughts, and all its tokens if it ends before any content."""

    def __init__(self, parser: ReasoningParser) -> None:
        """`parser`: a fresh one, used for this answer only."""
        self._parser = parser
        self._num_tokens = 0
        self._thinks = parser.inside
        self._has_content = False
        self.count = 0

    def push(self, text: str) -> None:
        """Count one token. `text`: the text that it completes."""
        if self._has_content:
            return
        self._num_tokens += 1
        split = self._parser.push(text)
        self._thinks = self._thinks or self._parser.inside or bool(split.reasoning)
        self._has_content = bool(split.content)
        if self._thinks and not self._has_content:
            self.count = self._num_tokens
