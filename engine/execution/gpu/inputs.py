"""Owns how a step reaches the device: all its integers in one tensor, padded to a captured size if there is one.
Never looks at values that are on the device already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from engine.batch.inputs import StepInputs, int_tensor
from engine.execution.gpu.cuda_graph_buckets import Bucket
from kernels.rows.adapter_tokens import NO_SLOT, AdapterTokens, count_tiles, most_tiles, pack_tokens
from kernels.rows.device import DeviceRows, DeviceStateRows


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """Views into a packed step; see StepInputs. The views of a captured step are filled anew before each replay."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slots: Tensor  # [num_tokens] int64
    numbers: Tensor  # int64: first tokens, lengths and first keys of the rows, number of decode rows, state slots
    adapters: Tensor  # int64: kernels.rows.adapter_tokens.pack_tokens, or empty
    tables: Tensor  # [num_rows, width] int64


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each part of a packed step lies: token ids, positions, slots, numbers about the rows, tokens with adapters,
    and block tables."""

    num_tokens: int
    num_rows: int
    width: int
    """Columns of the block tables."""
    has_states: bool = False
    """Whether rows have state slots; if not, the last part of `numbers` is empty."""
    num_tiles: int = 0
    """Tiles of tokens with LoRA adapters, used or not. 0: no row has an adapter."""

    @property
    def size(self) -> int:
        return self.tables_begin + self.num_rows * self.width

    @property
    def tables_begin(self) -> int:
        """Where the block tables begin."""
        return self._adapters_begin + (self.num_tokens + 3 * self.num_tiles if self.num_tiles else 0)

    @property
    def _adapters_begin(self) -> int:
        return 3 * self.num_tokens + sum(self._number_counts)

    @property
    def _number_counts(self) -> tuple[int, int, int, int, int]:
        return self.num_rows + 1, self.num_rows, self.num_rows + 1, 1, self.num_rows if self.has_states else 0

    def as_wide_as(self, inputs: StepInputs, *, decode: bool) -> Layout:
        """This layout with block tables only as wide as the longest row, including rows of padding."""
        padding = self.num_tokens - len(inputs.token_ids)
        padding_width = -(-(min(padding, 1) if decode else padding) // inputs.rows.block_size)
        return replace(self, width=max(inputs.rows.block_tables.shape[1], padding_width))

    def split(self, packed: Tensor, tables: Tensor | None = None) -> DeviceInputs:
        """Make views. packed: [size] int64; or [tables_begin] int64 if the block tables are given separately."""
        tokens = packed[: 3 * self.num_tokens].view(3, self.num_tokens)
        if tables is None:
            tables = packed[self.tables_begin : self.size].view(self.num_rows, self.width)
        numbers = packed[3 * self.num_tokens : self._adapters_begin]
        adapters = packed[self._adapters_begin : self.tables_begin]
        return DeviceInputs(tokens[0], tokens[1], tokens[2], numbers, adapters, tables)

    def rows(
        self,
        inputs: DeviceInputs,
        block_size: int,
        *,
        num_decode: int,
        num_chunks: int,
        max_count: int,
        max_length: int,
    ) -> DeviceRows:
        """Rows that read `inputs`, converted to int32 here. In a captured step, each replay converts them again.
        `contexts` and `counts` are empty."""
        parts = inputs.numbers.to(torch.int32).split(self._number_counts)  # type: ignore[no-untyped-call]
        return DeviceRows(
            num_decode=num_decode,
            contexts=(),
            counts=(),
            block_tables=inputs.tables,
            block_size=block_size,
            num_chunks=num_chunks,
            decodes=parts[3],
            first_tokens=parts[0],
            lengths=parts[1],
            first_keys=parts[2],
            tables=inputs.tables.to(torch.int32),
            max_count=max_count,
            max_length=max_length,
        )

    def lengths(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """(lengths [num_rows], first keys [num_rows + 1]) of the rows, as views of `DeviceInputs.numbers`."""
        _, lengths, first_keys, *_ = numbers.split(self._number_counts)  # type: ignore[no-untyped-call]
        return lengths, first_keys

    def adapter_tokens(self, inputs: DeviceInputs) -> AdapterTokens | None:
        """The tokens with LoRA adapters; None if no row has one."""
        return AdapterTokens.of(inputs.adapters, self.num_tokens) if self.num_tiles else None

    def state_slots(self, numbers: Tensor) -> Tensor:
        """State slots of the rows. # [num_rows] int64, -1 for a row of padding"""
        return numbers[len(numbers) - self.num_rows :]

    def states(self, numbers: Tensor, rows: DeviceRows) -> DeviceStateRows | None:
        """The same rows for layers with recurrent state; None if the model has none."""
        if not self.has_states:
            return None
        return DeviceStateRows(
            num_decode=rows.num_decode,
            contexts=(),
            counts=(),
            slots=(),
            index=self.state_slots(numbers),
            first_tokens=rows.first_tokens,
            lengths=rows.lengths,
            max_count=rows.max_count,
        )


