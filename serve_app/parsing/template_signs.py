"""Recognizes a model family's format in a chat template: the texts that it writes show which parser fits.
Never looks at a model's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A parser that fits. `written`: the template's texts that show it."""

    parser: str
    written: tuple[str, ...]

    @property
    def why(self) -> str:
        return f"the chat template writes {' and '.join(repr(text) for text in self.written)}"


def first_sign(signs: Sequence[tuple[str, tuple[str, ...]]], chat_template: str) -> Suggestion | None:
    """Suggest the first parser for which the template has all texts."""
    for parser, texts in signs:
        if all(text in chat_template for text in texts):
            return Suggestion(parser, texts)
    return None
