"""Owns the comparison of steps with llama.cpp's own benchmark, on random weights in the shapes of larger models.
Never serves: both run steps alone, so that a model of 8 billion weights is compared in minutes."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from benchmarks.engine.step import decode_plan, measure, prefill_plan, step_of
from benchmarks.machine import machine
from benchmarks.peers.comparison import Aim, shown, spread, verdict
from benchmarks.peers.run import end_with_sigterm
from benchmarks.peers.servers import NotInstalled, Setup
from benchmarks.results import write_whole
from engine.build.executor import create_executor
from engine.checkpoints.prepare import prepare_model
from engine.config import EngineConfig, SpeculativeConfig
from loadtest.server import ROOT

RESULTS = ROOT / "loadtest" / "results" / "llama_cpp_shapes.json"
LLAMA_CPP = "llama.cpp"
OURS: dict[str, dict[str, Any]] = {"rounded": {"activations": "int8"}, "stored": {}}
"""Settings of the engine, besides weights as their file stores them."""
TITLES = {"rounded": "chunkserve, activations in int8", "stored": "chunkserve", LLAMA_CPP: LLAMA_CPP}
PROMPT, DECODES = 512, 16
"""Tokens of the prompt, which is one step, and steps of one row."""
AIMS = {"decode": Aim(0.9), "prefill": Aim(0.5)}
"""Our time ÷ llama.cpp's: a prefill twice as fast takes half the time."""
STEPS = {
    "decode": "a token of one stream",
    "prefill": f"a prompt of {PROMPT} tokens",
    "late": "a token behind {late:,}",
}
"""The last one only with `--late`, which says how many tokens come before it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of the `llama` architecture, or with experts of `qwen3moe`."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    experts: int = 0
    """Each of `inner` columns; 0: a dense MLP"""
    per_token: int = 0


SHAPES = {
    "135M": Shape(576, 30, 9, 3, 64, 1536),
    "1B": Shape(2048, 16, 32, 8, 64, 8192),
    "4B": Shape(3072, 32, 32, 8, 128, 9216),
    "8B": Shape(4096, 32, 32, 8, 128, 14336),
}
"""SmolLM2-135M, Llama-3.2-1B, Llama-3.1-Minitron-4B and Llama-3.1-8B, with the default model's vocabulary."""
FORMATS = {"q4_0": gguf.GGMLQuantizationType.Q4_0, "q4_k": gguf.GGMLQuantizationType.Q4_K}
SCALES = {"q4_0": (0,), "q4_k": (0, 2)}
"""Where a block has its float16 factors, in bytes from its start."""
FACTOR = 2.0**-9
"""Keeps the values of a forward pass finite."""


