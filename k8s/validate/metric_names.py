"""Owns the metric names and labels that a query may use: those of /metrics, of Ray, and of our own recording rules.
Never parses PromQL; it recognises names by their form. Never judges labels of metrics that are not ours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from k8s.dashboards import DASHBOARDS
from k8s.validate.manifests import K8S, Doc, Finding, at, of_kind, read
from serve_app.metrics.catalogue import BY_NAME, MISSING

ALERTS = K8S / "monitoring" / "alerts.yaml"
_OF_PROMETHEUS = {"up", "scrape_duration_seconds", "ALERTS"}
_NAME = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")
_NOT_METRICS = re.compile(
    r'"[^"]*"|'  # label values
    r"\{[^}]*\}|"  # labels
    r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\([^)]*\)|"
    r"\[[^\]]*\]|"  # ranges
    r"\b\d[\w.]*"  # numbers and durations
)
_WORDS = {"and", "or", "unless", "bool", "offset"}
_SELECTOR = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)\{([^}]*)\}")
_MATCHED_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_GROUPING = re.compile(r"\bby\s*\(([^)]*)\)")
_IN_A_LEGEND = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_OF_ALL = {"model_name", "job", "instance"}
_SERVE_GAUGE = re.compile(r'"(serve_[a-z_]+)"')
_IN_RAYS_DASHBOARDS = re.compile(r"\b((?:ray|autoscaler)_[a-z_]+)")


@cache
def exported() -> frozenset[str]:
    """Return every name that a scrape of this server or of Ray can have."""
    ours = {name for metric in BY_NAME.values() for name in _series(metric.kind, metric.name)}
    return frozenset(ours | {MISSING} | _OF_PROMETHEUS | _ray_names())


def _series(kind: str, name: str) -> tuple[str, ...]:
    if kind == "histogram":
        return (f"{name}_bucket", f"{name}_sum", f"{name}_count")
    return (f"{name}_total",) if kind == "counter" else (name,)


@cache
def _labels() -> dict[str, set[str]]:
    """Map every series of ours to its labels."""
    known = {
        name: {*_OF_ALL, metric.owner, *metric.labels, *(("le",) if name.endswith("_bucket") else ())}
        for metric in BY_NAME.values()
        for name in _series(metric.kind, metric.name)
    }
    return known | {MISSING: {*_OF_ALL, "deployment"}}


def _ray_names() -> set[str]:
    """Return the names in the installed Ray's own dashboards and in Serve's sources, so that a renaming is noticed."""
    spec = find_spec("ray")
    assert spec is not None, "Ray is installed"
    assert spec.origin is not None, "Ray is a package"
    ray = Path(spec.origin).parent
    panels = (ray / "dashboard" / "modules" / "metrics" / "dashboards").glob("*_panels.py")
    serve = (ray / "serve" / "_private").glob("*.py")
    names = {name for path in panels for name in _IN_RAYS_DASHBOARDS.findall(path.read_text())}
    return names | {f"ray_{name}" for path in serve for name in _SERVE_GAUGE.findall(path.read_text())}


def names_in(query: str) -> set[str]:
    """Return the metrics in a PromQL query."""
    bare = _NOT_METRICS.sub(" ", query)
    names = [match for match in _NAME.finditer(bare) if not bare[match.end() :].lstrip().startswith("(")]
    return {match[0] for match in names} - _WORDS - {"inf", "Inf", "NaN"}


def unknown_labels(query: str, legend: str = "") -> list[str]:
    """Return a line for each label that a query matches, groups by or shows, and that the series of ours in it lack."""
    named = [
        (name, label)
        for name, matchers in _SELECTOR.findall(query)
        for label in _MATCHED_LABEL.findall(matchers)
        if name in _labels()
    ]
    wrong = [f"{name} has no label {label}" for name, label in named if label not in _labels()[name]]
    if not (names := names_in(query)) or not names <= _labels().keys():
        return wrong
    known = set[str]().union(*(_labels()[name] for name in names))
    kept = {label.strip() for labels in _GROUPING.findall(query) for label in labels.split(",")}
    wrong += [f"nothing in it has a label {label}" for label in sorted(kept - known)]
    shown = set(_IN_A_LEGEND.findall(legend))
    return wrong + [f"its answer has no label {label}" for label in sorted(shown - (kept or known))]


def recorded(rules: Doc) -> set[str]:
    return {rule["record"] for group in at(rules, "spec.groups", []) for rule in group["rules"] if "record" in rule}


def queries(rules: Doc) -> Iterator[tuple[str, str, str]]:
    """Yield (where, query, legend) for every rule and every panel; a rule has an empty legend."""
    for i, group in enumerate(at(rules, "spec.groups", [])):
        for j, rule in enumerate(group["rules"]):
            yield f"PrometheusRule spec.groups[{i}].rules[{j}].expr", rule["expr"], ""
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            for query, legend in panel.queries:
                yield f"dashboard {dashboard.name}, {panel.title}", query, legend


def check(rules: Doc | None = None) -> list[Finding]:
    """Find queries with a name that nothing exports, by default in the alerts of this repository."""
    if rules is None:
        (rules,) = of_kind(read(ALERTS.read_text()), "PrometheusRule")
    known = exported() | recorded(rules)
    return [
        Finding(where, "", problem)
        for where, query, legend in queries(rules)
        for problem in (
            *(f"nothing exports {name}" for name in sorted(names_in(query) - known)),
            *unknown_labels(query, legend),
        )
    ]
