"""Owns docs/reference/api-fields.md: every field of every body, honoured, a hint or refused, made from the schemas.
Never holds a description of its own; a field is documented, and given its class, where it is defined."""

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

Written by `make docs` from the schemas. A field is of one of three classes:

- **honoured**: it does what it says, or is refused where it cannot. Labels, such as `user`, promise nothing.
- **hint**: it asks for no other answer than this server gives. It is taken, and used where the model can do something
  with it; where it had no effect, the response's header `x-chunkserve-ignored` and the metric
  `chunkserve:ignored_fields_total` name it. With `args.strict` it is refused, as below.
- **refused**: a 400 names it. It would change or constrain the answer, and this server cannot do what it asks for.

Any other field is refused as unknown, and any object of another type than these by its type. Null is taken for each
hint and each field that is refused, as are the values that the table has for them: they ask for what is done anyway.

Some values of fields are hints, too. They stand at the end of a table, by the names that the header has for them.
One value of a hint is refused: an edit of `context_management` with `pause_after_compaction`, which would end an answer
early.

In a path, `[]` is each item of a list, and `{text}` stands behind an object that has the `type` text.
"""

_MAX_TYPES = 2
"""Bounds how many types of an object a path shows."""


@dataclass(frozen=True, slots=True)
class Row:
    path: str
    kind: Literal["honoured", "hint", "refused"]
    meaning: str
    model: type[BaseModel]
    """Which has the field."""
    name: str


def render() -> str:
    """The page as Markdown, with a table for each body."""
    return "\n".join([INTRODUCTION, *(line for operation in _operations() for line in _section(operation))])


def _operations() -> list[Operation]:
    """Those that take a body, each under one of its paths."""
    found: dict[str, Operation] = {}
    for operation in OPERATIONS:
        if operation.body is not None:
            found.setdefault(operation.path.removeprefix("/v1"), operation)
    return list(found.values())


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
    """What one of several bodies is."""
    return [] if alone or not body.__doc__ else [" ".join(body.__doc__.split())]


def bodies_of(body: type[BaseModel]) -> list[type[BaseModel]]:
    """The models that a body may be."""
    kinds: Any = body.model_fields["root"].annotation if issubclass(body, RootModel) else body
    return [model for _, model in _each_model("", kinds)]


def rows(model: type[BaseModel], path: str = "", inside: Sequence[type[BaseModel]] = ()) -> Iterator[Row]:
    """A model's fields, each with those of the objects in it. `inside`: models that this one is in, shown once."""
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
    is_hint = bool(getattr(model, "is_hint", False))  # AbsentTool is no StrictModel
    is_hint = is_hint or any(isinstance(one, UsedIfPossible) for one in field.metadata)
    words = _words(field.annotation)
    one_of = f"One of {', '.join(f'`{word}`' for word in words)}." if words else ""
    told = " ".join(filter(None, [" ".join((field.description or "").split()), one_of]))
    yield Row(path + name, "hint" if is_hint else "honoured", told, model, name)
    for place, nested in _models(path + name, field.annotation):
        if nested not in inside and nested is not model:
            yield from rows(nested, f"{place}.", (*inside, model))


def _models(path: str, annotation: Any) -> list[tuple[str, type[BaseModel]]]:
    """The models of the objects that a value may be or hold, each with its path, which tells several apart."""
    found = list(dict.fromkeys(_each_model(path, annotation)))
    several = len({model for _, model in found}) > 1
    return [(f"{place}{_type_of(model)}" if several else place, model) for place, model in found]


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
    """The texts that a value may be; none where it may be anything else but null."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return [argument for argument in arguments if isinstance(argument, str)]
    if origin is Annotated:
        return _words(arguments[0])
    if origin in (Union, types.UnionType):
        found = [_words(argument) for argument in arguments if argument is not type(None)]
        return [word for words in found for word in words] if all(found) else []
    return []
