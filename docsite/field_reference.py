"""Owns docs/reference/api-fields.md: every field of every body with its class (honoured, hint or refused), from the
schemas. Never has a description of its own: a field is documented and classified where it is defined."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, RootModel
from pydantic.fields import FieldInfo

from serve_app.api.openapi.operations import OPERATIONS, Operation
from serve_app.api.requests.strict_model import StrictModel, UsedIfPossible

INTRODUCTION = """\
# Fields of requests

Written by `make docs` from the schemas. Each field belongs to one of three classes:

- **honoured**: it does what it says, or is refused if that is impossible. Labels, such as `user`, promise nothing.
- **hint**: it does not ask for a different answer. It is accepted, and used if the model supports it. If it had no
  effect, the response's header `x-chunkserve-ignored` and the metric `chunkserve:ignored_fields_total` name it. With
  `args.strict` it is refused, as below.
- **refused**: a 400 names it. It would change or constrain the answer in a way that this server does not support.

Any other field is refused as unknown, and an object of a type that is not listed is refused by its type. Hints and
refused fields accept null and the values in the table, since these ask for what is done anyway.

Some values of fields are hints, too. They are at the end of a table, under the names that the header uses for them. One
value of a hint is refused: an edit of `context_management` with `pause_after_compaction`, which would end an answer
early.

In a path, `[]` is each item of a list, and `{text}` follows an object with the `type` text.
"""

_MAX_TYPES = 2
"""The maximum number of types of an object that a path shows."""


@dataclass(frozen=True, slots=True)
class Row:
    path: str
    kind: Literal["honoured", "hint", "refused"]
    meaning: str
    model: type[BaseModel]
    """The model that has the field."""
    name: str


def render() -> str:
    """Render the page as Markdown, with a table for each body."""
    return "\n".join([INTRODUCTION, *(line for operation in _operations() for line in _section(operation))])


def _operations() -> list[Operation]:
    """Return the operations that take a body, each under one of its paths."""
    by_path: dict[str, Operation] = {}
    for operation in OPERATIONS:
        if operation.body is not None:
            by_path.setdefault(operation.path.removeprefix("/v1"), operation)
    return list(by_path.values())


def _section(operation: Operation) -> Iterator[str]:
    assert operation.body is not None
    for body in bodies_of(operation.body):
        yield f"## {operation.method.upper()} {operation.path}"
        yield ""
        yield " ".join([operation.summary, *_doc(body, alone=body is operation.body)])
        yield ""
        yield "| field | class | meaning |"
        yield "|---|---|---|"
        for row in rows(body):
            yield f"| `{row.path}` | {row.kind} | {row.meaning.replace('|', '&#124;')} |"
        yield ""


def _doc(body: type[BaseModel], *, alone: bool) -> list[str]:
    """Return the description of a body, if it is one of several."""
    return [] if alone or not body.__doc__ else [" ".join(body.__doc__.split())]


def bodies_of(body: type[BaseModel]) -> list[type[BaseModel]]:
    """Return the models that a body may be."""
    kinds: Any = body.model_fields["root"].annotation if issubclass(body, RootModel) else body
    return [model for _, model in _each_model("", kinds)]


def rows(model: type[BaseModel], path: str = "", inside: Sequence[type[BaseModel]] = ()) -> Iterator[Row]:
    """Yield a model's fields, each with those of the objects in it. `inside` are the models around this one, which are
    not shown again."""
    for name, field in model.model_fields.items():
        yield from _field_rows(model, field.alias or name, field, path, inside)
    if not issubclass(model, StrictModel):
        return
    for name, neutral in model.hints.items():
        yield Row(path + name, "hint", _neutral(neutral), model, name)
    for name, neutral in model.unsupported.items():
        yield Row(path + name, "refused", _neutral(neutral), model, name)
    for name, when in model.value_hints.items():
        yield Row(name, "hint", when, model, name)


def _neutral(values: Sequence[Any]) -> str:
    written = ", ".join(f"`{json.dumps(value)}`" for value in values)
    return f"{written}: as it is anyway." if values else ""


def _field_rows(
    model: type[BaseModel], name: str, field: FieldInfo, path: str, inside: Sequence[type[BaseModel]]
) -> Iterator[Row]:
    is_hint = bool(getattr(model, "is_hint", False))  # AbsentTool is not a StrictModel
    is_hint = is_hint or any(isinstance(mark, UsedIfPossible) for mark in field.metadata)
    words = _words(field.annotation)
    one_of = f"One of {', '.join(f'`{word}`' for word in words)}." if words else ""
    meaning = " ".join(filter(None, [" ".join((field.description or "").split()), one_of]))
    yield Row(path + name, "hint" if is_hint else "honoured", meaning, model, name)
    for place, nested in _models(path + name, field.annotation):
        if nested not in inside and nested is not model:
            yield from rows(nested, f"{place}.", (*inside, model))


def _models(path: str, annotation: Any) -> list[tuple[str, type[BaseModel]]]:
    """Return the models of the objects that a value may be or contain, each with a path that distinguishes them."""
    models = list(dict.fromkeys(_each_model(path, annotation)))
    several = len({model for _, model in models}) > 1
    return [(f"{place}{_type_of(model)}" if several else place, model) for place, model in models]


def _each_model(path: str, annotation: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield path, annotation
    elif get_origin(annotation) is Annotated:
        yield from _each_model(path, get_args(annotation)[0])
    elif get_origin(annotation) in (list, tuple, Union, types.UnionType):
        place = path if get_origin(annotation) in (Union, types.UnionType) else f"{path}[]"
        for argument in get_args(annotation):
            yield from _each_model(place, argument)


def _type_of(model: type[BaseModel]) -> str:
    words = _words(model.model_fields["type"].annotation) if "type" in model.model_fields else []
    more = ["…"] if len(words) > _MAX_TYPES else []
    return f"{{{'/'.join([*words[:_MAX_TYPES], *more])}}}" if words else ""


def _words(annotation: Any) -> list[str]:
    """Return the texts that a value may be; none if it may be anything else except null."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return [argument for argument in arguments if isinstance(argument, str)]
    if origin is Annotated:
        return _words(arguments[0])
    if origin in (Union, types.UnionType):
        found = [_words(argument) for argument in arguments if argument is not type(None)]
        return [word for words in found for word in words] if all(found) else []
    return []
