"""Contracts of the memory and the threads of ranks: each machine counts its own, and the least room decides for all.
Never starts a process: the followers are threads, and the leader believes that they are elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build.engine import check_engine
from engine.build.executor import check_executor, create_executor
from engine.build.host_fit import KV_SHARE, HostBudget, host_use
from engine.build.rank_fit import claim_rank
from engine.build.resolve import block_bytes
from engine.config import ConfigError, EngineConfig, ResolvedConfig
from engine.host.cores import usable_cores, usable_threads
from engine.host.memory import HostMemory
from engine.host.shares import Claim, Room, Shares
from engine.models.config import read_model_config
from engine.models.description import Shard
from engine.models.shards import sharded
from engine.protocol import SamplingParams
from tests.support.rank_engine import Engine, on_ranks, saved
from tests.support.thread_launcher import ThreadLauncher
from tests.support.tiny_models import save_model

SETTINGS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 12, "num_threads": 1, "tensor_parallel_size": 2}


def counted(directory: Path, here: list[int] | None, **settings: Any) -> tuple[ResolvedConfig, list[int]]:
    """Start an engine and end it. Return its resolved config, and the sizes of all claims on memory."""
    claims: list[int] = []
    claim = Shares.claim

    def keep(shared: Shares, size: int) -> Claim:
        claims.append(size)
        return claim(shared, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shares, "claim", keep)
        launcher = ThreadLauncher(None if here is None else "127.0.0.1", here=here)
        executor, resolved = create_executor(directory, EngineConfig(**SETTINGS | settings), launcher=launcher)
    executor.shutdown()
    return resolved, claims


def test_each_rank_claims_its_memory_on_its_own_machine(tmp_path: Path) -> None:
    """The leader claims that of all ranks which are on its machine."""
    save_model("llama", tmp_path)
    _, together = counted(tmp_path, None)
    _, apart = counted(tmp_path, [0])
    assert len(together) == 1
    assert len(apart) == 2
    assert sum(apart) == together[0]
    assert min(apart) > 0.4 * together[0], "each has about half of it"


def test_a_rank_joins_the_leaders_claim_where_that_counts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes would seem promised as well as taken, and another engine would not fit beside this one."""
    joined: list[Path] = []
    monkeypatch.setattr("engine.build.follower.join_claim", joined.append)
    save_model("llama", tmp_path)
    counted(tmp_path, None)
    assert len(joined) == 1
    counted(tmp_path, [0])
    assert len(joined) == 1


def test_threads_of_a_rank_on_another_machine_do_not_count_here(tmp_path: Path) -> None:
    cores = usable_cores()
    save_model("llama", tmp_path)
    with pytest.raises(ConfigError, match=f"num_threads is {2 * cores}: expected at most {cores}"):
        counted(tmp_path, None, num_threads=2 * cores)
    resolved, _ = counted(tmp_path, [0], num_threads=2 * cores)
    assert resolved.num_threads == 2 * cores
    unset, _ = counted(tmp_path, [0], num_threads=None)
    assert "; 1 of 2 ranks are on this machine, and all have" in unset.reasons["num_threads"]
    assert unset.num_threads == 2 * usable_threads()[0]


