"""Owns, on the device, how often each token occurs in the texts of requests with penalties.
Never waits for the device, and never counts a token that the host has not read: a step may still be discarded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from engine.batch.inputs import int_tensor
from engine.execution.device import Device
from engine.step import PENDING_TOKEN, LogitControls, RowSampling
from kernels.rows.row_tokens import RowTokens

SLOTS_AT_A_TIME = 8
"""Slots are allocated in multiples of this: 4.9 MB with a vocabulary of 152,000."""
IN_PROMPT, IN_ANSWER = 1, 2
"""What a token adds to its count; see kernels.rows.row_tokens."""

Flying = Mapping[str, tuple[Tensor, int | None]]
"""Request id -> (tokens of the last step that samples for it, index of its own token). The index is None if the row
has drafts: the host then does not know which token is the newest."""
NONE_FLYING: Flying = MappingProxyType({})


@dataclass(slots=True)
class _Counted:
    slot: int
    length: int = 0
    """How many of the answer's tokens the slot has."""


@dataclass(slots=True)
class _Update:
    """What one step adds to the counts: runs of tokens, each of one slot."""

    fresh: list[int] = field(default_factory=list)
    """Slots to set to zero first."""
    runs: list[Sequence[int]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    amounts: list[int] = field(default_factory=list)
    """What each token of the run adds."""

    def add(self, slot: int, tokens: Sequence[int], amount: int) -> None:
        if tokens:
            self.runs.append(tokens)
            self.slots.append(slot)
            self.amounts.append(amount)

    def flat(self, vocab: int) -> tuple[Tensor, Tensor]:
        """(indices into the flattened counts, amounts). # [tokens of all runs] int64 each"""
        if not self.runs:
            return (torch.empty(0, dtype=torch.int64),) * 2
        lengths = torch.tensor([len(run) for run in self.runs])
        slots, amounts = torch.tensor([self.slots, self.amounts]).repeat_interleave(lengths, dim=1)
        return int_tensor(self.runs) + slots * vocab, amounts


class TokenCounts:
    """Counts of requests with penalties, in slots of one tensor [slots, vocab] int32.

    A slot is a cache: each row brings its prompt's tokens and its answer, from which it can be filled anew. There are
    as many slots as a step has had such requests, in multiples of SLOTS_AT_A_TIME: for 64 and a vocabulary of 152,000,
    39 MB. The largest trial step of a start has a penalty on every row, so that this memory is measured.
    """

    def __init__(self, device: Device, vocab: int) -> None:
        self._device, self._vocab = device, vocab
        self._counts: Tensor | None = None
        self._free: list[int] = []
        self._counted: dict[str, _Counted] = {}
        """By request, the longest unused first."""

    def rows(
        self,
        names: Sequence[str],
        rows: Sequence[RowSampling],
        answers: Sequence[tuple[int, ...]],
        *,
        begun: Collection[str] = (),
        flying: Flying = NONE_FLYING,
    ) -> RowTokens | None:
        """Count what the host has read since the last step, and return what penalties and bans look up; None if no row
        needs it.

        names: the request of each place, those of a request one after another; answers: the tokens before each place;
        begun: requests whose answers are counted anew, since tokens may have been taken back before this step; flying:
        where the tokens are for which an answer has PENDING_TOKEN.
        """
        penalized = {name for name, row in zip(names, rows, strict=True) if row.controls and row.controls.penalizes}
        pending = any(
            answer[-1:] == (PENDING_TOKEN,) and row.controls for row, answer in zip(rows, answers, strict=True)
        )
        if not penalized and not pending:
            return None
        try:
            slots, latest, update = self._counted_by(names, rows, answers, penalized, begun)
            return self._placed(names, slots, latest, update, flying)
        except BaseException:
            self.forget(list(self._counted))  # the host may have noted what the device never counted
            raise

    def forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if (counted := self._counted.pop(request_id, None)) is not None:
                self._free.append(counted.slot)

    # --- on the host --------------------------------------------------------------------------------------------------

    def _counted_by(
        self,
        names: Sequence[str],
        rows: Sequence[RowSampling],
        answers: Sequence[tuple[int, ...]],
        penalized: Collection[str],
        begun: Collection[str],
    ) -> tuple[list[int], list[tuple[int, ...]], _Update]:
        """Each place's slot and the end of its answer that is not counted, and what there is to count."""
        slots, latest, update = list[int](), list[tuple[int, ...]](), _Update()
        for number, (name, row, answer) in enumerate(zip(names, rows, answers, strict=True)):
            length = len(answer) - (answer[-1:] == (PENDING_TOKEN,))
            if name not in penalized or row.controls is None:
                slots.append(-1)
                latest.append(answer[length:])
                continue
            if number == 0 or names[number - 1] != name:  # else these are the drafts of the row before
                counted = self._slot_of(name, row.controls, length, update, penalized, name in begun)
                update.add(counted.slot, answer[counted.length : length], IN_ANSWER)
                counted.length = length
            slots.append(self._counted[name].slot)
            latest.append(answer[self._counted[name].length :])
        return slots, latest, update

    def _slot_of(
        self,
        name: str,
        controls: LogitControls,
        length: int,
        update: _Update,
        penalized: Collection[str],
        anew: bool,
    ) -> _Counted:
        counted = self._counted.pop(name, None)
        if counted is None or anew or counted.length > length:
            counted = _Counted(self._free_slot(penalized) if counted is None else counted.slot)
            update.fresh.append(counted.slot)
            update.add(counted.slot, controls.prompt_token_ids, IN_PROMPT)
        self._counted[name] = counted  # now the last
        return counted

    def _free_slot(self, used: Collection[str]) -> int:
        """Return a slot that no request of this step has. used: all requests of this step that need one.

        The tensor grows once for all of them: torch's allocator keeps the memory of every smaller one, and would join
        none of it for the next.
        """
        if not self._free:
            self.forget([name for name in self._counted if name not in used][:1])
        if not self._free:
            before = 0 if self._counts is None else len(self._counts)
            where = self._device.torch_device
            count = -(-len(used) // SLOTS_AT_A_TIME) * SLOTS_AT_A_TIME
            larger = torch.zeros(count, self._vocab, dtype=torch.int32, device=where)
            if self._counts is not None:
                larger[:before] = self._counts
            self._counts, self._free = larger, list(range(before, len(larger)))
        return self._free.pop()

    # --- on the device ------------------------------------------------------------------------------------------------

    def _placed(
        self,
        names: Sequence[str],
        slots: Sequence[int],
        latest: Sequence[tuple[int, ...]],
        update: _Update,
        flying: Flying,
    ) -> RowTokens:
        width = max(1, *map(len, latest))
        ends = int_tensor([*tokens, *[-1] * (width - len(tokens))] for tokens in latest)
        waiting = [number for number, tokens in enumerate(latest) if tokens[:1] == (PENDING_TOKEN,)]
        sources: dict[int, list[int]] = {}
        for number in waiting:
            sources.setdefault(id(flying[names[number]][0]), []).append(number)
        parts = [int_tensor([slots]), ends, *update.flat(self._vocab)]
        for numbers in sources.values():
            parts += [int_tensor([[number * width for number in numbers]])]
            parts += [int_tensor([[flying[names[number]][1] or 0 for number in numbers]])]
        there = self._device.upload(torch.cat(parts)).split([len(part) for part in parts])  # type: ignore[no-untyped-call]
        on_device, ends, index, amounts, *indices = there
        if self._counts is not None:
            for slot in update.fresh:
                self._counts[slot].zero_()
            self._counts.view(-1).index_add_(0, index, amounts.to(torch.int32))
        for places, index, numbers in zip(indices[::2], indices[1::2], sources.values(), strict=True):
            ends.index_copy_(0, places, flying[names[numbers[0]]][0][index])
        counts = torch.empty(0, dtype=torch.int32, device=ends.device) if self._counts is None else self._counts
        return RowTokens(counts, on_device, ends.view(len(names), width))
