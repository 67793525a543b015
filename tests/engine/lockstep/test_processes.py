"""Contracts of ranks in lockstep that are processes: they answer as engines alone, and end together. Long: one rig.
Never needs a second machine, nor a time limit: what is waited for comes, or the test's own limit fails it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.build import lockstep
from engine.build.engine import build_engine, check_engine
from engine.build.executor import create_executor
from engine.build.host_fit import HostBudget
from engine.build.lockstep import start_lockstep
from engine.config import ConfigError, EngineConfig
from engine.host.cores import usable_cores, usable_threads
from engine.host.shares import Claim, Shares
from engine.observer import StepFacts
from engine.parallel.leading_engine import LeadingEngine
from engine.parallel.processes import Child, SubprocessLauncher
from engine.parallel.rank_messages import Question
from engine.parallel.served_rank import ServedRank
from engine.protocol import (
    EngineError,
    ErrorCode,
    Event,
    Failed,
    Finished,
    FinishReason,
    RequestRejected,
    SamplingParams,
    Submission,
    Token,
)
from kernels.collectives.gloo import GlooGroup
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


def asked(size: int, **settings: Any) -> EngineConfig:
    return EngineConfig(**ASKED | settings, expert_parallel_size=size)


class Launcher(SubprocessLauncher):
    """Keeps the processes, to kill them."""

    def __init__(self, remote_host: str | None = None) -> None:
        super().__init__()
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


Start = Callable[..., tuple[LeadingEngine, Any]]


@pytest.fixture
def start(checkpoint: Path) -> Iterator[Start]:
    made: list[LeadingEngine] = []

    def begin(size: int, launcher: Any = None, **settings: Any) -> tuple[LeadingEngine, Any]:
        launcher = launcher or Launcher()
        made.append(start_lockstep(checkpoint, asked(size, **settings), 1, launcher))
        place_by_name(made[-1])
        return made[-1], launcher

    yield begin
    for engines in made:
        engines.shutdown()


def place_by_name(engine: LeadingEngine) -> None:
    """Let a request "1 name" go to rank 1, and one without a number where it would."""
    choose = engine._places._choose

    def chosen(submission: Submission, cached: Mapping[int, int]) -> int:
        rank = submission.request_id.split()[0]
        return int(rank) if rank.isdecimal() else choose(submission, cached)

    engine._places._choose = chosen  # type: ignore[method-assign]


async def events_of(
    engine: LeadingEngine, name: str, prompt: tuple[int, ...], count: int = 9, seen: list[Event] | None = None
) -> list[Event]:
    """seen: gets the events as they come."""
    params, found = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True), [] if seen is None else seen
    async for events in engine.stream(Submission(name, prompt, params)):
        found += events
    return found


async def answer(*how: Any, **more: Any) -> list[int]:
    events = await events_of(*how, **more)
    assert isinstance(events[-1], Finished), events[-1]
    return [event.token_id for event in events if isinstance(event, Token)]


async def answers_alone(
    checkpoint: Path, prompts: Sequence[tuple[int, ...]] = PROMPTS, **settings: Any
) -> list[list[int]]:
    engine = build_engine(str(checkpoint), EngineConfig(**ASKED | settings), progress=False)
    try:
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        return [
            [event.token_id async for event in engine.generate(prompt, params) if isinstance(event, Token)]
            for prompt in prompts
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
    engine, _ = start(2, Launcher(remote_host), kernels=kernels, overlap=True)
    for rank in (0, 1):  # the other one has none
        assert await answer(engine, f"{rank} alone", PROMPTS[0]) == wanted[0]
    asking = [answer(engine, f"{int(n != 1)} {n}", prompt) for n, prompt in enumerate(PROMPTS)]
    assert await asyncio.gather(*asking) == wanted
    load = engine.load()
    assert (load.num_running, load.num_waiting, load.num_blocks) == (0, 0, 2 * 24)
    await engine.drain()
    if remote_host is None:
        meetings = engine._group_ranks._group.num_meetings  # type: ignore[attr-defined]
        assert meetings[0] == meetings[1] > 0


async def test_ranks_on_machines_with_addresses_of_ipv6_reach_their_leader_and_answer(start: Start) -> None:
    """Regression: the leader waited for their lines at its address of IPv4 alone."""
    engine, _ = start(2, ThreadLauncher("::1"), kernels="torch_cpu")
    assert len(await answer(engine, "1 asked", PROMPTS[0])) == 9


@pytest.mark.slow
@pytest.mark.parametrize(("size", "killed", "busy"), [(2, 1, 0), (2, 1, 1), (3, 1, 2), (3, 2, None)])
async def test_a_rank_that_is_killed_ends_all_with_its_name_whoever_has_requests(
    start: Start, size: int, killed: int, busy: int | None
) -> None:
    engine, launcher = start(size, kernels="torch_cpu", max_model_len=4096, num_kv_blocks=400)
    seen: list[Event] = []
    reading = (
        asyncio.create_task(events_of(engine, f"{busy} long", PROMPTS[0], 4000, seen)) if busy is not None else None
    )
    await until(lambda: reading is None or any(isinstance(event, Token) for event in seen))
    os.kill(launcher.children[killed - 1].pid, signal.SIGKILL)
    if reading is not None:
        await reading
        failed = seen[-1]
        assert isinstance(failed, Failed), "no half answer is a whole one"
        assert failed.code is ErrorCode.ENGINE_DEAD
        assert f"Rank {killed} has died" in failed.message
        assert sum(isinstance(event, Failed | Finished) for event in seen) == 1
    await until(lambda: engine._fault is not None)
    with pytest.raises(EngineError, match=f"Rank {killed} has died"):
        await engine.check_health()
    for rank in range(size):
        with pytest.raises(EngineError, match=f"Rank {killed} has died"):
            await answer(engine, f"{rank} later", PROMPTS[0])


async def test_a_rank_whose_process_is_gone_ends_an_idle_engine_also_if_its_line_does_not_end(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine without power closes no connection. Regression: the engine was healthy until its next request."""
    engine, launcher = start(2, ThreadLauncher(), kernels="torch_cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher.ranks[0], "poll", lambda: "rank 1 is gone: its node is dead")
        await until(lambda: engine._fault is not None)
    with pytest.raises(EngineError, match="Rank 1 has died: rank 1 is gone: its node is dead"):
        await engine.check_health()
    assert "rank 1 is gone: its node is dead" in caplog.text


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("the leader's", "the line to rank 1 has failed: a message could not be taken: UnpicklingError"),
        (
            "the rank's",
            "the line to the leader has failed: a message could not be taken: UnpicklingError",
        ),
    ],
)
async def test_a_message_that_one_end_cannot_read_ends_all_with_what_it_is(start: Start, end: str, told: str) -> None:
    """Regression: it was told as the death of a rank, which sent whoever looked for it to the wrong place."""
    served: list[ServedRank] = []
    run = ServedRank.run

    async def kept(self: ServedRank) -> None:
        served.append(self)
        await run(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServedRank, "run", kept)
        engine, _ = start(2, ThreadLauncher(), kernels="torch_cpu", max_model_len=4096, num_kv_blocks=400)
    seen: list[Event] = []
    reading = asyncio.create_task(events_of(engine, "1 long", PROMPTS[0], 4000, seen))
    await until(lambda: any(isinstance(event, Token) for event in seen))
    sender = engine._lines[1] if end == "the rank's" else served[0].line
    assert sender is not None
    sender._outgoing.put(b"no pickle")
    await reading
    failed = seen[-1]
    assert isinstance(failed, Failed)
    assert told in failed.message
    assert "has died" not in failed.message


