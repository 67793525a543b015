"""Owns the page of a report: the verdict, tables and charts in one self-contained HTML file.
Never computes a figure: all it shows is in the document. Text from servers and users is escaped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from loadtest.plots import STYLE, Points, chart, linear, logarithmic, nines

_VERDICTS = {0: "passed", 3: "a limit was missed", 4: "the generator was too slow", 5: "the run is not whole"}

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1160px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.passed { color: #1a7f37 } .failed { color: #cf222e }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { padding: 2px 10px; border-bottom: 1px solid #8884; text-align: right }
th:first-child, td:first-child { text-align: left; white-space: nowrap }
.scroll { overflow-x: auto }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(380px, 1fr)); gap: 1rem }
@media (prefers-color-scheme: dark) { .passed { color: #3fb950 } .failed { color: #f85149 } }
"""

_COLUMNS = {
    "offered": ("offered", 0),
    "good": ("good", 0),
    "good_share": ("good, share", 3),
    "failed": ("failed", 0),
    "rejected": ("refused", 0),
    "cancelled": ("left", 0),
    "offered_per_s": ("offered/s", 2),
    "goodput_per_s": ("goodput/s", 2),
    "output_tokens_per_s": ("tokens/s", 1),
    **{
        f"{name}_{share}_ms": (f"{name} {share}, ms", 1)
        for name in ("ttft", "tpot", "itl", "e2e")
        for share in ("p50", "p99")
    },
    "queue_p99_ms": ("queue p99, ms", 1),
    "lag_p99_ms": ("lag p99, ms", 1),
    "prompt_length_ratio": ("prompt tokens/asked", 3),
}


def page(document: Mapping[str, Any]) -> str:
    """Render the whole page."""
    title = f"Load {document['settings'].get('scenario', '')} on {document['settings'].get('url', '')}"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{escape(title)}</title><style>{_STYLE}{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *_verdict(document),
        *_points(document),
        '<h2>Charts</h2><div class="charts">',
        *charts(document),
        "</div>",
        *_counts("Errors", document["errors"]),
        *_counts("Ends of answers", document["finish_reasons"]),
        *_counts("Settings", {key: value for key, value in document["settings"].items() if value not in ("", None)}),
        *_counts("Generator", document["generator"]),
        *_counts("Plan", document["plan"]),
        *_counts("Deployment", document.get("deployment", {})),  # a simulated one
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _verdict(document: Mapping[str, Any]) -> Iterator[str]:
    code = document["exit_code"]
    words = f"{_VERDICTS.get(code, 'failed')} (code {code})"
    yield f'<p class="{"failed" if code else "passed"}"><strong>{escape(words)}</strong></p>'
    ended = [] if document["ended"] is None else [f"ended early: {document['ended']}"]
    reasons = [*ended, *document["broken"], *document["saturated"], *document["missed"]]
    if reasons:
        yield "<ul>" + "".join(f"<li>{escape(reason)}</li>" for reason in reasons) + "</ul>"
    goal = ", ".join(f"{name.removesuffix('_ms').upper()} ≤ {ms:g} ms" for name, ms in document["goal"].items() if ms)
    limits, judged = ", ".join(document["limits"]) or "none", document["judged"]
    limits += f" (of {judged} alone)" if judged else ""
    sentences = [f"An answer is good with {goal or 'any times'}", f"Limits: {limits}", *document["notes"]]
    yield "<p>" + " ".join(f"{escape(sentence)}." for sentence in sentences) + "</p>"


def _points(document: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for point in document["points"]:
        rows.append((point["name"], point["figures"]))
        if len(point["kinds"]) > 1:
            rows += [(f"— {kind}", figures) for kind, figures in point["kinds"].items()]
    columns = {key: shown for key, shown in _COLUMNS.items() if any(key in figures for _, figures in rows)}
    yield '<h2>Figures</h2><div class="scroll"><table><tr><th></th>'
    yield "".join(f"<th>{escape(title)}</th>" for title, _ in columns.values()) + "</tr>"
    for name, figures in rows:
        cells = (f"{figures[key]:.{digits}f}" if key in figures else "–" for key, (_, digits) in columns.items())
        yield f"<tr><td>{escape(name)}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</table></div>"


def _counts(title: str, values: Mapping[str, Any]) -> Iterator[str]:
    if values:
        rows = "".join(f"<tr><td>{escape(str(k))}</td><td>{escape(_shown(v))}</td></tr>" for k, v in values.items())
        yield f'<h2>{escape(title)}</h2><div class="scroll"><table>{rows}</table></div>'


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- charts ---------------------------------------------------------------------------------------------------------


def charts(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the charts that the run has figures for. A chart without a line is left out."""
    yield from _over_points(document)
    course, marks = document["intervals"], [(event["at_s"], event["command"]) for event in document["happened"]]
    for title, names in (
        ("Latency over time: time to first token, ms", {"p50": "ttft_p50_ms", "p99": "ttft_p99_ms"}),
        ("Latency over time: between tokens, ms", {"p50": "itl_p50_ms", "p99": "itl_p99_ms"}),
        ("Requests a second over time", {"offered": "offered_per_s", "good": "good_per_s"}),
        ("Output tokens a second over time", {"tokens": "tokens_per_s"}),
    ):
        lines = _lines(course, "at_s", names)
        if lines:
            yield chart(title, "seconds from the beginning", lines, marks=marks)
    if curves := document["distributions"]:
        every = [ms for points in curves.values() for _, ms in points]
        yield chart("Percentiles, ms", "percent of the values", curves, x=nines(), y=logarithmic(every))


def _over_points(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield charts over the points. If there are several series of points, each chart shows only its last figure for
    each series: all figures of all series would be too many lines."""
    label = document["x_label"]
    rows = [{**point, **point["figures"]} for point in document["points"] if point["x"] is not None]
    if not label or len({row["x"] for row in rows}) < 2:
        return
    rows.sort(key=lambda row: float(row["x"]))
    series = {name: [row for row in rows if row["line"] == name] for name in dict.fromkeys(row["line"] for row in rows)}
    for title, names in (
        ("Goodput against load, requests a second", {"offered": "offered_per_s", "goodput": "goodput_per_s"}),
        ("Share of good answers against load", {"good": "good_share"}),
        ("Time to first token against load, ms", {"p50": "ttft_p50_ms", "p99": "ttft_p99_ms"}),
        ("Time per output token against load, ms", {"p50": "tpot_p50_ms", "p99": "tpot_p99_ms"}),
    ):
        lines = _lines(rows, "x", names)
        if len(series) > 1:
            last = [*names.values()][-1]
            lines = {}
            for name, series_rows in series.items():
                lines |= _lines(series_rows, "x", {name: last})
        if lines:
            yield chart(title, label, lines, x=linear(row["x"] for row in rows), dots=True)


def _lines(rows: Sequence[Mapping[str, float]], x: str, names: Mapping[str, str]) -> dict[str, Points]:
    found = {title: [(row[x], row[key]) for row in rows if key in row] for title, key in names.items()}
    return {title: points for title, points in found.items() if points}
