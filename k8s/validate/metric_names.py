"""Owns the metric names that a query may use: those of /metrics, of Ray, and of our own recording rules.
Never parses PromQL; it recognises names by their form."""

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


def recorded(rules: Doc) -> set[str]:
    return {rule["record"] for group in at(rules, "spec.groups", []) for rule in group["rules"] if "record" in rule}


def queries(rules: Doc) -> Iterator[tuple[str, str]]:
    """Yield (where, query) for every rule and every panel."""
    for i, group in enumerate(at(rules, "spec.groups", [])):
        for j, rule in enumerate(group["rules"]):
            yield f"PrometheusRule spec.groups[{i}].rules[{j}].expr", rule["expr"]
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            for query, _ in panel.queries:
                yield f"dashboard {dashboard.name}, {panel.title}", query


def check(rules: Doc | None = None) -> list[Finding]:
    """Find queries with a name that nothing exports, by default in the alerts of this repository."""
    if rules is None:
        (rules,) = of_kind(read(ALERTS.read_text()), "PrometheusRule")
    known = exported() | recorded(rules)
    return [
        Finding(where, "", f"nothing exports {name}")
        for where, query in queries(rules)
        for name in sorted(names_in(query) - known)
    ]
