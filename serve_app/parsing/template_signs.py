"""Owns the search for a family's format in a chat template: what it writes says which parser reads it.
Never looks at a model's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Suggestion:
    """`written`: what the template has in it that the parser reads."""

    parser: str
    written: tuple[str, ...]

    @property
    def why(self) -> str:
        return f"the chat template writes {' and '.join(repr(text) for text in self.written)}"


def first_sign(signs: Sequence[tuple[str, tuple[str, ...]]], chat_template: str) -> Suggestion | None:
    """The first parser of which the template has all texts."""
    for parser, texts in signs:
        if all(text in chat_template for text in texts):
            return Suggestion(parser, texts)
    return None