class Observer:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.submissions, self.tokens, self.ends = list[str](), Counter[str](), list[str]()

    def submitted(self, submission: Submission) -> None:
        self.submissions.append(submission.request_id)

    def rejected(self, code: ErrorCode) -> None: ...

    def stepped(self, facts: StepFacts, events: Sequence[Event]) -> None:
        for event in events:
            self.tokens[event.request_id] += isinstance(event, Token)
            self.ends += [event.request_id] * isinstance(event, Finished | Failed)


async def test_a_prompt_goes_to_the_rank_that_has_its_beginning_and_has_the_answer_of_an_engine_alone(
    start: Start, checkpoint: Path
) -> None:
    """Only its end is computed again. By number, an idle engine gave all to the leader."""
    engine, _ = start(2, ThreadLauncher(), kernels="torch_cpu")
    prompts = [tuple(range(first, first + 40)) for first in (3, 50)]  # two whole blocks each
    turns = [(*prompt, 5 + turn) for turn in range(3) for prompt in prompts]
    first = await asyncio.gather(*(events_of(engine, f"first {n}", prompt) for n, prompt in enumerate(turns[:2])))
    later = [await events_of(engine, f"later {n}", prompt) for n, prompt in enumerate(turns[2:])]
    ends = [events[-1] for events in (*first, *later)]
    assert [end.usage.cached_tokens for end in ends if isinstance(end, Finished)] == [0, 0, 32, 32, 32, 32]
    assert await engine.reset_prefix_cache() >= 4
    again = await events_of(engine, "after the reset", turns[1])
    assert isinstance(again[-1], Finished)
    assert again[-1].usage.cached_tokens == 0
    blocks = [engine._places._index.num_blocks(rank) for rank in ("0", "1")]
    assert blocks == [2, 0], "the leader got it, as by number, and not the rank that had it before"
    found = [[event.token_id for event in events if isinstance(event, Token)] for events in (*first, *later)]
    assert found == await answers_alone(checkpoint, turns, kernels="torch_cpu", enable_prefix_caching=False)