def layout_of(inputs: StepInputs) -> Layout:
    """The layout of the step without padding."""
    num_rows, width = inputs.rows.block_tables.shape
    num_tiles = count_tiles(inputs.adapter_slots, inputs.rows.counts) if inputs.adapter_slots else 0
    return Layout(len(inputs.token_ids), num_rows, width, bool(inputs.state_slots), num_tiles)


def bucket_layout(
    bucket: Bucket, block_size: int, max_model_len: int, *, has_states: bool = False, adapter_slots: int = 0
) -> Layout:
    """The layout of a captured step. A mixed step has an additional row, which holds the tokens of padding.
    adapter_slots: how many the device has."""
    longest = max(max_model_len, 1 if bucket.decode else bucket.num_tokens)
    num_rows, width = bucket.num_rows + (not bucket.decode), -(-longest // block_size)
    num_tiles = most_tiles(bucket.num_tokens, adapter_slots) if bucket.adapters else 0
    return Layout(bucket.num_tokens, num_rows, width, has_states, num_tiles)


def pack(inputs: StepInputs, layout: Layout, *, decode: bool = False, padding_block: int = 0) -> Tensor:
    """Pack the step on the host as `layout` says. # [layout.size] int64

    Padding is in `padding_block`, which no request has, in no state slot (-1), and without an adapter. With `decode`,
    rows of padding are decode rows, too:

        rows     | the step's | padding: 1 token each |
    otherwise the last row has all tokens of padding, and the rows of padding before it have none:
        rows     | the step's | padding: 0 tokens ... | layout.num_tokens - the step's tokens |
    """
    rows, spare = inputs.rows, layout.num_rows - len(inputs.rows.counts)
    counts, lengths = list(rows.counts), [sum(pair) for pair in zip(rows.contexts, rows.counts, strict=True)]
    padding = layout.num_tokens - len(inputs.token_ids)
    added = [1] * spare if decode else [0] * (spare - 1) + [padding] * (spare > 0)
    assert sum(added) == padding, "the step fits the layout"
    positions = torch.arange(padding) * (not decode)
    tables = torch.full((layout.num_rows, layout.width), padding_block)
    tables[: len(counts), : rows.block_tables.shape[1]] = rows.block_tables
    return torch.cat(
        [
            inputs.token_ids,
            torch.zeros(padding, dtype=torch.int64),
            inputs.positions,
            positions,
            inputs.slots,
            padding_block * rows.block_size + positions % rows.block_size,
            _integers(accumulate([*counts, *added], initial=0)),
            _integers([*lengths, *added]),
            _integers(accumulate([*lengths, *added], initial=0)),
            _integers([layout.num_rows if decode else rows.num_decode]),
            *([_integers([*inputs.state_slots, *[-1] * spare])] if layout.has_states else []),
            *([_adapters(inputs, layout)] if layout.num_tiles else []),
            tables.flatten(),
        ]
    )


def _adapters(inputs: StepInputs, layout: Layout) -> Tensor:
    slots = inputs.adapter_slots or (NO_SLOT,) * len(inputs.rows.counts)
    return pack_tokens(slots, inputs.rows.counts, layout.num_tokens, layout.num_tiles)


def _integers(numbers: Sequence[int] | accumulate[int]) -> Tensor:
    return int_tensor([list(numbers)])
