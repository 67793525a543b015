"""Owns a recorded forward pass: a model's operations, run by the library in each step. Long: it has most operations.
Never runs an operation while recording, and knows no model."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.cpu.large_pages import Empty
from kernels.cpu.native.grouped import BLOCK, LANES, PANEL, Panels, Rows, panels_of
from kernels.cpu.native.library import load_library
from kernels.cpu.native.low_rank import AdaptedMatrix, PackedAdapter
from kernels.cpu.native.reduction import Reduction, RowExchange
from kernels.cpu.native.spans import NO_SPANS, Spans
from kernels.forward import GELU, SILU, HeadShape, Linear, Routing, held_experts
from kernels.rows.integers import joined

MAX_HEAD_DIM = 256
"""The same as in cache.h."""

ROUNDED_BYTES = BLOCK + 16
"""The bytes of 32 rounded activations: the size of RoundedBlock in rounded.h."""

UNLIMITED = 1 << 40
"""A window that is never reached, in tokens."""

_NOT_THERE, _RANK_LOST = 0, 2
"""What a run may end with, in program.cpp."""

_NARROW = {torch.int8: 1, torch.float8_e4m3fn: 2}
"""What program.cpp calls the types of a cache in 8 bits; 0: the type of activations."""


def why_unfit(head_dim: int, block_size: int, inputs: Iterable[int]) -> str | None:
    """Return what the kernels cannot do of a model's or cache's shape, or None. inputs: of the model's matrices."""
    if odd := [size for size in inputs if size % 2]:
        return f"a matrix has {odd[0]} inputs, and they take even numbers"
    if block_size % LANES:
        return f"block_size is {block_size}, and they read keys in groups of {LANES}"
    if head_dim % LANES or head_dim > MAX_HEAD_DIM:
        return f"head_dim is {head_dim}, and they take multiples of {LANES} up to {MAX_HEAD_DIM}"
    return None


class _StepRows(ctypes.Structure):
    """Mirrors StepRows of step.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_rows", "num_sampled")),
        *((name, ctypes.c_void_p) for name in ("token_ids", "contexts", "counts", "first_blocks", "blocks", "sampled")),
        ("state_slots", ctypes.c_void_p),
        ("adapters", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("first_drafted", "num_drafted")),
        *((name, ctypes.c_void_p) for name in ("shifts", "spans")),
        ("num_spans", ctypes.c_int64),
    ]


class _ExpertMatrices(ctypes.Structure):
    """Mirrors ExpertMatrices of experts.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("panels", "scales", "grouped")),
        ("num_grouped", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("input_sums", "rounded")),
    ]


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]


class StepRows:
    """The rows of a step, as the library reads them: contiguous integers, which are not checked here."""

    def __init__(
        self,
        token_ids: Iterable[Sequence[int]],
        contexts: Sequence[int],
        counts: Sequence[int],
        blocks: Sequence[Sequence[int]],
        sampled: Sequence[int] = (),
        state_slots: Sequence[int] = (),
        drafted: tuple[int, int] = (0, 0),
        adapters: Sequence[PackedAdapter | None] = (),
        spans: Spans | None = None,
    ) -> None:
        """Pack, for each row: its tokens, how many tokens are cached before them, their count, its blocks, and the slot
        of its recurrent state if the model has one. sampled: indices of the step's tokens after which one is sampled.
        drafted: the first row with drafts and their number; the states of these rows stay as they are.
        adapters: each row's; empty: none has one. spans: None for a model of text alone."""
        self._arrays = [
            joined(token_ids),
            array("q", contexts),
            array("q", counts),
            array("q", accumulate((len(ids) for ids in blocks), initial=0)),
            joined(blocks),
            array("q", sampled),
        ]
        slots = array("q", state_slots)
        assert len(slots) in (0, len(counts))
        self._arrays.append(slots)
        self.num_tokens, self.num_rows = len(self._arrays[0]), len(counts)
        self.num_drafted_tokens = sum(counts[drafted[0] : sum(drafted)])
        sizes = (self.num_tokens, self.num_rows, len(sampled))
        self._adapters = adapters  # the library has only addresses
        self._tables = array("Q", (0 if adapter is None else adapter.address for adapter in adapters))
        tables = _address(self._tables) if adapters else None
        self.spans = spans
        fields = NO_SPANS if spans is None else spans.fields
        self.struct = _StepRows(*sizes, *map(_address, self._arrays), tables, *drafted, *fields)


