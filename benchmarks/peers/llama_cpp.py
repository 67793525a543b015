"""Owns the comparison with llama.cpp's server on one GGUF file, through the whole stack: figures, ratios and aims.
Never measures by itself: benchmarks/peers/run.py runs the servers and the loads."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.peers.comparison import Aim, Document, Row, figure, ratio, shown, verdict
from benchmarks.peers.run import compared, end_with_sigterm, parsed, reported
from benchmarks.peers.servers import SERVERS
from loadtest.scenarios import SCENARIOS, Closed, Scenario
from loadtest.server import ROOT

RESULTS = ROOT / "loadtest" / "results" / "llama_cpp.json"
LLAMA_CPP = "llama-cpp"
OURS = ("chunkserve-rounded", "chunkserve-stored", "chunkserve-no-drafts")
LOADS: dict[str, Scenario] = {
    "single": SCENARIOS["single"],
    "prompt-180": Closed(requests=4, clients=1, prompt=180, answer=2),
    "prompt-2000": Closed(requests=4, clients=1, prompt=2000, answer=2),
    "closed": SCENARIOS["closed"],
    "mixed": SCENARIOS["mixed"],
}
ROWS = (
    (Row("single", "tpot_ms", "alone: ms a token", 1), Aim(0.65)),
    (Row("prompt-180", "ttft_ms", "prompt of 180 words: first token, ms", 0), Aim(0.25)),
    (Row("prompt-2000", "ttft_ms", "prompt of 2,000 words: first token, ms", 0), Aim(0.25)),
    (Row("closed", "tokens_per_s", "16 clients: tokens/s", 0, more_is_better=True), Aim(5.0, at_least=True)),
    (Row("closed", "ttft_ms", "16 clients: first token, ms", 0), None),
    (Row("mixed", "longest_gap_ms", "beside long prompts: longest gap, ms", 0), Aim(0.02)),
    (Row("mixed", "long_ttft_ms", "long prompts: first token, ms", 0), None),
    (Row("", "engine_gb", "memory of the engine's process, GB", 2), Aim(1.3)),
    (Row("", "resident_gb", "memory of all processes, GB", 2), None),
)


def table(document: Document) -> str:
    """Render the table of docs/benchmarks/llama-cpp.md: medians over the rounds with the extremes in brackets, and
    ours divided by llama.cpp's."""
    servers = document["servers"]
    ours = [name for name in OURS if name in servers]
    titles = [SERVERS[name].title for name in servers] + [f"{SERVERS[name].title} ÷ llama.cpp" for name in ours]
    lines = [f"| | {' | '.join(titles)} | aim |", "|---" * (len(titles) + 2) + "|"]
    for row, aim in ROWS:
        cells = [shown(figure(document, name, row), row.digits) for name in servers]
        ratios = [ratio(document, row, LLAMA_CPP, name) for name in ours]
        cells += [shown(found, 3 if row.figure == "longest_gap_ms" else 2) for found in ratios]
        lines.append(f"| {row.title} | {' | '.join(cells)} | {verdict(aim, ratios[0]) if ratios else ''} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, then the document as the last line. Returns 1 if anything failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.llama_cpp",
        description="Compare this server with llama.cpp's on the default model's file, on this machine: each server "
        "in turn, round by round. benchmarks/peers/llama_cpp.sh builds llama.cpp.",
    )
    document = compared(parsed(parser, arguments, (*OURS, LLAMA_CPP), LOADS, RESULTS), LOADS)
    print(table(document), end="\n\n")
    return reported(document)


if __name__ == "__main__":
    end_with_sigterm()
    sys.exit(main())
