"""Owns how a member of a union is told by its value: a text from a list, and objects by their `type`.
Never names the members; their tags are written `<tag>`, which error messages leave out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BeforeValidator, Discriminator
from pydantic_core import PydanticCustomError

from serve_app.api.requests.strict_model import UNSUPPORTED
from serve_app.errors.api_error import clip

_MAX_CHARS = 50
"""Bounds how much of an unknown type an error quotes."""


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


def of_types(*kinds: str, is_hint: Callable[[str], bool] = lambda kind: False) -> BeforeValidator:
    """Objects of another type are refused by that type, before their fields are looked at. `is_hint`: types that are
    taken, too, and that nobody is told to send."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in kinds and not is_hint(kind):
            raise unsupported(f"the type {clip(kind, _MAX_CHARS)}", kinds, "type")
        return value

    return BeforeValidator(check)


def of_words(*words: str) -> BeforeValidator:
    """The same of texts."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and value not in words:
            raise unsupported(clip(value, _MAX_CHARS), words)
        return value

    return BeforeValidator(check)


def unsupported(what: str, known: Sequence[str], field: str | None = None) -> PydanticCustomError:
    """`field`: below the value that is validated."""
    text = f"{what} is not supported by the server; supported are: {', '.join(known)}"
    context = {"text": text, "code": UNSUPPORTED} | ({} if field is None else {"field": field})
    return PydanticCustomError(UNSUPPORTED, "{text}", context)