async def test_more_requests_than_all_ranks_hold_are_refused_by_the_engine_s_own_limits(start: Start) -> None:
    engine, _ = start(2, ThreadLauncher(), kernels="torch_cpu", max_num_seqs=2, max_queued_requests=1)
    seen: list[list[Event]] = [[] for _ in range(6)]
    asking = [asyncio.create_task(events_of(engine, f"r{n}", PROMPTS[3], 60, events)) for n, events in enumerate(seen)]
    await until(lambda: sum(engine._places.counts) == 6)
    text = (
        r"holds 6 requests: 4 may run \(max_num_seqs 2 for each of 2 ranks\) and 2 may wait "
        r"\(max_queued_requests 1 for each of 2 ranks\)"
    )
    with pytest.raises(RequestRejected, match=text) as caught:
        await events_of(engine, "one more", PROMPTS[0])
    assert (caught.value.code, caught.value.limit, caught.value.value) == (ErrorCode.QUEUE_FULL, 6, 7)
    assert all(isinstance(events[-1], Finished) for events in await asyncio.gather(*asking)), "no rank has refused any"


async def test_requests_go_to_the_rank_with_the_fewest_and_the_observer_is_told_of_all(start: Start) -> None:
    engine, _ = start(2, ThreadLauncher(), kernels="torch_cpu")
    engine.observe(observer := Observer())
    names = ["a", "b", "c", "d"]
    asking = [asyncio.create_task(events_of(engine, name, PROMPTS[3], 40)) for name in names]
    await until(lambda: len(observer.submissions) == 4)
    assert engine._places.counts == (2, 2)
    ended = await asyncio.gather(*asking)
    assert [len([event for event in events if isinstance(event, Token)]) for events in ended] == [40] * 4
    await until(lambda: sorted(observer.ends) == names)
    assert observer.tokens == Counter(dict.fromkeys(names, 40))


async def test_a_request_of_another_rank_is_aborted_refused_and_counted_as_one_of_this(start: Start) -> None:
    engine, _ = start(2, ThreadLauncher(), kernels="torch_cpu")
    seen: list[Event] = []
    asking = asyncio.create_task(events_of(engine, "1 long", PROMPTS[3], 100, seen))
    await until(lambda: any(isinstance(event, Token) for event in seen))
    with pytest.raises(RequestRejected, match="already in use"):
        await events_of(engine, "1 long", PROMPTS[0])
    with pytest.raises(RequestRejected, match="maximum context length is 128"):
        await events_of(engine, "1 longer", tuple([3] * 200))
    engine.abort("1 long")
    last = (await asking)[-1]
    assert isinstance(last, Finished)
    assert last.reason is FinishReason.ABORT
    await until(lambda: engine._places.counts == (0, 0))


class Wire:
    """In place of a line: what is sent stays here."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


async def test_the_load_is_that_of_all_ranks_from_the_start_with_requests_that_have_only_been_sent(
    start: Start,
) -> None:
    engine, _ = start(2, ThreadLauncher(), kernels="torch_cpu")
    assert engine.load().num_blocks == 2 * 24
    lines, wire = engine._lines, Wire()
    engine._lines = {1: wire}  # type: ignore[dict-item]
    asking = asyncio.create_task(events_of(engine, "1 sent", PROMPTS[0]))
    await until(lambda: bool(wire.sent))
    assert (engine.load().num_running, engine.load().num_waiting) == (0, 1)
    engine._lines = lines
    for message in wire.sent:
        lines[1].send(message)
    assert isinstance((await asking)[-1], Finished)
    assert (engine.load().num_running, engine.load().num_waiting) == (0, 0)


def test_a_rank_s_answer_to_who_has_left_with_the_loop_is_nobody_s(start: Start) -> None:
    """It is given by the thread that reads the rank's line, which must go on."""
    engine, _ = start(2, ThreadLauncher(), kernels="torch_cpu")
    given: list[Callable[[Any], object]] = []

    async def leave() -> None:
        wire: Any = Wire()
        task = asyncio.create_task(engine._ask_rank(wire, Question.CACHED_DIGESTS, (1,)))
        await until(lambda: bool(wire.sent))
        given.extend(engine._answers.values())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    given[0]([])


