"""Owns the comparison of a mixture's steps: its experts as a file stores them, in bfloat16, and beside rounded rows.
Never serves: it writes a random file of a large mixture's layers, and hands it to `benchmarks.engine.step`."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine import step
from benchmarks.engine.shapes import FORMATS, Shape, write_random
from benchmarks.peers.run import end_with_sigterm
from engine.checkpoints.default_model import download_default_gguf

LAYERS, EXPERTS = 8, 32
"""Fewer of both than Qwen3-30B-A3B has, 48 and 128, so that the weights in bfloat16 fit into 3 GB. A token reads as
many experts of a layer, and they are as large."""


def shape_of(layers: int, experts: int) -> Shape:
    """Return the shape of Qwen3-30B-A3B with fewer layers and experts."""
    return Shape(2048, layers, 32, 4, 128, 768, experts, 8)


def table(document: dict[str, Any]) -> str:
    """Render the table of docs/benchmarks/stored-weights.md; see benchmarks.engine.step.table."""
    return step.table(document)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what `benchmarks.engine.step` does."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.mixture",
        description="Measure steps of a mixture of experts in the shape of Qwen3-30B-A3B, on random weights in a GGUF "
        "file's blocks: as stored, with activations in int8, and in bfloat16, in turn. Other options are those of "
        "benchmarks.engine.step.",
    )
    parser.add_argument("--format", default="q4_k", choices=list(FORMATS), help="of all matrices (%(default)s)")
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers of the model (%(default)s)")
    parser.add_argument("--experts", type=int, default=EXPERTS, help="experts of a layer (%(default)s)")
    parser.add_argument("--weights-seed", type=int, default=time.time_ns() % 1_000_000, help="of the weights")
    options, others = parser.parse_known_args(arguments)
    kernels = [] if "--kernels" in others else ["--kernels", "native", "stored", "stored+rounded"]
    step.parse_options([*kernels, *others])  # which refuses wrong ones before gigabytes are written
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / f"mixture-{options.format}.gguf"
        draw = np.random.default_rng(options.weights_seed)
        with download_default_gguf(Path(directory), False, stored=True, hasty=False) as default:
            write_random(file, shape_of(options.layers, options.experts), options.format, default, draw)
        os.environ["CHUNKSERVE_CACHE"] = directory  # gigabytes that nobody asks for again
        step.main(["--model", str(file), *kernels, *others])


if __name__ == "__main__":
    end_with_sigterm()
    main()
