"""Owns a run's report: its JSON document, its page, and whether it passed.
Never measures, and never passes a run whose generator lagged: its figures would not describe the server."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.histogram import Histogram
from loadtest.page import page
from loadtest.plan import Plan, Point
from loadtest.slo import exit_code, misses
from loadtest.tally import Figures, Second, Tally

SCHEMA = 1
"""Version of the document's format. A reader checks it first."""
MOST_INTERVALS = 120
"""The maximum number of intervals in a run's time series. A longer run has longer intervals."""
CURVE = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)
"""The shares at which a distribution is recorded."""

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Generator:
    """The load generator's own use of resources, and its limits."""

    workers: int
    cpu_percent: float
    """CPU of the busiest worker, in percent of a core."""
    max_cpu_percent: float
    max_lag_ms: float


@dataclass(slots=True)
class RunEvents:
    """Events of a run other than its requests."""

    broken: list[str] = field(default_factory=list)
    """Why the run is incomplete: a worker was lost, or a command failed."""
    ended: str | None = None
    """How far the load had come when somebody ended it; None if it came to its own end."""
    unsettled: list[str] = field(default_factory=list)
    """What the server still held after the load, or why that could not be determined."""
    happened: list[tuple[float, str]] = field(default_factory=list)
    """The commands that ran, each with its time in seconds from the beginning."""


def document_of(
    plan: Plan, tally: Tally, generator: Generator, run_events: RunEvents, settings: Mapping[str, Any]
) -> Document:
    points = {point.name: tally.figures(point.name) for point in plan.points}
    kinds = {
        point.name: {kind: tally.figures(point.name, kind) for kind in _kinds(point, tally)} for point in plan.points
    }
    judged = points if plan.judged is None else {name: figures.get(plan.judged, {}) for name, figures in kinds.items()}
    saturated = saturation(points, generator)
    if run_events.ended is None:
        missed = [*misses(plan.limits, judged), *broken_promises(plan, points), *unanswered(plan, kinds)]
    else:  # what had not begun misses nothing
        missed = misses(plan.limits, {name: figures for name, figures in judged.items() if figures.get("offered")})
    missed += run_events.unsettled
    whole = tally.whole()
    return {
        "schema": SCHEMA,
        "settings": dict(settings),
        "goal": dataclasses.asdict(tally.goal),
        "limits": [f"{limit.figure}{limit.sign}{limit.bound:g}" for limit in plan.limits],
        "judged": plan.judged,
        "exit_code": exit_code([*run_events.broken, *filter(None, [run_events.ended])], saturated, missed),
        "ended": run_events.ended,
        "broken": list(run_events.broken),
        "saturated": saturated,
        "missed": missed,
        "notes": list(plan.notes),
        "happened": [{"at_s": at, "command": command} for at, command in run_events.happened],
        "generator": {"workers": generator.workers, "cpu_percent": generator.cpu_percent},
        "plan": dict(plan.series),
        "x_label": plan.x_label,
        "points": [
            {
                "name": point.name,
                "x": point.x,
                "line": point.line,
                "figures": points[point.name],
                "kinds": kinds[point.name],
            }
            for point in plan.points
        ],
        "errors": dict(whole.errors.most_common(20)),
        "finish_reasons": dict(whole.finish_reasons),
        "intervals": list(intervals(tally.seconds)),
        "distributions": {name: curve(histogram) for name, histogram in whole.times.items() if histogram},
    }


def _kinds(point: Point, tally: Tally) -> list[str]:
    """Return the kinds of a point's requests, also those of which none was due."""
    return list(dict.fromkeys((*(source.kind for source in point.sources), *tally.kinds(point.name))))


def saturation(points: Mapping[str, Figures], generator: Generator) -> list[str]:
    """Return the reasons why the generator was too slow for its figures to describe the server."""
    found = [
        f"{name}: the generator sent late: p99 {figures['lag_p99_ms']:.1f} ms, beyond {generator.max_lag_ms:g} ms"
        for name, figures in points.items()
        if figures.get("lag_p99_ms", 0.0) > generator.max_lag_ms
    ]
    if generator.cpu_percent > generator.max_cpu_percent:
        took, most = generator.cpu_percent, generator.max_cpu_percent
        found.append(f"a worker took {took:.0f} % of a core, beyond {most:g} %: use more workers")
    return found


