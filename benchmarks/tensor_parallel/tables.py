"""Owns the tables of docs/benchmarks/tensor-parallel.md, as its results file says them.
Never computes a figure: means and formats alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Document = Mapping[str, Any]
NO_ROOM = "none"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> str:
    """`words`: columns from the left that hold words."""
    rule = "|---" * words + "|--:" * (len(head) - words) + "|"
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])


def memory(document: Document) -> str:
    rows = [
        [
            cell["weights"],
            str(cell["size"]),
            f"{cell['weight_gb']:.1f}",
            f"{cell['kv_tokens']:,}" if cell["kv_tokens"] else NO_ROOM,
        ]
        for cell in document["memory"]
    ]
    return _table(["weights in", "ranks", "weights of a rank, GB", "KV tokens that fit"], rows)


def sums(document: Document) -> str:
    rows = [
        [
            cell["way"],
            f"{cell['tokens']:,}",
            str(cell["size"]),
            f"{cell['sent_mb']:,.1f}",
            f"{cell['one_us']:,.0f}",
            f"{cell['step_ms']:.2f}",
            f"{100 * cell['link_share']:.1f}",
        ]
        for cell in document["sums"]
    ]
    head = ["way", "tokens", "ranks", "MB sent by a rank", "one, µs", "all of a step, ms", "of NVLink's rate, %"]
    return _table(head, rows)


def _steps(document: Document, kind: str, what: str) -> str:
    rows = [
        [
            f"{cell['count']:,}",
            f"{cell['size']}{'*' if cell['size'] == 1 else ''}",
            f"{cell['ms']:.1f}",
            f"{cell['sums_ms']:.2f}",
            f"{100 * cell['efficiency']:.0f}",
            f"{cell['tokens_per_s_a_card']:,.0f}",
        ]
        for cell in sorted(document["steps"], key=lambda cell: (cell["count"], cell["size"]))
        if cell["step"] == kind
    ]
    head = [what, "ranks", "step, ms", "of it sums, ms", "of a perfect speed-up, %", "tokens a second and card"]
    return _table(head, rows, words=0)


def decode(document: Document) -> str:
    return _steps(document, "decode", "streams")


def prefill(document: Document) -> str:
    return _steps(document, "prefill", "prompt")


def rounds(document: Document) -> str:
    streams = [name.removeprefix("ms_") for name in document["rounds"][0] if name.startswith("ms_")]
    rows = [
        [str(cell["round_us"]), str(cell["size"]), *(f"{cell[f'ms_{count}']:.1f}" for count in streams)]
        for cell in document["rounds"]
    ]
    return _table(["a round, µs", "ranks", *(f"{count} streams, ms" for count in streams)], rows, words=0)


def loads(document: Document) -> str:
    """Means over the seeds."""
    cells = document["loads"]
    rows = []
    for rate, size in dict.fromkeys((cell["rate"], cell["size"]) for cell in _by_rate(cells)):
        here = [cell for cell in cells if (cell["rate"], cell["size"]) == (rate, size)]
        mean = {name: statistics.mean(cell[name] for cell in here) for name in here[0]}
        rows.append(
            [
                f"{rate:g}",
                f"{here[0]['replicas']} of {size}",
                f"{mean['ttft_p50_ms']:,.0f}",
                f"{mean['ttft_p99_ms']:,.0f}",
                f"{mean['tpot_p50_ms']:.1f}",
                f"{mean['itl_p99_ms']:.0f}",
                f"{100 * mean['good_share']:.1f}",
                f"{mean['output_tokens_per_s']:,.0f}",
            ]
        )
    times = ["TTFT p50, ms", "TTFT p99, ms", "TPOT p50, ms", "gap p99, ms"]
    return _table(
        ["requests a second", "replicas of ranks", *times, "good, %", "answer tokens a second"], rows, words=0
    )


def _by_rate(cells: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(cells, key=lambda cell: (cell["rate"], -cell["size"]))


def pipelines(document: Document) -> str:
    streams = [name.removeprefix("gap_ms_") for name in document["pipelines"][0] if name.startswith("gap_ms_")]
    rows = [
        [
            cell["way"],
            str(cell["cards"]),
            *(f"{cell[f'gap_ms_{count}']:.1f}" for count in streams),
            f"{cell['first_token_ms']:,.0f}",
            f"{cell['prompt_tokens_per_s']:,.0f}",
        ]
        for cell in document["pipelines"]
    ]
    gaps = [f"{count} streams: gap, ms" for count in streams]
    return _table(["way", "cards", *gaps, "long prompt: first token, ms", "prompt tokens a second"], rows)


def check(document: Document) -> str:
    rows = [
        [
            cell["model"],
            f"{cell['step']} {cell['count']:,}",
            f"{cell['measured_ms']:.2f}",
            f"{cell['said_ms']:.2f}",
            f"{100 * (cell['said_ms'] / cell['measured_ms'] - 1):+.0f}",
        ]
        for cell in document["check"]
    ]
    return _table(["model", "step", "measured, ms", "by arithmetic, ms", "off by, %"], rows, words=2)


TABLES: dict[str, Callable[[Document], str]] = {
    "tensor parallel memory": memory,
    "tensor parallel sums": sums,
    "tensor parallel": decode,
    "tensor parallel prefill": prefill,
    "tensor parallel rounds": rounds,
    "tensor parallel loads": loads,
    "tensor parallel pipelines": pipelines,
    "tensor parallel check": check,
}
"""By their marks on the page."""
