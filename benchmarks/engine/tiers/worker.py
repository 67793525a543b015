"""Runs an engine's steps on request: `worker.py SETTINGS` reads commands from standard input, and prints milliseconds.
Never imports anything but the engine, so that it also runs with the engine of an older checkout."""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from typing import Any

from engine.build.executor import create_executor
from engine.checkpoints.gguf_form import gguf_form
from engine.checkpoints.prepare import prepare_model
from engine.config import DEFAULT_MODEL, EngineConfig, SpeculativeConfig
from engine.core.core import EngineCore
from engine.protocol import Failed, SamplingParams, Submission
from engine.scheduling.request import create_request

READY = "ready"
UNCOUNTED = 3
WAIT_S = 0.05
"""How long nothing is done if no move ends meanwhile."""


class Worker:
    """An engine whose streams go on from command to command."""

    def __init__(self, settings: dict[str, Any], rows: int, context: int) -> None:
        """settings: of EngineConfig. rows, context: the streams of `decode`, and the tokens that the first begins with;
        each further one has one more, so that some block is full after every step."""
        if tiers := settings.pop("kv_tiers", None):
            from engine.config import KvTiersConfig

            settings["kv_tiers"] = KvTiersConfig(**tiers)
        config = EngineConfig(device="cpu", speculative=SpeculativeConfig(method="none"), **settings)
        model = prepare_model(DEFAULT_MODEL, progress=False, **gguf_form(config))
        executor, self._config = create_executor(model, config)
        self._core = EngineCore(executor, self._config)
        self._rows, self._context = rows, context
        self._draw = random.Random(0)
        self._count = 0
        self._streams: list[str] = []
        self._moved = threading.Event()
        if hasattr(self._core, "on_move"):
            self._core.on_move(self._moved.set)

    def decode(self, steps: int) -> list[float]:
        """Return the milliseconds of each of so many steps in which all streams decode, after a few that do not
        count."""
        if not self._streams:
            room = self._config.max_model_len - self._context - self._rows
            self._streams = [self._submit(self._context + i, room) for i in range(self._rows)]
            while self._core.load().num_queued_tokens or self._core.load().num_running < self._rows:
                self._step()
        return [self._timed() for _ in range(UNCOUNTED + steps)][UNCOUNTED:]

    def prefill(self, tokens: int) -> list[float]:
        """Return the milliseconds of each step of a fresh prompt, alone. Streams end."""
        for name in self._streams:
            self._core.abort(name)
        self._streams = []
        self._submit(tokens, 1)
        times = []
        while self._core.load().num_running or self._core.load().num_waiting:
            times.append(self._timed())
        self._settle()
        return times

    def _settle(self) -> None:
        """Wait until nothing moves, if the engine is one that moves anything."""
        while getattr(self._core, "is_moving", False) or self._core.has_work:
            self._moved.wait(WAIT_S)
            self._moved.clear()
            self._step()

    def shutdown(self) -> None:
        self._core.shutdown()

    def _submit(self, prompt: int, answer: int) -> str:
        ids = tuple(self._draw.randrange(self._config.vocab_size) for _ in range(prompt))
        name = f"request {self._count}"
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        self._core.submit(create_request(Submission(name, ids, params), self._config, self._count))
        self._count += 1
        return name

    def _timed(self) -> float:
        began = time.perf_counter()
        self._step()
        return 1000 * (time.perf_counter() - began)

    def _step(self) -> None:
        for event in self._core.step():
            if isinstance(event, Failed):
                raise RuntimeError(f"{event.request_id} failed: {event.message}")


def main() -> None:
    """Read settings, say READY, and then answer each command, which has a name and a number."""
    argparse.ArgumentParser(
        prog="python -m benchmarks.engine.tiers.worker",
        description="Run the steps that standard input asks for. benchmarks.engine.kv_tiers starts this one.",
    ).parse_args()
    worker = Worker(**json.loads(sys.stdin.readline()))
    print(READY, flush=True)
    for line in sys.stdin:
        command, number = json.loads(line)
        print(json.dumps(getattr(worker, command)(number)), flush=True)
    worker.shutdown()


if __name__ == "__main__":
    main()