def broken_promises(plan: Plan, points: Mapping[str, Figures]) -> Iterator[str]:
    """Yield violations of requirements that concern several points or all refusals, which a single limit cannot
    express."""
    if plan.retry_after:
        for name, figures in points.items():
            if figures.get("retry_after_share", 1.0) < 1.0:
                yield f"{name}: {100 * figures['retry_after_share']:.0f} % of the refusals say when to come again"
    if plan.no_collapse is not None:
        (first, begun), *later = ((name, figures.get("goodput_per_s", 0.0)) for name, figures in points.items())
        if not begun:
            yield f"{first}: no goodput, of which something could be left"
        for name, goodput in later:
            if goodput < plan.no_collapse * begun:
                yield f"{name}: goodput {goodput:.2f}/s, less than {plan.no_collapse:g} of {begun:.2f}/s at {first}"


def unanswered(plan: Plan, kinds: Mapping[str, Mapping[str, Figures]]) -> Iterator[str]:
    """Yield the kinds of requests that were never answered. Otherwise a run could pass because its long prompts were
    all refused and so disturbed nobody."""
    for point in plan.points:
        for kind in dict.fromkeys(source.kind for source in point.sources):
            figures = kinds[point.name].get(kind, {})
            if not figures.get("ok", 0) + figures.get("cancelled", 0):
                yield f"{point.name}: no request of kind {kind} was answered"


def intervals(seconds: Mapping[int, Second]) -> Iterator[dict[str, float]]:
    """Yield a run's time series: rates and percentiles by intervals of whole seconds. Empty intervals are left out."""
    if not seconds:
        return
    width = -(-(max(seconds) + 1) // MOST_INTERVALS)
    merged: dict[int, Second] = {}
    for at, second in seconds.items():
        merged.setdefault(at // width, Second()).merge(second)
    for number, second in sorted(merged.items()):
        rates = {f"{name}_per_s": second.counts.get(name, 0) / width for name in ("offered", "good", "tokens")}
        yield {"at_s": number * width, "seconds": width, **rates, **dict(_percentiles(second.times))}


def _percentiles(times: Mapping[str, Histogram]) -> Iterator[tuple[str, float]]:
    for name, histogram in times.items():
        if histogram:
            p50, p99 = histogram.percentiles((0.5, 0.99))
            yield from ((f"{name}_p50_ms", p50), (f"{name}_p99_ms", p99))


def curve(histogram: Histogram) -> list[tuple[float, float]]:
    """Return pairs of a share (0 to 1) and the milliseconds that this share of the values does not exceed."""
    return list(zip(CURVE, histogram.percentiles(CURVE), strict=True))


def write(document: Document, out: Path) -> None:
    """Write report.json and report.html into a folder, which is created if needed."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    (out / "report.html").write_text(page(document))


def verdict(document: Document) -> list[str]:
    """Return lines for a terminal: the run's figures, and what is wrong with it."""
    lines = [line for point in document["points"] for line in _point_lines(point)]
    return [*lines, *reasons(document), conclusion(document)]


def reasons(document: Document) -> list[str]:
    """Return why a run did not pass, in a line each."""
    ended = [] if document["ended"] is None else [f"ended early: {document['ended']}"]
    kinds = ("broken", "saturated", "missed")
    return [*ended, *(f"{kind}: {reason}" for kind in kinds for reason in document[kind])]


def conclusion(document: Document) -> str:
    """Return the last line for a terminal. A run that somebody ended has not failed by that."""
    code = document["exit_code"]
    if code == 0:
        return "passed"
    only_ended = document["ended"] is not None and not any(document[kind] for kind in ("broken", "saturated", "missed"))
    return f"incomplete, with code {code}" if only_ended else f"failed, with code {code}"


def _point_lines(point: Mapping[str, Any]) -> Sequence[str]:
    figures = point["figures"]
    counts = ", ".join(f"{name} {figures[name]:.0f}" for name in ("offered", "good", "failed", "rejected", "cancelled"))
    times = [
        f"{title} p50 {figures[f'{name}_p50_ms']:.1f} p99 {figures[f'{name}_p99_ms']:.1f} ms"
        for name, title in (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2e", "E2E"), ("lag", "lag"))
        if f"{name}_p99_ms" in figures
    ]
    return [f"{point['name']}: {counts}; goodput {figures.get('goodput_per_s', 0.0):.2f}/s", *(f"  {t}" for t in times)]
