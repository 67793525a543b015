"""Owns the table of the study `targets`: goodput, latencies and throughput of each policy on each load.
Never simulates: it reads the study's results file."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

NAMES = {"time": "by time", "tpot": "by time, in order of arrival", "vllm-v1": "vLLM V1's schedule, 2,048 tokens"}


def table(document: dict[str, Any]) -> str:
    """Render the table of docs/benchmarks/targets-simulated.md: medians over seeds, goodput with its extremes."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for run in document["runs"]:
        found.setdefault((run["spec"]["trace"], run["spec"]["policy"]), []).append(run["figures"])
    lines = [
        "| load | a step's prefill | goodput | first token p50 / p99, ms | gap p99, ms | tokens a second |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for trace in dict.fromkeys(trace for trace, _ in found):
        policies = sorted((policy for of, policy in found if of == trace), key=_order)
        for policy in policies:
            figures = found[trace, policy]
            good = [one["good_share"] for one in figures]
            first = " / ".join(f"{_middle(figures, f'ttft_p{percent}_ms'):,.0f}" for percent in (50, 99))
            lines.append(
                f"| {trace} | {_name(policy)} | {median(good):.3f} ({min(good):.3f}–{max(good):.3f}) | {first} "
                f"| {_middle(figures, 'itl_p99_ms'):.0f} | {_middle(figures, 'output_tokens_per_s'):,.0f} |"
            )
    return "\n".join(lines)


def _order(policy: str) -> tuple[int, int]:
    fixed = policy.startswith("fixed-")
    return (1, int(policy.removeprefix("fixed-"))) if fixed else (0, [*NAMES].index(policy))


def _name(policy: str) -> str:
    return NAMES.get(policy) or f"{int(policy.removeprefix('fixed-')):,} tokens"


def _middle(figures: Sequence[dict[str, float]], name: str) -> float:
    return median(one[name] for one in figures)
