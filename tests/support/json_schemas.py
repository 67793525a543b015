"""Owns random JSON schemas, one for each seed, of the keywords that clients use and the server supports.
Never makes one that no value fits, nor alternatives of which two may fit: `oneOf` is treated as `anyOf`."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
_NAMES = ("name", "city", "count", "tags", "a b", "é", "x-1", 'q"', "items", "nullable")
_WORDS = ("red", "green", "Łódź", 'a "b"', "tab\there", "", "🦜")
_PATTERNS = ("^[a-z]{2,5}$", "^(foo|bar)+$", "^[0-9]{3}", "^[A-Z][a-z]*( [A-Z][a-z]*)*$")
_FORMATS = ("date", "uuid", "ipv4", "time")


def random_schema(seed: object, depth: int = 3) -> Schema:
    """Return the random schema of an object."""
    rng = random.Random(str(seed))
    schema = _object(rng, depth)
    if rng.random() < 0.5:
        schema["$defs"] = {"one": _any(rng, 1), "two": _object(rng, 1)}
        schema["properties"] |= {f"by_{name}": {"$ref": f"#/$defs/{name}"} for name in schema["$defs"]}
        schema["required"] = [*schema.get("required", ()), "by_one"]
    return schema


def _any(rng: random.Random, depth: int) -> Schema:
    leaves = [_string, _string, _integer, _number, _listed, lambda _: {"type": rng.choice(["boolean", "null"])}]
    if depth == 0 or rng.random() < 0.5:
        schema: Schema = rng.choice(leaves)(rng)
    else:
        schema = rng.choice([_object, _array, _alternatives])(rng, depth - 1)
    return schema | {"description": "what it is"} if rng.random() < 0.2 else schema


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randint(0, 4))
    schema: Schema = {"type": "object", "properties": {name: _any(rng, depth - 1 if depth else 0) for name in names}}
    if required := [name for name in names if rng.random() < 0.5]:
        schema["required"] = required
    match rng.randrange(4):
        case 0:
            schema["additionalProperties"] = _integer(rng)
        case 1:
            pass
        case _:
            schema["additionalProperties"] = False
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array", "items": _any(rng, depth)}
    if rng.random() < 0.5:
        schema["minItems"] = rng.randint(0, 2)
        schema["maxItems"] = schema["minItems"] + rng.randint(0, 3)
    if rng.random() < 0.2:
        schema["prefixItems"] = [_any(rng, 0), _any(rng, 0)]
    return schema


def _alternatives(rng: random.Random, depth: int) -> Schema:
    """Return alternatives, each of another type."""
    options = [
        {"type": "string", "maxLength": rng.randint(0, 9)},
        _integer(rng),
        {"type": "boolean"},
        {"type": "null"},
        _array(rng, depth),
    ]
    return {rng.choice(["anyOf", "oneOf"]): rng.sample(options, rng.randint(1, 3))}


def _string(rng: random.Random) -> Schema:
    match rng.randrange(5):
        case 0:
            low = rng.randint(0, 5)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 9)}
        case 1:
            return {"type": "string", "pattern": rng.choice(_PATTERNS)}
        case 2:
            return {"type": "string", "format": rng.choice(_FORMATS)}
        case _:
            return {"type": ["string", "null"]} if rng.random() < 0.2 else {"type": "string"}


def _integer(rng: random.Random) -> Schema:
    low = rng.randint(-1000, 1000)
    match rng.randrange(4):
        case 0:
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
        case 1:
            return {"type": "integer", "multipleOf": rng.randint(1, 9)}
        case 2:
            return {"allOf": [{"type": "integer"}, {"exclusiveMinimum": low}]}
        case _:
            return {"type": "integer"}


def _number(rng: random.Random) -> Schema:
    low = rng.randint(-50, 50) / 4
    return {"type": "number", "minimum": low, "exclusiveMaximum": low + rng.randint(1, 99) / 8}


def _listed(rng: random.Random) -> Schema:
    values = [*rng.sample(_WORDS, 3), rng.randint(-9, 9), None, True, [1, "a"], {"k": {"l": 0.5}}]
    return {"const": rng.choice(values)} if rng.random() < 0.3 else {"enum": rng.sample(values, rng.randint(1, 5))}
