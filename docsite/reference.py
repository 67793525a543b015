"""Owns the tables of docs/reference/settings.md and metrics.md, made from the settings and metrics in the code.
Never has a description of its own: a setting or a metric is documented where it is defined."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from engine.config import EngineConfig, FakeConfig, KvTiersConfig, SchedulerConfig, SpeculativeConfig, Targets
from engine.presets import PRESETS
from serve_app.metrics.catalogue import BY_NAME, MISSING, MISSING_HELP
from serve_app.settings.admission import AdmissionSettings
from serve_app.settings.application import AppSettings
from serve_app.settings.auth import ApiKey, AuthSettings
from serve_app.settings.cors import CorsSettings
from serve_app.settings.images import ImageSettings
from serve_app.settings.responses_store import ResponsesStoreSettings
from serve_app.settings.routing import RoutingSettings
from serve_app.settings.sampling import SamplingSettings
from serve_app.settings.scaling import AutoscalingSettings
from serve_app.settings.several import ModelAdmissionSettings, ModelEntry
from serve_app.settings.tracing import TracingSettings


@dataclass(frozen=True, slots=True)
class _Row:
    """A setting. Its texts are Markdown."""

    name: str
    kind: str
    default: str
    description: str
    expert: bool = False


SECTIONS: dict[type, str] = {
    AppSettings: "`args`: the application",
    ModelEntry: "`args.models`: one of several models",
    ModelAdmissionSettings: "`args.models.admission`: a model's part in what is admitted",
    AutoscalingSettings: "`args.autoscaling`: how many engines",
    RoutingSettings: "`args.routing`: which engine takes a request",
    AdmissionSettings: "`args.admission`: what is admitted, and what waits",
    TracingSettings: "`args.tracing`: spans of requests",
    SamplingSettings: "`args.default_sampling`: what a request does not set",
    ImageSettings: "`args.images`: images in requests",
    ResponsesStoreSettings: "`args.responses_store`: responses that are kept",
    AuthSettings: "`args.auth`: keys",
    ApiKey: "`args.auth.keys`: an API key",
    CorsSettings: "`args.cors`: web pages",
    EngineConfig: "`args.engine`: each engine",
    Targets: "`args.engine.targets`: service-level targets, in time",
    SpeculativeConfig: "`args.engine.speculative`: drafts",
    KvTiersConfig: "`args.engine.kv_tiers`: prefixes in memory and on disk",
    SchedulerConfig: "`args.engine.scheduler`: how steps are composed",
    FakeConfig: "`args.engine.fake`: the scripted executor",
}
"""Each level of `args:` in config.yaml, with the title of its table."""

FIRST: dict[type, tuple[str, ...]] = {
    AppSettings: ("model", "engine_replicas", "engine_num_gpus", "autoscaling"),
    AutoscalingSettings: ("ttft_target_ms",),
    EngineConfig: (
        *("max_num_batched_tokens", "max_num_seqs", "max_model_len", "kv_cache_memory_gib", "gpu_memory_utilization"),
        *("quantize", "activations", "kv_cache_dtype"),
    ),
    Targets: ("tpot_ms", "ttft_ms"),
}
"""The settings to know, by level. The reference shows them first."""

FIRST_TITLE = "The settings to know"
FIRST_INTRODUCTION = """\
These decide latency, throughput and memory, and few servers need others. Each is also in the table of its level.
"""

EXPERT_INTRODUCTION = """\
Few servers need these. They are at the same level as those above.
"""
SCHEDULER_INTRODUCTION = """\
No server needs these: the defaults are measured. They make the scheduler follow other designs, and a `preset` sets
several of them; [Five public designs](../../engine/DESIGNS.md) has the values of each preset. They are at the same
level as those above.
"""


def render() -> str:
    """Render the reference as Markdown: the settings to know, then a table for each level of `args:` in config.yaml."""
    return "\n".join([*_first(), *(line for level in SECTIONS for line in _section(level))])


def _first() -> Iterator[str]:
    rows = [
        dataclasses.replace(row, name=_path(level) + row.name)
        for level, names in FIRST.items()
        for row in _rows(level)
        if row.name in names
    ]
    yield from (f"## {FIRST_TITLE}", "", FIRST_INTRODUCTION, *_table(rows), "")


def _path(level: type) -> str:
    """Return the path of a level's settings: `engine.` for those of an engine, empty for those of the application."""
    place = SECTIONS[level].split("`")[1].removeprefix("args").removeprefix(".")
    return f"{place}." if place else ""


def _section(level: type) -> Iterator[str]:
    title, rows = SECTIONS[level], list(_rows(level))
    yield from (f"## {title}", "", *_table(row for row in rows if not row.expert), "")
    if expert := [row for row in rows if row.expert]:
        name = title.partition(":")[0]
        introduction = SCHEDULER_INTRODUCTION if level is SchedulerConfig else EXPERT_INTRODUCTION
        yield from (f"### {name} for experts", "", introduction, *_table(expert), "")


def render_presets() -> str:
    """Render the values of each scheduler preset as a Markdown table in the order of the settings."""
    head = ["| setting | default |" + "".join(f" `{name}` |" for name in PRESETS), "|---|---|" + "---|" * len(PRESETS)]
    used = {name for preset in PRESETS.values() for name in preset}
    rows = [row for row in _rows(SchedulerConfig) if row.name in used]
    cells = [[row.default, *(_value(preset.get(row.name)) for preset in PRESETS.values())] for row in rows]
    return "\n".join(
        [*head, *(f"| `{row.name}` | {' | '.join(cell)} |" for row, cell in zip(rows, cells, strict=True))]
    )


def anchor(title: str) -> str:
    """Return the link to a heading, as GitHub and the site make it."""
    return "#" + re.sub(r"[^\w\s-]", "", title).lower().replace(" ", "-")


def render_metrics() -> str:
    """Render the names in a scrape as a Markdown table."""
    rows = []
    for metric in BY_NAME.values():
        name = f"{metric.name}_total" if metric.kind == "counter" else metric.name
        replica = () if metric.owner == "cluster" else (metric.owner,)
        labels = ", ".join(f"`{label}`" for label in (*replica, *metric.labels))
        rows.append(f"| `{name}` | {metric.kind} | {labels} | {metric.help} |")
    head = ["| name | type | labels besides `model_name` | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, f"| `{MISSING}` | gauge | `deployment` | {MISSING_HELP} |", ""])


def _table(rows: Iterable[_Row]) -> Iterator[str]:
    yield from ("| setting | type | default | meaning |", "|---|---|---|---|")
    yield from (f"| `{row.name}` | {row.kind} | {row.default} | {row.description} |" for row in rows)


def _rows(level: type) -> Iterator[_Row]:
    return _model_rows(level) if issubclass(level, BaseModel) else _dataclass_rows(level)


def _model_rows(model: type[BaseModel]) -> Iterator[_Row]:
    hints = get_type_hints(model)
    for name, spec in model.model_fields.items():
        default = None if spec.default is PydanticUndefined else spec.default
        yield _Row(name, _kind(hints[name]), _value(default), spec.description or "")


def _dataclass_rows(config: type) -> Iterator[_Row]:
    hints = get_type_hints(config)
    for spec in dataclasses.fields(config):
        default = None if spec.default is dataclasses.MISSING else spec.default
        description, expert = spec.metadata["description"], spec.metadata.get("expert", False)
        yield _Row(spec.name, _kind(hints[spec.name]), _value(default), description, expert)


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
