"""Owns an engine of the default model that a measurement drives request by request, and its clock, which can skip time.
Never uses a thread or a server: the caller's loop steps the engine."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine.build import resolve
from engine.build.executor import create_executor
from engine.checkpoints.gguf_form import gguf_form
from engine.checkpoints.prepare import prepare_model
from engine.config import DEFAULT_MODEL, EngineConfig, ResolvedConfig, SpeculativeConfig
from engine.core.core import EngineCore
from engine.execution.device import choose_device
from engine.kv_tiers import Tier
from engine.models.config import read_model_config
from engine.protocol import Failed, Finished, LoadSnapshot, SamplingParams, Scheduled, Submission, Token, TokenLogprobs
from engine.scheduling.request import create_request
from engine.step import Executor

WAIT_S = 0.05
"""How long nothing is done if no move ends meanwhile. A load that never ends is given up by its own timeout."""
SETTLE_S = 300.0


class Clock:
    """Real seconds, and those that were skipped: an engine that is idle takes a pause of any length for passed."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def __call__(self) -> float:
        return time.perf_counter() + self._skipped

    def skip_to(self, at: float) -> None:
        """Let it be `at`, unless it is later already."""
        self._skipped += max(at - self(), 0.0)


@dataclass(frozen=True, slots=True)
class Asked:
    """What came of one request."""

    first_s: float
    """From its submission to its first token, in seconds."""
    cached_tokens: int
    answer: tuple[tuple[int, TokenLogprobs | None], ...]
    """Its tokens, with their log-probabilities if they were asked for."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token_id for token_id, _ in self.answer)


class DrivenEngine:
    """One engine, which is asked one thing after another."""

    def __init__(self, executor: Executor, config: ResolvedConfig) -> None:
        self.clock = Clock()
        self.config = config
        self._core = EngineCore(executor, config, clock=self.clock)
        self._moved = threading.Event()
        self._core.on_move(self._moved.set)
        self._arrivals = itertools.count()

    def load(self) -> LoadSnapshot:
        return self._core.load()

    def blocks_in(self, tier: Tier) -> int:
        """Return how many blocks a tier is known to have; 0 if there is no such tier."""
        return sum(load.num_blocks for load in self.load().tiers if load.tier is tier)

    def ask(
        self, prompt: Sequence[int], num_tokens: int, *, session: str = "", salt: str = "", logprobs: int | None = None
    ) -> Asked:
        """Have a greedy answer of `num_tokens` tokens, and wait for its end.

        Raises:
            RuntimeError: the engine failed it.
        """
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=logprobs)
        number = next(self._arrivals)
        submission = Submission(f"request {number}", tuple(prompt), params, session=session, cache_salt=salt)
        began, first_s, cached, answer = time.perf_counter(), None, 0, []
        self._core.submit(create_request(submission, self.config, number))
        while True:
            for event in self._step():
                match event:
                    case Scheduled(cached_tokens=cached):
                        pass
                    case Token(token_id=token_id, logprobs=found):
                        first_s = time.perf_counter() - began if first_s is None else first_s
                        answer.append((token_id, found))
                    case Failed(message=message):
                        raise RuntimeError(f"a request failed: {message}")
                    case Finished():
                        assert first_s is not None
                        return Asked(first_s, cached, tuple(answer))

    def settle(self) -> None:
        """Step until nothing runs and nothing moves.

        Raises:
            RuntimeError: something still moves after SETTLE_S.
        """
        deadline = time.perf_counter() + SETTLE_S
        while self._core.has_work or self._core.is_moving:
            if time.perf_counter() > deadline:
                raise RuntimeError(f"blocks still move after {SETTLE_S:g} s: {self.load()}")
            self._step()

    def _step(self) -> list[Any]:
        if not self._core.has_work:
            self._moved.wait(WAIT_S)
        self._moved.clear()
        return self._core.step()

    def shutdown(self) -> None:
        self._core.shutdown()


@contextmanager
def default_engine(**settings: Any) -> Iterator[DrivenEngine]:
    """Build an engine of the default model with these settings, without drafts, on the CPU. It ends with the block."""
    asked = EngineConfig(device="cpu", speculative=SpeculativeConfig(method="none"), **settings)
    executor, resolved = create_executor(prepare_model(DEFAULT_MODEL, progress=False, **gguf_form(asked)), asked)
    engine = DrivenEngine(executor, resolved)
    try:
        yield engine
    finally:
        engine.shutdown()


def block_bytes() -> int:
    """Return the bytes of a KV block of the default model on this machine's CPU."""
    asked = EngineConfig(device="cpu")
    model = read_model_config(prepare_model(DEFAULT_MODEL, progress=False, **gguf_form(asked)))
    device, _ = choose_device(asked)
    return resolve.block_bytes(model, asked, resolve.resolve_dtype(asked, device)[0], None)
