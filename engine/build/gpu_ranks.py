"""Owns what the ranks of an engine on GPUs do together while they start: they meet, try the same steps, and agree.
Never measures: each rank measures its own device, and the least that any has counts."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

import torch
import torch.cuda

from engine.build.rank_start import any_port, start_followers
from engine.config import ConfigError
from engine.execution.device import Device, device_faults
from engine.execution.gpu.executor import DeviceExecutor
from engine.execution.gpu.model import DeviceModel
from engine.execution.gpu.ranks import ALONE, DeviceRanks
from engine.execution.ranks import Ranks
from engine.models.description import WHOLE, Shard
from engine.parallel.processes import RankLauncher, SubprocessLauncher
from engine.step import StepPlan
from kernels.collectives.group import LEADER, RankLostError
from kernels.collectives.nccl import GLOO, NCCL, NcclGroup, lacks

if TYPE_CHECKING:  # a machine for tests of one GPU has no package for messages
    from engine.parallel.device_follower import DeviceFollower
    from engine.parallel.ranks import Ranks as StartedRanks

_LONGEST_START_S = 3600.0
"""How long ranks may be apart while they choose their kernels."""


class Trial(Protocol):
    """The steps that a start tries, on all ranks."""

    def run(self, plan: StepPlan) -> None:
        """Run a step with its choice of tokens, and wait for it."""

    def compute(self, plan: StepPlan) -> None:
        """Queue the same step without the choice."""

    def end(self) -> None: ...


class Together(Protocol):
    """All ranks of an engine that starts, as one of them sees them."""

    @property
    def shard(self) -> Shard:
        """This rank's part."""

    @property
    def ranks(self) -> DeviceRanks: ...

    @property
    def started(self) -> Ranks | None:
        """The others, if this rank has started them."""

    def meet(self, computes: str) -> None:
        """Return once all have loaded their parts. computes: what must be the same on all ranks.

        Raises:
            ConfigError: not every rank could start.
        """

    def least(self, number: int) -> int:
        """Return the least of all ranks' numbers."""

    def trial(self, model: DeviceModel, device: Device, num_threads: int) -> Trial: ...

    def end(self) -> None:
        """End the others, where the start has failed."""


class OneGpu:
    """A Together of one."""

    shard = WHOLE
    ranks: DeviceRanks = ALONE
    started: Ranks | None = None

    def meet(self, computes: str) -> None: ...

    def least(self, number: int) -> int:
        return number

    def trial(self, model: DeviceModel, device: Device, num_threads: int) -> Trial:
        return _OwnTrial(model, device, num_threads)

    def end(self) -> None: ...


class LeadingGpu:
    """The leader's: it has started the others."""

    def __init__(self, group: NcclGroup, started: StartedRanks, vocab_sizes: list[int]) -> None:
        from engine.parallel.device_leader import LeadingDevice

        self.shard = Shard(LEADER, group.size)
        self.ranks = LeadingDevice(group, vocab_sizes, _LONGEST_START_S)
        self.started = started
        self._group = group

    def meet(self, computes: str) -> None:
        try:
            self.started.meet(computes)
        except (RankLostError, OSError) as error:
            raise not_every_rank(self._group.size, error) from error

    def least(self, number: int) -> int:
        return _least(self._group, number)

    def trial(self, model: DeviceModel, device: Device, num_threads: int) -> Trial:
        return _OwnTrial(model, device, num_threads)

    def end(self) -> None:
        if self._group.has_joined:
            self._group.give_up("the engine does not start")  # whoever is in a sum waits for nobody any more
        self.started.end()


class FollowingGpu:
    """A follower's."""

    started: Ranks | None = None

    def __init__(self, group: NcclGroup, vocab_sizes: list[int]) -> None:
        from engine.parallel.device_follower import FollowingDevice

        self.shard = Shard(group.rank, group.size)
        self.ranks = FollowingDevice(group, vocab_sizes)
        self._group = group

    def meet(self, computes: str) -> None:
        from engine.parallel.follower import answer_start
        from engine.parallel.messages import decode

        self._group.join()
        answer_start(self._group, decode(self._group.receive()), computes)

    def least(self, number: int) -> int:
        return _least(self._group, number)

    def trial(self, model: DeviceModel, device: Device, num_threads: int) -> Trial:
        from engine.parallel.device_follower import DeviceFollower

        return _ToldTrial(DeviceFollower(model, self.ranks, device))

    def end(self) -> None: ...


