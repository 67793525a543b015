"""Accepts the hints of these schemas, or refuses them if the server is strict.
Never decides what is a hint: the schemas do, and the code that finds a hint useless for the model."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from serve_app.api.requests.hints import hints
from serve_app.api.requests.strict_model import UNSUPPORTED


def ignore_hint_in_schema(name: str, why: str, field: str | None = None) -> None:
    """Do what `ignore_or_refuse` does, while the body is validated. `field`: relative to the object validated."""
    if hints().strict:
        raise PydanticCustomError(UNSUPPORTED, "{text}", _context(why) | ({"field": field} if field else {}))
    hints().ignore(name)


def hint_where_refused(name: str) -> WrapValidator:
    """Read an object that does not validate as null, and count it as an ignored hint of this name."""

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
