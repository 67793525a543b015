"""Owns a model on a device: a step is copied there in one piece, and runs eagerly or as a captured step.
Never waits for the device, and keeps nothing of a step but K and V and recurrent states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.batch.inputs import StepInputs, build_inputs, int_tensor
from engine.execution.device import Device, Graph
from engine.execution.gpu.adapters import AdapterSlots
from engine.execution.gpu.cuda_graph_buckets import Bucket, Buckets
from engine.execution.gpu.decode_loop import DecodeLoop
from engine.execution.gpu.inputs import DeviceInputs, Layout, bucket_layout, layout_of, pack
from engine.execution.gpu.ranks import ALONE, DeviceRanks, Pending, Way
from engine.models.computed import Computed
from engine.models.decoder import Decoder
from engine.models.kv_cache import KVCache
from engine.models.recurrent_state import RecurrentState
from engine.step import GraphUse, PaddedSizes, StepPlan
from kernels.choice import forward_pass
from kernels.eager.forward import multiply
from kernels.eager.ops import Ops
from kernels.rows.adapter_tokens import AdapterTokens
from kernels.rows.step import PagedRows, StateRows


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Graph
    layout: Layout


class DeviceModel:
    """An engine.models.computed.Model whose weights, KV cache and recurrent states are on `device`."""

    def __init__(
        self,
        decoder: Decoder,
        ops: Ops,
        cache: KVCache,
        device: Device,
        *,
        block_size: int,
        max_model_len: int,
        state: RecurrentState | None = None,
    ) -> None:
        """cache: if steps are captured, its last block is for padding."""
        self.ranks: DeviceRanks = ALONE
        """Set before the first step or capture, if `decoder` is this rank's part of a model."""
        self.adapters: AdapterSlots | None = None
        """Set before the first step or capture, if rows may have LoRA adapters."""
        self.decoder, self.cache, self.ops, self.state = decoder, cache, ops, state
        self._device, self._block_size, self._max_model_len = device, block_size, max_model_len
        self._pass = forward_pass(ops)
        self._buckets = Buckets()
        self._captured: dict[Bucket, _Captured] = {}
        self._packed = self._tables = self._hidden = torch.empty(0)
        self._loop: DecodeLoop | None = None
        """None: no decode step is captured."""

    # --- captured steps -----------------------------------------------------------------------------------------------

    @property
    def sizes(self) -> PaddedSizes:
        """What steps are padded to. The rare step of an image's positions or of too long a row runs unpadded."""
        return PaddedSizes(self._buckets.decode_rows, self._buckets.mixed_tokens)

    @torch.inference_mode()
    def warm_up(self, buckets: Buckets) -> None:
        """Run the largest bucket of each kind once without capturing: `capture` needs that memory besides what it
        keeps."""
        layouts, kinds = self._prepare(buckets), set[tuple[bool, bool]]()
        for bucket, layout in layouts.items():  # largest first
            if (kind := (bucket.decode, bucket.adapters)) not in kinds:
                kinds.add(kind)
                self._place(self._nothing(), bucket, layout)
                self._work(bucket, layout)()
                if self._loop is not None and _chooses(bucket):
                    self._loop.choose(bucket, self._logits_of(bucket), self.ranks)()

    @torch.inference_mode()
    def capture(self, buckets: Buckets) -> None:
        """Capture every bucket. All share one memory pool, one input tensor and one tensor of hidden states."""
        assert self.ops.capturable
        assert self._device.captures
        first: Graph | None = None
        for bucket, layout in self._prepare(buckets).items():
            self._place(self._nothing(), bucket, layout)
            graph = self._device.capture(self._work(bucket, layout), first)
            first = first or graph
            self._captured[bucket] = _Captured(graph, layout)
            if self._loop is not None and _chooses(bucket):
                advance = self._loop.advance(bucket, layout, self._views(layout))
                choose = self._loop.choose(bucket, self._logits_of(bucket), self.ranks)
                self._loop.capture(bucket, advance, choose, first)
        self._buckets = buckets

    def _prepare(self, buckets: Buckets) -> dict[Bucket, Layout]:
        """Allocate the tensors that captures read and write; return each bucket's layout in them."""
        layouts = {bucket: self._layout(bucket) for bucket in buckets.all}
        sizes, where = layouts.values(), self._device.torch_device
        most_tokens = max(layout.num_tokens for layout in sizes)
        self._packed = torch.zeros(max(layout.tables_begin for layout in sizes), dtype=torch.int64, device=where)
        # A tensor of its own, so that no other number stands where a kernel looks for a block.
        shape = max(layout.num_rows for layout in sizes), max(layout.width for layout in sizes)
        self._tables = torch.full(shape, self._padding_block, dtype=torch.int64, device=where)
        size = self.decoder.config.hidden_size
        self._hidden = torch.zeros(most_tokens, size, dtype=self.decoder.dtype, device=where)
        if buckets.decode_rows:
            self._loop = DecodeLoop(
                self.ops,
                self._device,
                most_rows=max(buckets.decode_rows),
                block_size=self._block_size,
                max_model_len=self._max_model_len,
            )
        return layouts

    def _layout(self, bucket: Bucket) -> Layout:
        has_states, adapter_slots = self.state is not None, 0 if self.adapters is None else self.adapters.num_slots
        return bucket_layout(
            bucket, self._block_size, self._max_model_len, has_states=has_states, adapter_slots=adapter_slots
        )

    def _nothing(self) -> StepInputs:
        """A step without tokens, which becomes one of padding alone."""
        empty = torch.zeros(0, dtype=torch.int64)
        rows = PagedRows(0, (), (), torch.zeros(0, 0, dtype=torch.int64), self._block_size)
        return StepInputs(empty, empty, empty, empty, rows)

    def _place(self, inputs: StepInputs, bucket: Bucket, layout: Layout) -> DeviceInputs:
        """Copy the padded step to where the bucket reads it. Only the columns of block tables that its longest row
        needs are copied: the others still name blocks of earlier steps, but no kernel uses a table beyond the row's
        length."""
        step = layout.as_wide_as(inputs, decode=bucket.decode)
        host = pack(inputs, step, decode=bucket.decode, padding_block=self._padding_block)
        there, begin = self._views(layout), step.tables_begin
        self._device.upload(host[:begin], self._packed[:begin])
        self._device.upload(host[begin:].view(step.num_rows, step.width), there.tables[:, : step.width])
        return there

    def _views(self, layout: Layout) -> DeviceInputs:
        tables = self._tables[: layout.num_rows, : layout.width]
        return layout.split(self._packed[: layout.tables_begin], tables)

    @property
    def _padding_block(self) -> int:
        return len(self.cache.layers[0][0]) - 1

    def _work(self, bucket: Bucket, layout: Layout) -> Callable[[], None]:
        inputs, hidden = self._views(layout), self._hidden[: bucket.num_tokens]

        def work() -> None:
            rows = layout.rows(
                inputs,
                self._block_size,
                num_decode=min(bucket.num_rows, bucket.num_tokens),
                num_chunks=0 if bucket.decode else layout.num_rows,
                max_count=1 if bucket.decode else bucket.num_tokens,
                max_length=layout.width * self._block_size,
            )
            hidden.copy_(self._run(inputs, rows, layout.states(inputs.numbers, rows), layout.adapter_tokens(inputs)))

        return work

    def _logits_of(self, bucket: Bucket) -> Callable[[], Tensor]:
        """The logits after every token of a captured decode step. # [rows, vocab]"""
        return lambda: self._logits(self._hidden[: bucket.num_rows])

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.ranks.joined(multiply(self.ops, self.decoder.weights.lm_head, hidden))

    # --- a step -------------------------------------------------------------------------------------------------------

    def decode(
        self, plan: StepPlan, newest: Mapping[str, int], pending: Sequence[Pending]
    ) -> tuple[Tensor, GraphUse] | None:
        """Queue a decode step with the choice of its tokens, if both are captured; see DecodeLoop. Returns the tokens,
        NO_TOKEN for a row that has none, # [rows] int64, and which captured step ran. None: `start` is to run it.

        Raises:
            ValueError: as `start`.
        """
        if self._loop is None or not self._loop.takes(plan.rows):
            return None
        if self._loop.goes_on(plan.rows, newest):
            return self.go_on(plan, newest)
        return self.begin(plan, newest, pending)

    def go_on(self, plan: StepPlan, newest: Mapping[str, int]) -> tuple[Tensor, GraphUse]:
        """Queue a decode step whose rows follow those of the step before, as `decode` finds."""
        loop = self._loop
        assert loop is not None
        self.ranks.tell(Way.GO_ON, plan, newest, ())
        bucket = loop.bucket
        loop.go_on(plan.rows, self._views(self._captured[bucket].layout).tables)
        return self._end(bucket, plan)

    def begin(
        self, plan: StepPlan, newest: Mapping[str, int], pending: Sequence[Pending]
    ) -> tuple[Tensor, GraphUse] | None:
        """Queue any other decode step whose choice of tokens is captured. None: no captured size holds it."""
        loop = self._loop
        assert loop is not None
        loop.stop()
        inputs = self._inputs(plan, newest)
        bucket = self._bucket(inputs)
        if not isinstance(bucket, Bucket):
            return None
        self.ranks.tell(Way.BEGIN, plan, newest, pending)
        places = self._loose(inputs, pending)[1]
        _put(self._place(inputs, bucket, self._captured[bucket].layout).token_ids, places)
        loop.begin(bucket, plan.rows)
        return self._end(bucket, plan)

    def _end(self, bucket: Bucket, plan: StepPlan) -> tuple[Tensor, GraphUse]:
        assert self._loop is not None
        self._captured[bucket].graph.replay()
        tokens = self._loop.end(bucket, plan.rows)
        self.ranks.keep(tokens)
        return tokens, GraphUse(True, bucket.name)

    def forward(self, plan: StepPlan, newest: Mapping[str, int]) -> Computed:
        return self.start(plan, newest, (), Way.COMPUTE)[0]

    def start(
        self, plan: StepPlan, newest: Mapping[str, int], pending: Sequence[Pending], way: Way = Way.CHOOSE
    ) -> tuple[Computed, GraphUse | None]:
        """Queue a step; the plan is in kernel order. pending: tokens that `newest` does not have yet. way: COMPUTE or
        CHOOSE. With the latter, `logits_at` is called for what rows with `scoring` ask for alone, and `share` with the
        chosen tokens. Also returns which captured step ran, or why none did; None if nothing was captured.

        Raises:
            ValueError: a row breaks the contract of engine.step.
        """
        if self._loop is not None:
            self._loop.stop()
        inputs = self._inputs(plan, newest)
        bucket = self._bucket(inputs)
        self.ranks.tell(way, plan, newest, pending)
        sampled, places = self._loose(inputs, pending)
        hidden = self._replay(bucket, inputs, places) if isinstance(bucket, Bucket) else self._eager(inputs, places)

        def logits_at(index: Tensor) -> Tensor:
            if way is Way.COMPUTE:
                self.ranks.tell_scored(index.tolist())
            return self._logits(hidden[self._device.upload(index)])

        computed = Computed(hidden, self._logits(hidden[sampled]), logits_at)
        use = GraphUse(True, bucket.name) if isinstance(bucket, Bucket) else GraphUse(False, bucket)
        return computed, use if self._captured else None

    def share(self, tokens: Tensor) -> None:
        """Give all ranks the tokens that were chosen after `start`: [places] int64, the same number on each."""
        self.ranks.broadcast(tokens)
        self.ranks.keep(tokens)

    def _inputs(self, plan: StepPlan, newest: Mapping[str, int]) -> StepInputs:
        num_slots = 0 if self.state is None else self.state.num_slots
        inputs = build_inputs(plan, self._block_size, newest, num_state_slots=num_slots, drafts=not num_slots)
        return replace(inputs, adapter_slots=self._adapter_slots(plan))

    def _adapter_slots(self, plan: StepPlan) -> tuple[int, ...]:
        if self.adapters is not None:
            return self.adapters.slots_of(plan.rows)
        if lost := next((row.adapter for row in plan.rows if row.adapter), None):
            raise ValueError(f"A row needs the adapter {lost}, and this model has none.")
        return ()

    def _bucket(self, inputs: StepInputs) -> Bucket | str:
        rows = inputs.rows
        num_rows = len(rows.counts)
        found = self._buckets.find(
            num_tokens=len(inputs.token_ids),
            num_rows=num_rows,
            decode=rows.num_decode == num_rows,
            adapters=bool(inputs.adapter_slots),
        )
        if isinstance(found, Bucket) and rows.block_tables.shape[1] > self._captured[found].layout.width:
            return f"a row of more than {self._max_model_len} positions"
        return found

    def _loose(self, inputs: StepInputs, pending: Sequence[Pending]) -> tuple[Tensor, Sequence[tuple[Tensor, Tensor]]]:
        """Copy to the device, at once: the indices of the tokens after which one is sampled. Also returns (places,
        values) of the input tokens that are on the device already."""
        sources: dict[int, list[Pending]] = {}
        for token in pending:
            sources.setdefault(id(token.tokens), []).append(token)
        parts = [inputs.sampled_tokens]
        for group in sources.values():
            parts += [int_tensor([[token.place for token in group]]), int_tensor([[token.number for token in group]])]
        packed, sizes = self._device.upload(torch.cat(parts)), [len(part) for part in parts]
        sampled, *indices = packed.split(sizes)  # type: ignore[no-untyped-call]
        # NO_TOKEN is negative. Its row fails once it is read, so that any token of the vocabulary will do here.
        found = [
            (places, group[0].tokens[index].clamp(min=0))
            for places, index, group in zip(indices[::2], indices[1::2], sources.values(), strict=True)
        ]
        return sampled, found

    def _replay(self, bucket: Bucket, inputs: StepInputs, places: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        captured = self._captured[bucket]
        _put(self._place(inputs, bucket, captured.layout).token_ids, places)
        captured.graph.replay()
        return self._hidden[: len(inputs.token_ids)]

    def _eager(self, inputs: StepInputs, places: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        layout, rows = layout_of(inputs), inputs.rows
        there = layout.split(self._device.upload(pack(inputs, layout)))
        _put(there.token_ids, places)
        adapters = layout.adapter_tokens(there)
        if not self.ops.capturable:
            plain = PagedRows(rows.num_decode, rows.contexts, rows.counts, there.tables, rows.block_size)
            return self._run(there, plain, self._host_states(inputs, layout.state_slots(there.numbers)), adapters)
        lengths = map(sum, zip(rows.contexts, rows.counts, strict=True))
        device_rows = layout.rows(
            there,
            self._block_size,
            num_decode=rows.num_decode,
            num_chunks=len(rows.counts) - rows.num_decode,
            max_count=max(rows.counts),
            max_length=max(lengths),
        )
        device_rows = replace(device_rows, contexts=rows.contexts, counts=rows.counts)  # launches are sized by them
        if self.ops.states_capturable:
            return self._run(there, device_rows, layout.states(there.numbers, device_rows), adapters)
        return self._run(there, device_rows, self._host_states(inputs, layout.state_slots(there.numbers)), adapters)

    def _host_states(self, inputs: StepInputs, slots: Tensor) -> StateRows | None:
        """State rows for operators that read their rows on the host. slots: the slots on the device."""
        if not inputs.state_slots:
            return None
        rows = inputs.rows
        return StateRows(rows.num_decode, rows.contexts, rows.counts, inputs.state_slots, slots)

    def _run(
        self, inputs: DeviceInputs, rows: PagedRows, states: StateRows | None, adapters: AdapterTokens | None
    ) -> Tensor:
        config = self.decoder.config
        run = self._pass(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            slots=inputs.slots,
            plan=self.ops.prepare_attention(rows, config.num_kv_heads, self.decoder.dtype),
            states=states,
            adapters=None if adapters is None or self.adapters is None else self.adapters.step(adapters),
            group=self.ranks.group,
        )
        hidden: Tensor = self.decoder.forward(run, self.cache, self.state)
        return hidden


def _put(token_ids: Tensor, places: Sequence[tuple[Tensor, Tensor]]) -> None:
    for index, values in places:
        token_ids.index_copy_(0, index, values)


def _chooses(bucket: Bucket) -> bool:
    """Whether the choice of tokens is captured for this size. Steps with adapters choose theirs outside."""
    return bucket.decode and not bucket.adapters