class _OwnTrial:
    def __init__(self, model: DeviceModel, device: Device, num_threads: int) -> None:
        self._model = model
        self._executor = DeviceExecutor(model, device, num_threads=num_threads)

    def run(self, plan: StepPlan) -> None:
        self._executor.launch(plan)
        self._executor.collect()

    @torch.inference_mode()
    def compute(self, plan: StepPlan) -> None:
        with self._model.ranks.together():
            self._model.forward(plan, {})

    def end(self) -> None:
        self._executor.shutdown()


class _ToldTrial:
    """What the leader tells is what it tries at the same time."""

    def __init__(self, follower: DeviceFollower) -> None:
        self._follower = follower

    def run(self, plan: StepPlan) -> None:
        with device_faults():
            self._follower.step()

    def compute(self, plan: StepPlan) -> None:
        self.run(plan)

    def end(self) -> None: ...


def start_gpu_ranks(
    launcher: RankLauncher | None,
    size: int,
    device: Device,
    vocab_sizes: list[int],
    specify: Callable[[Shard, str], bytes],
) -> LeadingGpu:
    """Start the followers, each of which takes one GPU. launcher: None: children of this process on the GPUs that it
    sees. specify: from a rank's part and the leader's address to engine.build.rank_start.GpuSpecification, encoded.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
    """
    from engine.parallel.ranks import Ranks as StartedRanks

    launcher = launcher or SubprocessLauncher(_gpus_for(size))
    place = any_port(launcher.remote_host or "127.0.0.1")
    with ExitStack() as undone:
        group = group_of(place, Shard(LEADER, size), device)
        undone.callback(group.close)
        started = start_followers(launcher, size, lambda shard: specify(shard, group.address), undone)
        undone.pop_all()
    return LeadingGpu(group, StartedRanks(group, started), vocab_sizes)


def group_of(place: str, shard: Shard, device: Device) -> NcclGroup:
    """Return a rank's end of the group. place: host:port of the leader."""
    backend = NCCL if device.torch_device.type == "cuda" else GLOO
    return NcclGroup(place, rank=shard.rank, size=shard.size, device=device.torch_device, backend=backend)


def not_every_rank(size: int, error: Exception) -> ConfigError:
    return ConfigError(f"tensor_parallel_size is {size}, and not every rank could start: {error}")


def check_gpu_ranks(launcher: RankLauncher | None, size: int) -> None:
    """Check that so many ranks can start. launcher: see start_gpu_ranks.

    Raises:
        ConfigError: there are fewer GPUs than ranks, or torch is too old.
    """
    if size == 1:
        return
    if (missing := lacks()) is not None:
        raise ConfigError(f"tensor_parallel_size is {size}, but {missing}.")
    if launcher is None:
        _gpus_for(size)


def _gpus_for(size: int) -> list[str]:
    """Return how CUDA names the GPU of each rank."""
    seen = torch.cuda.device_count()
    if seen < size:
        raise ConfigError(
            f"tensor_parallel_size is {size}, and each rank has a GPU of its own, but this process sees {seen}."
        )
    return visible_gpus(seen)[:size]


def _least(group: NcclGroup, number: int) -> int:
    """Return the least of the ranks' numbers below 2 ** 48: each has a place of its own, in two parts that float32 has
    exactly."""
    high, low = divmod(number, 1 << 24)
    own = torch.zeros(2, group.size)  # float32
    own[0, group.rank], own[1, group.rank] = high, low
    with group.watched(_LONGEST_START_S):  # gloo would wait for no longer than for a step
        found = group.all_reduce(own.to(group.device)).cpu()
    return min(int(first) * (1 << 24) + int(second) for first, second in found.T.tolist())


def visible_gpus(count: int) -> list[str]:
    """Return the names by which CUDA_VISIBLE_DEVICES names the `count` GPUs that this process sees."""
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(number) for number in range(count)]