async def test_cached_prefixes_are_those_of_all_ranks(start: Start) -> None:
    engine, _ = start(2, ThreadLauncher(), kernels="torch_cpu")
    prompts = [tuple(range(3, 43)), tuple(range(4, 76))]  # two whole blocks, and four
    for rank, prompt in enumerate(prompts):
        await answer(engine, f"{rank} prompt", prompt)
    found = await engine.cached_digests(100)
    assert len(set(found)) == len(found) >= 6
    # Regression: a router took for all what one rank's share of the limit had cut, and forgot the rest.
    assert [len(await engine.cached_digests(limit)) for limit in range(8)] == [
        min(limit, len(found)) for limit in range(8)
    ]
    assert await engine.reset_prefix_cache() >= 6
    assert await engine.cached_digests(100) == []


@pytest.mark.parametrize("what", ["model_digest", "torch.backends.cpu.get_cpu_capability"])
def test_a_rank_with_another_model_or_instructions_is_refused_at_the_start_and_no_process_is_left(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    versions = iter(("one version", "another version"))
    monkeypatch.setattr(f"engine.build.follower.{what}", lambda *_: next(versions))
    launcher = ThreadLauncher()
    with pytest.raises(ConfigError, match=r"have another model than rank 0"):
        start_lockstep(checkpoint, asked(2, kernels="torch_cpu"), 1, launcher)
    assert isinstance(launcher.ranks[0].error, ConfigError)


def test_ranks_read_their_model_s_files_before_others_wait_for_them(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a rank on a slow disk took longer than others wait in a step."""
    join, compute, done = GlooGroup.join, lockstep.what_computes, list[tuple[str, int]]()

    def joins(self: GlooGroup, *how: Any) -> None:
        done.append(("joins", threading.get_ident()))
        join(self, *how)

    def computes(*how: Any) -> str:
        done.append(("reads", threading.get_ident()))
        return compute(*how)

    monkeypatch.setattr(GlooGroup, "join", joins)
    monkeypatch.setattr(lockstep, "what_computes", computes)
    start(2, ThreadLauncher("127.0.0.1"), kernels="torch_cpu")
    ranks = {thread for _, thread in done}
    assert [[what for what, thread in done if thread == rank] for rank in ranks] == [["reads", "joins"]] * 2


@pytest.mark.parametrize("host", [pytest.param(None, marks=needs_compiler), "127.0.0.1"], ids=["memory", "gloo"])
def test_a_rank_that_cannot_load_ends_the_start_with_its_reason(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, host: str | None
) -> None:
    load = lockstep._load

    def fail_elsewhere(directory: Path, config: EngineConfig, engines: int, group: Any, num_here: int) -> Any:
        if group.rank:
            raise MemoryError("no room for these weights")
        return load(directory, config, engines, group, num_here)

    monkeypatch.setattr(lockstep, "_load", fail_elsewhere)
    with pytest.raises(
        ConfigError, match=r"expert_parallel_size is 2.*rank 1 ended with MemoryError.*no room for these"
    ):
        start_lockstep(checkpoint, asked(2, kernels="torch_cpu"), 1, ThreadLauncher(host))


def test_more_ranks_than_experts_are_refused_before_any_starts(checkpoint: Path) -> None:
    launcher = Launcher()
    with pytest.raises(ConfigError, match=r"expert_parallel_size is 7, but Qwen3MoeForCausalLM has 6 experts"):
        start_lockstep(checkpoint, asked(7), 1, launcher)
    assert not launcher.children


def test_an_executor_is_of_one_rank_and_more_are_refused_by_the_setting_s_name(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="expert_parallel_size is 2, but an executor is of one rank"):
        create_executor(checkpoint, asked(2))


@pytest.mark.parametrize(("ranks_apart", "sharing"), [(False, 6), (True, 2)])
def test_a_check_promises_each_rank_its_part_of_the_memory_as_the_start_does(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, ranks_apart: bool, sharing: int
) -> None:
    found: list[int] = []
    monkeypatch.setattr(
        "engine.build.executor.check_executor", lambda directory, config, engines, *_: found.append(engines)
    )
    check_engine(str(checkpoint), asked(3), 2, ranks_apart=ranks_apart)
    assert found == [sharing]


def test_each_rank_takes_its_part_of_its_own_machine_s_memory(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that are alone on a machine do not leave room for those on others."""
    sharing: dict[int, int] = {}
    load = lockstep._load

    def noted(directory: Path, config: EngineConfig, engines: int, group: Any, num_here: int) -> Any:
        sharing[group.rank] = engines
        return load(directory, config, engines, group, num_here)

    monkeypatch.setattr(lockstep, "_load", noted)
    launcher = ThreadLauncher("127.0.0.1", here=[0])
    start_lockstep(checkpoint, asked(3, kernels="torch_cpu"), 2, launcher).shutdown()
    assert sharing == {0: 2, 1: 4, 2: 4}


@pytest.mark.parametrize("small", [0, 1])
async def test_all_ranks_have_the_limits_of_the_one_with_the_least_room_and_take_a_request_up_to_these(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, small: int
) -> None:
    """Regression: the leader took by its own limits what another rank then refused. Each claims the memory of these
    blocks alone, and only the leader warns that a request may be shorter than max_model_len."""
    claim, claims, has_room = Shares.claim, dict[int, Claim](), {0: 6, 1: 6} | {small: 5}

    def rank_here() -> int:
        return int(threading.current_thread().name == "rank-1")

    def keep(shared: Shares, size: int) -> Claim:
        claims[rank_here()] = claim(shared, size)
        return claims[rank_here()]

    monkeypatch.setattr(HostBudget, "blocks", lambda *_: (has_room[rank_here()], "injected"))
    monkeypatch.setattr(Shares, "claim", keep)
    engine, _ = start(2, ThreadLauncher(), kernels="torch_cpu", num_kv_blocks=None)
    assert engine.config.num_kv_blocks == 5
    assert engine.load().num_blocks == 2 * 5
    assert claims[0]._size == claims[1]._size
    why = f"rank {small} has room for no more on its machine, and rank 0's has for 6; a request may have 81 tokens"
    assert (why in engine.config.reasons["num_kv_blocks"]) == (small == 1)
    longest = 5 * 16 + 1 - len(PROMPTS[0])
    for rank in (0, 1):
        assert len(await answer(engine, f"{rank} longest", PROMPTS[0], longest)) == longest
        with pytest.raises(RequestRejected, match="81"):
            await events_of(engine, f"{rank} longer", PROMPTS[0], longest + 1)
    warned = [record.getMessage() for record in caplog.records if record.name == "engine.build.least_room"]
    assert len(warned) == int(small == 1)


def test_each_rank_has_its_part_of_the_threads_on_its_own_machine(start: Start, checkpoint: Path) -> None:
    """Regression: threads of all ranks on all machines were counted as those of each."""
    settings = {"kernels": "torch_cpu", "num_threads": 2 * usable_cores()}
    engine, _ = start(2, ThreadLauncher("127.0.0.1", here=[0]), **settings)
    assert engine.config.num_threads == 2 * usable_cores()
    assert check_engine(str(checkpoint), asked(2, **settings), ranks_apart=True).num_threads == 2 * usable_cores()
    with pytest.raises(ConfigError, match=f"num_threads is {2 * usable_cores()}: expected at most"):
        start_lockstep(checkpoint, asked(2, **settings), 1, ThreadLauncher())
    unset, _ = start(2, ThreadLauncher("127.0.0.1", here=[0]), kernels="torch_cpu", num_threads=None)
    assert unset.config.num_threads == 2 * usable_threads()[0]


async def test_an_engine_with_the_setting_is_built_of_as_many_ranks(checkpoint: Path) -> None:
    config = asked(2, kernels="torch_cpu")
    engine = build_engine(str(checkpoint), config, progress=False, launcher=ThreadLauncher())
    assert isinstance(engine, LeadingEngine)
    place_by_name(engine)
    first, second = [await answer(engine, f"{rank} prompt", PROMPTS[1]) for rank in (0, 1)]
    assert first == second
    await asyncio.to_thread(engine.shutdown)
