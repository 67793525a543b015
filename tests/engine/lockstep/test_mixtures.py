"""Contracts of a real mixture whose experts are spread over ranks in lockstep: each rank answers as an engine alone.
Never starts a process: ranks are threads here; tests/engine/lockstep/test_processes.py has processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.async_engine import AsyncEngine
from engine.build.cpu import start_on_cpu
from engine.build.executor import create_executor
from engine.config import ConfigError, EngineConfig, SpeculativeConfig
from engine.core.core import EngineCore
from engine.execution.device import HostDevice
from engine.execution.lockstep import LockstepExecutor
from engine.lockstep.shape import StepShape
from engine.lockstep.threads import make_thread_ranks
from engine.models.config import read_model_config
from engine.models.narrow import Keep
from engine.models.shards import with_experts_of
from engine.models.stored_matrix import StoredExperts
from engine.models.weights import dummy_weights, load_weights
from engine.protocol import ErrorCode, Failed, SamplingParams, Token
from engine.step import ScheduledRequest, StateUse, StepPlan
from kernels.collectives.experts import NUM_EXCHANGES
from tests.engine.models.test_stored_matrix import converted
from tests.support import tiny_gguf
from tests.support.compiler import needs_compiler
from tests.support.packed_models import save_packed
from tests.support.plans import chunk
from tests.support.rank_threads import make_thread_groups
from tests.support.tiny_models import save_model, save_tokenizer

pytestmark = pytest.mark.anyio

PROMPTS = [tuple(range(3, 3 + length)) for length in (5, 11, 1, 20)]
KERNELS = ["torch_cpu", pytest.param("native", marks=needs_compiler)]
KINDS = ["qwen3_moe", "mixtral", "qwen3_next", "qwen3_5_moe"]
ASKED = {"dtype": "float32", "num_kv_blocks": 24, "max_num_seqs": 4, "num_threads": 1, "max_model_len": 64}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def find(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            save_model(kind, made[kind])
        return made[kind]

    return find


def executors(directory: Path, size: int, **settings: Any) -> tuple[list[Any], list[Any], Any]:
    """Return the executor of each rank, its group, and the config of one. Of size 1, that of an engine alone."""
    config = EngineConfig(**{**ASKED, **settings})
    if size == 1:
        executor, resolved = create_executor(directory, config)
        return [executor], [None], resolved
    config = replace(config, expert_parallel_size=size)
    groups = make_thread_groups(size)
    built = [start_on_cpu(directory, config, (HostDevice(), "a test"), 1, None, group).build() for group in groups]
    return [executor for executor, _ in built], list(groups), built[0][1]


@pytest.fixture
def make_engines() -> Iterator[Any]:
    made: list[AsyncEngine] = []

    def make(directory: Path, size: int, **settings: Any) -> list[Any]:
        """Return (engine, group, executor) of each rank."""
        found, groups, config = executors(directory, size, **settings)
        ranks: list[Any] = [None] if size == 1 else make_thread_ranks(size)
        engines = [
            AsyncEngine(EngineCore(executor, config, lockstep=size > 1), end)
            for executor, end in zip(found, ranks, strict=True)
        ]
        made.extend(engines)
        return list(zip(engines, groups, found, strict=True))

    yield make
    for engine in made:
        engine.shutdown()


async def answer(engine: AsyncEngine, prompt: tuple[int, ...], count: int = 9) -> list[int] | Failed:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    events = [event async for event in engine.generate(prompt, params)]
    return events[-1] if isinstance(events[-1], Failed) else [e.token_id for e in events if isinstance(e, Token)]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("overlap", [False, True])
async def test_ranks_answer_as_an_engine_with_all_experts_does(
    make_engines: Any, checkpoint: Any, kernels: str, overlap: bool
) -> None:
    directory = checkpoint("qwen3_moe")
    ((alone, _, _),) = make_engines(directory, 1, kernels=kernels)
    wanted = [await answer(alone, prompt) for prompt in PROMPTS]
    (first, sums, _), (second, others, _) = make_engines(
        directory, 2, kernels=kernels, overlap=overlap, max_prefill_tokens=8
    )
    asked = [answer(first, PROMPTS[0]), *(answer(second, prompt) for prompt in PROMPTS[1:])]
    assert await asyncio.gather(*asked) == wanted
    assert await answer(first, PROMPTS[1]) == wanted[1], "the other rank has no request"
    assert sums.num_calls == others.num_calls
    assert sums.num_calls
    assert not sums.num_calls % (2 * NUM_EXCHANGES), "two layers of three have experts"


async def test_a_rank_that_fails_between_two_layers_makes_the_rest_of_its_exchanges(
    make_engines: Any, checkpoint: Any
) -> None:
    directory = checkpoint("qwen3_moe")
    ((alone, _, _),) = make_engines(directory, 1, kernels="torch_cpu")
    (first, sums, _), (second, others, failing) = make_engines(directory, 2, kernels="torch_cpu")
    ops, calls = failing.model._ops, []

    def rope(*given: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 5:  # in the second of three layers of the second step
            raise RuntimeError("injected")
        return ops.rope(*given)

    failing.model._ops = replace(ops, rope=rope)
    good, bad = await asyncio.gather(answer(first, PROMPTS[3]), answer(second, PROMPTS[1]))
    assert good == await answer(alone, PROMPTS[3])
    assert isinstance(bad, Failed)
    assert await answer(second, PROMPTS[1]) == await answer(alone, PROMPTS[1])
    assert sums.num_calls == others.num_calls


@pytest.mark.parametrize("kernels", KERNELS)
async def test_a_rank_that_fails_once_others_have_its_rows_ends_all_and_nobody_gets_a_wrong_token(
    make_engines: Any, checkpoint: Any, kernels: str
) -> None:
    """Others have gone on to the next layer: what they exchange there is not what a repeated exchange is for."""
    (first, _, _), (second, failing, _) = make_engines(checkpoint("qwen3_moe"), 2, kernels=kernels)
    exchange = failing.exchange

    def fails_late(rows: Tensor, counts: Any) -> Any:
        found = exchange(rows, counts)
        if failing.num_calls == 3 * NUM_EXCHANGES:  # the last of the first of two layers, in the second step
            raise MemoryError("injected")
        return found

    failing.exchange = fails_late
    found = await asyncio.gather(answer(first, PROMPTS[3]), answer(second, PROMPTS[1]))
    assert [isinstance(one, Failed) and one.code for one in found] == [ErrorCode.ENGINE_DEAD] * 2
    assert failing.num_calls == 3 * NUM_EXCHANGES, "it has not come to that exchange again"


def test_a_rank_that_only_pads_computes_others_rows_with_the_engine_s_threads(checkpoint: Any) -> None:
    """torch keeps the number for each thread, and takes all cores until it is told."""
    (executor,), _, _ = executors(checkpoint("qwen3_moe"), 1, kernels="torch_cpu")
    used: list[int] = []

    class Padded:
        def begin_pass(self) -> None: ...

        def finish_pass(self) -> None:
            used.append(torch.get_num_threads())

    padding = LockstepExecutor(executor, Padded(), make_thread_groups(2)[0])  # type: ignore[arg-type]

    def pad() -> None:
        torch.set_num_threads(7)
        padding.launch(StepPlan(0, (), joint=StepShape(1, 1)))

    with ThreadPoolExecutor(1) as steps:
        steps.submit(pad).result()
    assert used == [ASKED["num_threads"]]
    padding.shutdown()


# --- the model --------------------------------------------------------------------------------------------------------


def rows_of(executor: Any, prompt: tuple[int, ...], block: int) -> ScheduledRequest:
    row = chunk("a", prompt, 0, len(prompt), [block, block + 1])
    return row._replace(state=StateUse(0)) if executor.capabilities.recurrent_state else row


def log_probs(found: list[Any], prompts: list[tuple[int, ...]]) -> list[Tensor]:
    """Run a step on all ranks, each with a prompt of its own, and return what each makes of its tokens."""

    def run(executor: Any, prompt: tuple[int, ...]) -> Tensor:
        if len(found) > 1:
            executor.model.begin_pass()
        if not prompt:
            executor.model.finish_pass()
            return torch.empty(0)
        logits: Tensor = executor.logits(StepPlan(0, (rows_of(executor, prompt, 0),)))
        return logits.log_softmax(-1)

    with ThreadPoolExecutor(len(found)) as pool:
        return list(pool.map(run, found, prompts))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_of_each_rank_are_those_of_an_engine_with_all_experts(
    checkpoint: Any, kind: str, kernels: str
) -> None:
    """Also on a rank that is alone in having tokens, and beside ranks with others."""
    (alone,), _, _ = executors(checkpoint(kind), 1, kernels=kernels)
    found, groups, _ = executors(checkpoint(kind), 3, kernels=kernels)
    steps = [[PROMPTS[3], PROMPTS[1], PROMPTS[0]], [(), PROMPTS[3], ()]]
    for prompts in steps:
        for prompt, got in zip(prompts, log_probs(found, prompts), strict=True):
            if prompt:
                torch.testing.assert_close(got, log_probs([alone], [prompt])[0], atol=1e-4, rtol=0)
    assert len({group.num_calls for group in groups}) == 1
    for executor in (alone, *found):
        executor.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_reads_its_own_experts_and_all_that_is_not_an_expert(checkpoint: Any, kind: str) -> None:
    whole = read_model_config(checkpoint(kind))
    parts = [with_experts_of(whole, rank, 4) for rank in range(4)]
    loads: list[Any] = [
        lambda config: load_weights(checkpoint(kind), config, torch.float32),
        lambda config: dummy_weights(config, torch.float32),
    ]
    for load in loads:
        every, own = load(whole), [load(part) for part in parts]
        for number, layer in enumerate(every.layers):
            assert all(torch.equal(part.layers[number].qkv.weight, layer.qkv.weight) for part in own)
            if layer.router is None:
                continue
            assert all(torch.equal(part.layers[number].router, layer.router) for part in own)
            for matrix in ("gate_up", "down"):
                held = [getattr(part.layers[number], matrix).weight for part in own]
                assert max(map(len, held)) - min(map(len, held)) <= 1
                assert torch.equal(torch.cat(held), getattr(layer, matrix).weight)
        assert all(torch.equal(part.lm_head.weight, every.lm_head.weight) for part in own)


@needs_compiler
@pytest.mark.parametrize("form", ["int_by_output", "packed_4_zeros", "fp8_blocks"])
def test_ranks_of_a_packed_mixture_compute_what_one_engine_does(tmp_path: Path, form: str) -> None:
    """Experts stay in 8 bits with a scale for each output, and are unpacked in formats with groups of 16 or 20."""
    save_packed(tmp_path / "packed", tmp_path / "plain", form, "qwen3_moe")
    check_ranks(tmp_path / "packed")


@needs_compiler
def test_ranks_with_unequally_many_packed_experts_are_set_to_the_same_also_beside_a_draft_model(tmp_path: Path) -> None:
    """Regression: what a pass of the draft model costs differed, and so their first step ended all of them."""
    save_packed(tmp_path / "packed", tmp_path / "plain", "int_by_output", "qwen3_moe")
    save_model("llama", tmp_path / "draft")
    for name in ("packed", "draft"):
        save_tokenizer(tmp_path / name)
    drafts = SpeculativeConfig(method="draft_model", model=str(tmp_path / "draft"))
    asked = {**ASKED, "kernels": "native", "num_speculative_tokens": 3, "speculative": drafts}
    config, groups = EngineConfig(**asked, expert_parallel_size=4), make_thread_groups(4)  # type: ignore[arg-type]
    starts = [start_on_cpu(tmp_path / "packed", config, (HostDevice(), "a test"), 1, None, group) for group in groups]
    for start in starts:
        start.release()
    assert {len(start.model.layers[0].experts.here) for start in starts if start.model.layers[0].experts} == {1, 2}
    first, *others = [replace(start.resolved, reasons={}) for start in starts]
    assert all(other == first for other in others)


@needs_compiler
@pytest.mark.parametrize("settings", [{}, pytest.param({"activations": "int8"}, marks=pytest.mark.slow)], ids=str)
def test_ranks_hold_their_experts_as_a_gguf_file_stores_them(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in {"hidden": 256, "inner": 512, "head_dim": 64, "expert": 256}.items():
        monkeypatch.setitem(tiny_gguf.SHAPE, name, size)
    monkeypatch.setattr("engine.build.cpu.cpu_flags", lambda: frozenset({"avx512_vnni"}))  # no other needs them here
    directory = converted(tmp_path, "qwen3moe")
    for part in (with_experts_of(read_model_config(directory), rank, 2) for rank in range(2)):
        layers = load_weights(directory, part, torch.float32, keep=Keep.GROUPED).layers
        assert all(isinstance(each.weight, StoredExperts) for layer in layers for each in (layer.gate_up, layer.down))
        assert all(len(layer.gate_up.weight) == len(layer.down.weight) in (2, 3) for layer in layers)
    check_ranks(directory, quantize="stored", **settings)


def check_ranks(directory: Path, **settings: Any) -> None:
    """Compare the log-probabilities of two ranks with those of an engine alone, on the native kernels."""
    (alone,), _, _ = executors(directory, 1, kernels="native", **settings)
    found, _, _ = executors(directory, 2, kernels="native", **settings)
    prompts = [PROMPTS[3], PROMPTS[1]]
    for prompt, got in zip(prompts, log_probs(found, prompts), strict=True):
        torch.testing.assert_close(got, log_probs([alone], [prompt])[0], atol=1e-4, rtol=0)
    for executor in (alone, *found):
        executor.shutdown()


@pytest.mark.parametrize(("kind", "most"), [("qwen3_moe", 6), ("qwen3", 0)])
def test_a_model_without_enough_experts_is_refused(checkpoint: Any, kind: str, most: int) -> None:
    with pytest.raises(ConfigError, match=f"has {most} experts in a layer, and a rank has at least one"):
        with_experts_of(read_model_config(checkpoint(kind)), 0, 7)
