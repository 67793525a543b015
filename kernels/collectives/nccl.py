"""Owns the group of ranks that have a GPU each: NCCL adds up what lies on them, while messages go over TCP.
Never waits for a device: what waits for one waits under `watched`, which ends when a rank is lost."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
import torch.distributed.distributed_c10d
from torch import Tensor

from kernels.collectives.gloo import GlooGroup
from kernels.collectives.group import LEADER, RankLostError, no_reason, stop_if
from kernels.collectives.watch import Watch

_dist: Any = torch.distributed
_c10d: Any = torch.distributed.distributed_c10d
_POLL_S = 0.25
_ASKED_S = 0.2
"""How often a rank whose device is being connected asks whether it should go on."""
_LEAVES_S = 1.0
"""How long the same may take once another rank has gone, which may be because that one is connected and done."""
_DEVICE_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Backend:
    """What sums tensors of one kind of device."""

    name: str
    make: Callable[[Any, int, int, float], Any]
    """From a store, a rank, the number of ranks and a time limit in seconds to one of torch's process groups."""
    aborts: bool
    """Whether any thread may end the calls that others are in. If not, a call ends with its connections."""


def _nccl(store: Any, rank: int, size: int, limit_s: float) -> Any:
    # torch's own watch would end this process on an error of a lost rank, or while an abort waits for graphs, before
    # anybody heard why; `watched` ends such waits.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=limit_s)  # torch would end the process; `watched` knows better when
    return _dist.ProcessGroupNCCL(store, rank, size, options)


def _gloo(store: Any, rank: int, size: int, limit_s: float) -> Any:
    options = _dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=limit_s)
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return _dist.ProcessGroupGloo(store, rank, size, options)


NCCL = Backend("nccl", _nccl, aborts=True)
GLOO = Backend("gloo", _gloo, aborts=False)
"""The stand-in on one machine without GPUs: the same calls, on tensors of the CPU."""


