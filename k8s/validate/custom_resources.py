"""Owns the check of custom resources against their own CRDs, as an API server does it: structure, bounds, defaults,
list keys, CEL rules. Never asks a cluster, and never accepts a version that the CRD beside it does not have."""

from __future__ import annotations

import copy
import gzip
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import cel
import yaml

from k8s.validate.manifests import Doc, Finding, name_of

CRDS = Path(__file__).with_name("crds")
KINDS = {
    "RayService": "ray.io_rayservices.yaml.gz",
    "InferencePool": "inference.networking.k8s.io_inferencepools.yaml.gz",
    "HTTPRoute": "gateway.networking.k8s.io_httproutes.yaml.gz",
}
"""Kind -> the file of its CRD. crds/sources.yaml says where each comes from."""
_VERSION = "v1"
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}
_CEL_KEYWORDS = frozenset(
    {"true", "false", "null", "in", "as", "break", "const", "continue", "else", "for", "function"}
)
_CEL_RESERVED = _CEL_KEYWORDS | {
    "if",
    "import",
    "let",
    "loop",
    "package",
    "namespace",
    "return",
    "var",
    "void",
    "while",
}
"""Fields with these names have two underscores on each side in a CEL rule."""


@cache
def _crd(kind: str) -> Doc:
    return dict(yaml.load(gzip.decompress((CRDS / KINDS[kind]).read_bytes()), Loader=yaml.CSafeLoader))


@cache
def schema(kind: str) -> Doc:
    """Return the structural schema of one of KINDS, version v1."""
    (version,) = [version for version in _crd(kind)["spec"]["versions"] if version["name"] == _VERSION]
    return dict(version["schema"]["openAPIV3Schema"])


def api_version(kind: str) -> str:
    return f"{_crd(kind)['spec']['group']}/{_VERSION}"


def with_defaults(doc: Doc) -> Doc:
    """Return a copy as a controller reads it, with the CRD's defaults filled in and without nulls."""
    return dict(_defaulted(schema(doc["kind"]), copy.deepcopy(doc)))


def _defaulted(spec: Doc, value: Any) -> Any:
    if isinstance(value, list):
        return [_defaulted(spec.get("items", {}), item) for item in value]
    if not isinstance(value, dict):
        return value
    fields = spec.get("properties", {})
    for name, field in fields.items():
        if name not in value and "default" in field:
            value[name] = copy.deepcopy(field["default"])
    rest = spec.get("additionalProperties", {})
    rest = rest if isinstance(rest, dict) else {}
    return {name: _defaulted(fields.get(name, rest), item) for name, item in value.items() if item is not None}


def check(doc: Doc) -> list[Finding]:
    """Find what an API server with the CRD refuses in an object of KINDS, and fields that it silently drops."""
    kind = doc["kind"]
    if doc.get("apiVersion") != api_version(kind):
        wrong = f"must be {api_version(kind)}, but it is {doc.get('apiVersion')}"
        return [Finding(name_of(doc), "apiVersion", wrong)]
    found = _walk(schema(kind), with_defaults(doc), "")
    return [Finding(name_of(doc), path, problem) for path, problem in found]


def _walk(spec: Doc, value: Any, path: str) -> Iterator[tuple[str, str]]:
    problem = _of_type(spec, value) or _of_value(spec, value)
    if problem is not None:
        yield path, problem
        return
    if isinstance(value, dict):
        yield from _walk_object(spec, value, path)
    elif isinstance(value, list):
        yield from _walk_list(spec, value, path)
    for rule in spec.get("x-kubernetes-validations", []):
        # Rules about a change refer to the old object, which does not exist here.
        if "oldSelf" not in rule["rule"] and not cel.evaluate(rule["rule"], {"self": _for_cel(spec, value)}):
            yield path, f"{rule['message']} (given: {value!r})"


def _for_cel(spec: Doc, value: Any) -> Any:
    """Return the value under the names that a rule has for its fields."""
    if isinstance(value, list):
        return [_for_cel(spec.get("items", {}), item) for item in value]
    if not isinstance(value, dict):
        return value
    fields = spec.get("properties", {})
    return {
        f"__{name}__" if name in fields and name in _CEL_RESERVED else name: _for_cel(fields.get(name, {}), item)
        for name, item in value.items()
    }


def _of_type(spec: Doc, value: Any) -> str | None:
    if spec.get("x-kubernetes-int-or-string"):
        expected: tuple[type, ...] = (int, str)
    else:
        expected = _TYPES.get(spec.get("type", ""), (object,))
    if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected and expected != (object,)):
        names = " or ".join(kind.__name__ for kind in expected)
        return f"must be {names}, but it is {value!r}"
    return None


def _of_value(spec: Doc, value: Any) -> str | None:
    if "enum" in spec and value not in spec["enum"]:
        return f"must be one of {', '.join(map(str, spec['enum']))}, but it is {value!r}"
    if "pattern" in spec and isinstance(value, str) and not re.search(spec["pattern"], value):
        return f"must match {spec['pattern']}, but it is {value!r}"
    if spec.get("format") == "int32" and not -(2**31) <= value < 2**31:
        return f"must be of 32 bits, but it is {value!r}"
    return _of_size(spec, value)


def _of_size(spec: Doc, value: Any) -> str | None:
    size, unit = value, ""
    if isinstance(value, str | list | dict):
        size, unit = len(value), {str: "Length", list: "Items", dict: "Properties"}[type(value)]
    names = (f"min{unit}", f"max{unit}") if unit else ("minimum", "maximum")
    least, most = (spec.get(name) for name in names)
    if least is not None and size < least:
        return f"must have {names[0]} {least}, but it is {value!r}"
    if most is not None and size > most:
        return f"must have {names[1]} {most}, but it is {value!r}"
    return None


def _walk_object(spec: Doc, value: Doc, path: str) -> Iterator[tuple[str, str]]:
    fields, rest = spec.get("properties", {}), spec.get("additionalProperties")
    for name in spec.get("required", []):
        if name not in value:
            yield _join(path, name), "is required"
    # The API server itself checks the root's metadata, whose schema is an object without fields.
    is_open = spec.get("x-kubernetes-preserve-unknown-fields") or not (fields or rest)
    for name, item in value.items():
        if name in fields:
            yield from _walk(fields[name], item, _join(path, name))
        elif isinstance(rest, dict):
            yield from _walk(rest, item, _join(path, name))
        elif not is_open:
            yield _join(path, name), "is no field of this CRD"


def _walk_list(spec: Doc, value: list[Any], path: str) -> Iterator[tuple[str, str]]:
    keys = spec.get("x-kubernetes-list-map-keys", []) if spec.get("x-kubernetes-list-type") == "map" else []
    seen: dict[tuple[Any, ...], int] = {}
    for i, item in enumerate(value):
        yield from _walk(spec.get("items", {}), item, f"{path}[{i}]")
        if keys and isinstance(item, dict):
            key = tuple(item.get(name) for name in keys)
            if key in seen:
                yield f"{path}[{i}]", f"has the same {', '.join(keys)} as [{seen[key]}]: {key}"
            seen.setdefault(key, i)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
