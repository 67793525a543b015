"""Owns the start of engines that are ranks of a mixture, each a process with its own requests and KV.
Never decides a step, and never loads weights of another rank."""

from __future__ import annotations

import asyncio
import hashlib
import pickle
import secrets
import shutil
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from engine.async_engine import AsyncEngine
from engine.build.cpu import CpuStart, start_on_cpu
from engine.build.executor import check_executor
from engine.build.follower import group_at, what_computes
from engine.build.least_room import with_least
from engine.build.rank_fit import naming
from engine.build.ranks import place_of
from engine.config import ConfigError, EngineConfig, ResolvedConfig
from engine.core.core import EngineCore
from engine.execution.device import choose_device
from engine.execution.executor import ModelExecutor
from engine.models.description import Shard
from engine.parallel.follower import blocks_of_all
from engine.parallel.group_ranks import GroupRanks
from engine.parallel.leading_engine import LeadingEngine
from engine.parallel.line import Line
from engine.parallel.processes import Followers, RankLauncher, RankProcess, SubprocessLauncher
from engine.parallel.served_rank import ServedRank
from kernels.collectives.gloo import GlooGroup
from kernels.collectives.group import LEADER, ExchangeGroup, RankLostError, rows_of_all
from kernels.collectives.star import accept_ranks, reach_leader

_JOIN_S = 3600.0
"""How long ranks may take to load their weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockstepSpecification:
    """What a rank needs in order to load its experts, to join, and to be given requests. The leader's word alone."""

    shard: Shard
    place: Path | str
    """Where the group meets: see engine.build.follower.group_at."""
    host: str
    port: int
    token: bytes
    """Where the leader waits for the rank's line, and what it is to say first. # [16]"""
    model_dir: Path
    config: EngineConfig
    engines: int
    """How many share the memory of this rank's machine, each of the ranks there counted as one."""
    num_here: int
    """How many of this engine's ranks are on that machine."""

    def encode(self) -> bytes:
        return pickle.dumps(self)

    def follow(self) -> None:
        """Be the rank until the leader ends it. Raises: as engine.build.follower.follow."""
        peer = reach_leader(self.host, self.port, self.token, self.shard.rank, _JOIN_S)[LEADER]
        group = group_at(self.place, self.shard)
        with ExitStack() as undone:
            undone.callback(peer.close)
            undone.callback(group.close)
            with naming(self.shard.rank):
                start, executor, resolved = _load(self.model_dir, self.config, self.engines, group, self.num_here)
            undone.callback(executor.shutdown)
            computes = _what_computes(start, resolved)
            group.join()
            resolved = _agreed(group, start, resolved, computes)
            undone.pop_all()
        asyncio.run(_serve(peer, group, executor, resolved))


async def _serve(peer: socket.socket, group: ExchangeGroup, executor: ModelExecutor, resolved: ResolvedConfig) -> None:
    ranks = GroupRanks(group, lambda message: line.send(message))
    served = ServedRank(AsyncEngine(EngineCore(executor, resolved, lockstep=True), ranks), ranks)
    served.line = line = Line(peer, served.hear, served.end)
    line.start()
    try:
        await served.run()
    finally:
        await asyncio.to_thread(line.close)


def _load(
    model_dir: Path, config: EngineConfig, engines: int, group: ExchangeGroup, num_here: int
) -> tuple[CpuStart, ModelExecutor, ResolvedConfig]:
    """Load one rank's part. Also returns what claimed its memory."""
    start = start_on_cpu(model_dir, config, choose_device(config), engines, expert_ranks=group, num_here=num_here)
    return start, *start.build()


def _what_computes(start: CpuStart, resolved: ResolvedConfig) -> str:
    """Say what must be the same on all ranks. It reads samples of the model's files, which may take long: no rank waits
    for another meanwhile that has not joined."""
    return f"{what_computes(start.model_dir, resolved.kernels)} in {resolved.dtype}"


