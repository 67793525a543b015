"""Owns engines of real shapes, with few layers where asked, and the order in which a part starts and ends one.
Never reads a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import engine.models
from benchmarks.engine.gpu import BLOCK_SIZE
from engine.build.executor import create_executor
from engine.config import EngineConfig, ResolvedConfig
from engine.execution.executor import ModelExecutor
from tests.gpu.hour.phases import STAND_IN

SHAPES = Path(engine.models.__file__).parent / "shapes"


@contextmanager
def started(
    device: str, shape: str, *, layers: int | None = None, **settings: Any
) -> Iterator[tuple[ModelExecutor, ResolvedConfig]]:
    """Yield an engine with random weights. layers None: all of them. In a rehearsal the shape is tiny."""
    with TemporaryDirectory(prefix="shape-") as scratch:
        if device == STAND_IN:
            from tests.support.gpu_stand_in import tiny_shape

            directory = tiny_shape(shape, vocab_size=272)
            settings |= {"max_num_batched_tokens": 40, "max_num_seqs": min(4, settings.get("max_num_seqs", 4))}
            settings |= {"max_model_len": 256, "num_kv_blocks": 64}
        else:
            directory = Path(scratch)
            config = json.loads((SHAPES / shape / "config.json").read_text())
            of_layers = {} if layers is None else {"num_hidden_layers": layers}
            (directory / "config.json").write_text(json.dumps(config | of_layers))
        asked: dict[str, Any] = {
            "load_format": "dummy",
            "device": "cuda",
            "max_model_len": 16384,
            "block_size": BLOCK_SIZE,
        }
        asked |= {"num_speculative_tokens": 0, "enable_prefix_caching": False}
        executor, resolved = create_executor(directory, EngineConfig(**asked | settings))
        try:
            yield executor, resolved
        finally:
            executor.shutdown()