class Team:
    """The threads that run programs, one program at a time: the one that calls, and others that help it and sleep
    between runs.

    Raises: RuntimeError: the system does not grant so many threads."""

    def __init__(self, num_threads: int) -> None:
        self._library = load_library()
        self.handle = self._library.team_create(num_threads)
        if self.handle is None:
            raise RuntimeError(
                f"num_threads: the system does not grant {num_threads} threads to this process; a lower number, or a "
                "higher limit of processes and of memory (pids.max, ulimit -u, ulimit -v), would let it start"
            )

    @property
    def num_shares(self) -> int:
        """How often work has been shared out so far."""
        return int(self._library.team_shares(self.handle))

    def __del__(self) -> None:
        if handle := getattr(self, "handle", None):
            self._library.team_destroy(handle)


@dataclass(frozen=True, slots=True)
class Packed:
    """Weights in panels, as linear.h reads them."""

    panels: Tensor | None
    """[ceil(outputs / 32) * 32, inputs], int8 where there are scales. None: see `groups`"""
    scales: Tensor | None
    """[ceil(outputs / 32) * 32] float32: the factor of each output"""
    bias: Tensor | None
    """[ceil(outputs / 32) * 32] float32"""
    inputs: int
    outputs: int
    groups: Panels | None = None
    """Weights of 4 to 8 bits in groups. Of experts, the panels of all, as many for each"""
    rounded: bool = False
    """Whether activations are rounded to 8 bits for this product. Bytes in `panels` are then in the order for
    bfloat16."""
    adapted: AdaptedMatrix | None = None
    """How adapters add to it. None: they do not."""


def pack_grouped(
    parts: Sequence[Rows],
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    rounded: bool = False,
    num_threads: int = 1,
    empty: Empty = torch.empty,
) -> Linear:
    """Return the product with a matrix whose outputs are those of all parts, packed for `Program`. Embeddings are
    packed likewise. gated: the outputs are [gate | up], in a single part, for `gated_linear`. rounded: round
    activations to 8 bits in blocks of 32, unless a part is in FP8. num_threads, empty: see `panels_of`."""
    outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
    order = _gated_order(outputs) if gated else None
    if bias is not None:  # a panel of the last part may begin anywhere, and is read whole
        bias = torch.nn.functional.pad(bias.float() if order is None else bias.float()[order], (0, PANEL))
    rounded &= not any(part.form.fp8 for part in parts)
    panels = panels_of(parts, order, num_threads=num_threads, empty=empty)
    return Linear(Packed(None, None, bias, inputs, outputs, panels, rounded))


def pack_grouped_experts(
    experts: Iterable[Rows],
    *,
    gated: bool = False,
    rounded: bool = False,
    num_threads: int = 1,
    empty: Empty = torch.empty,
) -> Linear:
    """Return the matrices of all experts of a mixture, of one shape, packed for `Program`. Their forms may differ.

    experts: each expert's outputs, taken one after another: what was packed can be let go before the next is taken.
    gated, rounded, num_threads, empty: as in `pack_grouped`; activations are rounded for all experts or for none.
    """
    packed: list[Packed] = []
    for rows in experts:
        made = pack_grouped([rows], gated=gated, rounded=rounded, num_threads=num_threads, empty=empty)
        packed.append(made.weight)
    first, found = packed[0], [each.groups for each in packed if each.groups is not None]
    assert all((each.inputs, each.outputs) == (first.inputs, first.outputs) for each in packed)
    panels = Panels(
        tuple(part for each in found for part in each.data),
        torch.cat([each.table for each in found]),
        any(each.minima for each in found),
    )
    return Linear(Packed(None, None, None, first.inputs, first.outputs, panels, all(each.rounded for each in packed)))