def _agreed(group: ExchangeGroup, start: CpuStart, resolved: ResolvedConfig, computes: str) -> ResolvedConfig:
    """Return what all ranks plan with. The leader checks a request by its own limits, and any rank may get it: so all
    have the KV blocks of the one with the least room. All ranks call this once they have joined. computes: here.

    Raises:
        ConfigError: as _compare.
        RankLostError: a rank is lost.
    """
    _compare(group, computes)
    room = blocks_of_all(group, resolved.num_kv_blocks)
    start.give_back_blocks(resolved.num_kv_blocks - min(room))
    return with_least(resolved, room, group.rank)


def _compare(group: ExchangeGroup, computes: str) -> None:
    """Raise ConfigError, on all ranks, unless they have the same model and compute it by the same instructions: a
    request's answer must not depend on the rank that has it. computes: here."""
    own = torch.tensor(list(hashlib.sha256(computes.encode()).digest()), dtype=torch.uint8)
    found = rows_of_all(group, own)
    others = [rank for rank in range(group.size) if not torch.equal(found[rank], own)]
    if others:
        raise ConfigError(
            f"Ranks {others} have another model than rank {group.rank}, or compute it by other kernels or "
            f"instructions: here it is {computes}."
        )


def start_lockstep(
    model_dir: Path, config: EngineConfig, engines: int = 1, launcher: RankLauncher | None = None
) -> LeadingEngine:
    """Start the `config.expert_parallel_size` ranks that have a mixture's experts between them: this process is the
    first, and starts the others.

    engines: how many of several ranks share a machine's memory. launcher: starts the others; None: as children of
    this process.

    Raises:
        CheckpointError: the checkpoint is broken or not supported.
        ConfigError: the model has too few experts, a setting does not go with ranks, or a rank could not start.
    """
    size = config.expert_parallel_size
    launcher = launcher or SubprocessLauncher()
    beside = [len(launcher.ranks_beside(rank, size)) for rank in range(size)]
    check_executor(model_dir, config, engines * beside[LEADER], launcher)  # before any rank starts
    host = launcher.remote_host or "127.0.0.1"
    place, token = place_of(launcher), secrets.token_bytes(16)
    lost: list[str] = []
    with ExitStack() as undone:
        if isinstance(place, Path):
            undone.callback(shutil.rmtree, place, ignore_errors=True)
        family = socket.getaddrinfo(host, None)[0][0]
        listener = socket.create_server(("" if launcher.remote_host else host, 0), family=family)
        group = group_at(place, Shard(LEADER, size))
        undone.callback(group.close)
        if isinstance(group, GlooGroup):
            place = group.address  # with the port that it holds
        processes: list[RankProcess] = []
        with listener:
            for rank in range(1, size):
                specification = LockstepSpecification(
                    shard=Shard(rank, size),
                    place=place,
                    host=host,
                    port=listener.getsockname()[1],
                    token=token,
                    model_dir=model_dir,
                    config=config,
                    engines=engines * beside[rank],
                    num_here=beside[rank],
                )
                processes.append(launcher.start(rank, specification.encode()))
                undone.callback(processes[-1].kill)
            followers = Followers(processes, lambda rank, how: lost.append(how))
            undone.callback(followers.expect_end)
            start, executor, resolved = _load(model_dir, config, engines * beside[LEADER], group, beside[LEADER])
            undone.callback(executor.shutdown)
            try:
                computes = _what_computes(start, resolved)
                peers = accept_ranks(listener, token, size, _JOIN_S, lambda: lost[0] if lost else None)
                for peer in peers.values():
                    undone.callback(peer.close)
                group.join(lambda: lost[0] if lost else None)
                resolved = _agreed(group, start, resolved, computes)
            except (RankLostError, OSError) as error:
                raise ConfigError(f"expert_parallel_size is {size}, and not every rank could start: {error}") from error
        undone.pop_all()
    return _led(group, executor, resolved, followers, peers)


def _led(
    group: ExchangeGroup,
    executor: ModelExecutor,
    resolved: ResolvedConfig,
    followers: Followers,
    peers: dict[int, socket.socket],
) -> LeadingEngine:
    ranks = GroupRanks(group, lambda message: engine.tell(message))
    engine = LeadingEngine(EngineCore(executor, resolved, lockstep=True), ranks, followers)
    engine.connect(
        {rank: Line(peer, partial(engine.hear, rank), partial(engine.lose, rank)) for rank, peer in peers.items()}
    )
    return engine
