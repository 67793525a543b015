"""Chooses the member of a union by its value: a text or a list by its kind, and objects by their `type`.
Never names a member in errors, unless its tag is its bare type: error messages leave out tags written `<tag>`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BeforeValidator, Discriminator
from pydantic_core import PydanticCustomError

from serve_app.api.requests.strict_model import UNSUPPORTED
from serve_app.errors.api_error import clip

_MAX_CHARS = 50
"""The most characters of an unknown type that an error quotes."""


def text_or_list(value: Any) -> str | None:
    return "<text>" if isinstance(value, str) else "<list>" if isinstance(value, list) else None


def text_or_list_of(expected: str) -> Discriminator:
    """Make the discriminator of a union with the tags `<text>` and `<list>`."""
    return Discriminator(text_or_list, custom_error_type="type", custom_error_message=f"should be {expected}")


def kind_of(value: Any, kinds: Sequence[str], default: str | None = None) -> str | None:
    """Return the tag of an object, or of a model made from one; None for other values. `default`: used without a
    type."""
    kind = bare_kind_of(value, kinds, default)
    return None if kind is None else f"<{kind}>"


def bare_kind_of(value: Any, kinds: Sequence[str], default: str | None = None) -> str | None:
    """Return a tag that errors name, as `kind_of` returns one that they leave out."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", "")
    kind = default if kind is None else kind
    return str(kind) if kind in kinds else None


def by_type(
    kinds: Sequence[str], expected: str, default: str | None = None, *, tag: Callable[..., str | None] = kind_of
) -> Discriminator:
    """Make the discriminator of a union with members that are tagged by their `type`. `tag`: how tags are written."""
    return Discriminator(
        lambda value: tag(value, kinds, default),
        custom_error_type="type",
        custom_error_message=f"should be {expected}",
    )


def of_types(*kinds: str, is_hint: Callable[[str], bool] = lambda kind: False) -> BeforeValidator:
    """Refuse objects of other types by naming the type, before their fields are checked. `is_hint`: recognizes types
    that are accepted, too, but that the error does not list."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in kinds and not is_hint(kind):
            raise unsupported(f"the type {clip(kind, _MAX_CHARS)}", kinds, "type")
        return value

    return BeforeValidator(check)


def of_words(*words: str) -> BeforeValidator:
    """Refuse other texts by naming the text, like `of_types`."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and value not in words:
            raise unsupported(clip(value, _MAX_CHARS), words)
        return value

    return BeforeValidator(check)


def unsupported(what: str, known: Sequence[str], field: str | None = None) -> PydanticCustomError:
    """`field`: relative to the value that is validated."""
    text = f"{what} is not supported by the server; supported are: {', '.join(known)}"
    context = {"text": text, "code": UNSUPPORTED} | ({} if field is None else {"field": field})
    return PydanticCustomError(UNSUPPORTED, "{text}", context)
