"""Owns how a member of a union is told by its value: a text from a list, and objects by their `type`.
Never names the members; their tags are written `<tag>`, which error messages leave out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Discriminator


def text_or_list(value: Any) -> str | None:
    return "<text>" if isinstance(value, str) else "<list>" if isinstance(value, list) else None


def text_or_list_of(expected: str) -> Discriminator:
    """Of a union whose members are tagged `<text>` and `<list>`."""
    return Discriminator(text_or_list, custom_error_type="type", custom_error_message=f"should be {expected}")


def kind_of(value: Any, kinds: Sequence[str], default: str | None = None) -> str | None:
    """The tag of an object, or of a model made from one; None for what is neither. `default`: where it has no type."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", "")
    kind = default if kind is None else kind
    return f"<{kind}>" if kind in kinds else None


def by_type(kinds: Sequence[str], expected: str, default: str | None = None) -> Discriminator:
    """Of a union whose members are tagged by their `type`."""
    return Discriminator(
        lambda value: kind_of(value, kinds, default),
        custom_error_type="type",
        custom_error_message=f"should be {expected}",
    )
