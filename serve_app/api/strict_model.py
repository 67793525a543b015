"""Owns the rule that nothing a client sends is ignored: a field is honoured, neutral, or refused by name.
Never guesses a type: a bool is no number, a number no string, and NaN no value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from serve_app.errors import MAX_PARAM_CHARS, clip

Unsupported = Mapping[str, tuple[Any, ...]]
UNSUPPORTED = "unsupported_parameter"
"""The code of a refusal."""


class StrictModel(BaseModel):
    # The docstrings of fields are what the OpenAPI document says of them.
    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, frozen=True, use_attribute_docstrings=True
    )

    unsupported: ClassVar[Unsupported] = {}
    """Fields that other servers have and this one does not, with the values, besides null, that change nothing."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        # Stops at the first: a body of a million unknown names must not cost a million errors.
        known = _names(cls)
        for name in (name for name in data if name not in known):
            if name not in cls.unsupported:
                raise _error("unknown_parameter", name, "this field is not known to the server")
            if not _is_neutral(data[name], cls.unsupported[name]):
                raise _error(UNSUPPORTED, name, _not_supported(cls.unsupported[name]))
        return {name: value for name, value in data.items() if name in known}


@cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    """Of its fields, as clients write them."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    # `True == 1` in Python, but `"n": true` is a mistake.
    return value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _not_supported(neutral: tuple[Any, ...]) -> str:
    accepted = ", ".join(json.dumps(value) for value in (None, *neutral))
    return f"this field is not supported by the server; leave it out, or send one of: {accepted}"


def _error(code: str, name: str, text: str) -> PydanticCustomError:
    # The path to the field ends at the object that holds it, so the name travels in the context.
    return PydanticCustomError(code, "{text}", {"text": text, "field": clip(name, MAX_PARAM_CHARS), "code": code})
