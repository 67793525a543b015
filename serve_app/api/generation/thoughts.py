"""Owns how many tokens of an answer its thoughts took.
Never shows any text: a reader of the same answer does that, and is given text in other pieces."""

from __future__ import annotations

from serve_app.parsing.reasoning import ReasoningParser


class ThoughtCounter:
    """Counts one answer's tokens up to the one that begins its content: the marks around the thoughts are among them.
    It is 0 where the answer has no thoughts, and all of them where it ends before there is any content."""

    def __init__(self, parser: ReasoningParser) -> None:
        """`parser`: a fresh one, of this answer's own."""
        self._parser = parser
        self._num_tokens = 0
        self._thinks = parser.inside
        self._has_content = False
        self.count = 0

    def push(self, text: str) -> None:
        """Take one token, by the text that it completes."""
        if self._has_content:
            return
        self._num_tokens += 1
        split = self._parser.push(text)
        self._thinks = self._thinks or self._parser.inside or bool(split.reasoning)
        self._has_content = bool(split.content)
        if self._thinks and not self._has_content:
            self.count = self._num_tokens
