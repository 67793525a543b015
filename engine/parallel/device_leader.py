"""Owns the leader's end of the steps of a model on several GPUs: the others are told how each runs, and get its tokens.
Never waits for a device in a step: logits and tokens go from device to device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from engine.batch.logprobs import SCORED_POSITIONS, wanted_scores
from engine.execution.device import Download, device_faults
from engine.execution.gpu.ranks import Pending, Way
from engine.execution.ranks import LOST, all_or_none
from engine.parallel.messages import DeviceStep, Message, Score, bare, encode
from engine.step import ExecutorFatalError, ScheduledRequest, StepPlan
from kernels.collectives.group import RankLostError
from kernels.collectives.nccl import NcclGroup

KEPT_STEPS = 8
"""How many steps' tokens may be named as pending. There are at most two steps in flight."""


class LeadingDevice:
    """An engine.execution.gpu.ranks.DeviceRanks."""

    chooses = True

    def __init__(self, group: NcclGroup, vocab_sizes: Sequence[int], patience_s: float | None = None) -> None:
        """vocab_sizes: how many columns of the logits each rank has. patience_s: see start_serving."""
        self.group = group
        self._vocab_sizes = vocab_sizes
        self._patience_s = patience_s
        self._tokens: deque[Tensor] = deque(maxlen=KEPT_STEPS)
        self._has_told = False
        self._rows: tuple[ScheduledRequest, ...] = ()
        """Those of the step that was told last."""

    def start_serving(self) -> None:
        """From now on, a step takes the group's timeout at most. Before, kernels are compiled and chosen."""
        self._patience_s = None

    def tell(self, way: Way, plan: StepPlan, newest: Mapping[str, int], pending: Sequence[Pending]) -> None:
        scored = [score[0] for row in wanted_scores(plan.rows).values() for score in row] if way is Way.CHOOSE else []
        pieces = [scored[first : first + SCORED_POSITIONS] for first in range(0, len(scored), SCORED_POSITIONS)]
        told, self._rows = self._known_left_out(plan) if way is Way.GO_ON else plan, plan.rows
        self._send(DeviceStep(way, bare(told, newest), [self._named(one) for one in pending], pieces))

    def _known_left_out(self, plan: StepPlan) -> StepPlan:
        """Leave out blocks that rows had in the step before, which are most of what a long context's message has."""
        pairs = zip(plan.rows, self._rows, strict=True)
        rows = (row._replace(block_ids=()) if row.block_ids is before.block_ids else row for row, before in pairs)
        return replace(plan, rows=tuple(rows))

    def tell_scored(self, index: Sequence[int]) -> None:
        self._send(Score(list(index)))

    def joined(self, logits: Tensor) -> Tensor:
        if not len(logits):
            return torch.empty(0, sum(self._vocab_sizes), device=logits.device)
        found = self.group.gather(logits.float().contiguous(), self._vocab_sizes)
        assert found is not None, "this is the leader"
        return found

    def broadcast(self, tokens: Tensor) -> None:
        self.group.broadcast(tokens)

    def keep(self, tokens: Tensor) -> None:
        self._tokens.appendleft(tokens)

    @contextmanager
    def together(self, *, advances: bool = False) -> Iterator[None]:
        self._has_told = False
        with all_or_none(self.group, is_mine_alone=lambda: not (self._has_told or advances)), device_faults():
            yield

    def wait(self, download: Download) -> Sequence[Tensor]:
        try:
            with self.group.watched(self._patience_s):
                return download.wait()
        except RankLostError as error:
            raise ExecutorFatalError(f"{LOST}: {error}") from error

    def _named(self, token: Pending) -> tuple[int, int, int]:
        """Return (place, how many steps ago it was chosen, number among its step's tokens)."""
        ago = next(ago for ago, tokens in enumerate(self._tokens) if tokens is token.tokens)
        return token.place, ago, token.number

    def _send(self, message: Message) -> None:
        self._has_told = True
        self.group.send(encode(message))
