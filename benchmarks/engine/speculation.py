"""Owns the measurement of prompt-lookup drafts: tokens a second with and without them, on repetitive and on free texts.
Never uses a server: one loop steps an engine for each setting in turn, and the answers are compared."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.machine import machine
from engine.build.executor import create_executor
from engine.checkpoints.prepare import prepare_model
from engine.config import DEFAULT_MODEL, EngineConfig, ResolvedConfig, SpeculativeConfig
from engine.core.core import EngineCore
from engine.observer import Verified
from engine.protocol import Failed, SamplingParams, Submission, Token
from engine.scheduling.request import create_request
from engine.step import Executor

STREAMS = (1, 4, 16)
ANSWER = 160
ARMS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
}
_NAMES = ("Ada", "Boris", "Chen", "Dalia", "Emil", "Fatou", "Goran", "Hana", "Ines", "Jonas", "Kofi", "Lena", "Marta")
_TOWNS = ("Lisbon", "Oslo", "Quito", "Tunis", "Turin", "Delft", "Kyoto", "Perth", "Lagos", "Sofia")
_THINGS = ("lighthouse", "railway", "bakery", "library", "market", "harbour", "garden", "theatre", "school", "bridge")

Prompt = tuple[str, SamplingParams]


def repetitive(draw: random.Random) -> Prompt:
    """Make a prompt that asks to repeat a list, so that most of the answer is in the prompt. Greedy."""
    lines = [
        f'{{"name": "{draw.choice(_NAMES)}", "town": "{draw.choice(_TOWNS)}", "age": {draw.randrange(20, 80)}}}'
        for _ in range(8)
    ]
    text = "\n".join(lines)
    question = f"Write these lines again, as they are:\n{text}"
    return _chat(question), SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)


def free(draw: random.Random) -> Prompt:
    """Make a prompt for a story, little of which is in the prompt. Sampled, since greedy texts of small models repeat
    themselves."""
    question = f"Tell a story about {draw.choice(_NAMES)}, who found a {draw.choice(_THINGS)} in {draw.choice(_TOWNS)}."
    seed = draw.randrange(1 << 31)
    return _chat(question), SamplingParams(temperature=1.0, top_p=0.95, seed=seed, max_tokens=ANSWER, ignore_eos=True)


def _chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


TEXTS = {"repetitive": repetitive, "free": free}


class Run:
    """Runs streams that all decode. The measurement begins when each has its first token."""

    def __init__(self, executor: Executor, config: ResolvedConfig, requests: Sequence[Submission]) -> None:
        self._core = EngineCore(executor, config)
        self.answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
        self._verified: list[Verified] = []
        self._took, self._steps = 0.0, 0
        for number, request in enumerate(requests):
            self._core.submit(create_request(request, config, number))
        while not all(self.answers.values()):
            self._step()
        self._first = self.num_tokens
        self._verified.clear()

    @property
    def has_work(self) -> bool:
        return self._core.has_work

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers.values()))

    def step(self) -> None:
        begun = time.perf_counter()
        self._step()
        self._took += time.perf_counter() - begun
        self._steps += 1

    def figures(self) -> dict[str, float]:
        """Return tokens a second of this run's own step time, and the numbers of drafted and accepted tokens."""
        return {
            "tokens_s": (self.num_tokens - self._first) / self._took,
            "step_ms": self._took / self._steps * 1000,
            "drafted": sum(row.num_drafted for row in self._verified),
            "accepted": sum(row.num_accepted for row in self._verified),
        }

    def _step(self) -> None:
        for event in self._core.step():
            if isinstance(event, Failed):
                raise RuntimeError(f"{event.request_id} failed: {event.message}")
            if isinstance(event, Token):
                self.answers[event.request_id].append(event.token_id)
        self._verified += self._core.last_step.verified


def submissions(tokenizer: Tokenizer, kind: str, streams: int, draw: random.Random) -> list[Submission]:
    made = [TEXTS[kind](draw) for _ in range(streams)]
    return [
        Submission(str(number), tuple(tokenizer.encode(text, add_special_tokens=False).ids), params)
        for number, (text, params) in enumerate(made)
    ]


