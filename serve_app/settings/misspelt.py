"""Owns what a setting that there is not was probably meant for, and where that stands.
Never knows a setting's name by itself: all are those of the settings' own schema, and only some groups are named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

from serve_app.settings.application import AppSettings

Path = tuple[str, ...]
_ENTRY = "ModelEntry"
_HERE, _ANYWHERE = 0.72, 0.75
"""How alike names must be, for a setting of the same level and for any."""
_PLAIN: tuple[Path, ...] = ((), ("engine",), ("engine", "scheduler"), ("engine", "targets"))
"""Levels whose settings say by their names alone what they are, as `max_tokens` of `images` does not."""
_UNITS = ("s", "ms", "mib", "gib", "bytes")


def meant(setting: Sequence[str | int]) -> str | None:
    """Return the name of a setting that there is, for one at a path below `args` that there is not; or its whole path
    if it stands at another level. None: there is nothing like it."""
    *above, last = setting
    entry = above[:2] if above[:1] == ["models"] else []
    level, name = tuple(part for part in above[len(entry) :] if isinstance(part, str)), str(last)
    paths = _paths(bool(entry))
    here = [path for path in _paths(bool(entry), in_lists=True) if path[:-1] == level]
    same = next((path for path in paths if path[-1] == name), None)
    found = same or _with_unit(name, here) or _closest(name, here, _HERE) or _closest(name, paths, _ANYWHERE)
    if found is None:
        return None
    return found[-1] if found in here else ".".join(map(str, ("args", *entry, *found)))


def named(name: str) -> str | None:
    """Return the whole path of the setting that has this name, with or without its unit. None: there is none, or its
    name says too little without its group."""
    names = (name, *(f"{name}_{unit}" for unit in _UNITS))
    found = [path for path in _paths(of_an_entry=False) if path[-1] in names and path[:-1] in _PLAIN]
    return ".".join(("args", *found[0])) if found else None


def _with_unit(name: str, paths: Iterable[Path]) -> Path | None:
    longer = [path for path in paths if path[-1].startswith(f"{name}_")]
    return longer[0] if len(longer) == 1 else None


def _closest(name: str, paths: Iterable[Path], cutoff: float) -> Path | None:
    by_name: dict[str, Path] = {}
    for path in paths:
        by_name.setdefault(path[-1], path)
    close = get_close_matches(name, by_name, n=1, cutoff=cutoff)
    return by_name[close[0]] if close else None


@cache
def _paths(of_an_entry: bool, in_lists: bool = False) -> tuple[Path, ...]:
    """Return the paths of all settings, those at the top first: below `args`, or below an entry of `models`.
    `in_lists`: also those of a list's items, whose paths lack the item's number and so cannot be written."""
    schema = AppSettings.model_json_schema()
    groups = schema["$defs"]
    found = _below(groups[_ENTRY] if of_an_entry else schema, groups, (), in_lists)
    return tuple(sorted(found, key=lambda path: (len(path), path)))


def _below(group: Mapping[str, Any], groups: Mapping[str, Any], above: Path, in_lists: bool) -> Iterator[Path]:
    for name, spec in group.get("properties", {}).items():
        yield (*above, name)
        items = [spec.get("items", {})] if in_lists else []
        for part in (spec, *spec.get("anyOf", ()), *items):
            kind = part.get("$ref", "").rpartition("/")[2]
            if kind not in ("", _ENTRY):
                yield from _below(groups[kind], groups, (*above, name), in_lists)
