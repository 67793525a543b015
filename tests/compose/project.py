"""Owns reading compose.yaml as Docker Compose does, as far as it goes here: variables, and files that are added to it.
Never starts anything."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from k8s.validate.compose import COMPOSE

Doc = dict[str, Any]
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


class VariableMissing(ValueError):
    """A variable that must be set is not. The message is the file's."""


def interpolated(text: str, variables: Mapping[str, str]) -> str:
    """Replace `${NAME}`, `${NAME:-default}` and `${NAME:?message}`. Raises VariableMissing."""

    def value(found: re.Match[str]) -> str:
        name, kind, rest = found.groups()
        if variables.get(name):
            return variables[name]
        if kind == "?":
            raise VariableMissing(f"{name}: {rest}")
        return rest or ""

    return _VARIABLE.sub(value, text)


def variables_of(path: Path) -> set[str]:
    return {name for name, _, _ in _VARIABLE.findall(path.read_text())}


def project(*added: Path, **variables: str) -> Doc:
    """Return compose.yaml with these files added, one over the other."""
    read: Doc = {}
    for path in (COMPOSE, *added):
        read = _merged(read, _interpolated(yaml.safe_load(path.read_text()), variables))
    return read


def _interpolated(value: Any, variables: Mapping[str, str]) -> Any:
    """Replace variables in the texts of a document: once it is parsed, so that an empty one is not null."""
    if isinstance(value, dict):
        return {key: _interpolated(one, variables) for key, one in value.items()}
    if isinstance(value, list):
        return [_interpolated(one, variables) for one in value]
    return interpolated(value, variables) if isinstance(value, str) else value


def services(*added: Path, **variables: str) -> dict[str, Doc]:
    found: dict[str, Doc] = project(*added, **variables)["services"]
    return found


def _merged(below: Any, above: Any, name: str = "") -> Any:
    """Maps are merged and lists are joined. All else is replaced, and so are commands, entrypoints and checks."""
    if isinstance(below, dict) and isinstance(above, dict):
        return below | {key: _merged(below.get(key), value, key) for key, value in above.items()}
    if isinstance(below, list) and isinstance(above, list) and name not in ("command", "entrypoint", "test"):
        return below + above
    return above


def mounts(service: Doc) -> list[list[str]]:
    """Return [source, target] or [source, target, mode] of a service's volumes."""
    return [volume.split(":") for volume in service["volumes"]]


def seconds(text: str) -> int:
    """Parse a duration in one unit: 180s or 15m."""
    return int(text[:-1]) * {"s": 1, "m": 60}[text[-1]]
