"""Owns the evaluation of the comparison with peers: medians over rounds, ratios to the others' figures, and the aims.
Never measures: it is given the document of benchmarks/peers/run.py."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.servers import SERVERS
from loadtest.panels import Spread

OURS = "chunkserve"
OURS_NO_DRAFTS = "chunkserve-no-drafts"
VLLM = ("vllm", "vllm-512")
RAY_LLM = "ray-llm"

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Aim:
    limit: float
    at_least: bool = False

    def is_met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of a scenario, or, if `scenario` is empty, of a server's whole run."""

    scenario: str
    figure: str
    title: str
    digits: int
    more_is_better: bool = False
    of_vllm: Aim | None = None
    """Aim for our figure divided by that of vLLM's best setting."""
    of_ray_llm: Aim | None = None
    alone: Aim | None = None
    """Aim for our figure itself."""
    setting_of: str = ""
    """The figure by which vLLM's best setting is chosen, if it is not this one: a single setting must be good at
    both."""


ROWS = (
    Row("single", "tpot_ms", "alone: ms a token", 1, of_vllm=Aim(0.45)),
    Row("single", "ttft_ms", "alone: first token, ms", 0, of_vllm=Aim(1.0), of_ray_llm=Aim(0.5)),
    Row("closed", "tokens_per_s", "16 clients: tokens/s", 0, True, Aim(2.2, True), Aim(3.0, True)),
    Row("closed", "ttft_ms", "16 clients: first token, ms", 0),
    Row("mixed", "longest_gap_ms", "beside long prompts: longest gap, ms", 0, of_vllm=Aim(0.4)),
    Row("mixed", "long_ttft_ms", "long prompts: first token, ms", 0, of_vllm=Aim(1.0), setting_of="longest_gap_ms"),
    Row("prefix", "wall_s", "shared prefix: whole load, s", 2, of_vllm=Aim(0.7)),
    Row("", "cold_start_s", "command to first token, s", 1, alone=Aim(20)),
    Row("", "resident_gb", "memory, GB", 2),
    Row("", "beyond_gb", "memory beyond weights and KV cache, GB", 2, alone=Aim(2.5)),
)


def row_of(scenario: str, figure: str) -> Row:
    (row,) = [row for row in ROWS if (row.scenario, row.figure) == (scenario, figure)]
    return row


# --- figures --------------------------------------------------------------------------------------------------------


def by_round(document: Document, server: str, row: Row) -> dict[int, float]:
    """Return the figure of each round that has it."""
    found = {}
    for number, servers in enumerate(document["rounds"]):
        life = servers.get(server, {})
        figures = life.get("scenarios", {}).get(row.scenario, {}) if row.scenario else life
        if row.figure in figures:
            found[number] = figures[row.figure]
    return found


def spread(values: Sequence[float]) -> Spread | None:
    """Return median, minimum and maximum over the rounds."""
    return (statistics.median(values), min(values), max(values)) if values else None


def figure(document: Document, server: str, row: Row) -> Spread | None:
    return spread(list(by_round(document, server, row).values()))


def ratio(document: Document, row: Row, other: str, ours: str = OURS) -> Spread | None:
    """Return our figure divided by another server's: the ratio of medians, then minimum and maximum over the rounds
    that have both."""
    own, theirs = by_round(document, ours, row), by_round(document, other, row)
    rounds = [own[number] / theirs[number] for number in own.keys() & theirs.keys()]
    if not rounds:
        return None
    medians = statistics.median(own.values()) / statistics.median(theirs.values())
    return medians, min(rounds), max(rounds)


def best_vllm(document: Document, row: Row) -> str | None:
    """Return vLLM's setting with the best median: the lowest, or the highest if more is better."""
    chosen_by = row_of(row.scenario, row.setting_of) if row.setting_of else row
    medians = {name: found[0] for name in VLLM if (found := figure(document, name, chosen_by))}
    if not medians:
        return None
    return (max if chosen_by.more_is_better else min)(medians, key=lambda name: medians[name])


# --- tables ---------------------------------------------------------------------------------------------------------


def table(document: Document) -> str:
    """Render the page's tables: each server's figures, then the ratios of each of ours to the others'."""
    notes = [f"{SERVERS[name].title} was not measured: {why}" for name, why in document["failed"].items()]
    ratios = [_ratios_table(document, name) for name in document["servers"] if name.startswith(OURS)]
    aims = [_aims_of_ours(document)] if OURS in document["servers"] else []
    return "\n\n".join([_measured_with(document), _figures_table(document), *ratios, *aims, *notes])


def _measured_with(document: Document) -> str:
    peers = [f"{name} {version}" for name, version in document["peers"].items()]
    versions = f"chunkserve at {document['commit']}; the peers with {', '.join(peers) or 'nothing installed'}"
    short = (
        " **A short run, to see that all works: these figures say nothing of the servers.**"
        if document["short"]
        else ""
    )
    return f"{document['cpu']}; rounds: {len(document['rounds'])}; {versions}.{short}"


def _figures_table(document: Document) -> str:
    names = document["servers"]
    lines = [f"| | {' | '.join(SERVERS[name].title for name in names)} |", "|---" * (len(names) + 1) + "|"]
    for row in ROWS:
        cells = [shown(figure(document, name, row), row.digits) for name in names]
        lines.append(f"| {row.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratios_table(document: Document, ours: str) -> str:
    others = ["vLLM's better setting", *([SERVERS[RAY_LLM].title] if RAY_LLM in document["servers"] else [])]
    lines = [f"| {SERVERS[ours].title} ÷ | {' | aim | '.join(others)} | aim |", "|---" * (1 + 2 * len(others)) + "|"]
    for row in ROWS:
        best = best_vllm(document, row)
        vllm = ratio(document, row, best, ours) if best else None
        setting = f", {SERVERS[best].title}" if best and vllm else ""
        cells = [shown(vllm, 2) + setting, verdict(row.of_vllm, vllm)]
        if RAY_LLM in document["servers"]:
            ray_llm = ratio(document, row, RAY_LLM, ours)
            cells += [shown(ray_llm, 2), verdict(row.of_ray_llm, ray_llm)]
        lines.append(f"| {row.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _aims_of_ours(document: Document) -> str:
    rows = [(row, figure(document, OURS, row)) for row in ROWS if row.alone]
    return "\n".join(
        f"- {row.title}: {shown(found, row.digits)}, aim {verdict(row.alone, found)}" for row, found in rows
    )


def shown(found: Spread | None, digits: int) -> str:
    """Render median, minimum and maximum as a cell of a table."""
    if found is None:
        return "–"
    median, least, most = (f"{value:.{digits}f}" for value in found)
    return f"{median} ({least}–{most})"


def verdict(aim: Aim | None, found: Spread | None) -> str:
    """Render an aim and whether the median meets it; empty if there is none."""
    if aim is None:
        return ""
    if found is None:
        return str(aim)
    return f"{aim}: {'met' if aim.is_met(found[0]) else 'missed'}"
