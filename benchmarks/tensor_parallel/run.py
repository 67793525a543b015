"""Owns the study of tensor parallel on paper: a 70B model on H200s, its memory, sums, steps and simulated loads.
Never measures time: the same commit gives the same document."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.results import write_whole
from benchmarks.tensor_parallel import tables
from benchmarks.tensor_parallel.layouts import RATES, SEEDS, SIZES, run_layout
from benchmarks.tensor_parallel.ways import PROMPT, ways
from loadtest.sim.tensor_parallel import (
    H200,
    INFINIBAND,
    LLAMA_8B,
    LLAMA_70B,
    MEASURED,
    NVLINK,
    QWEN3_06B,
    Ranks,
    Shape,
)

RANKS = (1, 2, 4, 8)
STREAMS = (1, 16, 64, 256)
CONTEXT = 1024
"""Cached tokens of each stream."""
PROMPTS = (512, 1024, 2048, 4096, 8192)
ROUNDS_US = (5, 10, 20)
"""Times of a round of an exchange that are compared."""
GPU = Path(__file__).parents[2] / "loadtest" / "results" / "gpu.json"
CHECKED = {"llama-3.1-8b": LLAMA_8B, "qwen3-0.6b": QWEN3_06B}
"""Models whose steps were measured on one card."""
Cell = dict[str, Any]


def memory() -> Iterator[Cell]:
    """Yield what the weights take, and the KV that fits beside them."""
    for name, width in (("bfloat16", 2.0), ("8 bits", 1.0)):
        for size in RANKS:
            ranks = Ranks(replace(LLAMA_70B, bytes_a_weight=width), size)
            yield {"weights": name, "size": size, "weight_gb": ranks.weight_bytes / 1e9, "kv_tokens": ranks.kv_tokens}


def sums() -> Iterator[Cell]:
    """Yield the all-reduces of steps with so many tokens."""
    for tokens, size in product((1, 16, 64, 256, 2048, 8192), RANKS[1:]):
        ranks = Ranks(LLAMA_70B, size)
        one = ranks.all_reduce(tokens)
        yield {
            "tokens": tokens,
            "size": size,
            "way": one.way,
            "sent_mb": ranks.num_sums * one.sent / 1e6,
            "one_us": one.seconds * 1e6,
            "step_ms": ranks.sums_s(tokens) * 1e3,
            "link_share": one.sent / one.seconds / ranks.link.rate,
        }


def steps() -> Iterator[Cell]:
    """Yield decode steps and prompts; `efficiency` is the share of a perfect speed-up over one card."""
    alone = Ranks(LLAMA_70B)
    for size in RANKS:
        ranks = Ranks(LLAMA_70B, size)
        for streams in STREAMS:
            took = ranks.decode_s(streams, CONTEXT)
            yield _step("decode", streams, ranks, took, alone.decode_s(streams, CONTEXT), streams)
        for tokens in PROMPTS:
            took = ranks.prefill_s(tokens)
            yield _step("prefill", tokens, ranks, took, alone.prefill_s(tokens), tokens)


def _step(kind: str, count: int, ranks: Ranks, took_s: float, alone_s: float, tokens: int) -> Cell:
    return {
        "step": kind,
        "count": count,
        "size": ranks.size,
        "ms": took_s * 1e3,
        "sums_ms": ranks.sums_s(tokens) * 1e3,
        "efficiency": alone_s / (took_s * ranks.size),
        "tokens_per_s_a_card": tokens / took_s / ranks.size,
    }


def rounds() -> Iterator[Cell]:
    """Yield decode steps with other times of a round than the one assumed."""
    for round_us, size in product(ROUNDS_US, RANKS[1:]):
        ranks = Ranks(LLAMA_70B, size, link=replace(NVLINK, round_s=round_us / 1e6))
        yield {
            "round_us": round_us,
            "size": size,
            **{f"ms_{streams}": ranks.decode_s(streams, CONTEXT) * 1e3 for streams in STREAMS},
        }


def pipelines() -> Iterator[Cell]:
    """Yield the ways to use so many cards."""
    for cards in RANKS[1:]:
        for way in ways(LLAMA_70B, cards):
            first_s, each_s = way.prompt
            yield {
                "cards": cards,
                "way": way.name,
                **{f"gap_ms_{streams}": way.gap_s(streams, CONTEXT) * 1e3 for streams in STREAMS},
                "first_token_ms": first_s * 1e3,
                "prompt_tokens_per_s": PROMPT / each_s,
            }


def check(document: dict[str, Any]) -> Iterator[Cell]:
    """Yield the steps that were measured on one card (loadtest/results/gpu.json), and what the arithmetic says."""
    for cell in document["cells"]:
        shape = CHECKED.get(cell["model"])
        if shape is not None and cell["cell"] in ("decode", "prefill", "prefill_only"):
            said = _said(shape, cell["cell"], cell["size"])
            yield {
                "model": cell["model"],
                "step": "decode" if cell["cell"] == "decode" else "prefill",
                "count": cell["size"],
                "measured_ms": cell["device_ms"],
                "said_ms": said * 1e3,
            }


def _said(shape: Shape, kind: str, count: int) -> float:
    ranks = Ranks(shape)
    return ranks.decode_s(count, CONTEXT) if kind == "decode" else ranks.prefill_s(count)


def on_paper() -> dict[str, Any]:
    """Return all of the document but the simulated loads."""
    measured = json.loads(GPU.read_text(encoding="utf-8"))
    return {
        "assumed": {
            "shape": asdict(LLAMA_70B),
            "device": asdict(H200),
            "links": [asdict(NVLINK), asdict(INFINIBAND)],
            "reached": asdict(MEASURED),
        },
        "memory": list(memory()),
        "sums": list(sums()),
        "steps": list(steps()),
        "rounds": list(rounds()),
        "pipelines": list(pipelines()),
        "check": list(check(measured)),
    }


def table(document: dict[str, Any]) -> str:
    """Render the table of decode steps of docs/benchmarks/tensor-parallel.md; `tables.TABLES` has all of them."""
    return tables.decode(document)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tensor_parallel.run",
        description="Work out on paper, and by the simulator, what a 70B model takes on 2, 4 and 8 H200s. Nothing is "
        "measured.",
    )
    parser.add_argument("--processes", type=int, default=1, help="simulations at a time (%(default)s)")
    parser.add_argument("--out", type=Path, help="also write the JSON document to this file")
    options = parser.parse_args(arguments)
    if options.processes < 1:
        parser.error(f"--processes is 1 or more, not {options.processes}")
    asked = list(product([LLAMA_70B], SIZES, RATES, SEEDS))
    with ProcessPoolExecutor(options.processes) as pool:
        loads = list(pool.map(run_layout, *zip(*asked, strict=True)))
    head = {"benchmark": "tensor_parallel", "commit": machine()["commit"], "simulated": True}
    document = {**head, **on_paper(), "loads": loads}
    if options.out:
        write_whole(options.out, document)
    print("\n\n".join(render(document) for render in tables.TABLES.values()))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
