"""Owns the measurement of single operations: their time, and how close they come to the peaks. Long, because it has
every operation. Never compares with a data sheet: peaks are measured in the same run. The last line of output is one
JSON document."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.results import write_whole
from kernels.choice import ATTENTION, TORCH_ATTENTION, TRITON, choose_attention
from kernels.eager.forward import EagerPass, multiply
from kernels.eager.ops import TORCH, TORCH_CPU, Ops
from kernels.forward import HeadShape, Linear, LinearHeads, Routing
from kernels.kv_format import stored_size
from kernels.rows.device import on_device, states_on_device
from kernels.rows.step import PagedRows, StateRows

logger = logging.getLogger(__name__)

Run = Callable[[], object]

MOST_SETS = 32
CPU_CACHE_BYTES = GPU_CACHE_BYTES = 64 << 20
"""More than most caches; for a GPU only used if torch does not report the size."""
WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Cell:
    """One operation on one shape."""

    op: str
    shape: dict[str, int]
    num_bytes: int
    """The minimum that it must move: each input read once, each output written once."""
    flops: int
    make: Callable[[], Run]
    """Makes a run on its own inputs."""
    capturable: bool = True
    """If False, it is timed with its launches from Python, which is how an engine would have to run it."""


@dataclass(frozen=True, slots=True)
class Bench:
    options: argparse.Namespace
    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def heads(self) -> HeadShape:
        o = self.options
        return HeadShape(num_heads=o.heads, num_kv_heads=o.kv_heads, head_dim=o.head_dim)

    @property
    def linear_heads(self) -> LinearHeads:
        o = self.options
        return LinearHeads(
            num_key_heads=o.linear_key_heads,
            num_value_heads=o.linear_value_heads,
            key_dim=o.linear_head_dim,
            value_dim=o.linear_head_dim,
        )

    @property
    def table(self) -> Ops:
        if not self.on_gpu:
            return TORCH_CPU
        from kernels.triton.ops import TRITON as TABLE

        return TABLE

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=dtype or self.dtype)

    def cache(self, shape: Sequence[int], kept_in: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return random K and V. shape: [num_blocks, block_size, kv_heads, head_dim]; kept_in: a type of 8 bits; None:
        that of the operands."""
        if kept_in is None:
            return self.random(*shape), self.random(*shape)
        *places, head_dim = shape
        k, v = (
            torch.zeros(*places, stored_size(head_dim, kept_in), dtype=torch.int8, device=self.device).view(kept_in)
            for _ in "kv"
        )
        num_slots = places[0] * places[1]
        for first in range(0, num_slots, WRITTEN_AT_A_TIME):
            slots = torch.arange(first, min(first + WRITTEN_AT_A_TIME, num_slots), device=self.device)
            some = self.random(len(slots), places[2], head_dim)
            self.table.write_cache(some, some, k, v, slots)
        return k, v

    def run_of(self, rows: PagedRows | None, num_tokens: int) -> EagerPass:
        """Return the forward pass whose operations are measured: Triton's on a GPU, torch's operators on the CPU."""
        positions = torch.randint(4096, (num_tokens,), generator=self.generator, device=self.device)
        slots = torch.arange(num_tokens, device=self.device)
        if not self.on_gpu:
            plan = None if rows is None else TORCH_CPU.prepare_attention(rows, self.heads.num_kv_heads, self.dtype)
            return EagerPass(TORCH_CPU, token_ids=positions, positions=positions, slots=slots, plan=plan)
        from kernels.triton.attention.plan import prepare_attention
        from kernels.triton.forward import TritonPass

        rows = rows or PagedRows(1, (0,), (1,), torch.zeros(1, 1, dtype=torch.int64, device=self.device), 16)
        made = prepare_attention(rows, self.heads.num_kv_heads, self.dtype)
        return TritonPass(token_ids=positions, positions=positions, slots=slots, plan=made)

    def attention_tables(self) -> tuple[dict[str, Ops], list[str]]:
        """Return by name the tables whose attention is measured besides that of `table`, and why others are missing."""
        if not self.on_gpu:
            return {TORCH_ATTENTION: TORCH}, []
        tables, missing = {}, []
        for name in ATTENTION:
            if name == TRITON:
                continue
            try:
                tables[name] = choose_attention(
                    name,
                    dtype=self.dtype,
                    head_dim=self.options.head_dim,
                    block_size=self.options.block_size,
                    capability=torch.cuda.get_device_capability(self.device),
                )[1]
            except ValueError as error:
                missing.append(str(error))
        return tables, missing

    def cells(self, others: Mapping[str, Ops]) -> list[Cell]:
        """others: tables whose attention is measured, too. Most rows come first: kernels choose their configurations at
        their first launch, and for one row alone they would choose others."""
        o = self.options
        most_first, tokens_first = sorted(o.rows, reverse=True), sorted((*o.rows, *o.chunk), reverse=True)
        by_token = (
            self.norm,
            self.activation,
            self.rotation,
            self.cache_write,
            self.sigmoid_gate,
            self.gated_norm,
        )
        found = [cell(tokens) for tokens in most_first for cell in by_token]
        for suffix, table in {"": None, **{f"_{name}": table for name, table in others.items()}}.items():
            for rows in most_first:
                found.append(self.attention(f"attention_decode{suffix}", [o.context] * rows, [1] * rows, rows, table))
            found += [self.attention(f"attention_chunk{suffix}", [o.context], [count], 0, table) for count in o.chunk]
            found.append(self.attention(f"attention_after_prefix{suffix}", [o.prefix], [o.after_prefix], 0, table))
        for name, kept_in in NARROW_CACHES.items():
            for rows in most_first:
                decode = f"attention_decode_{name}_cache"
                found.append(self.attention(decode, [o.context] * rows, [1] * rows, rows, None, kept_in))
            chunk = f"attention_chunk_{name}_cache"
            found += [self.attention(chunk, [o.context], [count], 0, None, kept_in) for count in o.chunk]
        for linear in (self.causal_conv, self.delta_rule):
            found += [linear("decode", [1] * rows, rows) for rows in most_first]
            found += [linear("chunk", [count], 0) for count in o.chunk]
        found += [self.experts(tokens) for tokens in tokens_first]
        if self.on_gpu:
            found += [self.sampling(rows, name) for rows in most_first for name in SAMPLING]
            found += [cell(rows) for rows in most_first for cell in (self.controls, self.logprobs)]
            found += [self.experts(tokens, kind) for tokens in tokens_first for kind in WEIGHTS if kind != "plain"]
            found += [self.linear(tokens, kind) for tokens in tokens_first for kind in (*WEIGHTS, BY_TORCH)]
            found += [self.gated_linear(tokens) for tokens in most_first]
            if self.multiplies_fp8:
                found += [self.linear(tokens, BY_FP8) for tokens in tokens_first]
        return found

    @property
    def multiplies_fp8(self) -> bool:
        narrow = self.table.narrow
        return narrow is not None and torch.cuda.get_device_capability(self.device) >= narrow.fp8_from

    def norm(self, tokens: int) -> Cell:
        size, item = self.options.hidden, self.dtype.itemsize

        def make() -> Run:
            run, weight = self.run_of(None, tokens), self.random(size)
            x, residual = self.random(tokens, size), self.random(tokens, size, dtype=torch.float32)
            return lambda: run.add_rms_norm(x, residual, weight, 1e-5)

        return Cell("add_rms_norm", {"tokens": tokens, "size": size}, tokens * size * (2 * item + 8), 0, make)

    def activation(self, tokens: int) -> Cell:
        size = self.options.intermediate

        def make() -> Run:
            x, table = self.random(tokens, 2 * size), self._activation()
            return lambda: table(x)

        shape = {"tokens": tokens, "size": size}
        return Cell("silu_and_mul", shape, 3 * tokens * size * self.dtype.itemsize, 0, make)

    def _activation(self) -> Callable[[Tensor], Tensor]:
        if not self.on_gpu:
            return TORCH_CPU.silu_and_mul
        from kernels.triton.elementwise.activation import silu_and_mul

        return silu_and_mul

    def rotation(self, tokens: int) -> Cell:
        heads = self.heads
        width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim

        def make() -> Run:
            run, qkv = self.run_of(None, tokens), self.random(tokens, width)
            rotations = run.rotations(torch.rand(heads.head_dim // 2, device=self.device), 1.0)
            shape = (-(-tokens // 16), 16, heads.num_kv_heads, heads.head_dim)
            cache = (self.random(*shape), self.random(*shape))
            return lambda: run.rotate_and_cache(qkv, rotations, heads, cache, None, 0.0)

        shape = {"tokens": tokens, "heads": heads.num_heads, "kv_heads": heads.num_kv_heads, "head_dim": heads.head_dim}
        num_bytes = tokens * (2 * width * self.dtype.itemsize + heads.head_dim * 4)
        return Cell("rotate_and_cache", shape, num_bytes, 0, make)

    def cache_write(self, tokens: int) -> Cell:
        """The write alone, without rotation, for models that have a norm between the two or no rotation."""
        heads = self.heads

        def make() -> Run:
            k, v = (self.random(tokens, heads.num_kv_heads, heads.head_dim) for _ in range(2))
            shape = (-(-tokens // 16), 16, heads.num_kv_heads, heads.head_dim)
            cache, slots = (self.random(*shape), self.random(*shape)), torch.arange(tokens, device=self.device)
            table = self.table
            return lambda: table.write_cache(k, v, *cache, slots)

        shape = {"tokens": tokens, "kv_heads": heads.num_kv_heads, "head_dim": heads.head_dim}
        num_bytes = 4 * tokens * heads.num_kv_heads * heads.head_dim * self.dtype.itemsize
        return Cell("write_cache", shape, num_bytes, 0, make)

    def attention(
        self,
        name: str,
        contexts: Sequence[int],
        counts: Sequence[int],
        num_decode: int,
        table: Ops | None,
        kept_in: torch.dtype | None = None,
    ) -> Cell:
        """`table` None means the forward pass's own attention. kept_in: K and V in 8 bits."""
        heads, block_size = self.heads, self.options.block_size
        needed = [-(-(context + count) // block_size) for context, count in zip(contexts, counts, strict=True)]
        tokens, keys = sum(counts), sum(contexts) + sum(counts)
        pairs = sum(n * context + n * (n + 1) // 2 for context, n in zip(contexts, counts, strict=True))

        def make() -> Run:
            blocks = torch.randperm(sum(needed), generator=self.generator, device=self.device)
            tables = blocks.view(len(counts), -1)  # rows are equally long
            rows = PagedRows(num_decode, tuple(contexts), tuple(counts), tables, block_size)
            q = self.random(tokens, heads.num_heads * heads.head_dim)
            shape = (sum(needed), block_size, heads.num_kv_heads, heads.head_dim)
            cache, scale = self.cache(shape, kept_in), heads.head_dim**-0.5
            if table is None:
                run = self.run_of(rows, tokens)
                return lambda: run.attention(q, heads, cache, scale)
            there = on_device(rows, self.device) if table.capturable else rows
            plan = table.prepare_attention(there, heads.num_kv_heads, self.dtype)
            by_head, attention = q.view(tokens, heads.num_heads, heads.head_dim), table.attention
            return lambda: attention(by_head, *cache, plan, scale)

        shape = {"rows": len(counts), "tokens": tokens, "context": contexts[0], "head_dim": heads.head_dim}
        kept = self.dtype if kept_in is None else kept_in
        of_keys = keys * heads.num_kv_heads * stored_size(heads.head_dim, kept) * kept.itemsize
        num_bytes = 2 * (of_keys + tokens * heads.num_heads * heads.head_dim * self.dtype.itemsize)
        flops = 4 * pairs * heads.num_heads * heads.head_dim
        return Cell(name, shape, num_bytes, flops, make, capturable=table is None or table.capturable)

    def sigmoid_gate(self, tokens: int) -> Cell:
        size = self.heads.num_heads * self.heads.head_dim

        def make() -> Run:
            x, gate, table = self.random(tokens, size), self.random(tokens, size), self.table
            return lambda: table.sigmoid_gate(x, gate, None)

        return Cell("sigmoid_gate", {"tokens": tokens, "size": size}, 3 * tokens * size * self.dtype.itemsize, 0, make)

    def gated_norm(self, tokens: int) -> Cell:
        heads = self.linear_heads
        size = heads.value_size

        def make() -> Run:
            x, gate, weight = self.random(tokens, size), self.random(tokens, size), self.random(heads.value_dim)
            table = self.table
            return lambda: table.gated_rms_norm(x, gate, weight, 1e-6)

        shape = {"tokens": tokens, "size": size, "head_dim": heads.value_dim}
        return Cell("gated_rms_norm", shape, 3 * tokens * size * self.dtype.itemsize, 0, make)

    def state_rows(self, counts: Sequence[int], num_decode: int) -> StateRows:
        """Make rows that continue from states in their own slots."""
        slots = tuple(range(len(counts)))
        index = torch.tensor(slots, device=self.device)
        rows = StateRows(num_decode, (self.options.context,) * len(counts), tuple(counts), slots, index)
        return states_on_device(rows) if self.on_gpu else rows

    def causal_conv(self, kind: str, counts: Sequence[int], num_decode: int) -> Cell:
        channels, kernel = self.linear_heads.channels, self.options.linear_conv_kernel
        tokens = sum(counts)

        def make() -> Run:
            rows, x, weight = (
                self.state_rows(counts, num_decode),
                self.random(tokens, channels),
                self.random(channels, kernel),
            )
            state, table = self.random(len(counts), kernel - 1, channels), self.table
            return lambda: table.causal_conv(x, weight, state, rows)

        shape = {"rows": len(counts), "tokens": tokens, "channels": channels, "kernel": kernel}
        numbers = 2 * tokens * channels + 2 * len(counts) * (kernel - 1) * channels + channels * kernel
        flops = 2 * tokens * channels * kernel
        return Cell(f"causal_conv_{kind}", shape, numbers * self.dtype.itemsize, flops, make)

    def delta_rule(self, kind: str, counts: Sequence[int], num_decode: int) -> Cell:
        """The operations counted are those of the recurrence: a decay, two products with the state, and a sum."""
        heads, tokens = self.linear_heads, sum(counts)
        count, state_size = heads.num_value_heads, heads.num_value_heads * heads.key_dim * heads.value_dim

        def make() -> Run:
            rows, qkv = self.state_rows(counts, num_decode), self.random(tokens, heads.channels)
            strength, step = self.random(tokens, count), self.random(tokens, count)
            rates = (-self.random(count, dtype=torch.float32).exp(), self.random(count, dtype=torch.float32))
            shape = (len(counts), count, heads.key_dim, heads.value_dim)
            state, table = self.random(*shape, dtype=torch.float32), self.table
            return lambda: table.delta_rule(qkv, strength, step, rates, heads, state, rows)

        shape = {"rows": len(counts), "tokens": tokens, "heads": count, "head_dim": heads.key_dim}
        moved = tokens * (heads.channels + 2 * count + heads.value_size) * self.dtype.itemsize
        return Cell(f"delta_rule_{kind}", shape, moved + 8 * len(counts) * state_size, 7 * tokens * state_size, make)

    def experts(self, tokens: int, kind: str = "plain") -> Cell:
        """The weights counted are those of the expected number of experts that random choices would use. kind: one of
        WEIGHTS."""
        o, item = self.options, self.dtype.itemsize
        count, size, hidden = o.experts, o.expert_size, o.hidden
        routing = Routing(o.experts_per_token, renormalize=True)

        def make() -> Run:
            run, x = self.run_of(None, tokens), self.random(tokens, hidden)
            router = self.random(count, hidden, dtype=torch.float32)
            gate_up, down = self._weight(kind, count, 2 * size, hidden), self._weight(kind, count, hidden, size)
            return lambda: run.experts(x, router, gate_up, down, routing)

        shape = {"tokens": tokens, "experts": count, "per_token": routing.per_token, "hidden": hidden, "size": size}
        used = count * (1 - (1 - routing.per_token / count) ** tokens)
        own = self._weight_bytes(kind, 2 * size, hidden) + self._weight_bytes(kind, hidden, size)
        num_bytes = 4 * count * hidden + round(used * own) + 2 * tokens * hidden * item
        flops = 2 * tokens * hidden * (count + routing.per_token * 3 * size)
        return Cell("experts" if kind == "plain" else f"experts_{kind}", shape, num_bytes, flops, make)

    def linear(self, tokens: int, kind: str) -> Cell:
        """The gate and up projection, with a weight of one of WEIGHTS, or BY_FP8, or BY_TORCH."""
        outputs, inputs = 2 * self.options.intermediate, self.options.hidden
        own = {BY_FP8: "fp8", BY_TORCH: "plain"}.get(kind, kind)

        def make() -> Run:
            run, x, weight = self.run_of(None, tokens), self.random(tokens, inputs), self._weight(own, outputs, inputs)
            if kind == BY_FP8:
                weight = replace(weight, input_scale=torch.zeros(1, device=self.device))
            if kind == BY_TORCH:
                return lambda: multiply(TORCH, weight, x)
            return lambda: run.linear(x, weight)

        shape = {"tokens": tokens, "outputs": outputs, "inputs": inputs}
        moved = tokens * (inputs + outputs) * self.dtype.itemsize
        num_bytes = self._weight_bytes(own, outputs, inputs) + moved
        return Cell(f"linear_{kind}", shape, num_bytes, 2 * tokens * outputs * inputs, make)

    def gated_linear(self, tokens: int) -> Cell:
        """The same projection with its activation, which for few tokens is one launch."""
        outputs, inputs = 2 * self.options.intermediate, self.options.hidden

        def make() -> Run:
            run, x = self.run_of(None, tokens), self.random(tokens, inputs)
            weight = self._weight("plain", outputs, inputs)
            return lambda: run.gated_linear(x, weight)

        shape = {"tokens": tokens, "outputs": outputs // 2, "inputs": inputs}
        moved = tokens * (inputs + outputs // 2) * self.dtype.itemsize
        num_bytes = self._weight_bytes("plain", outputs, inputs) + moved
        return Cell("gated_linear", shape, num_bytes, 2 * tokens * outputs * inputs, make)

    def _weight(self, kind: str, *shape: int) -> Linear:
        """Return a random weight of one of WEIGHTS as products take it. shape: [outputs, inputs], or with experts."""
        (bits, group), (*stack, inputs) = WEIGHTS[kind], shape
        if bits == 16:
            return Linear(self.random(*shape) / inputs**0.5)
        dtype = torch.uint8 if bits == 4 else torch.int8
        numbers = torch.randint(
            127, (*stack, inputs * bits // 8), generator=self.generator, device=self.device, dtype=dtype
        )
        groups = [] if group is None else [-(-inputs // group)]
        narrow = Linear(numbers, scales=torch.full((*stack, *groups), 1 / inputs, device=self.device), group=group)
        if kind == "fp8":
            narrow = replace(narrow, weight=narrow.weight.view(torch.float8_e4m3fn))
        assert self.table.narrow is not None
        return self.table.narrow.pack(narrow)

    def _weight_bytes(self, kind: str, outputs: int, inputs: int) -> int:
        bits, group = WEIGHTS[kind]
        if bits == 16:
            return outputs * inputs * self.dtype.itemsize
        return outputs * inputs * bits // 8 + 4 * outputs * (1 if group is None else -(-inputs // group))

    def sampling(self, num_rows: int, name: str) -> Cell:
        vocab = self.options.vocab

        def make() -> Run:
            from kernels.rows.sampled_row import SampledRow
            from kernels.triton.sampling.rows import pack_rows
            from kernels.triton.sampling.sampler import sample

            options = SAMPLING[name]
            rows = [SampledRow(**options, seed=i, position=i) for i in range(num_rows)]  # type: ignore[arg-type]
            logits, packed = 3 * self.random(num_rows, vocab, dtype=torch.float32), pack_rows(rows, vocab, self.device)
            return lambda: sample(logits, packed)

        return Cell(f"sample_{name}", {"rows": num_rows, "vocab": vocab}, num_rows * vocab * 4, 0, make)

    def controls(self, num_rows: int) -> Cell:
        """Penalties for the tokens of a text, counted on the device, and a bias, with the values of `CONTROLS`."""
        vocab = self.options.vocab

        def make() -> Run:
            from kernels.rows.row_tokens import RowTokens
            from kernels.rows.sampled_row import SampledRow
            from kernels.triton.sampling.controls import control_logits
            from kernels.triton.sampling.rows import pack_rows

            shape = (num_rows, 2 * CONTROLLED)
            token_ids = torch.randint(vocab, shape, generator=self.generator, device=self.device)
            counts = torch.zeros(num_rows, vocab, dtype=torch.int32, device=self.device)
            counts.scatter_add_(1, token_ids, torch.full_like(token_ids, 2, dtype=torch.int32))
            slots = torch.arange(num_rows, device=self.device)
            tokens = RowTokens(counts, slots, token_ids[:, :1].contiguous())
            rows = [SampledRow(temperature=0.0, **CONTROLS)] * num_rows  # type: ignore[arg-type]
            logits = self.random(num_rows, vocab, dtype=torch.float32)
            packed = pack_rows(rows, vocab, self.device, tokens=tokens)
            return lambda: control_logits(logits, packed)

        return Cell("control_logits", {"rows": num_rows, "vocab": vocab}, 2 * num_rows * vocab * 4, 0, make)

    def logprobs(self, num_rows: int) -> Cell:
        vocab = self.options.vocab

        def make() -> Run:
            from kernels.triton.sampling.logprobs import token_logprobs

            logits = self.random(num_rows, vocab, dtype=torch.float32)
            ids = torch.randint(vocab, (num_rows,), generator=self.generator, device=self.device)
            return lambda: token_logprobs(logits, ids, LOGPROBS)

        shape = {"rows": num_rows, "vocab": vocab, "most_likely": LOGPROBS}
        return Cell("logprobs", shape, num_rows * vocab * 4, 0, make)


WEIGHTS: dict[str, tuple[int, int | None]] = {"plain": (16, None), "int8": (8, None), "fp8": (8, 128), "int4": (4, 128)}
"""(bits of a weight, inputs that share a scale)"""
BY_FP8 = "fp8_by_fp8"
"""The product of fp8 weights by activations that are rounded to fp8, each row with a scale of its own."""
BY_TORCH = "plain_by_torch"
"""The product of plain weights by torch's operator for any number of rows: cuBLAS on a GPU."""

NARROW_CACHES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
WRITTEN_AT_A_TIME = 1 << 16
"""Tokens that are rounded at a time when such a cache is filled."""

SAMPLING: dict[str, dict[str, float | int]] = {
    "greedy": {"temperature": 0.0},
    "whole": {"temperature": 1.0},
    "top_k": {"temperature": 1.0, "top_k": 50},
    "top_p": {"temperature": 1.0, "top_p": 0.95},
    "top_k_top_p": {"temperature": 1.0, "top_k": 50, "top_p": 0.95},
}


CONTROLS = {
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "bias": ((1, 5.0), (2, -5.0)),
}
CONTROLLED = 512
"""The number of tokens, in the prompt and in the answer each, that penalties look at."""
LOGPROBS = 5


def _gpu_cache_bytes(device: torch.device) -> int:
    """torch 2.4 does not report the size."""
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", GPU_CACHE_BYTES))


def measure(bench: Bench, make: Callable[[], Run], num_bytes: int, *, capturable: bool = True) -> list[float]:
    """Measure runs in microseconds, with so many sets of inputs that no cache holds them all."""
    cache = _gpu_cache_bytes(bench.device) if bench.on_gpu else CPU_CACHE_BYTES
    sets = [make() for _ in range(min(MOST_SETS, 1 + 2 * cache // max(num_bytes, 1)))]
    if not bench.on_gpu:
        return _on_cpu(sets, bench.options.runs)
    return _on_gpu(sets, bench.options.runs) if capturable else _launched(sets, bench.options.runs)


def _on_cpu(sets: Sequence[Run], runs: int) -> list[float]:
    times = []
    for number in range(runs + WARM_UP):
        begun = time.perf_counter()
        sets[number % len(sets)]()
        times.append(1e6 * (time.perf_counter() - begun))
    return times[WARM_UP:]


def _on_gpu(sets: Sequence[Run], runs: int) -> list[float]:
    """Capture all sets in one graph: with launches of a few microseconds, Python's time would be measured instead."""
    _warm_up(sets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [run() for run in sets]
    times = [_elapsed_us(graph.replay) / len(sets) for _ in range(runs + WARM_UP)]
    del kept
    return times[WARM_UP:]


def _launched(sets: Sequence[Run], runs: int) -> list[float]:
    _warm_up(sets)
    return [_elapsed_us(sets[number % len(sets)]) for number in range(runs)]


def _warm_up(sets: Sequence[Run]) -> None:
    """Let kernels compile and choose their configurations."""
    for _ in range(WARM_UP):
        for run in sets:
            run()
    torch.cuda.synchronize()


def _elapsed_us(run: Run) -> float:
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begun.record()
    run()
    ended.record()
    ended.synchronize()
    return 1e3 * float(begun.elapsed_time(ended))


def peaks(bench: Bench) -> dict[str, float]:
    """Return the best measured GB/s of a copy (bytes read plus written) and GFLOP/s of a square matrix product."""
    size, side = bench.options.copy_mib << 20, bench.options.matrix

    def copy() -> Run:
        source, to = (torch.ones(size, dtype=torch.uint8, device=bench.device) for _ in range(2))
        return lambda: to.copy_(source)

    def product() -> Run:
        a, b = bench.random(side, side), bench.random(side, side)
        return lambda: a @ b

    # An H200 copies 2.8 TB/s in a captured graph, and 4.2 TB/s outside one.
    copied = min(*measure(bench, copy, 2 * size), *measure(bench, copy, 2 * size, capturable=False))
    multiplied = min(measure(bench, product, 3 * side * side * bench.dtype.itemsize))
    return {"copy_gb_s": 2 * size / copied / 1e3, "matrix_gflop_s": 2 * side**3 / multiplied / 1e3}


def result(cell: Cell, times: Sequence[float], peak: dict[str, float]) -> dict[str, Any]:
    """Return the measured times with their shares of both peaks; `share` is the larger one, `of` names its peak."""
    us = statistics.median(times)
    rates = {"gb_s": cell.num_bytes / us / 1e3, "gflop_s": cell.flops / us / 1e3}
    shares = {"copy": rates["gb_s"] / peak["copy_gb_s"], "matrix": rates["gflop_s"] / peak["matrix_gflop_s"]}
    bound = max(shares, key=lambda name: shares[name])
    sizes = {"bytes": cell.num_bytes, "flops": cell.flops}
    spread = {"us_p50": us, "us_min": min(times), "us_max": max(times)}
    return {"op": cell.op, **cell.shape, **spread, **sizes, **rates, "share": shares[bound], "of": bound}


def choose_for_itself(environment: MutableMapping[str, str]) -> None:
    """Before a kernel of Triton's is imported: no choice of configurations is left to engines, none is taken from them.
    The name is that of kernels.triton.shared.launch.TUNING, which cannot be asked: the import would come too early."""
    environment.setdefault("CHUNKSERVE_TRITON_TUNING", "forget")


def of_share(cells: Sequence[Cell], share: tuple[int, int]) -> list[Cell]:
    """Return the cells of a share's operations. share: (2, 16) is every sixteenth operation, from the third on. All
    cells of an operation are in one share: two processes would compile the same kernel."""
    number, count = share
    chosen = list(dict.fromkeys(cell.op for cell in cells))[number::count]
    return [cell for cell in cells if cell.op in chosen]


def describe(bench: Bench) -> dict[str, Any]:
    name = torch.cuda.get_device_name(bench.device) if bench.on_gpu else platform.processor() or platform.machine()
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout if shutil.which("git") else ""
    found: dict[str, Any] = {"commit": commit.strip(), "device": name}
    found |= {"torch": torch.__version__, "dtype": str(bench.dtype).removeprefix("torch.")}
    if bench.on_gpu:
        return found | {"table": "triton", "triton": version("triton")}
    return found | {"table": TORCH_CPU.name, "threads": torch.get_num_threads()}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    device = torch.device(options.device)
    if device.type == "cuda":
        choose_for_itself(os.environ)
    generator = torch.Generator(device).manual_seed(options.seed)
    bench = Bench(options, device, getattr(torch, options.dtype), generator)
    with torch.inference_mode():
        peak = peaks(bench)
        print("peaks: copy {copy_gb_s:.1f} GB/s, matrix {matrix_gflop_s:.1f} GFLOP/s".format(**peak))
        found: list[dict[str, Any]] = []
        others, missing = bench.attention_tables()
        for why in missing:
            print(f"no cell: {why}")
        settings = {name: value for name, value in vars(options).items() if name != "out"}
        head = {"benchmark": "kernels", **describe(bench), "peaks": peak, "config": settings, "missing": missing}
        for cell in of_share(bench.cells(others), options.share):
            shape = " ".join(f"{name}={size}" for name, size in cell.shape.items())
            try:
                times = measure(bench, cell.make, cell.num_bytes, capturable=cell.capturable)
            except Exception as error:  # a GPU may be available only for minutes: keep the results of the other cells
                logger.exception("%s failed", cell.op)
                found.append({"op": cell.op, **cell.shape, "failed": f"{type(error).__name__}: {error}"})
            else:
                found.append(result(cell, times, peak))
                print("{op:32} {0:50} {us_p50:10.1f} us {share:6.1%} of the {of} peak".format(shape, **found[-1]))
            if options.out:
                write_whole(options.out, head | {"cells": found})
    print(json.dumps(head | {"cells": found}))
    if any("failed" in cell_result for cell_result in found):
        raise SystemExit(1)


def _share(text: str) -> tuple[int, int]:
    number, count = (int(part) for part in text.split("/"))
    if not 0 <= number < count:
        raise argparse.ArgumentTypeError(f"{text}: expected a number below the count")
    return number, count


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels",
        description="Measure single operations: how long each takes, and how near it comes to the peaks of the same "
        "device in the same run. The last line is one JSON document.",
    )
    parser.add_argument(
        "--device",
        default="cuda",
        choices=["cuda", "cpu"],
        help="where to measure; cpu measures torch's operators, not this project's kernels (%(default)s)",
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=["bfloat16", "float16", "float32"],
        help="type of the operands (%(default)s)",
    )
    parser.add_argument("--heads", type=int, default=32, help="query heads (%(default)s)")
    parser.add_argument("--kv-heads", type=int, default=8, help="KV heads (%(default)s)")
    parser.add_argument("--head-dim", type=int, default=128, help="size of a head (%(default)s)")
    parser.add_argument("--hidden", type=int, default=4096, help="hidden size (%(default)s)")
    parser.add_argument("--intermediate", type=int, default=14336, help="intermediate size of the MLP (%(default)s)")
    parser.add_argument("--experts", type=int, default=128, help="experts of a mixture (%(default)s)")
    parser.add_argument("--experts-per-token", type=int, default=8, help="experts that a token uses (%(default)s)")
    parser.add_argument("--expert-size", type=int, default=768, help="intermediate size of an expert (%(default)s)")
    parser.add_argument("--linear-key-heads", type=int, default=16, help="key heads of linear attention (%(default)s)")
    parser.add_argument(
        "--linear-value-heads", type=int, default=48, help="value heads of linear attention (%(default)s)"
    )
    parser.add_argument(
        "--linear-head-dim", type=int, default=128, help="size of a head of linear attention (%(default)s)"
    )
    parser.add_argument(
        "--linear-conv-kernel", type=int, default=4, help="width of the convolution of linear attention (%(default)s)"
    )
    parser.add_argument("--vocab", type=int, default=128256, help="size of the vocabulary (%(default)s)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a KV block (%(default)s)")
    parser.add_argument("--context", type=int, default=2048, help="cached tokens of each row (%(default)s)")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 16, 128], help="numbers of tokens, or of decode rows, to measure"
    )
    parser.add_argument(
        "--chunk", type=int, nargs="+", default=[512, 2048], help="numbers of prefill tokens to measure"
    )
    parser.add_argument(
        "--prefix", type=int, default=32768, help="cached tokens before a short chunk of one row (%(default)s)"
    )
    parser.add_argument("--after-prefix", type=int, default=50, help="tokens of that chunk (%(default)s)")
    parser.add_argument(
        "--copy-mib",
        type=int,
        default=512,
        help="size of the copy that measures memory bandwidth, in MiB (%(default)s)",
    )
    parser.add_argument(
        "--matrix",
        type=int,
        default=4096,
        help="rows and columns of the product that measures peak arithmetic (%(default)s)",
    )
    parser.add_argument("--runs", type=int, default=20, help="times that each operation is measured (%(default)s)")
    parser.add_argument(
        "--share",
        type=_share,
        default=(0, 1),
        metavar="NUMBER/COUNT",
        help="measure only some operations: with 2/16, every sixteenth, from the third on; so processes beside each "
        "other compile all kernels in a fraction of the time (0/1)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=time.time_ns() % 1_000_000,
        help="seed of the load; another one each time if not given",
    )
    parser.add_argument("--out", type=Path, help="also write the JSON document to this file")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch can use no GPU here; --device cpu measures torch's operators on the processor")
    if options.heads % options.kv_heads or options.head_dim % 2:
        parser.error("--heads must be a multiple of --kv-heads, and --head-dim even")
    if options.linear_value_heads % options.linear_key_heads:
        parser.error("--linear-value-heads must be a multiple of --linear-key-heads")
    if options.experts_per_token > options.experts:
        parser.error("--experts-per-token must be at most --experts")
    return options


if __name__ == "__main__":
    main()