def pack(
    linear: Linear,
    *,
    gated: bool = False,
    consume: bool = False,
    quantize: bool = False,
    dtype: torch.dtype | None = None,
    rounded: bool = False,
    empty: Empty = torch.empty,
) -> Linear:
    """Return the same product, packed for `Program`.

    A three-dimensional weight has one matrix per expert. gated: its outputs are [gate | up], for `gated_linear`.
    consume: the weight's memory may be overwritten, so that a model is never in memory twice. quantize: round each
    output's weights to 255 levels, of one byte each. An int8 weight with scales is not rounded again; it is packed for
    activations of `dtype`. rounded: round activations to 8 bits in blocks of 32, where weights are bytes and inputs
    are whole blocks. empty: allocates panels that do not lie in the weight's memory.

    Raises:
        ValueError: the kernels do not read this number of inputs or this type.
    """
    weight: Tensor = linear.weight
    assert weight.is_contiguous(), "the library reads row after row"
    if weight.dim() == 3:
        return _pack_each(
            linear, gated=gated, consume=consume, quantize=quantize, dtype=dtype, rounded=rounded, empty=empty
        )
    outputs, inputs = weight.shape
    if weight.dtype == torch.int8:
        assert dtype is not None
        return _pack_int8(linear, dtype, gated=gated, consume=consume, rounded=rounded, empty=empty)
    if inputs % 2 or weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"A weight of {inputs} inputs in {weight.dtype}: expected an even number in bfloat16 or float32."
        )
    bias = None if linear.bias is None else linear.bias.float()
    if gated:
        order = _gated_order(outputs)
        ordered, bias = weight[order], None if bias is None else bias[order]
        fits = consume and not quantize and len(order) == outputs
        weight = _copied(ordered, weight) if fits else ordered
    padded = -(-len(weight) // PANEL) * PANEL
    wide, scales = int(weight.dtype == torch.float32), None
    rounded &= quantize and inputs % BLOCK == 0
    if quantize:
        panels, scales = empty(padded, inputs, dtype=torch.int8), torch.zeros(padded)
        load_library().quantize_panels(
            wide,
            weight.data_ptr(),
            len(weight),
            inputs,
            _pair(weight.dtype, rounded),
            panels.data_ptr(),
            scales.data_ptr(),
        )
    else:
        panels = weight if consume and padded == outputs else empty(padded, inputs, dtype=weight.dtype)
        load_library().pack_panels(wide, weight.data_ptr(), len(weight), inputs, panels.data_ptr())
    if bias is not None:
        bias = _padded(bias)
    return Linear(Packed(panels, scales, bias, inputs, outputs, rounded=rounded))


def _pair(dtype: torch.dtype, rounded: bool) -> int:
    """Return how many inputs of an output lie together, as bytes for activations of this type."""
    return 1 if dtype == torch.float32 and not rounded else 2


def _pack_int8(
    linear: Linear, dtype: torch.dtype, *, gated: bool, consume: bool, rounded: bool, empty: Empty
) -> Linear:
    """Pack the values unchanged, in the order in which `lanes` of vector.h reads bytes; linear.h does the same."""
    weight: Tensor = linear.weight
    outputs, inputs = weight.shape
    if inputs % 2:
        raise ValueError(f"A weight of {inputs} inputs in {weight.dtype}: expected an even number.")
    order = _gated_order(outputs) if gated else torch.arange(outputs)
    rows = torch.nn.functional.pad(weight[order], (0, 0, 0, -len(order) % PANEL))
    scales, bias = (
        None if vector is None else _padded(vector.float()[order]) for vector in (linear.scales, linear.bias)
    )
    rounded &= inputs % BLOCK == 0
    pair = _pair(dtype, rounded)
    by_lane = rows.view(len(rows) // PANEL, PANEL // LANES, LANES, inputs // pair, pair)
    panels = by_lane.permute(0, 3, 1, 4, 2).reshape(len(rows), inputs)
    fits = consume and panels.shape == weight.shape
    panels = _copied(panels, weight if fits else empty(len(rows), inputs, dtype=torch.int8))
    return Linear(Packed(panels, scales, bias, inputs, outputs, rounded=rounded))


def _copied(values: Tensor, to: Tensor) -> Tensor:
    """Copy to weights that may have been loaded in inference mode, and return them."""
    with torch.inference_mode():
        return to.copy_(values)


def _padded(values: Tensor) -> Tensor:
    """Pad with zeros to whole panels."""
    return torch.nn.functional.pad(values, (0, -len(values) % PANEL))


def _pack_each(
    linear: Linear,
    *,
    gated: bool,
    consume: bool,
    quantize: bool,
    dtype: torch.dtype | None,
    rounded: bool,
    empty: Empty,
) -> Linear:
    """Pack [experts, outputs, inputs] expert by expert, in place where the panels fit."""
    weight: Tensor = linear.weight
    panels: Tensor | None = None
    scales: list[Tensor] = []
    for number, matrix in enumerate(weight):
        own = Linear(matrix, scales=None if linear.scales is None else linear.scales[number])
        found: Packed = pack(own, gated=gated, consume=consume, quantize=quantize, dtype=dtype, rounded=rounded).weight
        rounded = found.rounded  # of all alike: it depends on their inputs and types
        assert found.panels is not None
        if panels is None:
            fits = consume and found.panels.shape == matrix.shape and found.panels.dtype == weight.dtype
            panels = weight if fits else empty(len(weight), *found.panels.shape, dtype=found.panels.dtype)
        if found.panels.data_ptr() != panels[number].data_ptr():
            _copied(found.panels, panels[number])
        scales += [] if found.scales is None else [found.scales]
    assert panels is not None
    _, outputs, inputs = weight.shape
    return Linear(Packed(panels, torch.stack(scales) if scales else None, None, inputs, outputs, rounded=rounded))


def _gated_order(outputs: int) -> Tensor:
    """Return the order of outputs: sixteen gates, then their sixteen values, and so on; padding repeats the last."""
    size = outputs // 2
    first = torch.arange(0, size, LANES).unsqueeze(1)
    gates = (first + torch.arange(LANES)).clamp_(max=size - 1)  # [groups, 16]
    return torch.cat((gates, gates + size), dim=1).flatten()


def outputs_by_lane(packed: Packed, *, gated: bool) -> Tensor:
    """Return the output that each lane of the panels has; a lane of padding has that of the lane before it.
    # [panels, 32] int32

    gated: whether it was packed for `gated_linear`.
    """
    if gated:
        found = _gated_order(packed.outputs).view(-1, PANEL)
    elif packed.groups is not None:
        first, count = packed.groups.table[:, 2:].unsqueeze(2).unbind(1)
        found = first + torch.arange(PANEL).minimum(count - 1)
    else:
        found = torch.arange(-(-packed.outputs // PANEL) * PANEL).clamp_(max=packed.outputs - 1).view(-1, PANEL)
    return found.int()


class Buffer:
    """A place in a program's memory: [capacity, width]. Reused for another value once nothing refers to it."""

    def __init__(self, tensor: Tensor, pool: dict[Any, list[Tensor]]) -> None:
        self.tensor = tensor
        self._pool = pool

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    @property
    def stride(self) -> int:
        """How many elements a token's numbers lie from the next one's."""
        return self.tensor.shape[1]

    def __del__(self) -> None:
        key = self.tensor.shape[1], self.tensor.dtype
        self._pool.setdefault(key, []).append(self.tensor)


class Columns(NamedTuple):
    """Neighbouring columns of a Buffer, in its memory: `width` from `first` on."""

    of: Buffer
    first: int
    width: int

    @property
    def address(self) -> int:
        return self.of.address + self.first * self.of.tensor.element_size()

    @property
    def stride(self) -> int:
        return self.of.stride


class Program:
    """A kernels.forward.ForwardPass that records, and then runs the record on any step of up to `capacity` tokens.

    An operation's result is in the Buffer that it returned, for as long as the caller holds that.
    """

    def __init__(
        self,
        team: Team,
        *,
        block_size: int,
        capacity: int,
        dtype: torch.dtype,
        reduction: Reduction | None = None,
        exchange: RowExchange | None = None,
    ) -> None:
        """reduction: how ranks sum. None: there is one rank, and no operation sums over ranks. exchange: how ranks with
        tokens of their own reach each other's experts. None: all experts are here."""
        self._library = load_library()
        self._team = team  # must outlive the program
        self._reduction = reduction
        self._exchange = exchange
        self._handle = self._library.program_create(team.handle, block_size)
        self._capacity = capacity
        self._dtype = dtype
        self._wide = int(dtype == torch.float32)
        self._pool: dict[Any, list[Tensor]] = {}
        self._kept: list[Any] = []  # what recorded operations read: the library holds only addresses
        self._shrunk: dict[int, Tensor] = {}

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._library.program_destroy(handle)

    def run(self, rows: StepRows) -> None:
        """Run the record on one step.

        Raises:
            IndexError: a token id is outside the vocabulary, a block outside the cache, a slot outside the states, a
                row with drafts outside the rows, or a span outside its row. Nothing was computed.
            BaseException: the ranks' own, once one is lost. The operations after it were not run.
        """
        assert rows.num_tokens <= self._capacity
        outcome = self._library.program_run(self._handle, ctypes.byref(rows.struct))
        if outcome == _NOT_THERE:
            raise IndexError("The step names a token, block, state, row with drafts or span that is not there.")
        if outcome == _RANK_LOST:
            ranks = self._reduction or self._exchange
            assert ranks is not None
            raise ranks.error()

    # --- recording --------------------------------------------------------------------------------------------------

    def embed(self, table: Tensor | Packed, scale: float = 1.0) -> Buffer:
        out = self._new(table.shape[1] if isinstance(table, Tensor) else table.inputs)
        if isinstance(table, Packed):
            groups, _ = self._keep_groups(table)
            self._library.program_embed_grouped(
                self._handle, self._wide, groups, table.outputs, table.inputs, scale, out.address
            )
            return out
        self._library.program_embed(self._handle, self._wide, self._keep(table), *table.shape, scale, out.address)
        return out

    def rotations(self, inverse_frequencies: Tensor, factors: Tensor | float) -> Buffer:
        frequencies = inverse_frequencies.float().contiguous()
        each = torch.zeros_like(frequencies) + factors
        out = self._new(2 * len(each), torch.float32)
        self._library.program_rotations(self._handle, self._keep(frequencies), self._keep(each), len(each), out.address)
        return out

    def add_rms_norm(self, x: Buffer, residual: Buffer | None, weight: Tensor, eps: float) -> tuple[Buffer, Buffer]:
        """Add to the residual in place."""
        size = len(weight)
        out, total = self._new(size), residual or self._new(size, torch.float32)
        self._library.program_norm(
            self._handle,
            self._wide,
            x.address,
            total.address,
            int(residual is None),
            self._keep(weight.float()),
            eps,
            size,
            out.address,
        )
        return out, total

    def linear(self, x: Buffer, linear: Linear) -> Buffer:
        self._adapt(linear.weight)
        return self._linear(x, linear.weight, self._new(linear.weight.outputs), sampled=False)

    def gated_linear(self, x: Buffer, linear: Linear, activation: str = SILU) -> Buffer:
        packed: Packed = linear.weight
        out = self._new(packed.outputs // 2)
        self._adapt(packed)
        self._library.program_gated(
            self._handle,
            self._wide,
            x.address,
            *self._keep_weights(packed),
            packed.inputs,
            packed.outputs,
            *self._keep_groups(packed),
            *self._beside_rows(packed, len(out.tensor)),
            int(activation == GELU),
            out.address,
        )
        return out

    def all_reduce(self, x: Buffer) -> Buffer:
        """Sum in place."""
        assert self._reduction is not None, "there are no ranks to sum over"
        wide = int(x.tensor.dtype == torch.float32)
        function, context = self._reduction.function, self._reduction.context
        self._library.program_all_reduce(self._handle, wide, x.address, x.stride, function, context)
        return x

    def experts(self, x: Buffer, router: Tensor, gate_up: Linear, down: Linear, routing: Routing) -> Buffer:
        inner, outer = gate_up.weight, down.weight
        (count, hidden), size, rows = router.shape, inner.outputs // 2, self._capacity * routing.per_token
        room = rows * (1 if self._exchange is None else self._exchange.size)
        shares = self._new(routing.per_token, torch.float32)
        chosen, places = (self._new(routing.per_token, torch.int64) for _ in range(2))
        firsts = self._new(1, torch.int64, count + 1)
        of_experts, gated = self._new(hidden, rows=room), self._new(size, rows=room)
        found, out = self._new(hidden, torch.float32, room), self._new(hidden)
        between = (shares, chosen, places, firsts, of_experts, gated, found, out)
        held = count if self._exchange is None else len(held_experts(count, self._exchange.rank, self._exchange.size))
        matrices = [self._expert_matrices(packed, held, room) for packed in (inner, outer)]
        operation = (
            self._handle,
            self._wide,
            x.address,
            self._keep(router),
            count,
            hidden,
            size,
            routing.per_token,
            int(routing.renormalize),
            *map(ctypes.byref, matrices),
            *(buffer.address for buffer in between),
        )
        if self._exchange is None:
            self._library.program_experts(*operation)
        else:
            self._divided_experts(operation, self._exchange, rows, hidden, held)
        return out

    def _expert_matrices(self, packed: Packed, experts: int, rows: int) -> _ExpertMatrices:
        """rows: the most that all experts have together."""
        panels, scales, _ = self._keep_weights(packed)
        grouped, num_grouped = self._keep_groups(packed)
        assert num_grouped % experts == 0
        return _ExpertMatrices(panels, scales, grouped, num_grouped // experts, *self._beside_rows(packed, rows))

    def _divided_experts(
        self, operation: tuple[Any, ...], exchange: RowExchange, rows: int, hidden: int, held: int
    ) -> None:
        """Record experts of which this rank holds some. rows: the most that it sends."""
        room = rows * exchange.size
        row_bytes = -(-hidden * self._dtype.itemsize // 8) * 8 + 8  # the expert's number behind it
        sent, arrived = (self._new(row_bytes, torch.uint8, count) for count in (rows, room))
        arrived_rows, firsts = self._new(1, torch.int64, room), self._new(1, torch.int64, held + 1)
        back = self._new(hidden, torch.float32, rows)
        self._library.program_divided_experts(
            *operation,
            exchange.rank,
            exchange.size,
            exchange.function,
            exchange.context,
            row_bytes,
            *(buffer.address for buffer in (sent, arrived, arrived_rows, firsts, back)),
            room,
        )

    def rotate_and_cache(
        self,
        qkv: Buffer | Columns,
        rotations: Buffer,
        heads: HeadShape,
        cache: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> Buffer:
        q = self._new(heads.num_heads * heads.head_dim)
        q_norm, k_norm = (None, None) if norms is None else (self._keep(norm.float()) for norm in norms)
        self._library.program_rotate_and_cache(
            self._handle,
            self._wide,
            qkv.address,
            qkv.stride,
            q_norm,
            k_norm,
            eps,
            rotations.address,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            len(cache[0]),
            *map(self._keep, cache),
            _NARROW.get(cache[0].dtype, 0),
            q.address,
        )
        return q

    def attention(
        self, q: Buffer, heads: HeadShape, cache: tuple[Tensor, Tensor], scale: float, window: int | None = None
    ) -> Buffer:
        out = self._new(heads.num_heads * heads.head_dim)
        self._library.program_attention(
            self._handle,
            self._wide,
            q.address,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            *map(self._keep, cache),
            _NARROW.get(cache[0].dtype, 0),
            scale,
            window or UNLIMITED,
            out.address,
        )
        return out

    def logits(self, hidden: Buffer, lm_head: Linear, num_sampled: int) -> Buffer:
        """Compute the logits of the step's sampled tokens, at most `num_sampled`. # [num_sampled, vocab] float32"""
        packed: Packed = lm_head.weight
        sampled = self._new(packed.inputs, rows=num_sampled)
        self._library.program_gather(self._handle, self._wide, hidden.address, packed.inputs, sampled.address)
        return self._linear(sampled, packed, self._new(packed.outputs, torch.float32, num_sampled), sampled=True)

    def argmax(self, logits: Buffer) -> tuple[Buffer, Buffer]:
        """Return (the most likely token, its logit) of each row of `logits`. The logit is NaN if any of the row is."""
        rows, vocab = logits.tensor.shape
        tokens, best = self._new(1, torch.int64, rows), self._new(1, torch.float32, rows)
        self._library.program_argmax(self._handle, logits.address, vocab, tokens.address, best.address)
        return tokens, best

    def _linear(self, x: Buffer, packed: Packed, out: Buffer, *, sampled: bool) -> Buffer:
        self._library.program_linear(
            self._handle,
            self._wide,
            x.address,
            *self._keep_weights(packed),
            packed.inputs,
            packed.outputs,
            *self._keep_groups(packed),
            *self._beside_rows(packed, len(out.tensor)),
            out.address,
            int(out.tensor.dtype == torch.float32),
            int(sampled),
        )
        return out

    def _adapt(self, packed: Packed) -> None:
        """Say what adapters add to the product that is recorded next."""
        if (adapted := packed.adapted) is None:
            return
        if (width := adapted.width) not in self._shrunk:
            self._shrunk[width] = torch.zeros(self._capacity, width, dtype=self._dtype)
        shrunk = self._keep(self._shrunk[width])
        self._library.program_adapt(self._handle, adapted.number, self._keep(adapted.parts()), shrunk, width)

    def _new(self, width: int, dtype: torch.dtype | None = None, rows: int | None = None) -> Buffer:
        dtype, rows = dtype or self._dtype, rows or self._capacity
        free = self._pool.get((width, dtype), [])
        for i, tensor in enumerate(free):
            if len(tensor) >= rows:
                return Buffer(free.pop(i), self._pool)
        tensor = torch.zeros(rows, width, dtype=dtype)
        self._kept.append(tensor)
        return Buffer(tensor, self._pool)

    def _keep_weights(self, packed: Packed) -> tuple[int | None, ...]:
        parts = (packed.panels, packed.scales, packed.bias)
        return tuple(None if part is None else self._keep(part) for part in parts)

    def _keep_groups(self, packed: Packed) -> tuple[int | None, int]:
        """Return the address of a grouped matrix's panels, and their number."""
        if packed.groups is None:
            return None, 0
        for part in packed.groups.data:
            self._keep(part)
        return self._keep(packed.groups.table), len(packed.groups.table)

    def _beside_rows(self, packed: Packed, rows: int) -> tuple[int | None, int | None]:
        """Reserve memory for the sums of inputs, by which minima are multiplied, or for the rounded rows."""
        blocks = packed.inputs // BLOCK
        if packed.rounded:
            return None, self._new(blocks * ROUNDED_BYTES, torch.uint8, rows).address
        if packed.groups is None or not packed.groups.minima:
            return None, None
        return self._new(blocks, torch.float32, rows).address, None

    def _keep(self, tensor: Tensor) -> int:
        assert tensor.is_contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()
