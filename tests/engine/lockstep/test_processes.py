"""Contracts of ranks in lockstep that are processes: each answers as an engine alone, and all end with one.
Never needs a second machine, nor a time limit: what is waited for comes, or the test's own limit fails it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.build.engine import build_engine
from engine.build.lockstep import LockstepEngines, start_lockstep
from engine.config import ConfigError, EngineConfig
from engine.parallel.processes import Child, SubprocessLauncher
from engine.protocol import (
    EngineError,
    ErrorCode,
    Event,
    Failed,
    Finished,
    RequestRejected,
    SamplingParams,
    Submission,
    Token,
)
from tests.support.compiler import needs_compiler
from tests.support.conditions import until
from tests.support.thread_launcher import ThreadLauncher
from tests.support.tiny_models import edit_config, save_model, save_tokenizer

pytestmark = pytest.mark.anyio

PROMPTS = [tuple(range(3, 3 + length)) for length in (5, 11, 1, 20, 7)]
ASKED: dict[str, Any] = {
    "dtype": "float32",
    "num_kv_blocks": 24,
    "max_num_seqs": 4,
    "num_threads": 1,
    "max_model_len": 128,
    "max_prefill_tokens": 8,
}


class Launcher(SubprocessLauncher):
    """Keeps the processes, to kill them."""

    def __init__(self, remote_host: str | None = None) -> None:
        self.remote_host = remote_host
        self.children: list[Child] = []

    def start(self, rank: int, specification: bytes) -> Child:
        self.children.append(super().start(rank, specification))
        return self.children[-1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixture")
    save_model("qwen3_moe", directory)
    edit_config(directory, max_position_embeddings=4096)  # for answers that are long enough to be cut short
    save_tokenizer(directory)
    return directory


Start = Callable[..., tuple[LockstepEngines, Any]]


@pytest.fixture
def start(checkpoint: Path) -> Iterator[Start]:
    made: list[LockstepEngines] = []

    def begin(size: int, launcher: Any = None, **settings: Any) -> tuple[LockstepEngines, Any]:
        launcher = launcher or Launcher()
        made.append(start_lockstep(checkpoint, EngineConfig(**ASKED | settings), size, launcher))
        return made[-1], launcher

    yield begin
    for engines in made:
        engines.shutdown()


async def events_of(
    engines: LockstepEngines, name: str, prompt: tuple[int, ...], rank: int | None = None, count: int = 9
) -> list[Event]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    stream = engines.stream(Submission(name, prompt, params), rank)
    return [event async for events in stream for event in events]


async def answer(*how: Any, **more: Any) -> list[int]:
    events = await events_of(*how, **more)
    assert isinstance(events[-1], Finished), events[-1]
    return [event.token_id for event in events if isinstance(event, Token)]


async def answers_alone(checkpoint: Path, **settings: Any) -> list[list[int]]:
    engine = build_engine(str(checkpoint), EngineConfig(**ASKED | settings), progress=False)
    try:
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        return [
            [event.token_id async for event in engine.generate(prompt, params) if isinstance(event, Token)]
            for prompt in PROMPTS
        ]
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    ("kernels", "remote_host"),
    [
        pytest.param("native", None, marks=needs_compiler, id="memory"),
        pytest.param("torch_cpu", "127.0.0.1", marks=pytest.mark.slow, id="gloo"),
    ],
)
async def test_each_rank_answers_as_an_engine_alone_also_beside_one_without_requests(
    start: Start, checkpoint: Path, kernels: str, remote_host: str | None
) -> None:
    """And all have come to equally many exchanges once none has a step left to make."""
    wanted = await answers_alone(checkpoint, kernels=kernels)
    engines, _ = start(2, Launcher(remote_host), kernels=kernels, overlap=True)
    for rank in (0, 1):  # the other one has none
        assert await answer(engines, "a", PROMPTS[0], rank) == wanted[0]
    ranks = [1, 0, 1, 1, 1]
    asked = [answer(engines, f"r{n}", prompt, ranks[n]) for n, prompt in enumerate(PROMPTS)]
    assert await asyncio.gather(*asked) == wanted
    await engines.drain()
    if remote_host is None:
        meetings = engines.first._lockstep._ranks._group.num_meetings  # type: ignore[union-attr]
        assert meetings[0] == meetings[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("size", "busy"), [(2, 0), (2, 1), (3, 2), (3, None)])
async def test_a_rank_that_is_killed_ends_all_with_its_name_whoever_has_requests(
    start: Start, size: int, busy: int | None
) -> None:
    engines, launcher = start(size, kernels="torch_cpu", max_model_len=4096, num_kv_blocks=400)
    params = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
    seen: list[Event] = []

    async def read() -> None:
        async for events in engines.stream(Submission("long", PROMPTS[0], params), busy):
            seen.extend(events)

    task = None if busy is None else asyncio.create_task(read())
    await until(lambda: task is None or any(isinstance(event, Token) for event in seen))
    os.kill(launcher.children[0].pid, signal.SIGKILL)
    if task is not None:
        await task
        failed = seen[-1]
        assert isinstance(failed, Failed), "no half answer is a whole one"
        assert failed.code is ErrorCode.ENGINE_DEAD
        assert "ank 1 has died" in failed.message
    await until(lambda: engines.first._fault is not None)
    with pytest.raises(EngineError, match="ank 1 has died"):
        await engines.check_health()
    for rank in range(size):
        with pytest.raises(EngineError):
            await answer(engines, "later", PROMPTS[0], rank)


async def test_requests_go_to_the_rank_with_the_fewest_and_what_a_rank_refuses_is_told(start: Start) -> None:
    engines, _ = start(2, ThreadLauncher(), kernels="torch_cpu")
    asked = [asyncio.create_task(events_of(engines, str(number), PROMPTS[3], count=40)) for number in range(4)]
    await until(lambda: engines.others[0].num_live + engines._num_live == 4)
    assert engines.others[0].num_live == 2
    with pytest.raises(RequestRejected, match="already in use"):
        await events_of(engines, "1", PROMPTS[0], 1)
    with pytest.raises(RequestRejected, match="maximum context length is 128"):
        await events_of(engines, "long", tuple([3] * 200), 1)
    engines.others[0].abort("1")
    ended = await asyncio.gather(*asked)
    assert all(isinstance(events[-1], Finished) for events in ended)
    assert len(ended[1]) < len(ended[0])


def test_a_rank_with_another_model_is_refused_at_the_start_and_no_process_is_left(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = iter(("one version", "another version"))
    monkeypatch.setattr("engine.build.lockstep.model_digest", lambda directory: next(versions))
    launcher = ThreadLauncher()
    with pytest.raises(ConfigError, match=r"have another model than rank 0"):
        start_lockstep(checkpoint, EngineConfig(**ASKED, kernels="torch_cpu"), 2, launcher)
    assert isinstance(launcher.ranks[0].error, ConfigError)


@pytest.mark.parametrize(
    ("size", "settings", "message"),
    [
        (1, {}, "shares its experts with nobody"),
        (7, {}, "fewer than the 7 ranks"),
        (2, {"tensor_parallel_size": 2}, "tensor_parallel_size divides"),
        (2, {"max_loras": 1}, "max_loras needs adapters"),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_any_starts(
    checkpoint: Path, size: int, settings: dict[str, Any], message: str
) -> None:
    launcher = Launcher()
    with pytest.raises(ConfigError, match=message):
        start_lockstep(checkpoint, EngineConfig(**ASKED | settings), size, launcher)
    assert not launcher.children
