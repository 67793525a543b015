"""Enforces that nothing a client sends is silently ignored: a field is honoured, taken as a hint, or refused by name.
Never converts types: a bool is not a number, a number is not a string, and NaN is not a value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from serve_app.api.requests.hints import UNSUPPORTED as UNSUPPORTED
from serve_app.api.requests.hints import hints
from serve_app.errors.api_error import MAX_PARAM_CHARS, clip

Unsupported = Mapping[str, tuple[Any, ...]]


class UsedIfPossible:
    """Marks a field that is honoured if the model can use it, and is a hint otherwise."""


USED_IF_POSSIBLE = UsedIfPossible()


class StrictModel(BaseModel):
    # The docstrings of fields are their descriptions in the OpenAPI document.
    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, frozen=True, use_attribute_docstrings=True
    )

    unsupported: ClassVar[Unsupported] = {}
    """Fields that only other servers have, each with the values besides null that would change nothing."""
    hints: ClassVar[Unsupported] = {}
    """The same for fields that do not require a different answer. Other values are accepted, and the response names
    the field; a strict server refuses them."""
    hint_path: ClassVar[str] = ""
    """A prefix for the names of the model's hints, such as `output_config.`."""
    value_hints: ClassVar[Mapping[str, str]] = {}
    """A body's hints that depend on a value, or on what the model can do: their names in the response, and when."""
    is_hint: ClassVar[bool] = False
    """The whole object is a hint, such as a tool that the server does not run. The code that reads it names it."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_honoured(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        # Stops at the first error: a body with a million unknown names must not cost a million errors.
        known, current = _names(cls), hints()
        for name in (name for name in data if name not in known):
            neutral = cls.hints.get(name, cls.unsupported.get(name))
            if neutral is None:
                raise _error("unknown_parameter", name, "this field is not known to the server")
            if _is_neutral(data[name], neutral):
                continue
            if name not in cls.hints or current.strict:
                raise _error(UNSUPPORTED, name, _not_supported(neutral))
            current.ignore(cls.hint_path + name)
        return {name: value for name, value in data.items() if name in known}


@cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    """Return the names of a model's fields as clients write them."""
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