def write_random(path: Path, shape: Shape, kind: str, default: Path, draw: np.random.Generator) -> None:
    """Write a GGUF file with random blocks of one format in every matrix, and the tokenizer of the file `default`."""
    fields = gguf.GGUFReader(default).fields
    tokens = len(fields["tokenizer.ggml.tokens"].data)
    writer = gguf.GGUFWriter(path, "qwen3moe" if shape.experts else "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(tokens)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.per_token)
        writer.add_expert_feed_forward_length(shape.inner)
    for name, field in fields.items():
        if name.startswith("tokenizer."):
            sub_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrices: dict[str, tuple[int, ...]] = {"token_embd": (tokens, shape.hidden)}
    plain = {"output_norm": np.ones(shape.hidden, np.float32)}
    each, suffix = ((shape.experts,), "_exps") if shape.experts else ((), "")
    for layer in range(shape.layers):
        matrices |= {
            f"blk.{layer}.attn_q": (queries, shape.hidden),
            f"blk.{layer}.attn_k": (keys, shape.hidden),
            f"blk.{layer}.attn_v": (keys, shape.hidden),
            f"blk.{layer}.attn_output": (shape.hidden, queries),
            f"blk.{layer}.ffn_gate{suffix}": (*each, shape.inner, shape.hidden),
            f"blk.{layer}.ffn_up{suffix}": (*each, shape.inner, shape.hidden),
            f"blk.{layer}.ffn_down{suffix}": (*each, shape.hidden, shape.inner),
        }
        plain |= {f"blk.{layer}.{norm}": np.ones(shape.hidden, np.float32) for norm in ("attn_norm", "ffn_norm")}
        if shape.experts:
            router = draw.standard_normal((shape.experts, shape.hidden), np.float32) / shape.hidden**0.5
            head = np.ones(shape.head_dim, np.float32)
            own = {"ffn_gate_inp": router, "attn_q_norm": head, "attn_k_norm": head}
            plain |= {f"blk.{layer}.{name}": values for name, values in own.items()}
    for name, values in plain.items():
        writer.add_tensor(f"{name}.weight", values)
    for name, (*outer, columns) in matrices.items():
        blocks = random_blocks(math.prod(outer), columns, kind, draw)
        writer.add_tensor(f"{name}.weight", blocks.reshape(*outer, -1), raw_dtype=FORMATS[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(rows: int, columns: int, kind: str, draw: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return rows of blocks as bytes, [rows, bytes of a row], with random numbers and small factors."""
    per_block, size = gguf.GGML_QUANT_SIZES[FORMATS[kind]]
    blocks = draw.integers(0, 256, (rows * columns // per_block, size), np.uint8)
    factor = np.frombuffer(np.float16(FACTOR).tobytes(), np.uint8)
    for start in SCALES[kind]:
        blocks[:, start : start + 2] = factor
    return blocks.reshape(rows, -1)


def llama_bench(program: Path, file: Path, late: int) -> dict[str, float]:
    """Return the milliseconds that a step takes, by the median of llama.cpp's own runs after its warm-up."""
    found = {"prefill": _llama_bench(program, file, PROMPT, 0, 0), "decode": _llama_bench(program, file, 0, DECODES, 0)}
    if late:
        found["late"] = _llama_bench(program, file, 0, DECODES, late)
    return found


def _llama_bench(program: Path, file: Path, prompt: int, decodes: int, depth: int) -> float:
    amounts = ("-p", str(prompt), "-n", str(decodes), "-d", str(depth), "-r", "1")
    command = [str(program), "-m", str(file), *amounts, "-t", str(os.cpu_count()), "-o", "json"]
    (run,) = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    samples: list[float] = run["samples_ns"]
    return statistics.median(samples) / max(decodes, 1) / 1e6


def steps_of(file: Path, seed: int, late: int) -> dict[str, Callable[[], dict[str, float]]]:
    """Load the file with each of OURS. Each entry returns the milliseconds of its steps, one row's as a median."""
    made: dict[str, Callable[[], dict[str, float]]] = {}
    draw = random.Random(seed)
    model = prepare_model(str(file), progress=False, stored=True)
    for name, settings in OURS.items():
        config = EngineConfig(
            device="cpu",
            quantize="stored",
            num_kv_blocks=128 + late // 16,
            max_model_len=1024 + late,
            speculative=SpeculativeConfig(method="none"),
            **settings,
        )
        executor, resolved = create_executor(model, config)

        def token(most: int = resolved.vocab_size) -> int:
            return draw.randrange(most)

        decode = step_of(executor, decode_plan(1, DECODES // 2, resolved.block_size, token))
        prefill = step_of(executor, prefill_plan(PROMPT, 0, resolved.block_size, token))
        rows = {"decode": decode}
        if late:
            rows["late"] = step_of(executor, decode_plan(1, late + DECODES // 2, resolved.block_size, token))

        def run(
            rows: Mapping[str, Callable[[], object]] = rows, prefill: Callable[[], object] = prefill
        ) -> dict[str, float]:
            with torch.inference_mode():
                began = time.perf_counter()
                prefill()
                prefill_ms = (time.perf_counter() - began) * 1000
                own = {step: statistics.median(measure(row, DECODES)) for step, row in rows.items()}
                return {"prefill": prefill_ms, **own}

        made[name] = run
    return made


def compare(
    shape: str, kind: str, program: Path, default: Path, directory: Path, rounds: int, seed: int, late: int = 0
) -> dict[str, Any]:
    """Return the cell of one shape and format: each server's milliseconds by step, a number for each round."""
    file = directory / f"{shape}-{kind}.gguf"
    write_random(file, SHAPES[shape], kind, default, np.random.default_rng(seed))
    own = steps_of(file, seed, late)
    steps = [step for step in STEPS if late or step != "late"]
    found: dict[str, dict[str, list[float]]] = {name: {step: [] for step in steps} for name in TITLES}
    for name, run in own.items():
        run()  # the first run maps memory
        print(f"{shape} {kind}: {name} is ready", file=sys.stderr)
    for _ in range(rounds):
        for name in TITLES:
            for step, ms in (llama_bench(program, file, late) if name == LLAMA_CPP else own[name]()).items():
                found[name][step].append(ms)
    return {"shape": shape, "format": kind, "bytes": file.stat().st_size, "ms": found}


def table(document: Mapping[str, Any]) -> str:
    """Render the table of docs/benchmarks/llama-cpp.md: medians over the rounds with the extremes in brackets, and
    ours divided by llama.cpp's of the same round."""
    titles = [*(f"{TITLES[name]}, ms" for name in TITLES), *(f"{TITLES[name]} ÷ {LLAMA_CPP}" for name in OURS)]
    lines = [f"| | {' | '.join(titles)} | aim |", "|---" * (len(titles) + 2) + "|"]
    for cell in document["cells"]:
        for step in cell["ms"][LLAMA_CPP]:
            title = STEPS[step].format(late=document.get("late", 0))
            ms = {name: cell["ms"][name][step] for name in TITLES}
            ratios = {n: [a / b for a, b in zip(ms[n], ms[LLAMA_CPP], strict=True)] for n in OURS}
            cells = [shown(spread(ms[name]), 0) for name in TITLES] + [shown(spread(ratios[name]), 2) for name in OURS]
            what = f"{cell['shape']}, {cell['format'].upper()}: {title}"
            lines.append(f"| {what} | {' | '.join(cells)} | {verdict(AIMS.get(step), spread(ratios['rounded']))} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, then the document as the last line. Returns 1 if llama.cpp is not installed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.shapes",
        description="Compare steps with llama.cpp's own benchmark, on random weights in the shapes of larger models. "
        "benchmarks/peers/llama_cpp.sh builds llama.cpp.",
    )
    parser.add_argument(
        "--peers-venv", type=Path, default=ROOT / ".venv-peers", help="virtual environment with llama-bench"
    )
    larger = [name for name in SHAPES if name != "135M"]
    parser.add_argument("--shapes", nargs="+", default=larger, choices=list(SHAPES), help="shapes to compare")
    parser.add_argument(
        "--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS), help="formats of the weights"
    )
    parser.add_argument(
        "--late", type=int, default=0, help="also measure a token behind so many others; 0: do not (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds over the servers (%(default)s)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of the weights and tokens")
    parser.add_argument("--out", type=Path, help="also write the JSON document to this file")
    options = parser.parse_args(arguments)
    for shape, kind in itertools.product(options.shapes, options.formats):
        weights, _ = gguf.GGML_QUANT_SIZES[FORMATS[kind]]
        if SHAPES[shape].hidden % weights:
            parser.error(
                f"--formats {kind} has {weights} weights in a block, of which {shape} has no whole number in a row"
            )
    setup = Setup.of_this_repository(options.peers_venv)
    try:
        program = setup.installed("llama-bench", "benchmarks/peers/llama_cpp.sh")
    except NotInstalled as error:
        print(error, file=sys.stderr)
        return 1
    document = {"benchmark": "llama_cpp_shapes", **machine(), "seed": options.seed, "late": options.late, "cells": []}
    document["shapes"] = {name: asdict(SHAPES[name]) for name in options.shapes}
    for shape in options.shapes:
        for kind in options.formats:
            with tempfile.TemporaryDirectory() as directory:
                where = Path(directory)
                cell = compare(shape, kind, program, setup.gguf(), where, options.rounds, options.seed, options.late)
            document["cells"].append(cell)
            if options.out:
                write_whole(options.out, document)
    print(table(document))
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    end_with_sigterm()
    sys.exit(main())
