"""Owns the check of a RayService against KubeRay's own CRD, as an API server does it: structure, defaults, list keys,
CEL rules. Never keeps a copy of the CRD, and never passes a manifest because the CRD is missing."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import cel
import yaml

from k8s.validate.manifests import ROOT, Doc, Finding, name_of

_FILE = "kuberay/ray.io_rayservices.yaml"
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}


class CrdMissing(RuntimeError):
    """The CRD to check against is missing. The message names the file and says where to get it."""


def crd_path() -> Path:
    """Return the path of KubeRay v1.7.0's CRD, in the folder `CHUNKSERVE_DATA` or else in `shared/data` beside the
    checkout.

    Raises:
        CrdMissing: the file does not exist.
    """
    data = Path(os.environ.get("CHUNKSERVE_DATA") or ROOT.parent / "shared" / "data")
    if not (data / _FILE).is_file():
        raise CrdMissing(
            f"KubeRay's CRD is missing: {_FILE} of $CHUNKSERVE_DATA. Take it from KubeRay v1.7.0, "
            "helm-chart/kuberay-operator/crds/ray.io_rayservices.yaml, or from a cluster that has it: "
            "kubectl get crd rayservices.ray.io -o yaml"
        )
    return data / _FILE


@cache
def schema() -> Doc:
    """Return the structural schema of `ray.io/v1` RayServices. Raises CrdMissing."""
    crd = yaml.load(crd_path().read_text(), Loader=yaml.CSafeLoader)
    (version,) = [version for version in crd["spec"]["versions"] if version["name"] == "v1"]
    return dict(version["schema"]["openAPIV3Schema"])


def with_defaults(doc: Doc) -> Doc:
    """Return a copy as the operator reads it, with the CRD's defaults filled in and without nulls."""
    return dict(_defaulted(schema(), copy.deepcopy(doc)))


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
    """Find what an API server with this CRD refuses, and fields that it silently drops. Raises CrdMissing."""
    if doc.get("apiVersion") != "ray.io/v1":
        return [Finding(name_of(doc), "apiVersion", f"must be ray.io/v1, but it is {doc.get('apiVersion')}")]
    found = _walk(schema(), with_defaults(doc), "")
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
        if "oldSelf" not in rule["rule"] and not cel.evaluate(rule["rule"], {"self": value}):
            yield path, f"{rule['message']} (given: {value!r})"


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