def one_round(
    executors: Mapping[str, Executor], config: ResolvedConfig, requests: Sequence[Submission]
) -> dict[str, dict[str, float]]:
    """Run all settings on the same requests, step by step in turn, so that a temporary slowdown of the machine affects
    all of them. The setting with the fewest tokens runs the next step. Each has its own executor, and so its own cache.

    Raises:
        RuntimeError: an answer with drafts differs from the one without.
    """
    runs = {name: Run(executor, _with(config, name), requests) for name, executor in executors.items()}
    while at_work := [run for run in runs.values() if run.has_work]:
        min(at_work, key=lambda run: run.num_tokens).step()
    plain, *others = runs.items()
    for name, run in others:
        if run.answers != plain[1].answers:
            raise RuntimeError(f"{name}: the answers are not those of {plain[0]}")
    return {name: run.figures() for name, run in runs.items()}


def _with(config: ResolvedConfig, name: str) -> ResolvedConfig:
    asked = SpeculativeConfig(**ARMS[name], free_tokens=config.speculative.free_tokens)
    return dataclasses.replace(config, speculative=asked)


def measure(model: Path, asked: EngineConfig, rounds: int, streams: Sequence[int], seed: int) -> dict[str, Any]:
    """Measure with fresh prompts in each round. The executors rotate among the settings, because the position of a copy
    of the weights in memory made steps differ by 4 %."""
    made = [create_executor(model, asked) for _ in ARMS]
    config = dataclasses.replace(made[0][1], enable_prefix_caching=False)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    cells: dict[tuple[str, int, str], list[dict[str, float]]] = {}
    for number in range(rounds):
        executors = {name: made[(number + place) % len(made)][0] for place, name in enumerate(ARMS)}
        for kind in TEXTS:
            for count in streams:
                requests = submissions(tokenizer, kind, count, random.Random(f"{seed} {number} {kind} {count}"))
                for name, found in one_round(executors, config, requests).items():
                    cells.setdefault((kind, count, name), []).append(found)
                    print(kind, count, name, {key: round(value, 1) for key, value in found.items()}, flush=True)
    for executor, _ in made:
        executor.shutdown()
    summary = [
        {"text": kind, "streams": count, "drafts": name, **_summary(found, cells[kind, count, "none"])}
        for (kind, count, name), found in cells.items()
    ]
    document = {"benchmark": "speculation", **machine(), "seed": seed, "rounds": rounds, "answer_tokens": ANSWER}
    return document | {"config": dataclasses.asdict(config), "cells": summary}


def _summary(found: Sequence[dict[str, float]], plain: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return median, minimum and maximum over the rounds; `ratio` is relative to the same round without drafts."""
    figures = {name: [result[name] for result in found] for name in ("tokens_s", "step_ms")}
    figures["ratio"] = [result["tokens_s"] / base["tokens_s"] for result, base in zip(found, plain, strict=True)]
    spread = {name: [statistics.median(values), min(values), max(values)] for name, values in figures.items()}
    return spread | {name: sum(result[name] for result in found) for name in ("drafted", "accepted")}


def table(document: dict[str, Any]) -> str:
    """Render tokens a second and their ratio to those without drafts: medians over rounds, with minimum and maximum in
    brackets."""
    lines = [f"| text, streams | {' | '.join(ARMS)} |", "|---" * (len(ARMS) + 1) + "|"]
    rows: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for cell in document["cells"]:
        rows.setdefault((cell["text"], cell["streams"]), {})[cell["drafts"]] = cell
    for (kind, count), cells in rows.items():
        found = []
        for name in ARMS:
            tokens_s, ratio = cells[name]["tokens_s"], cells[name]["ratio"]
            times = f", × {ratio[0]:.2f} ({ratio[1]:.2f}–{ratio[2]:.2f})" if name != "none" else ""
            found.append(f"{tokens_s[0]:.0f} ({tokens_s[1]:.0f}–{tokens_s[2]:.0f}){times}")
        lines.append(f"| {kind}, {count} | {' | '.join(found)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.speculation",
        description="Measure tokens a second with and without prompt-lookup drafts, on repetitive texts "
        "and on others. It also checks that the answers are the same. It runs the engine directly, without "
        "a server.",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="directory, .gguf file or hub id (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds over all settings (%(default)s)")
    parser.add_argument(
        "--streams", type=int, nargs="*", default=STREAMS, help="numbers of concurrent streams to measure"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=time.time_ns() % 1_000_000,
        help="seed of the load; another one each time if not given",
    )
    parser.add_argument("--out", type=Path, help="also write the JSON document to this file")
    options = parser.parse_args(arguments)
    asked = EngineConfig(  # the settings of config.yaml, with weights in bfloat16
        device="cpu", quantize="none", max_num_seqs=64, max_num_batched_tokens=128, kv_cache_memory_gib=0.5
    )
    model = prepare_model(options.model, progress=False)
    document = measure(model, asked, options.rounds, options.streams, options.seed)
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
