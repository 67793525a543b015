"""Contracts of a real mixture whose experts are spread over ranks in lockstep: each rank answers as an engine alone.
Never a way to serve: `StepPlan.joint` is followed here by an executor of this test around the CPU's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.async_engine import AsyncEngine
from engine.build.executor import create_executor
from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.lockstep.threads import make_thread_ranks
from engine.protocol import Failed, SamplingParams, Token
from engine.step import Capabilities, ExecutorFatalError, StepOutput, StepPlan
from kernels.collectives.experts import NUM_SUMS, exchange_experts, held_experts
from kernels.collectives.group import RankLostError
from kernels.forward import Routing
from tests.support.rank_threads import ThreadGroup, make_thread_groups
from tests.support.tiny_models import save_model

pytestmark = pytest.mark.anyio

PROMPTS = [tuple(range(3, 3 + length)) for length in (5, 11, 1, 20)]


class MixtureRank:
    """Runs plans on a CPU executor of which this rank's part of the experts is used, and exchanges the rest."""

    def __init__(self, executor: Any, ranks: ThreadGroup | None, fails_on: int | None) -> None:
        self.executor, self._ranks = executor, ranks
        self._fails_on = fails_on
        decoder = executor.model.decoder
        layers = zip(decoder.config.layers, decoder.weights.layers, strict=True)
        self._mixtures = [(config.experts.routing, layer) for config, layer in layers if config.experts is not None]
        self._num_launches = self._num_left = self._most = 0
        if ranks is not None:
            executor.model._ops = replace(executor.model._ops, experts=self._experts)

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.executor.capabilities, lockstep=self._ranks is not None)

    def _experts(self, x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, routing: Routing) -> Tensor:
        assert self._ranks is not None
        if len(x) and self._num_left == len(self._mixtures) - 1 and self._num_launches == self._fails_on:
            raise RuntimeError("injected, after the first exchange")
        self._num_left -= 1
        own = held_experts(len(router), self._ranks.rank, self._ranks.size)
        held = gate_up[own.start : own.stop], down[own.start : own.stop]
        try:
            return exchange_experts(self._ranks, x, self._most, router, *held, routing)
        except RankLostError as error:
            raise ExecutorFatalError("a rank has gone") from error

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        if self._ranks is None:
            return self.executor.launch(plan)
        assert plan.joint is not None
        self._most, self._num_left, failure = plan.joint.tokens, len(self._mixtures), None
        if plan.rows:
            self._num_launches += 1
            try:
                self.executor.launch(replace(plan, joint=None))
            except ExecutorFatalError:
                raise
            except Exception as error:  # noqa: BLE001  raised below
                failure = error
        for routing, layer in self._mixtures[len(self._mixtures) - self._num_left :]:
            nothing = torch.zeros(0, layer.router.shape[1], dtype=layer.gate_up.weight.dtype)
            self._experts(nothing, layer.router, layer.gate_up.weight, layer.down.weight, routing)
        if failure is not None:
            raise failure

    def collect(self) -> StepOutput:
        return self.executor.collect()

    def forget(self, request_ids: Sequence[str]) -> None:
        self.executor.forget(request_ids)

    def shutdown(self) -> None:
        if self._ranks is not None:
            self._ranks.give_up("the rank ends")
        self.executor.shutdown()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixture")
    save_model("qwen3_moe", directory)
    return directory


@pytest.fixture
def make_engines(checkpoint: Path) -> Iterator[Any]:
    made: list[AsyncEngine] = []

    def make(size: int, fails_on: int | None = None, **settings: Any) -> list[tuple[AsyncEngine, ThreadGroup | None]]:
        """`fails_on`: the launch of the last rank that fails, counted from 1."""
        ranks: list[Any] = [None] if size == 1 else make_thread_ranks(size)
        sums: list[Any] = [None] if size == 1 else make_thread_groups(size)
        engines = []
        for number, (end, group) in enumerate(zip(ranks, sums, strict=True)):
            asked = {"dtype": "float32", "num_kv_blocks": 24, "max_num_seqs": 4, "num_threads": 1, "max_model_len": 64}
            executor, config = create_executor(checkpoint, EngineConfig(**asked, kernels="torch_cpu", **settings))
            rank = MixtureRank(executor, group, fails_on if number == size - 1 else None)
            engines.append((AsyncEngine(EngineCore(rank, config, lockstep=size > 1), end), group))
        made.extend(engine for engine, _ in engines)
        return engines

    yield make
    for engine in made:
        engine.shutdown()


async def answer(engine: AsyncEngine, prompt: tuple[int, ...], count: int = 9) -> list[int] | Failed:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    events = [event async for event in engine.generate(prompt, params)]
    return events[-1] if isinstance(events[-1], Failed) else [e.token_id for e in events if isinstance(e, Token)]


@pytest.mark.parametrize("overlap", [False, True])
async def test_ranks_answer_as_an_engine_with_all_experts_does(make_engines: Any, overlap: bool) -> None:
    ((alone, _),) = make_engines(1)
    wanted = [await answer(alone, prompt) for prompt in PROMPTS]
    (first, sums), (second, others) = make_engines(2, overlap=overlap, max_prefill_tokens=8)
    asked = [answer(first, PROMPTS[0]), *(answer(second, prompt) for prompt in PROMPTS[1:])]
    assert await asyncio.gather(*asked) == wanted
    assert await answer(first, PROMPTS[1]) == wanted[1], "the other rank has no request"
    assert sums.num_calls == others.num_calls
    assert not sums.num_calls % (2 * NUM_SUMS), "two layers of three have experts"


async def test_a_rank_that_fails_between_two_layers_makes_the_rest_of_its_exchanges(make_engines: Any) -> None:
    ((alone, _),) = make_engines(1)
    (first, sums), (second, others) = make_engines(2, fails_on=2)
    good, bad = await asyncio.gather(answer(first, PROMPTS[3]), answer(second, PROMPTS[1]))
    assert good == await answer(alone, PROMPTS[3])
    assert isinstance(bad, Failed)
    assert await answer(second, PROMPTS[1]) == await answer(alone, PROMPTS[1])
    assert sums.num_calls == others.num_calls
