"""Owns how a hint of these schemas is taken or, by a strict server, refused.
Never decides what is a hint; the schemas do, and whoever finds that a model cannot do with one."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from serve_app.api.requests.hints import hints
from serve_app.api.requests.strict_model import UNSUPPORTED


def ignore_hint_in_schema(name: str, why: str, field: str | None = None) -> None:
    """As `ignore_or_refuse`, while the body is read. `field`: below the object that is validated."""
    if hints().strict:
        raise PydanticCustomError(UNSUPPORTED, "{text}", _context(why) | ({"field": field} if field else {}))
    hints().ignore(name)


def hint_where_refused(name: str) -> WrapValidator:
    """An object that its model refuses is a hint of this name, and is read as null."""

    def take(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            if not isinstance(value, dict) or hints().strict:
                raise
        hints().ignore(name)
        return None

    return WrapValidator(take)


def _context(text: str) -> dict[str, Any]:
    return {"text": text, "code": UNSUPPORTED}
