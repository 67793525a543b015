"""Owns a rank that follows on a GPU: it queues the steps that the leader tells, the same way, on its own device.
Never reads a value back: the leader's device has the results, and paces this one by their sums."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from engine.execution.device import Device, Download
from engine.execution.gpu.model import DeviceModel
from engine.execution.gpu.ranks import Pending, Way
from engine.models.computed import Computed
from engine.parallel.device_leader import KEPT_STEPS
from engine.parallel.messages import DeviceStep, End, Message, Score, decode
from engine.step import ScheduledRequest, StepPlan
from kernels.collectives.group import LEADER, RankLostError
from kernels.collectives.nccl import NcclGroup


class FollowingDevice:
    """An engine.execution.gpu.ranks.DeviceRanks of a rank that is told, and chooses nothing."""

    chooses = False

    def __init__(self, group: NcclGroup, vocab_sizes: Sequence[int]) -> None:
        """vocab_sizes: how many columns of the logits each rank has."""
        self.group = group
        self._vocab_sizes = vocab_sizes
        self.tokens: deque[Tensor] = deque(maxlen=KEPT_STEPS)
        """Those of the last steps, the newest first."""

    def tell(self, way: Way, plan: StepPlan, newest: Mapping[str, int], pending: Sequence[Pending]) -> None: ...

    def tell_scored(self, index: Sequence[int]) -> None: ...

    def joined(self, logits: Tensor) -> Tensor:
        if len(logits):
            self.group.gather(logits.float().contiguous(), self._vocab_sizes)
        return logits

    def broadcast(self, tokens: Tensor) -> None:
        self.group.broadcast(tokens)

    def keep(self, tokens: Tensor) -> None:
        self.tokens.appendleft(tokens)

    @contextmanager
    def together(self, *, advances: bool = False) -> Iterator[None]:
        yield

    def wait(self, download: Download) -> Sequence[Tensor]:
        raise AssertionError("a follower waits for no results")


class DeviceFollower:
    """This rank's part of a model on its device, and its end of the group."""

    def __init__(self, model: DeviceModel, ranks: FollowingDevice, device: Device) -> None:
        self._model, self._ranks, self._device = model, ranks, device
        self._computed: Computed | None = None
        self._rows: tuple[ScheduledRequest, ...] = ()

    def run(self) -> None:
        """Follow until the leader has ended in order.

        Raises:
            RankLostError: another rank is lost.
            Exception: this rank has failed.
        """
        while not isinstance(message := decode(self._ranks.group.receive()), End):
            self._obey(message)

    def step(self) -> None:
        """Do one step that the leader tells.

        Raises: as run; RankLostError also if the leader ends instead.
        """
        message = decode(self._ranks.group.receive())
        if isinstance(message, End):
            raise RankLostError(f"Rank {LEADER} has ended.")
        self._obey(message)

    @torch.inference_mode()
    def _obey(self, message: Message) -> None:
        match message:
            case DeviceStep():
                self._step(message)
            case Score(tokens=tokens):
                assert self._computed is not None, "a step came before"
                self._computed.logits_at(torch.tensor(tokens))
            case _:
                raise ValueError(f"{type(message).__name__} is no message for a rank on a GPU")

    def _step(self, step: DeviceStep) -> None:
        state, self._computed = self._model.state, None  # its memory may be needed
        plan = self._with_known(step.plan) if step.way is Way.GO_ON else step.plan
        self._rows = plan.rows
        if state is not None:
            state.place(plan)
        pending = [Pending(place, self._ranks.tokens[ago], number) for place, ago, number in step.pending]
        match step.way:
            case Way.GO_ON:
                self._model.go_on(plan, {})
            case Way.BEGIN:
                begun = self._model.begin(plan, {}, pending)
                assert begun is not None, "all ranks have captured the same sizes"
            case Way.CHOOSE:
                self._choose(step, pending)
            case Way.COMPUTE:
                self._computed, _ = self._model.start(plan, {}, pending, Way.COMPUTE)
        if state is not None:
            state.save(plan)

    def _with_known(self, plan: StepPlan) -> StepPlan:
        """Fill in the blocks of rows that have those of the step before."""
        pairs = zip(plan.rows, self._rows, strict=True)
        rows = (row if row.block_ids else row._replace(block_ids=before.block_ids) for row, before in pairs)
        return replace(plan, rows=tuple(rows))

    def _choose(self, step: DeviceStep, pending: Sequence[Pending]) -> None:
        """Queue what the leader queues around its choice, in its order."""
        computed, _ = self._model.start(step.plan, {}, pending)
        for piece in step.scored:
            computed.logits_at(torch.tensor(piece))
        if num_places := len(computed.logits):
            self._model.share(torch.empty(num_places, dtype=torch.int64, device=self._device.torch_device))
