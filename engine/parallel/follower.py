"""Owns a rank that follows: it computes its part of each step that the leader tells, until the leader ends.
Never plans, samples or answers, and never outlives its leader."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.models.computed import Computed, Model
from engine.parallel.messages import DeviceStep, Drop, End, Keep, Message, Rewind, Score, Start, Step, decode
from engine.step import StepPlan
from kernels.collectives.group import ExchangeGroup, Exchanging, Group, RankLostError, rows_of_all


class Follower:
    """This rank's part of a model, and its end of the group."""

    def __init__(
        self,
        model: Model,
        group: ExchangeGroup,
        vocab_sizes: Sequence[int],
        digest: str,
        num_blocks: int,
        on_least: Callable[[int], None],
    ) -> None:
        """vocab_sizes: how many columns of the logits each rank has. digest: of the model's files, and of what
        computes them here. num_blocks: how many KV blocks this rank has room for. on_least: is called once with the
        least that any rank has room for, which the leader plans with."""
        self._model = model
        self._group = group
        self._vocab_sizes = vocab_sizes
        self._digest = digest
        self._num_blocks = num_blocks
        self._on_least = on_least
        self._plan: StepPlan | None = None
        self._computed: Computed | None = None

    @torch.inference_mode()
    def run(self) -> None:
        """Return when the leader has ended in order.

        Raises:
            RankLostError: another rank is lost.
            Exception: this rank has failed, and the others know why.
        """
        try:
            while self._follow():
                pass
        except RankLostError:
            raise
        except BaseException as error:
            self._group.give_up(f"{type(error).__name__}: {error}")
            raise

    def _follow(self) -> bool:
        """Do what the leader says next. Return whether more may come."""
        match decode(self._group.receive()):
            case Step(plan=plan):
                self._step(plan)
            case Score(tokens=tokens):
                self._give(self._last.logits_at(torch.tensor(tokens)))
            case Rewind(counts=counts):
                assert self._last.rewind is not None, "rows of the last step had drafts"
                self._last.rewind.to(counts)
                self._save()
            case Keep(digest=digest, files=files):
                self._keep(digest, files)
            case Drop(digest=digest):
                assert self._model.adapters is not None
                self._model.adapters.drop(digest)
            case Start() as start:
                answer_start(self._group, start, self._digest)
                self._on_least(min(blocks_of_all(self._group, self._num_blocks)))
            case End():
                return False
            case DeviceStep():
                raise ValueError("a step for a device, and this rank computes on the CPU")
        return True

    def _step(self, plan: StepPlan) -> None:
        state = self._model.state
        self._computed, self._plan = None, plan  # its memory may be needed
        if state is not None:
            state.place(plan)
        self._computed = self._model.forward(plan, {})
        self._give(self._computed.logits)
        if self._computed.rewind is None:  # else states have not moved on yet
            self._save()

    def _save(self) -> None:
        if self._model.state is not None and self._plan is not None:
            self._model.state.save(self._plan)

    @property
    def _last(self) -> Computed:
        assert self._computed is not None, "a step came before"
        return self._computed

    def _give(self, logits: Tensor) -> None:
        if len(logits):
            self._group.gather(logits.float().contiguous(), self._vocab_sizes)

    def _keep(self, digest: str, files: dict[str, bytes]) -> None:
        assert self._model.adapters is not None
        with tempfile.TemporaryDirectory(prefix="adapter-") as directory:
            for name, content in files.items():
                (Path(directory) / Path(name).name).write_bytes(content)
            found, weights = self._model.adapters.read(directory)
        if found != digest:
            raise ValueError(f"an adapter has the digest {found} here, and {digest} for the leader")
        self._model.adapters.keep(digest, weights)


def blocks_of_all(group: Exchanging, own: int) -> list[int]:
    """Return how many KV blocks each rank has room for; all call it once the start was answered. own: this rank.

    Raises:
        RankLostError: a rank is lost.
    """
    return [int(number) for number in rows_of_all(group, torch.tensor([own]))[:, 0]]


def answer_start(group: Group, message: Message, computes: str) -> None:
    """Let the leader know that this rank computes the same model in the same way. computes: here.

    Raises:
        ValueError: it does not.
    """
    if not isinstance(message, Start):
        raise ValueError(f"{type(message).__name__} before the start")
    if message.model != computes:
        raise ValueError(f"it has {computes}, and the leader has {message.model}")
    group.all_reduce(torch.zeros(1))
