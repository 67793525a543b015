"""Owns the references in README.md: tables of the settings and of the metrics, made from what they are in the code.
Never holds a description of its own; a setting or a metric is documented where it is defined."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from engine.config import EngineConfig, FakeConfig, SchedulerConfig, SpeculativeConfig
from serve_app.images.settings import ImageSettings
from serve_app.metrics.catalogue import BY_NAME, MISSING, MISSING_HELP
from serve_app.settings import (
    AdmissionSettings,
    ApiKey,
    AppSettings,
    AuthSettings,
    AutoscalingSettings,
    RoutingSettings,
    TracingSettings,
)

BEGIN = "<!-- configuration: written by `make docs` -->"
END = "<!-- end of configuration -->"
METRICS_BEGIN = "<!-- metrics: written by `make docs` -->"
METRICS_END = "<!-- end of metrics -->"

_Row = tuple[str, str, str, str]


def render() -> str:
    """The reference as Markdown: one table for each level of `args:` in config.yaml."""
    sections = [
        ("`args`: the application", _model_rows(AppSettings)),
        ("`args.autoscaling`: how many engines", _model_rows(AutoscalingSettings)),
        ("`args.routing`: which engine takes a request", _model_rows(RoutingSettings)),
        ("`args.admission`: what is let in, and what waits", _model_rows(AdmissionSettings)),
        ("`args.tracing`: spans of requests", _model_rows(TracingSettings)),
        ("`args.images`: images in requests", _model_rows(ImageSettings)),
        ("`args.auth`: keys", _model_rows(AuthSettings)),
        ("`args.auth.keys`: an API key", _model_rows(ApiKey)),
        ("`args.engine`: each engine", _dataclass_rows(EngineConfig)),
        ("`args.engine.speculative`: drafts", _dataclass_rows(SpeculativeConfig)),
        ("`args.engine.scheduler`: how steps are composed", _dataclass_rows(SchedulerConfig)),
        ("`args.engine.fake`: the scripted executor", _dataclass_rows(FakeConfig)),
    ]
    return "\n".join(line for title, rows in sections for line in _table(title, rows))


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
    """Put each reference between its two markers."""
    text = readme.read_text()
    for begin, end, made in ((BEGIN, END, render()), (METRICS_BEGIN, METRICS_END, render_metrics())):
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise SystemExit(f"{readme} lacks the markers {begin} and {end}")
        text = f"{before}{begin}\n\n{made}\n{end}{after}"
    readme.write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m serve_app.reference", description=__doc__)
    parser.add_argument("readme", type=Path, help="the file whose references are written anew")
    write(parser.parse_args().readme)
