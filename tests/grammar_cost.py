"""Owns the measured cost of structured output besides the model: `python -m tests.grammar_cost`, and
tests/grammar_cost.json.
Never runs a model: answers are random walks through the default model's vocabulary, sixteen at a time."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from benchmarks.machine import machine
from engine.batch.grammar import Grammars
from engine.checkpoints.prepare import prepare_model
from engine.config import DEFAULT_MODEL
from engine.models.config import read_model_config
from engine.step import GrammarRow
from serve_app.grammars.json_schema import json_schema
from tests.support.json_schemas import random_schema

RECORD = Path(__file__).with_name("grammar_cost.json")
SCHEMAS, ROWS, STEPS = 200, 16, 150
EOS = 2  # <|im_end|>

Result = TypeVar("Result")


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


def spread(values: Sequence[float], scale: float) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100)
    return {"p50": round(cuts[49] * scale, 3), "p99": round(cuts[98] * scale, 3), "max": round(max(values) * scale, 3)}


class Walks:
    """Answers of `ROWS` requests, each with a grammar of its own."""

    def __init__(self, grammars: Grammars, texts: Sequence[str], draw: random.Random) -> None:
        self._grammars = grammars
        self._draw = draw
        self._rows = {f"{number}": GrammarRow(f"{number}", text, ()) for number, text in enumerate(texts)}
        self.mask_s: list[float] = []
        self.num_tokens = self.num_forced = 0

    def step(self) -> None:
        rows = list(self._rows.values())
        (words, failed), seconds = timed(lambda: self._grammars.masks(rows))
        assert not failed, failed
        self.mask_s.append(seconds / len(rows))
        for row, mask in zip(rows, words, strict=True):
            self._go_on(row, np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")))

    def _go_on(self, row: GrammarRow, allowed: np.ndarray) -> None:
        """Do as an engine would: append a token that may come next, and those that it forces."""
        token = int(self._draw.choice(allowed))
        self.num_tokens += 1
        if token == EOS:
            del self._rows[row.request_id]
            self._grammars.forget(row.request_id)
            return
        forced = self._grammars.forced(row.request_id, (token,))
        self.num_tokens += len(forced)
        self.num_forced += len(forced)
        answer = (*row.answer, token, *forced)
        self._rows[row.request_id] = GrammarRow(row.request_id, row.grammar, answer)

    def run(self) -> None:
        for _ in range(STEPS):
            if self._rows:
                self.step()
        for name in self._rows:
            self._grammars.forget(name)


def main() -> None:
    directory = prepare_model(DEFAULT_MODEL)
    vocabulary = read_model_config(directory).vocab_size
    grammars, load_s = timed(lambda: Grammars.of_model(directory / "tokenizer.json", vocabulary, [EOS], 1))
    texts = [json_schema(random_schema(seed)).text() for seed in range(SCHEMAS)]
    compile_s = [timed(lambda text=text: grammars.compile(text))[1] for text in texts]  # type: ignore[misc]
    mask_s: list[float] = []
    num_tokens = num_forced = 0
    for first in range(0, SCHEMAS, ROWS):
        walks = Walks(grammars, texts[first : first + ROWS], random.Random(first))
        walks.run()
        mask_s += walks.mask_s
        num_tokens, num_forced = num_tokens + walks.num_tokens, num_forced + walks.num_forced
    record = {
        "schemas": SCHEMAS,
        "vocabulary": vocabulary,
        "tokenizer_load_ms": round(load_s * 1000, 1),
        "compile_ms": spread(compile_s, 1000),
        "mask_us_a_row": spread(mask_s, 1e6),
        "rows_a_step": ROWS,
        "tokens": num_tokens,
        "forced_share": round(num_forced / num_tokens, 3),
    }
    RECORD.write_text(json.dumps({**record, **machine()}, indent=2) + "\n")
    print(RECORD.read_text())


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m tests.grammar_cost",
        description="Measure what structured output costs besides the model, and write tests/grammar_cost.json.",
    ).parse_args()
    main()