class NcclGroup(GlooGroup):
    """A kernels.collectives.group.Group whose tensors are on `device`. Those on the CPU go by gloo, and messages and
    the news of a lost rank by the leader's connections.

    Sums and columns are queued on the current stream and may be captured in a graph: then each replay sums again, and
    all ranks replay the same graphs in the same order. They raise nothing that happens on the device. Of the contract,

    - each rank gets the same bits;
    - the order in which the ranks' numbers are added is NCCL's. It depends on the number of ranks and on how much is
      summed at once, and bfloat16 may be rounded at each addition. So a number's sum depends on what else is in x;
    - all ranks' devices wait for gathered columns;
    - a rank that is killed is named. One that does not arrive is not: only the device knows whom it waits for.
    """

    def __init__(
        self,
        address: str,
        *,
        rank: int,
        size: int,
        device: torch.device,
        backend: Backend = NCCL,
        join_timeout_s: float = 3600.0,
        timeout_s: float = 60.0,
    ) -> None:
        """device: the one that this rank has. Others: see GlooGroup."""
        super().__init__(address, rank=rank, size=size, join_timeout_s=join_timeout_s, timeout_s=timeout_s)
        self._device, self._backend = device, backend
        self._on_device: Any = None
        self._watch: Watch | None = None

    @property
    def device(self) -> torch.device:
        """The one whose tensors are summed there."""
        return self._device

    def join(self, why_not: Callable[[], str | None] = no_reason) -> None:
        """Join, and connect the devices: nothing connects any more while a graph is captured. Raises: as GlooGroup."""
        super().join(why_not)
        self._watch = Watch(self._late, min(_POLL_S, self._timeout_s / 4))
        # Long, where torch would end the process after it: ranks choose their kernels for minutes before they meet.
        limit_s = self._join_timeout_s if self._backend.aborts else self._timeout_s
        try:
            self._wait_until_connected(_dist.PrefixStore("device/", self._store), limit_s, why_not)
        except BaseException:
            self.close()
            raise

    def _wait_until_connected(self, store: Any, limit_s: float, why_not: Callable[[], str | None]) -> None:
        """Connect in a thread that nobody waits for once a rank is lost: what NCCL does then cannot be ended."""
        assert self._star is not None
        ends = queue.SimpleQueue[str | None]()
        threading.Thread(target=self._connect, args=(store, limit_s, ends), name="ranks-connect", daemon=True).start()
        lost = False
        while not lost:
            stop_if(why_not)
            lost = self._star.reason is not None  # but who is connected may leave
            with suppress(queue.Empty):
                if (failure := ends.get(timeout=_LEAVES_S if lost else _ASKED_S)) is None:
                    return
                self._star.lose(f"Rank {self._rank} cannot connect its device: {failure}.")
                lost = True
        raise RankLostError(self._star.reason or "This rank has closed its group.")

    def _connect(self, store: Any, limit_s: float, ends: queue.SimpleQueue[str | None]) -> None:
        """ends: gets why it failed; None: it did not."""
        assert self._watch is not None
        try:
            on_device = self._backend.make(store, self._rank, self._size, limit_s)
            with self._held:
                if not self._ended:
                    self._on_device = on_device
            del on_device
            with self._watch.over(self._join_timeout_s):
                self.all_reduce(torch.zeros(1, device=self._device)).cpu()
        except Exception as error:  # noqa: BLE001 - whoever waits for the connection raises it
            ends.put(str(error).partition("\n")[0].removesuffix(".") or repr(error))
        else:
            ends.put(None)

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.device.type != self._device.type:
            return super().all_reduce(x)
        assert x.is_contiguous()
        assert x.dtype in _DEVICE_TYPES
        if x.numel():
            self._queue(lambda group: group.allreduce([x], _options("Allreduce")))
        return x

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor | None:
        """As the contract, but all ranks get all columns, and the others drop them: so one communicator does."""
        if x.device.type != self._device.type:
            return super().gather(x, sizes)
        assert x.dtype == torch.float32
        assert len(sizes) == self._size
        assert x.shape[1] == sizes[self._rank]
        most = max(sizes)
        own = x.new_zeros(len(x), most)
        own[:, : x.shape[1]] = x
        found = x.new_empty(self._size * len(x), most)
        if found.numel():
            self._queue(lambda group: group._allgather_base(found, own, _options("Allgather")))
        if self._rank != LEADER:
            return None
        parts = found.view(self._size, len(x), most)
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], 1)

    def broadcast(self, x: Tensor) -> None:
        """Give all ranks the leader's numbers, in place. x: [...] contiguous, of any type, of the same size on all."""
        assert x.is_contiguous()
        assert x.device.type == self._device.type
        if x.numel():
            self._queue(lambda group: group.broadcast([x], _options("Broadcast", rootRank=LEADER, rootTensor=0)))

    @contextmanager
    def watched(self, limit_s: float | None = None) -> Iterator[None]:
        """End the body's wait for the device once a rank is lost, or after `limit_s` (None: the group's timeout).

        Raises:
            RankLostError: at the body's end, if a rank is lost. What the device computed last is worth nothing then.
        """
        assert self._watch is not None, "the group has formed"
        try:
            with self._watch.over(self._timeout_s if limit_s is None else limit_s):
                yield
        except RuntimeError:
            self.check()  # an error of what was aborted is not its cause
            raise
        self.check()

    def close(self) -> None:
        super().close()
        if self._watch is not None:
            self._watch.close()

    def _late(self, limit_s: float) -> None:
        assert self._star is not None
        self._star.lose(f"Not every rank arrived within {limit_s:g} s.")

    def _end(self) -> None:
        super()._end()
        with self._held:
            on_device = self._on_device
            if not self._in_call or self._backend.aborts:
                self._on_device = None
        if on_device is not None and self._backend.aborts:
            # The device waits for nobody any more. NCCL returns only once all graphs with its calls are gone, so nobody
            # waits for that: whoever holds the graphs may be the one who ends the group.
            threading.Thread(target=on_device.abort, name="ranks-abort", daemon=True).start()

    def _queue(self, call: Callable[[Any], Any]) -> None:
        """Queue a call on the current stream; gloo, which has none, makes it at once."""
        begun = time.monotonic()
        with self._held:
            self.check()
            group = self._on_device
            self._in_call = True
        failure = _failure(call, group)
        del group
        with self._held:
            self._in_call = False
            if self._ended:  # meanwhile
                self._gloo = self._on_device = None
        if failure is not None:
            self._end()
            raise self._lost_to(failure, begun)

    def _lost_to(self, failure: str, begun: float) -> RankLostError:
        """Return what is known of why a call failed."""
        assert self._star is not None
        if self._star.reason is None and time.monotonic() - begun >= self._timeout_s:
            self._late(self._timeout_s)
        self._star.wait_for_reason()
        self._star.lose(f"Rank {self._rank} cannot reach another: {failure}.")
        return RankLostError(self._star.reason or "This rank has closed its group.")


def lacks() -> str | None:
    """Say what torch lacks for a group of GPUs. None: nothing."""
    if hasattr(_c10d.AllreduceOptions(), "asyncOp"):
        return None
    return f"torch {torch.__version__} does not add up on the stream of a step; 2.8 does"


def _options(call: str, **fields: Any) -> Any:
    """Return the options of a call that is queued on the current stream itself, and not on one of the group's."""
    options = getattr(_c10d, f"{call}Options")()
    options.asyncOp = False
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def _failure(call: Callable[[Any], Any], group: Any) -> str | None:
    """Return why a call failed. Not an error, which would hold on to the connections."""
    try:
        if (work := call(group)) is not None:
            work.wait()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None
