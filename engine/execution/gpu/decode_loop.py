"""Owns decode steps that stay on the device: tokens are chosen in a capture, and the next step begins where they are.
Never takes a row whose logits are changed or reported; those steps choose their tokens outside of captures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch.inputs import int_tensor
from engine.batch.sampler import SMALLEST_TEMPERATURE
from engine.execution.device import Device, Graph
from engine.execution.gpu.cuda_graph_buckets import Bucket
from engine.execution.gpu.inputs import DeviceInputs, Layout
from engine.execution.gpu.ranks import DeviceRanks
from engine.step import PENDING_TOKEN, RowKind, RowSampling, ScheduledRequest
from kernels.eager.ops import Ops

NO_TOKEN = -1
_FLOATS, _INTEGERS = 3, 4
"""Numbers for each row: temperature, top_p, min_p; top_k, seed, position, and 1, or 0 for padding (never moves)."""


@dataclass(frozen=True, slots=True)
class _Captured:
    advance: Graph
    """Moves the step's inputs on by one token."""
    choose: Graph
    """From hidden states to tokens."""


@dataclass(frozen=True, slots=True)
class _Last:
    bucket: Bucket
    rows: tuple[ScheduledRequest, ...]


class DecodeLoop:
    """The captured beginning and end of decode steps; DeviceModel has the forward pass between them.

        first step   copy inputs and parameters |         | forward | choose
        next step    copy new blocks, if any    | advance | forward | choose

    A next step has the rows of the step before in their order, each one token on.
    """

    def __init__(self, ops: Ops, device: Device, *, most_rows: int, block_size: int, max_model_len: int) -> None:
        where = device.torch_device
        self._ops, self._device, self._block_size, self._max_model_len = ops, device, block_size, max_model_len
        self._floats = torch.zeros(_FLOATS * most_rows, dtype=torch.float64, device=where)
        self._integers = torch.zeros(_INTEGERS * most_rows, dtype=torch.int64, device=where)
        self._tokens = torch.zeros(most_rows, dtype=torch.int64, device=where)
        self._captured: dict[Bucket, _Captured] = {}
        self._last: _Last | None = None

    # --- captures -----------------------------------------------------------------------------------------------------

    def choose(self, bucket: Bucket, logits: Callable[[], Tensor], ranks: DeviceRanks) -> Callable[[], None]:
        """The work of choosing tokens, or of getting those that another rank chooses. logits: [bucket's rows, vocab] of
        any float type"""
        floats, integers, tokens = self._views(bucket)

        def work() -> None:
            found = logits()
            if ranks.chooses and self._ops.sample_packed is not None:
                self._ops.sample_packed(found, floats, integers[:3], tokens)
            elif ranks.chooses:
                best, likeliest = found.float().max(dim=-1)
                tokens.copy_(torch.where(best.isfinite(), likeliest, NO_TOKEN))
            ranks.broadcast(tokens)

        return work

    def advance(self, bucket: Bucket, layout: Layout, inputs: DeviceInputs) -> Callable[[], None]:
        """The work of making the step after `inputs`, in their place, from the tokens that were chosen."""
        _, integers, tokens = self._views(bucket)
        lengths, first_keys = layout.lengths(inputs.numbers)

        def work() -> None:
            moved = integers[3]
            inputs.token_ids.copy_(tokens.clamp(min=0))  # a row without a token fails once that is read
            inputs.positions.add_(moved)
            integers[2].add_(moved)
            lengths.add_(moved)
            first_keys[1:].copy_(lengths.cumsum(0))
            index = (inputs.positions // self._block_size).unsqueeze(1)
            blocks = inputs.tables.gather(1, index).squeeze(1)
            inputs.slots.copy_(blocks * self._block_size + inputs.positions % self._block_size)

        return work

    def capture(self, bucket: Bucket, advance: Callable[[], None], choose: Callable[[], None], beside: Graph) -> None:
        self._captured[bucket] = _Captured(self._device.capture(advance, beside), self._device.capture(choose, beside))

    def _views(self, bucket: Bucket) -> tuple[Tensor, Tensor, Tensor]:
        """(floats, integers, tokens) of a captured size. # [3, rows] float64, [4, rows] int64, [rows] int64"""
        rows = bucket.num_rows
        floats, integers = self._floats[: _FLOATS * rows], self._integers[: _INTEGERS * rows]
        return floats.view(_FLOATS, rows), integers.view(_INTEGERS, rows), self._tokens[:rows]

    # --- a step -------------------------------------------------------------------------------------------------------

    def takes(self, rows: Sequence[ScheduledRequest]) -> bool:
        """Whether all rows are decode rows of one token whose choice is captured."""
        drawn = self._ops.sample_packed is not None
        return bool(self._captured) and all(
            row.kind is RowKind.DECODE
            and len(row.token_ids) == 1
            and not row.adapter  # whose slot may be another one in the next step
            and row.pool_from is None
            and row.scoring is None
            and row.sampling is not None
            and _is_plain(row.sampling)
            and (drawn or row.sampling.temperature == 0)
            for row in rows
        )

    def stop(self) -> None:
        """Note that the device's inputs are no longer those of the step that ran last."""
        self._last = None

    @property
    def bucket(self) -> Bucket:
        """The captured size of the step that ran last."""
        assert self._last is not None, "a decode step ran last"
        return self._last.bucket

    def goes_on(self, rows: tuple[ScheduledRequest, ...], newest: Mapping[str, int]) -> bool:
        """Whether `rows` follow the step that ran last, in its captured size. newest: by request, the token that the
        host has read last."""
        last = self._last
        if last is None or len(last.rows) != len(rows):
            return False
        return all(
            before.request_id == row.request_id
            and before.start + 1 == row.start
            and row.token_ids[0] in (PENDING_TOKEN, newest.get(row.request_id))
            and (before.sampling is row.sampling or before.sampling == row.sampling)
            and _slot(before) == _slot(row)
            and row.end <= min(len(row.block_ids) * self._block_size, self._max_model_len)
            for before, row in zip(last.rows, rows, strict=True)
        )

    def go_on(self, rows: tuple[ScheduledRequest, ...], tables: Tensor) -> None:
        """Queue what turns the inputs of the step that ran last into those of `rows`. tables: [rows, width], where the
        captures read block tables, contiguous but for a longer width."""
        last, self._last = self._last, None
        assert last is not None
        places, blocks = list[int](), list[int]()
        for number, (before, row) in enumerate(zip(last.rows, rows, strict=True)):
            known, needed = self._blocks_of(before), self._blocks_of(row)
            same = before.block_ids is row.block_ids or before.block_ids[:known] == row.block_ids[:known]
            first = known if same else 0
            places += range(number * tables.stride(0) + first, number * tables.stride(0) + needed)
            blocks += row.block_ids[first:needed]
        if places:
            index, values = self._device.upload(int_tensor([places, blocks]).view(2, -1))
            whole = tables.as_strided((len(tables) * tables.stride(0),), (1,))
            whole.index_copy_(0, index, values)
        self._captured[last.bucket].advance.replay()

    def begin(self, bucket: Bucket, rows: tuple[ScheduledRequest, ...]) -> None:
        """Copy the parameters by which the tokens of `rows` are chosen to the device."""
        floats, integers, _ = self._views(bucket)
        how = [(row.sampling, row.end) for row in rows if row.sampling is not None]
        padding = bucket.num_rows - len(how)
        numbers = [(_temperature(row), row.top_p, row.min_p) for row, _ in how] + [(0.0, 1.0, 0.0)] * padding
        counts = [(row.top_k, row.seed, position, 1) for row, position in how] + [(0, 0, 0, 0)] * padding
        self._device.upload(torch.tensor(numbers, dtype=torch.float64).T.contiguous(), floats)
        self._device.upload(torch.tensor(counts, dtype=torch.int64).T.contiguous(), integers)

    def end(self, bucket: Bucket, rows: tuple[ScheduledRequest, ...]) -> Tensor:
        """Queue the choice of the tokens, and return them; NO_TOKEN for a row without a finite largest logit.
        # [rows] int64"""
        self._captured[bucket].choose.replay()
        self._last = _Last(bucket, rows)
        return self._tokens[: len(rows)].clone()  # the next step overwrites them

    def _blocks_of(self, row: ScheduledRequest) -> int:
        return -(-row.end // self._block_size)


def _is_plain(row: RowSampling) -> bool:
    return row.controls is None and row.num_logprobs is None and not row.banned_token_ids


def _temperature(row: RowSampling) -> float:
    return max(row.temperature, SMALLEST_TEMPERATURE) if row.temperature > 0 else 0.0


def _slot(row: ScheduledRequest) -> int | None:
    return None if row.state is None else row.state.slot
