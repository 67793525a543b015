"""Owns the leader's end of a model that several ranks compute: they are told each step, and their logits are joined.
Never samples: to the executor it is one model, whose logits are those of the whole vocabulary."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.batch.inputs import check_plan
from engine.execution.ranks import all_or_none
from engine.models.adapter_files import CONFIG_FILE, WEIGHTS_FILE, digest_of
from engine.models.computed import Computed, Model
from engine.models.computed import Rewind as LocalRewind
from engine.models.kv_cache import KVCache
from engine.models.recurrent_state import RecurrentState
from engine.parallel.messages import Drop, Keep, Message, Rewind, Score, Step, bare, encode
from engine.step import AdapterError, AdapterHost, StepPlan
from kernels.collectives.group import Group


class LeadingModel:
    """An engine.models.computed.Model that is this rank's part and those of the group's others. A failure ends all of
    them: the others may have computed what this rank has not."""

    def __init__(self, model: Model, group: Group, vocab_sizes: Sequence[int], block_size: int) -> None:
        """model: this rank's part. vocab_sizes: how many columns of the logits each rank has."""
        self._model = model
        self._group = group
        self._vocab_sizes = vocab_sizes
        self._block_size = block_size
        self._adapters = None if model.adapters is None else _SharedAdapters(model.adapters)

    @property
    def cache(self) -> KVCache:
        return self._model.cache

    @property
    def state(self) -> RecurrentState | None:
        return self._model.state

    @property
    def adapters(self) -> AdapterHost | None:
        return self._adapters

    def forward(self, plan: StepPlan, newest: Mapping[str, int]) -> Computed:
        # A plan that is wrong is refused before anybody was told of it.
        check_plan(plan, self._block_size, 0 if self.state is None else self.state.num_slots)
        with all_or_none(self._group):
            for message in () if self._adapters is None else self._adapters.untold():
                self._tell(message)
            self._tell(Step(bare(plan, newest)))
            computed = self._model.forward(plan, newest)
            logits = self._joined(computed.logits)
        rewind = None if computed.rewind is None else _SharedRewind(self, computed.rewind)

        def logits_at(index: Tensor) -> Tensor:
            with all_or_none(self._group):
                self._tell(Score(index.tolist()))
                return self._joined(computed.logits_at(index))

        return replace(computed, logits=logits, logits_at=logits_at, best=None, rewind=rewind)

    def rewind(self, local: LocalRewind, counts: Sequence[int]) -> None:
        with all_or_none(self._group):
            self._tell(Rewind(list(counts)))
            local.to(counts)

    def _joined(self, logits: Tensor) -> Tensor:
        """Return the logits of all ranks. logits: [n, own vocabulary]; # [n, vocab] float32"""
        if not len(logits):
            return torch.empty(0, sum(self._vocab_sizes))
        joined = self._group.gather(logits.float().contiguous(), self._vocab_sizes)
        assert joined is not None, "this is the leader"
        return joined

    def _tell(self, message: Message) -> None:
        self._group.send(encode(message))


@dataclass(frozen=True, slots=True)
class _SharedRewind:
    model: LeadingModel
    local: LocalRewind

    def to(self, counts: Sequence[int]) -> None:
        self.model.rewind(self.local, counts)


@dataclass(frozen=True, slots=True)
class _Adapter:
    own: Any
    files: dict[str, bytes]


class _SharedAdapters:
    """An engine.step.AdapterHost. The other ranks are told before the next step, by the thread that runs the steps."""

    def __init__(self, own: AdapterHost) -> None:
        self._own = own
        self._untold: deque[Message] = deque()

    def read(self, path: str) -> tuple[str, _Adapter]:
        digest, weights = self._own.read(path)
        try:
            files = {name: (Path(path) / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)}
        except OSError:
            files = {}
        if not files or digest_of(files[CONFIG_FILE], files[WEIGHTS_FILE]) != digest:  # others would find another
            raise AdapterError(f"{path} was changed while it was read; load it again")
        return digest, _Adapter(weights, files)

    def keep(self, digest: str, weights: _Adapter) -> None:
        self._own.keep(digest, weights.own)
        self._untold.append(Keep(digest, weights.files))

    def drop(self, digest: str) -> None:
        self._own.drop(digest)
        kept = next((one for one in self._untold.copy() if isinstance(one, Keep) and one.digest == digest), None)
        try:
            if kept is not None:
                self._untold.remove(kept)  # whole files, of which nobody needs to know any more
                return
        except ValueError:
            pass  # the others have just been told
        self._untold.append(Drop(digest))

    def untold(self) -> Iterator[Message]:
        while self._untold:
            yield self._untold.popleft()