def test_a_check_of_ranks_on_several_machines_counts_only_the_first_rank_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: an engine that several nodes could hold was refused before it started."""
    directory = saved(tmp_path, "llama")
    model, cores = read_model_config(directory), usable_cores()
    config = EngineConfig(**SETTINGS | {"num_threads": 2 * cores, "kernels": "torch_cpu"})
    use = host_use(directory, sharded(model, Shard(0, 2)), config, torch.float32, native=False).total
    free = use + 12 * block_bytes(model, config, torch.float32, None, (0,))
    room = Room(free=free, share=free, engines=1, memory=HostMemory(free, free, "a test's file"))
    monkeypatch.setattr(Shares, "room", lambda *_: room)
    resolved = check_engine(str(directory), config, ranks_apart=True)
    assert (resolved.num_kv_blocks, resolved.num_threads) == (12, 2 * cores)
    with pytest.raises(ConfigError, match="This engine needs"):
        check_engine(str(directory), config)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=f"num_threads is {2 * cores}: expected at most {cores}"):
        check_engine(str(directory), config)


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        ("memory", r"Rank 1, on .*: This engine needs .* without any KV cache .*, but 0.00 GiB of 1.00 GiB are free"),
        ("cores", r"Rank 1, on .*: num_threads is 1: expected at most 0, .*; 2 are for all 2 ranks"),
    ],
)
def test_a_rank_whose_own_machine_lacks_something_is_named_with_its_machine(
    lacking: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("llama", tmp_path)
    if lacking == "memory":
        nothing = Room(free=0, share=0, engines=1, memory=HostMemory(0, 2**30, "a test's file"))
        room = Shares.room
        monkeypatch.setattr(Shares, "room", lambda *given: nothing if is_follower() else room(*given))
    else:
        monkeypatch.setattr(
            "engine.build.rank_fit.refused_threads", lambda count: f"num_threads is {count}: expected at most 0, none"
        )
    launcher = ThreadLauncher("127.0.0.1", here=[0])
    with pytest.raises(ConfigError, match=message):
        create_executor(tmp_path, EngineConfig(**SETTINGS | {"num_threads": 2}), launcher=launcher)


def test_a_ranks_part_of_the_kv_cache_must_fit_on_its_own_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("llama", tmp_path)
    config, model, shard = EngineConfig(**SETTINGS), read_model_config(tmp_path), Shard(1, 2)
    resolved = check_executor(tmp_path, config)
    use = host_use(tmp_path, sharded(model, shard), config, torch.float32, native=False).total
    cache = 12 * block_bytes(model, config, torch.float32, None, (1,))
    given = tmp_path, model, shard, config, resolved
    for free, fits in ((use + cache, True), (use + cache - 1, False)):
        room = Room(free=free, share=free, engines=1, memory=HostMemory(free, free, "a test's file"))
        monkeypatch.setattr(Shares, "room", lambda shared, engines, room=room: room)
        if fits:
            claim, num_blocks = claim_rank(*given, native=False, engines=1)
            assert num_blocks == 12
            claim.release()
        else:
            with pytest.raises(ConfigError, match=r"Rank 1, on .*: its part of the KV cache of 12 blocks takes 0.00"):
                claim_rank(*given, native=False, engines=1)


UNSET = SETTINGS | {"num_kv_blocks": None, "max_model_len": 128, "max_num_seqs": 4}
MOST = 4 * 128 // 16
"""All that four requests can hold, in blocks: there is room for that on the leader's machine."""


