"""Owns what an LLMConfig becomes: settings by their paths, and a note on each value that is not simply taken over.
Never knows a setting's meaning or limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from serve_app.settings.ranks import ranks_in

MAX_SHOWN_CHARS = 60
_SECRET = re.compile(r"(?:^|[_.])(?:key|token|secret|password|credentials)$", re.IGNORECASE)
"""Ends of names whose values are not shown."""


class Kind(StrEnum):
    """What a note reports."""

    CHANGED = "changed"
    """Taken along, with another meaning or value."""
    LEFT_OUT = "left out"
    """Not taken along; answers do not depend on it."""
    NOT_SUPPORTED = "unsupported"
    """Not taken along, and answers, or where the model runs, depend on it."""


@dataclass(frozen=True, slots=True)
class Note:
    kind: Kind
    path: str
    """Where the value stands in the LLMConfig, such as engine_kwargs.max_model_len."""
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.path}: {self.text}"


@dataclass(slots=True)
class Taking:
    """The result so far. `args` are those of `serve_app.app:build`."""

    on_gpu: bool
    own_app: bool = True
    """Whether our own application is built; otherwise Ray Serve LLM deploys, scales and routes by the same config."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """Settings of ours, which are put over `args` at the end."""
    args: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def put(self, setting: str, value: Any) -> None:
        """Set the setting at a dotted path."""
        *parents, name = setting.split(".")
        place = self.args
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value

    def get(self, setting: str) -> Any:
        """Return the setting at a dotted path; None if it is not set."""
        place: Any = self.args
        for name in setting.split("."):
            place = place.get(name) if isinstance(place, dict) else None
        return place

    @property
    def num_ranks(self) -> int:
        """How many ranks an engine has, once its arguments are read."""
        settings = merge(self.args, self.own) if self.own_app else self.args  # elsewhere own ranks are refused
        engine = settings.get("engine")
        return ranks_in(engine) if isinstance(engine, Mapping) else 1

    def drop(self, setting: str) -> None:
        """Unset the setting at a dotted path, which must be set."""
        *parents, name = setting.split(".")
        place = self.args
        for parent in parents:
            place = place[parent]
        del place[name]

    def changed(self, path: str, value: Any, text: str) -> None:
        self._note(Kind.CHANGED, path, value, text)

    def leave_out(self, path: str, value: Any, text: str) -> None:
        self._note(Kind.LEFT_OUT, path, value, text)

    def unsupported(self, path: str, value: Any, text: str) -> None:
        self._note(Kind.NOT_SUPPORTED, path, value, text)

    def _note(self, kind: Kind, path: str, value: Any, text: str) -> None:
        self.notes.append(Note(kind, path, f"{text} (given: {shown(_without_secrets(path, value))})"))

    def leave_out_rest(self, path: str, given: Mapping[str, Any], known: set[str], why: str) -> None:
        """Note every key of `given` that nothing has read."""
        for name, value in given.items():
            if name not in known and value is not None:
                self.leave_out(f"{path}.{name}", value, why)

    def mapping(self, path: str, value: Any) -> dict[str, Any]:
        """Return `value` if it is a mapping, without its nulls; otherwise note that it is none, and return an empty
        one."""
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.unsupported(path, value, "expected a mapping")
            return {}
        return {str(name): one for name, one in value.items() if one is not None}


def _without_secrets(name: str, value: Any) -> Any:
    """Return a value for a note, which people paste into issues. Of environment variables only the names are shown."""
    if _SECRET.search(name):
        return "not shown"
    if isinstance(value, Mapping):
        hidden = name == "env_vars"
        return {one: "not shown" if hidden else _without_secrets(str(one), below) for one, below in value.items()}
    return [_without_secrets(name, one) for one in value] if isinstance(value, list | tuple) else value


def shown(value: Any) -> str:
    """Write a value for a note on one line, clipped."""
    text = " ".join((value if isinstance(value, str) else repr(value)).split())
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…"


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `over` in it, at any depth."""
    merged = dict(base)
    for name, value in over.items():
        below = merged.get(name)
        merged[name] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged
