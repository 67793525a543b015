"""Owns the comparison with vLLM of streams beside long prompts, through the whole stack: gaps and first tokens.
Never measures by itself: benchmarks/peers/run.py runs the servers and the loads."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.peers.comparison import Document, Row, figure, shown
from benchmarks.peers.run import compared, end_with_sigterm, parsed, reported
from benchmarks.peers.servers import SERVERS
from loadtest.scenarios import BESIDE
from loadtest.server import ROOT

RESULTS = ROOT / "loadtest" / "results" / "beside.json"
COMPARED = ("chunkserve-no-drafts", "chunkserve-250-ms", "vllm", "vllm-512", "vllm-128")
FIGURES = {
    "gap_p50_ms": "gap p50",
    "gap_p99_ms": "gap p99",
    "longest_gap_ms": "longest gap",
    "long_ttft_ms": "long prompt's first token",
}


def table(document: Document) -> str:
    """Render the table of docs/benchmarks/targets.md: milliseconds, medians over rounds with the extremes in
    brackets."""
    lines = [f"| streams | prompt | server | {' | '.join(FIGURES.values())} |", "|--:|--:|---|" + "--:|" * len(FIGURES)]
    for name, scenario in document["scenarios"].items():
        for server in document["servers"]:
            spreads = [figure(document, server, Row(name, of, title, 0)) for of, title in FIGURES.items()]
            load = f"| {scenario['streams']} | {scenario['long_prompt']:,} | {SERVERS[server].title} "
            lines.append(f"{load}| {' | '.join(shown(spread, 0) for spread in spreads)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, then the document as the last line. Returns 1 if anything failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.beside",
        description="Compare gaps of streams beside long prompts, and the prompts' first tokens, with vLLM's on this "
        "machine: each server in turn, round by round.",
    )
    document = compared(parsed(parser, arguments, COMPARED, dict(BESIDE), RESULTS), dict(BESIDE))
    print(table(document), end="\n\n")
    return reported(document)


if __name__ == "__main__":
    end_with_sigterm()
    sys.exit(main())