def limit_rank(directory: Path, num_blocks: float, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the machine of rank 1 have room for so many blocks, where all others have what there is."""
    model = read_model_config(directory)
    use = host_use(directory, sharded(model, Shard(1, 2)), config, torch.float32, native=False).total
    one = block_bytes(model, config, torch.float32, None, (1,))
    free = use + int(num_blocks * one / KV_SHARE)
    small = Room(free=free, share=free, engines=1, memory=HostMemory(free, free, "a test's file"))
    room = Shares.room
    monkeypatch.setattr(Shares, "room", lambda *given: small if is_follower() else room(*given))


@pytest.mark.parametrize(("fits", "planned"), [(5.5, 5), (MOST + 0.5, MOST), (1000, MOST)])
def test_the_leader_plans_with_the_kv_blocks_of_the_rank_with_the_least_room(
    fits: float, planned: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each claims the memory of these alone, so that the next engine finds the rest."""
    save_model("llama", tmp_path)
    config = EngineConfig(**UNSET, kernels="torch_cpu")
    limit_rank(tmp_path, fits, config, monkeypatch)
    claims: list[Claim] = []
    claim = Shares.claim

    def keep(shared: Shares, size: int) -> Claim:
        claims.append(claim(shared, size))
        return claims[-1]

    monkeypatch.setattr(Shares, "claim", keep)
    executor, resolved = create_executor(tmp_path, config, launcher=ThreadLauncher("127.0.0.1", here=[0]))
    sizes = [one._size for one in claims]
    executor.shutdown()
    assert resolved.num_kv_blocks == planned
    named = "rank 1 has room for no more on its machine" in resolved.reasons["num_kv_blocks"]
    assert named == (planned < MOST)
    model = read_model_config(tmp_path)
    shapes = [sharded(model, Shard(rank, 2)) for rank in (0, 1)]
    uses = [host_use(tmp_path, shape, config, torch.float32, native=False).total for shape in shapes]
    ones = [block_bytes(model, config, torch.float32, None, (rank,)) for rank in (0, 1)]
    assert sizes == [use + planned * one for use, one in zip(uses, ones, strict=True)]


def test_each_rank_that_has_more_room_than_the_one_with_the_least_gives_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: only the leader did, and the next engine on a follower's machine lacked what nobody used."""
    save_model("llama", tmp_path)
    config = EngineConfig(**UNSET | {"tensor_parallel_size": 3, "kernels": "torch_cpu"})
    has_room = {"rank-1": 20, "rank-2": 5}
    claim, claims = Shares.claim, dict[str, Claim]()

    def keep(shared: Shares, size: int) -> Claim:
        own = claims[threading.current_thread().name] = claim(shared, size)
        return own

    def fit(*given: Any) -> tuple[int, str]:
        return has_room.get(threading.current_thread().name, 30), "injected"

    monkeypatch.setattr(Shares, "claim", keep)
    monkeypatch.setattr(HostBudget, "blocks", fit)
    executor, resolved = create_executor(tmp_path, config, launcher=AloneThreads("127.0.0.1"))
    executor.shutdown()  # which waits for the followers
    assert resolved.num_kv_blocks == 5
    model = read_model_config(tmp_path)
    for rank, name in enumerate((threading.current_thread().name, *has_room)):
        use = host_use(tmp_path, sharded(model, Shard(rank, 3)), config, torch.float32, native=False).total
        assert claims[name]._size == use + 5 * block_bytes(model, config, torch.float32, None, (rank,)), name


@pytest.mark.anyio
async def test_an_engine_whose_follower_has_the_least_room_answers_as_one_rank_with_as_many_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that planned with more would name blocks that the follower does not have."""
    directory = saved(tmp_path, "llama")
    settings = {"num_kv_blocks": None, "kernels": "torch_cpu", "max_num_seqs": 4}
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    requests = [((*range(5, 25), 40 + number), params) for number in range(3)]
    one = await on_ranks(directory, 1, requests, **settings | {"num_kv_blocks": 5})
    limit_rank(directory, 5.5, EngineConfig(**UNSET, kernels="torch_cpu"), monkeypatch)
    engine = Engine(directory, 2, ThreadLauncher("127.0.0.1", here=[0]), **settings)
    try:
        found = await engine.answers(requests)
    finally:
        load = engine.end()
    assert load.num_blocks == 5
    assert [answer.tokens for answer in found] == [answer.tokens for answer in one]


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        ({"num_kv_blocks": 12}, "its part of the KV cache of 12 blocks takes 0.00 GiB, but only 0.00 GiB is left"),
        (
            {"kv_cache_memory_gib": 0.001},
            r"its part of the KV cache of \d+ blocks takes 0.00 GiB, but only 0.00 GiB is left",
        ),
        ({}, r"kv_cache_memory_gib is unset, and one KV block takes \d+ bytes, but only 0.00 GiB is left"),
    ],
)
def test_a_rank_without_room_for_the_blocks_that_are_asked_for_or_for_any_is_named_with_what_is_free(
    asked: dict[str, Any], refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("llama", tmp_path)
    config = EngineConfig(**UNSET | {"kernels": "torch_cpu"} | asked)
    limit_rank(tmp_path, 0.5 if not asked else 4, config, monkeypatch)
    with pytest.raises(ConfigError, match=rf"Rank 1, on .*: {refusal} .*GiB of .* GiB are free \(a test's file\)"):
        create_executor(tmp_path, config, launcher=ThreadLauncher("127.0.0.1", here=[0]))


def test_ranks_of_one_other_machine_divide_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first of them would take most of it, and the second would be refused."""
    save_model("llama", tmp_path)
    sharing: list[int] = []
    room = Shares.room

    def noted(shared: Shares, engines: int) -> Room | None:
        if threading.current_thread().name.startswith("rank-"):
            sharing.append(engines)
        return room(shared, engines)

    monkeypatch.setattr(Shares, "room", noted)
    config = EngineConfig(**UNSET | {"tensor_parallel_size": 3, "kernels": "torch_cpu"})
    launcher = ThreadLauncher("127.0.0.1", here=[0])
    executor, _ = create_executor(tmp_path, config, engines=2, launcher=launcher)
    executor.shutdown()
    assert sharing == [4, 4], "two engines, each with two ranks there"


class AloneThreads(ThreadLauncher):
    """Each rank believes that it is alone on its machine."""

    def ranks_beside(self, rank: int, size: int) -> Sequence[int]:
        return [rank]


def is_follower() -> bool:
    return threading.current_thread().name == "rank-1"
