"""Owns the tables of docs/reference/settings.md and metrics.md, made from what settings and metrics are in the code.
Never holds a description of its own; a setting or a metric is documented where it is defined."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from engine.config import EngineConfig, FakeConfig, SchedulerConfig, SpeculativeConfig
from serve_app.metrics.catalogue import BY_NAME, MISSING, MISSING_HELP
from serve_app.settings.admission import AdmissionSettings
from serve_app.settings.application import AppSettings
from serve_app.settings.auth import ApiKey, AuthSettings
from serve_app.settings.cors import CorsSettings
from serve_app.settings.images import ImageSettings
from serve_app.settings.routing import RoutingSettings
from serve_app.settings.scaling import AutoscalingSettings
from serve_app.settings.tracing import TracingSettings

_Row = tuple[str, str, str, str]


SECTIONS: dict[type, str] = {
    AppSettings: "`args`: the application",
    AutoscalingSettings: "`args.autoscaling`: how many engines",
    RoutingSettings: "`args.routing`: which engine takes a request",
    AdmissionSettings: "`args.admission`: what is let in, and what waits",
    TracingSettings: "`args.tracing`: spans of requests",
    ImageSettings: "`args.images`: images in requests",
    AuthSettings: "`args.auth`: keys",
    ApiKey: "`args.auth.keys`: an API key",
    CorsSettings: "`args.cors`: web pages",
    EngineConfig: "`args.engine`: each engine",
    SpeculativeConfig: "`args.engine.speculative`: drafts",
    SchedulerConfig: "`args.engine.scheduler`: how steps are composed",
    FakeConfig: "`args.engine.fake`: the scripted executor",
}
"""Each level of `args:` in config.yaml, with the title of its table."""


def render() -> str:
    """The reference as Markdown: one table for each level of `args:` in config.yaml."""
    return "\n".join(line for level, title in SECTIONS.items() for line in _table(title, _rows(level)))


def anchor(title: str) -> str:
    """Of a heading, as GitHub and the site make it."""
    return "#" + re.sub(r"[^\w\s-]", "", title).lower().replace(" ", "-")


def render_metrics() -> str:
    """The names in a scrape as a Markdown table."""
    rows = []
    for metric in BY_NAME.values():
        name = f"{metric.name}_total" if metric.kind == "counter" else metric.name
        labels = ", ".join(f"`{label}`" for label in (metric.owner, *metric.labels))
        rows.append(f"| `{name}` | {metric.kind} | {labels} | {metric.help} |")
    head = ["| name | type | labels besides `model_name` | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, f"| `{MISSING}` | gauge | `deployment` | {MISSING_HELP} |", ""])


def _table(title: str, rows: Iterator[_Row]) -> list[str]:
    head = [f"## {title}", "", "| setting | type | default | meaning |", "|---|---|---|---|"]
    return [*head, *(f"| `{name}` | {kind} | {default} | {text} |" for name, kind, default, text in rows), ""]


def _rows(level: type) -> Iterator[_Row]:
    return _model_rows(level) if issubclass(level, BaseModel) else _dataclass_rows(level)


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
    if hint in SECTIONS:
        return f"[table]({anchor(SECTIONS[hint])})"
    if get_origin(hint) is tuple:
        (item, *_) = get_args(hint)
        return f"list of [tables]({anchor(SECTIONS[item])})" if item in SECTIONS else f"list of {_kind(item)}s"
    if get_origin(hint) is dict:
        return "table"
    choices = [choice for choice in get_args(hint) if choice is not type(None)]
    if not choices:
        return str(hint.__name__)
    return " or ".join(f"`{choice}`" if isinstance(choice, str) else _kind(choice) for choice in choices)


def _value(default: Any) -> str:
    return "" if default in (None, ()) else f"`{str(default).lower() if isinstance(default, bool) else default}`"
