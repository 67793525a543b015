"""Owns ranks that are threads of one process: a group that sums, and models in parts that run the same plans together.
Never says what a part is, and never starts a process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.build.executor import check_executor
from engine.build.model import ModelBuilder
from engine.config import EngineConfig
from engine.models.adapted import AdaptedModel
from engine.models.computed import Model
from engine.models.config import read_model_config
from engine.models.decoder import Decoder
from engine.models.description import ModelConfig, Shard
from engine.models.eager import EagerModel
from engine.models.kv_cache import KVCache
from engine.models.native import NativeModel, torch_threads
from engine.models.recurrent_state import RecurrentState
from engine.models.shards import sharded
from engine.step import ScheduledRequest, StateUse, StepPlan
from kernels.collectives.group import LEADER, RankLostError
from kernels.eager.ops import TORCH_CPU
from tests.support.plans import chunk, decode

T = TypeVar("T")
TIMEOUT_S = 60.0
"""After which a rank that nobody meets gives up: a test that would hang fails."""


class Meeting:
    """Where the ranks of one model meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = Barrier(size, timeout=TIMEOUT_S)
        self.brought: list[Any] = [None] * size


class ThreadGroup:
    """One thread's end: the sums, gathered columns and exchanges of kernels.collectives.group.ExchangeGroup. It counts
    its calls."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self._meeting = rank, meeting
        self.num_calls = 0

    @property
    def size(self) -> int:
        return self._meeting.size

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        first, *others = (part.float() for part in self._exchange(x.clone()))
        for other in others:
            first = first + other
        return x.copy_(first)

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor | None:
        assert x.shape[1] == sizes[self.rank]
        parts = self._exchange(x)
        return torch.cat(parts, 1) if self.rank == LEADER else None

    def exchange(self, rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
        parts = self._exchange(rows.clone().split(list(counts)))
        own = [part[self.rank] for part in parts]
        return torch.cat(own), list(map(len, own))

    def _exchange(self, x: Any) -> list[Any]:
        self.num_calls += 1
        self._meeting.brought[self.rank] = x
        try:
            self._meeting.barrier.wait()
            found = list(self._meeting.brought)
            self._meeting.barrier.wait()  # before anyone brings what is next
        except BrokenBarrierError:
            raise RankLostError(f"rank {self.rank} met not all of {self.size} ranks") from None
        return found

    def send(self, message: bytes) -> None:
        raise NotImplementedError("these ranks are given the same plans")

    def receive(self) -> bytes:
        raise NotImplementedError("these ranks are given the same plans")

    @property
    def late_s(self) -> Sequence[float]:
        return ()

    def check(self) -> None:
        if self._meeting.barrier.broken:
            raise RankLostError("a rank gave up")

    def give_up(self, reason: str) -> None:
        self._meeting.barrier.abort()

    def close(self) -> None:
        pass


def make_thread_groups(size: int) -> list[ThreadGroup]:
    """Return each rank's end of one group."""
    meeting = Meeting(size)
    return [ThreadGroup(rank, meeting) for rank in range(size)]


Make = Callable[[ThreadGroup | None, Decoder, KVCache, RecurrentState | None], Model]
"""Makes a rank's model: its group (None: it is whole), its decoder and its memory."""
BLOCK_SIZE = 16


def eager(group: ThreadGroup | None, decoder: Decoder, cache: KVCache, state: RecurrentState | None) -> Model:
    if state is not None:
        return EagerModel(decoder, TORCH_CPU, cache, BLOCK_SIZE, state, group=group)
    return AdaptedModel(decoder, TORCH_CPU, cache, BLOCK_SIZE, max_rank=8, group=group)


def native(
    group: ThreadGroup | None, decoder: Decoder, cache: KVCache, state: RecurrentState | None, **options: Any
) -> Model:
    size: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_threads": 1, "num_tokens": 16, "num_sampled": 4}
    return NativeModel(decoder, cache, state, **size | options, group=group)


class Ranks:
    """A model in parts, each on a thread of its own. Of one part, the whole model."""

    def __init__(self, directory: Path, size: int, *, make: Make = eager, **builder: Any) -> None:
        """builder: further fields of ModelBuilder; settings: those of EngineConfig.

        Raises:
            ConfigError: the model cannot be cut into so many parts.
        """
        self.size = size
        settings = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 12, "num_threads": 1}
        self._config = EngineConfig(**settings | builder.pop("settings", {}))
        self._directory, self._make, self._builder = directory, make, builder
        whole = read_model_config(directory)
        self.configs = [sharded(whole, Shard(rank, size)) for rank in range(size)]
        self.groups = make_thread_groups(size)
        self.models: list[Any] = self.on_each(self._build)

    def _build(self, rank: int) -> Model:
        group = self.groups[rank] if self.size > 1 else None
        config: ModelConfig = self.configs[rank]

        def runner(decoder: Decoder, cache: KVCache, state: RecurrentState | None) -> Model:
            return self._make(group, decoder, cache, state)

        builder = ModelBuilder(
            model_dir=self._directory,
            model=config,
            config=self._config,
            resolved=check_executor(self._directory, self._config),
            runner=runner,
            **self._builder,
        )
        return builder.build()

    def on_each(self, do: Callable[[int], T]) -> list[T]:
        """Run on all ranks at the same time. Return what they return, or raise the first one's error."""

        def alone(rank: int) -> T:
            try:
                return do(rank)
            except BaseException as error:
                self.groups[rank].give_up(str(error))
                raise

        with torch_threads(1), ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(alone, rank) for rank in range(self.size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, RankLostError)):
            raise error
        return [future.result() for future in futures]

    def logits(self, rows: Sequence[ScheduledRequest]) -> Tensor:
        """Run a step on all ranks. Return the logits of every token, the ranks' columns beside each other.
        # [num_tokens, vocab]"""
        plan = StepPlan(0, tuple(self._stateful(row) for row in rows))

        @torch.inference_mode()
        def step(rank: int) -> Tensor:
            computed = self.models[rank].forward(plan, {})
            return computed.logits_at(torch.arange(plan.num_tokens)).float().clone()

        return torch.cat(self.on_each(step), 1)

    def _stateful(self, row: ScheduledRequest) -> ScheduledRequest:
        return row._replace(state=StateUse(0)) if self.configs[0].linear_layers else row

    def prompt(
        self, tokens: Sequence[int], blocks: Sequence[int], chunk_size: int = 16, adapter: str | None = None
    ) -> Tensor:
        """Return the logits at each position of a prompt, fed in chunks. # [len(tokens), vocab]"""
        steps = range(0, len(tokens), chunk_size)
        rows = [chunk("a", tokens, first, min(first + chunk_size, len(tokens)), blocks) for first in steps]
        return torch.cat([self.logits([row if adapter is None else row._replace(adapter=adapter)]) for row in rows])

    def greedy(self, tokens: Sequence[int], blocks: Sequence[int], count: int) -> list[int]:
        """Return the tokens with which the model goes on."""
        text, scores = list(tokens), self.prompt(tokens, blocks)
        while True:
            text.append(int(scores[-1].argmax()))
            if len(text) == len(tokens) + count:
                return text[len(tokens) :]
            scores = self.logits([decode("a", text[-1], len(text) - 1, blocks)])
