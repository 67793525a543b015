"""Owns the rule that nothing a client sends is ignored in silence: a field is honoured, a hint, or refused by name.
Never guesses a type: a bool is no number, a number no string, and NaN no value."""

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
    """Marks a field that is a hint where the model can do nothing with it, and honoured otherwise."""


USED_IF_POSSIBLE = UsedIfPossible()


class StrictModel(BaseModel):
    # The docstrings of fields are what the OpenAPI document says of them.
    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, frozen=True, use_attribute_docstrings=True
    )

    unsupported: ClassVar[Unsupported] = {}
    """Fields that other servers have and this one does not, with the values, besides null, that change nothing."""
    hints: ClassVar[Unsupported] = {}
    """The same of fields that ask for no other answer. Other values are taken, and the response names the field; a
    strict server refuses them."""
    hint_path: ClassVar[str] = ""
    """Before the names of its hints, such as `output_config.`."""
    value_hints: ClassVar[Mapping[str, str]] = {}
    """Of a body: hints that are told by a value, or by what the model can do, as the response names them, and when."""
    is_hint: ClassVar[bool] = False
    """The object is one as a whole, such as a tool that the server does not run. Who reads it names it."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_honoured(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        # Stops at the first: a body of a million unknown names must not cost a million errors.
        known, found = _names(cls), hints()
        for name in (name for name in data if name not in known):
            neutral = cls.hints.get(name, cls.unsupported.get(name))
            if neutral is None:
                raise _error("unknown_parameter", name, "this field is not known to the server")
            if _is_neutral(data[name], neutral):
                continue
            if name not in cls.hints or found.strict:
                raise _error(UNSUPPORTED, name, _not_supported(neutral))
            found.ignore(cls.hint_path + name)
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
