"""Owns the configuration reference in README.md: tables made from the settings' own fields.
Never holds a description of its own; a setting is documented where it is defined."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from engine.config import EngineConfig, FakeConfig, SchedulerConfig
from serve_app.settings import (
    AdmissionSettings,
    ApiKey,
    AppSettings,
    AuthSettings,
    AutoscalingSettings,
    RoutingSettings,
)

BEGIN = "<!-- configuration: written by `make docs` -->"
END = "<!-- end of configuration -->"

_Row = tuple[str, str, str, str]


def render() -> str:
    """The reference as Markdown: one table for each level of `args:` in config.yaml."""
    sections = [
        ("`args`: the application", _model_rows(AppSettings)),
        ("`args.autoscaling`: how many engines", _model_rows(AutoscalingSettings)),
        ("`args.routing`: which engine takes a request", _model_rows(RoutingSettings)),
        ("`args.admission`: what is let in, and what waits", _model_rows(AdmissionSettings)),
        ("`args.auth`: keys", _model_rows(AuthSettings)),
        ("`args.auth.keys`: an API key", _model_rows(ApiKey)),
        ("`args.engine`: each engine", _dataclass_rows(EngineConfig)),
        ("`args.engine.scheduler`: how steps are composed", _dataclass_rows(SchedulerConfig)),
        ("`args.engine.fake`: the scripted executor", _dataclass_rows(FakeConfig)),
    ]
    return "\n".join(line for title, rows in sections for line in _table(title, rows))


def _table(title: str, rows: Iterator[_Row]) -> list[str]:
    head = [f"**{title}**", "", "| setting | type | default | meaning |", "|---|---|---|---|"]
    return [*head, *(f"| `{name}` | {kind} | {default} | {text} |" for name, kind, default, text in rows), ""]


def _model_rows(model: type[BaseModel]) -> Iterator[_Row]:
    hints = get_type_hints(model)
    for name, spec in model.model_fields.items():
        default = None if spec.default is PydanticUndefined else spec.default
        yield name, _kind(hints[name]), _value(default), spec.description or ""


def _dataclass_rows(config: type) -> Iterator[_Row]:
    hints = get_type_hints(config)
    for spec in dataclasses.fields(config):
        default = None if spec.default is dataclasses.MISSING else spec.default
        yield spec.name, _kind(hints[spec.name]), _value(default), spec.metadata["description"]


def _kind(hint: Any) -> str:
    if dataclasses.is_dataclass(hint) or (isinstance(hint, type) and issubclass(hint, BaseModel)):
        return "table"
    if get_origin(hint) is tuple:
        return f"list of {_kind(get_args(hint)[0])}s"
    choices = [choice for choice in get_args(hint) if choice is not type(None)]
    if not choices:
        return str(hint.__name__)
    return " or ".join(f"`{choice}`" if isinstance(choice, str) else _kind(choice) for choice in choices)


def _value(default: Any) -> str:
    return "" if default in (None, ()) else f"`{str(default).lower() if isinstance(default, bool) else default}`"


def write(readme: Path) -> None:
    """Put the reference between its two markers."""
    before, _, rest = readme.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{readme} lacks the markers {BEGIN} and {END}")
    readme.write_text(f"{before}{BEGIN}\n\n{render()}\n{END}{after}")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
