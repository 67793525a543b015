"""Owns the measurement of steps and loads on a device, compared with the device's own peaks in the same run. Long,
because it has every load. Never needs a server or a checkpoint: weights are random, in real shapes. The last line of
output is one JSON document."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import random
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

import engine.models
from benchmarks.engine.aims import targets
from benchmarks.engine.mixed import CANONICAL, WHOLE, MixedLoad, Traffic, with_budget
from benchmarks.engine.step import decode_plan, in_slots, measure, prefill_plan, step_of
from benchmarks.kernels import Bench, choose_for_itself, peaks
from benchmarks.machine import machine
from benchmarks.results import write_whole
from engine.build.executor import create_executor
from engine.build.resolve import torch_dtype
from engine.config import ConfigError, EngineConfig, ResolvedConfig, SchedulerConfig
from engine.core.core import EngineCore
from engine.execution.device import CudaDevice, Device
from engine.execution.executor import ModelExecutor
from engine.execution.gpu.cuda_graph_buckets import SMALLEST_MIXED_TOKENS, plan_buckets
from engine.models.config import ModelConfig, read_model_config
from engine.protocol import Failed, Finished, SamplingParams, Submission, Token
from engine.scheduling.request import create_request
from engine.step import Executor, StepPlan

logger = logging.getLogger(__name__)

SHAPES = Path(engine.models.__file__).parent / "shapes"

Cell = dict[str, Any]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Load:
    """The sizes of all measurements."""

    decode_rows: tuple[int, ...]
    loop_rows: int
    """Streams of the whole engine loop, and decode rows beside a chunk. The chunk has a seat, too."""
    context: int
    """Cached tokens of each decode row."""
    prefill: int
    mixed: int
    """Tokens of a step with decode rows and a chunk."""
    traffic: Traffic
    traffic_chunk: int
    """Tokens of a step with a chunk of the traffic's prompts."""
    chunk: int
    """Tokens of the chunks into which the engine cuts the one long prompt; the scheduler plans steps of `mixed`
    tokens."""
    long_prompt: int
    stream_answer: int
    requests: int
    prompt: int
    answer: int
    """Tokens of each answer in the throughput load, whose requests all arrive at once."""


FULL = Load((1, 2, 4, 8, 16, 32, 64, 256), 64, 1024, 8192, 2048, CANONICAL, 1024, 512, 4096, 200, 64, 512, 128)
_LITTLE = Traffic(
    streams=1, stream_prompt=8, stream_answer=90, head_start=3, warm_up=1, prompts=2, prompt_tokens=32, every_s=0.0
)
SHORT = Load((1, 2), 2, 16, 24, 16, _LITTLE, 8, 8, 32, 12, 3, 10, 4)
LOADS = ["steps", "mixed_load", "host_gap", "throughput", "owner_by_graphs", "transformers"]
MAX_MODEL_LEN = 16384
"""Capped by the model's own limit. Block tables and splits of keys are sized for the longest possible row."""

BLOCK_SIZE = 64
"""That of config.gpu.yaml: a tile of up to 64 keys lies within one block."""
MOST_AHEAD = 128
BATCH_INVARIANT = ", batch-invariant"
"""What a step's cell ends with if kernels were: the aims are those of the others."""
BALLAST_BYTES = 512 << 20
"""Writing all of them takes an H100 a third of a millisecond."""


class DeviceBench:
    """One model on one device."""

    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.load = SHORT if options.short else FULL
        self.model_dir = options.model if options.model.exists() else SHAPES / str(options.model)
        self.device: Device | None = CudaDevice() if self.on_gpu else None
        """Whose own time can be told from that of the host."""
        self.where = torch.device("cpu") if self.device is None else self.device.torch_device
        self._draw = random.Random(options.seed)

    @property
    def on_gpu(self) -> bool:
        return bool(self.options.device == "cuda")

    @contextmanager
    def engine(self, *, graphs: bool = True, overlap: bool = False) -> Iterator[tuple[ModelExecutor, ResolvedConfig]]:
        """Build an engine for the block. It is released afterwards, since the device may not hold two of these
        models."""
        load, model = self.load, read_model_config(self.model_dir)
        graph_settings: dict[str, Any] = {"cuda_graphs": "auto" if graphs else "none"} if self.on_gpu else {}
        if self.on_gpu and graphs:
            graph_settings["cuda_graph_mixed_tokens"] = mixed_sizes(load)
        config = EngineConfig(
            load_format="dummy",
            device=self.options.device,
            dtype=self.options.dtype,
            max_model_len=min(MAX_MODEL_LEN, model.rope.default_length(model.max_position_embeddings)),
            max_num_seqs=max(load.decode_rows),
            max_num_batched_tokens=load.prefill,
            block_size=BLOCK_SIZE,
            num_kv_blocks=self._num_blocks(),
            num_speculative_tokens=0,
            enable_prefix_caching=False,
            overlap=overlap,
            batch_invariant=self.options.batch_invariant,
            **graph_settings,
        )
        try:
            executor, resolved = create_executor(self.model_dir, config)
        except ConfigError:  # sizes are refused if nothing can be captured; any other error is raised again
            config = dataclasses.replace(config, cuda_graph_mixed_tokens=None)
            executor, resolved = create_executor(self.model_dir, config)
        try:
            yield executor, resolved
        finally:
            executor.shutdown()

    def _num_blocks(self) -> int:
        load, traffic = self.load, self.load.traffic
        steps: int = self.options.steps
        rows = max(load.decode_rows) * _blocks(load.context + steps + 80) + _blocks(load.prefill)
        streams = traffic.streams * _blocks(traffic.stream_prompt + traffic.stream_answer)
        requests = load.requests * _blocks(load.prompt + load.answer) + _blocks(load.long_prompt)
        return max(rows, streams + traffic.prompts * _blocks(traffic.prompt_tokens), requests) + 64

    def token(self) -> int:
        return self._draw.randrange(100, 1000) if not self.options.short else self._draw.randrange(1, 50)

    # --- single steps, against the peaks ------------------------------------------------------------------------------

    def steps(self, executor: ModelExecutor, resolved: ResolvedConfig, peak: dict[str, float]) -> Iterator[Cell]:
        """Yield cells for single steps. Decode is compared with reading all weights and the cache once, prefill with
        its matrix products, and a mixed step with one without decode rows. The last comparison is valid only if both
        steps or neither of them were captured."""
        load, model = self.load, executor.model.decoder.config  # type: ignore[attr-defined]
        size = torch_dtype(resolved.dtype).itemsize
        for rows in load.decode_rows:
            plan = decode_plan(rows, load.context, resolved.block_size, self.token)
            least_ms = bytes_read(model, rows, load.context, size) / peak["copy_gb_s"] / 1e6
            yield self._step("decode", rows, executor, plan, least_ms)
        plan = prefill_plan(load.prefill, 0, resolved.block_size, self.token)
        least_ms = flops(model, load.prefill, 0) / peak["matrix_gflop_s"] / 1e6
        yield self._step("prefill", load.prefill, executor, plan, least_ms)
        plan = prefill_plan(load.mixed, 0, resolved.block_size, self.token)
        alone = self._step("prefill_only", load.mixed, executor, plan, 0.0)
        yield alone
        mixed = self._step("mixed", load.mixed, executor, self._mixed_plan(resolved.block_size), alone["ms_p50"])
        yield mixed | {"valid": mixed.get("captured") == alone.get("captured")}

    def _mixed_plan(self, block_size: int) -> StepPlan:
        rows = self.load.loop_rows - 1
        decode = decode_plan(rows, self.load.context, block_size, self.token).rows
        first_free = 1 + max(block for row in decode for block in row.block_ids)
        (chunk,) = prefill_plan(self.load.mixed - rows, 0, block_size, self.token).rows
        moved = chunk._replace(request_id="chunk", block_ids=tuple(b + first_free for b in chunk.block_ids))
        return StepPlan(0, (*decode, moved))

    def _step(self, kind: str, size: int, executor: ModelExecutor, plan: StepPlan, least_ms: float) -> Cell:
        graph = step_of(executor, plan)().graph
        times = measure(step_of(executor, plan), self.options.steps)
        cell = {
            "cell": kind + (BATCH_INVARIANT if self.options.batch_invariant else ""),
            "size": size,
            "ms_p50": statistics.median(times),
            "ms_min": min(times),
            "ms_max": max(times),
            "least_ms": least_ms,
        }
        if graph is not None:
            cell |= {"captured": graph.hit, "graph": graph.name}
        if own := self.device_times(executor, plan):
            cell["device_ms"] = statistics.median(own)
        return cell

    def device_times(self, executor: Executor, plan: StepPlan) -> list[float]:
        """Measure a step's own time on the device, by the function `device_times`. Also [] on the CPU, which computes
        while Python waits."""
        if self.device is None:
            return []
        plan = in_slots(executor, plan)
        ballast = torch.zeros(BALLAST_BYTES // 4 if self.on_gpu else 1, device=self.device.torch_device)
        return device_times(self.device, executor, plan, lambda: ballast.add_(1), self.options.steps)

    # --- loads --------------------------------------------------------------------------------------------------------

    def host_gap(self, executor: ModelExecutor, resolved: ResolvedConfig, peak: Mapping[str, float]) -> Iterator[Cell]:
        """Percent of the whole loop's decode step in which the device does nothing of it."""
        rows, steps = self.load.loop_rows, self.options.steps
        context, model = self.load.context + steps // 2, executor.model.decoder.config  # type: ignore[attr-defined]
        plan = decode_plan(rows, context, resolved.block_size, self.token)
        num_bytes = bytes_read(model, rows, context, torch_dtype(resolved.dtype).itemsize)
        own = self.device_times(executor, plan)
        core = _Loop(executor, resolved, self.token)
        for i in range(rows):
            core.submit(f"stream {i}", self.load.context, steps + 60)
        core.run_until(lambda: all(core.stamps.get(f"stream {i}") for i in range(rows)))
        for _ in range(3):  # the first step with all rows compiles
            core.step()
        begun = time.perf_counter()
        for _ in range(steps):
            core.step()
        loop_ms = 1000 * (time.perf_counter() - begun) / steps
        core.end()
        least_ms = num_bytes / peak["copy_gb_s"] / 1e6
        cell: Cell = {"cell": "host_gap", "size": rows, "loop_ms": loop_ms, "least_ms": least_ms}
        if not own:
            why = "launching waits for it" if self.device is not None else "the CPU computes while Python waits"
            yield cell | {"missing": f"the device's own time: {why}"}
            return
        device_ms = statistics.median(own)
        yield cell | {"device_ms": device_ms, "percent": max(0.0, 100 * (1 - device_ms / loop_ms))}

    def throughput(self, executor: ModelExecutor, resolved: ResolvedConfig) -> Iterator[Cell]:
        load = self.load

        def once() -> float:
            core = _Loop(executor, resolved, self.token)
            begun = time.perf_counter()
            for i in range(load.requests):
                core.submit(f"request {i}", load.prompt, load.answer)
            core.run_until(lambda: core.num_done == load.requests)
            wall_s = time.perf_counter() - begun
            core.end()
            return wall_s

        wall_s = second(once)
        tokens_s = load.requests * load.answer / wall_s
        yield {"cell": "throughput", "size": load.requests, "tokens_s": tokens_s, "wall_s": wall_s}

    def mixed_load(self, executor: ModelExecutor, resolved: ResolvedConfig) -> Iterator[Cell]:
        """Measure streams beside long prompts, both chunked and whole; see benchmarks.engine.mixed."""
        for size in (self.load.traffic_chunk, WHOLE):
            load = MixedLoad(executor, with_budget(resolved, size), self.options.seed, self.load.traffic)
            yield {"cell": "mixed_load", "size": size} | load.run()

    def owner_by_graphs(self) -> Iterator[Cell]:
        """Compare chunking by the engine within one step with chunking by the scheduler, with and without captured
        steps. The load is four streams, then one long prompt."""
        for graphs in (True, False) if self.on_gpu else (False,):
            with self.engine(graphs=graphs) as (executor, resolved):
                for owner, limit in (("engine", self.load.chunk), ("scheduler", self.load.mixed)):
                    config = dataclasses.replace(
                        resolved,
                        scheduler=SchedulerConfig(chunk_owner=owner, chunk_halving_context=0),  # type: ignore[arg-type]
                        max_num_batched_tokens=max(limit, resolved.max_num_seqs + 1),
                        max_prefill_tokens=limit,
                    )
                    cell = second(partial(self._one_long_prompt, executor, config))
                    yield cell | {"owner": owner, "graphs": graphs}

    def _one_long_prompt(self, executor: ModelExecutor, config: ResolvedConfig) -> Cell:
        streams, load = [f"stream {i}" for i in range(min(4, config.max_num_seqs - 1))], self.load
        core = _Loop(executor, config, self.token)
        for name in streams:
            core.submit(name, min(64, load.prompt), load.stream_answer)
        core.run_until(lambda: all(len(core.stamps.get(name, ())) >= 8 for name in streams))
        before, begun = core.num_tokens, time.perf_counter()
        core.submit("long", load.long_prompt, 1)
        core.run_until(lambda: core.num_done == len(streams) + 1)
        wall_s, ttft_s = time.perf_counter() - begun, core.stamps["long"][0] - begun
        tokens = core.num_tokens - before + load.long_prompt
        return {"cell": "owner_by_graphs", "ttft_ms": 1000 * ttft_s, "tokens_s": tokens / wall_s}

    def transformers_tokens_s(self) -> Iterator[Cell]:
        """Measure transformers' own generation of as many answers at once, on random weights of the same shape."""
        try:
            from transformers import AutoConfig, AutoModelForCausalLM
        except ImportError as error:
            yield {"cell": "transformers", "missing": str(error)}
            return
        load, device = self.load, self.where
        config = AutoConfig.from_pretrained(self.model_dir)
        torch.set_default_device(device)
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, self.options.dtype)).eval()
        finally:
            torch.set_default_device("cpu")
        ids = torch.randint(1, 50, (load.requests, load.prompt), device=device)
        options = {"do_sample": False, "min_new_tokens": load.answer, "max_new_tokens": load.answer, "pad_token_id": 0}

        def once() -> float:
            begun = time.perf_counter()
            model.generate(ids, attention_mask=torch.ones_like(ids), **options).cpu()
            return time.perf_counter() - begun

        wall_s = second(once)
        tokens_s = load.requests * load.answer / wall_s
        yield {"cell": "transformers", "size": load.requests, "tokens_s": tokens_s, "wall_s": wall_s}


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def mixed_sizes(load: Load) -> tuple[int, ...]:
    """Return the sizes of captured mixed steps: the default ones, and each size that a cell runs repeatedly. Without
    the latter, a whole prompt could be padded by a quarter, which would make chunks look better than they are."""
    most, traffic = load.prefill, load.traffic
    chosen = plan_buckets("all", max_num_seqs=max(load.decode_rows), max_num_batched_tokens=most).mixed_tokens
    again = (load.mixed, load.traffic_chunk, load.chunk, traffic.prompt_tokens + traffic.streams)
    exact = {-(-size // SMALLEST_MIXED_TOKENS) * SMALLEST_MIXED_TOKENS for size in again}
    return tuple(sorted({*chosen, *(size for size in exact if size < most)}))


def second(run: Callable[[], Result]) -> Result:
    """Run twice and return the second result: the first run compiles and allocates."""
    run()
    return run()


def device_times(
    device: Device, executor: Executor, plan: StepPlan, queue_ahead: Callable[[], object], steps: int
) -> list[float]:
    """Measure the milliseconds of a step's own work on the device. Returns [] if launching waits for the device.

    The step is queued behind other work, which is increased until the device is still busy with it when the whole step
    is queued. Otherwise the device would wait for Python between the step's kernels, and the wait would count.
    """
    times: list[float] = []
    ahead = 1
    while len(times) < steps and ahead <= MOST_AHEAD:
        for _ in range(ahead):
            queue_ahead()
        begun = device.timing_event()
        executor.launch(plan)
        ended, was_busy = device.timing_event(), not begun.is_past
        executor.collect()
        if was_busy:
            times.append(begun.ms_until(ended))
        else:
            ahead *= 2
    return times


class _Loop:
    """Runs an engine's loop in one thread: submits requests, steps, and timestamps every token."""

    def __init__(self, executor: ModelExecutor, config: ResolvedConfig, token: Callable[[], int]) -> None:
        self._core, self._config, self._token = EngineCore(executor, config), config, token
        self._live: list[str] = []
        self.stamps: dict[str, list[float]] = {}
        self.num_tokens = self.num_done = 0

    def submit(self, name: str, prompt: int, answer: int) -> None:
        ids = tuple(self._token() for _ in range(prompt))
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        self._core.submit(create_request(Submission(name, ids, params), self._config, len(self._live)))
        self._live.append(name)

    def step(self) -> None:
        events = self._core.step()
        now = time.perf_counter()
        for event in events:
            if isinstance(event, Failed):
                raise RuntimeError(f"{event.request_id} failed: {event.message}")
            if isinstance(event, Token):
                self.stamps.setdefault(event.request_id, []).append(now)
                self.num_tokens += 1
        self.num_done += sum(isinstance(event, Finished) for event in events)

    def run_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self.step()

    def end(self) -> None:
        for name in self._live:
            self._core.abort(name)
        while self._core.has_work:
            self._core.step()


# --- what a device must at least do ---------------------------------------------------------------------------------


def matrix_params(model: ModelConfig) -> int:
    """Return the number of weights that a token is multiplied with, without the LM head."""
    heads = ((3 if model.attention_gate else 2) * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    attention = model.num_attention_layers * heads
    linear = sum(layer.projected_size + layer.heads.value_size for layer in model.linear_layers)
    return model.hidden_size * (attention + linear + model.num_layers * 3 * model.multiplied_intermediate_size)


def bytes_read(model: ModelConfig, rows: int, context: int, item: int) -> int:
    """Return the bytes that a decode step reads: every weight once, and K, V and the recurrent state of every row."""
    head = model.vocab_size * model.hidden_size
    cache = 2 * model.num_attention_layers * model.num_kv_heads * model.head_dim * rows * (context + 1)
    heads = [layer.heads for layer in model.linear_layers]
    states = sum(shape.num_value_heads * shape.key_dim * shape.value_dim for shape in heads)
    return (matrix_params(model) + head + cache) * item + 4 * rows * states


def flops(model: ModelConfig, tokens: int, context: int) -> int:
    """Return the operations of one chunk's matrix products and attention, and of one row of the LM head."""
    pairs = tokens * context + tokens * (tokens + 1) // 2
    attention = 4 * model.num_attention_layers * model.num_heads * model.head_dim * pairs
    return 2 * matrix_params(model) * tokens + attention + 2 * model.vocab_size * model.hidden_size


class Findings:
    """Collects the measured cells. Each is printed and saved at once, since a GPU may be available only for minutes."""

    def __init__(self, head: Cell, out: Path | None) -> None:
        self._head, self._out = head, out
        self.cells: list[Cell] = []
        self.failed = False

    def add(self, load: str, cells: Iterable[Cell]) -> None:
        """Add a load's cells. If one fails, record the failure instead of the load's remaining cells; other loads go
        on."""
        try:
            for cell in cells:
                self._keep(cell)
        except Exception as error:
            logger.exception("%s failed", load)
            self.failed = True
            self._keep({"cell": load, "failed": f"{type(error).__name__}: {error}"})

    def _keep(self, cell: Cell) -> None:
        self.cells.append(cell)
        print(" ".join(f"{k}={v:.2f}" if isinstance(v, float) else f"{k}={v}" for k, v in cell.items()), flush=True)
        self.document()

    def document(self, **more: object) -> str:
        """Return the document as one line of JSON, and write it to `out`."""
        self._head |= more
        whole = self._head | {"cells": self.cells, "targets": targets(self.cells)}
        if self._out:
            write_whole(self._out, whole)
        return json.dumps(whole, default=str)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    bench = DeviceBench(options)
    device = bench.where
    if bench.on_gpu:
        choose_for_itself(os.environ)
    kernel_options = Namespace(copy_mib=options.copy_mib, matrix=options.matrix, runs=options.steps)
    peak_bench = Bench(
        kernel_options, device, getattr(torch, options.dtype), torch.Generator(device).manual_seed(options.seed)
    )
    name = machine()["cpu"] if bench.device is None else bench.device.name
    head: Cell = {"benchmark": "engine_device", **machine(), "device": name, "torch": torch.__version__}
    with torch.inference_mode():
        peak = peaks(peak_bench)
        head |= {"model": bench.model_dir.name, "short": options.short, "seed": options.seed, "peaks": peak}
        found = Findings(head, options.out)

        def measure_on_engine(
            loads: Mapping[str, Callable[[ModelExecutor, ResolvedConfig], Iterable[Cell]]], overlap: bool
        ) -> Iterator[Cell]:
            """Measure loads on one engine. It yields no cells itself; an engine that cannot be built fails like a
            load."""
            with bench.engine(overlap=overlap) as (executor, resolved):
                found.document(config=dataclasses.asdict(resolved))
                for load, cells_of in loads.items():
                    found.add(load, cells_of(executor, resolved))
            yield from ()

        steps, host_gap = partial(bench.steps, peak=peak), partial(bench.host_gap, peak=peak)
        by_overlap: dict[bool, dict[str, Callable[[ModelExecutor, ResolvedConfig], Iterable[Cell]]]] = {
            False: {"steps": steps, "mixed_load": bench.mixed_load},
            True: {"host_gap": host_gap, "throughput": bench.throughput},
        }
        for overlap, loads in by_overlap.items():
            if chosen := {name: load for name, load in loads.items() if name in options.loads}:
                found.add("engine", measure_on_engine(chosen, overlap))
        alone = {"owner_by_graphs": bench.owner_by_graphs, "transformers": bench.transformers_tokens_s}
        for load, cells in alone.items():
            if load in options.loads:
                found.add(load, cells())
    for aim in targets(found.cells):
        outcome = "met" if aim["met"] else "missed" if aim["valid"] else "not validly measured"
        print(f"{aim['what']}: {aim['value']:.2f} (aim {aim['aim']}): {outcome}")
    print(found.document())
    if found.failed:
        raise SystemExit(1)


def _options(arguments: Sequence[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.gpu",
        description="Measure steps and loads on a GPU or CPU, against the peaks of the same device in the same run. It "
        "needs no server and no checkpoint: weights are random, in the shapes of real models. The last line is one "
        "JSON document.",
    )
    names = ", ".join(sorted(path.name for path in SHAPES.iterdir()))
    parser.add_argument(
        "--model", type=Path, default=Path("llama-3.1-8b"), help=f"a directory with config.json, or: {names}"
    )
    parser.add_argument(
        "--device",
        default="cuda",
        choices=["cuda", "cpu"],
        help="where to measure; cpu also works on a machine with a GPU (%(default)s)",
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=["bfloat16", "float16", "float32"],
        help="type of weights and activations (%(default)s)",
    )
    parser.add_argument("--steps", type=int, default=20, help="steps measured for each combination (%(default)s)")
    parser.add_argument(
        "--copy-mib",
        type=int,
        default=512,
        help="size of the copy that measures memory bandwidth, in MiB (%(default)s)",
    )
    parser.add_argument(
        "--matrix",
        type=int,
        default=8192,
        help="rows and columns of the product that measures peak arithmetic (%(default)s)",
    )
    parser.add_argument(
        "--loads", nargs="+", default=LOADS, choices=LOADS, metavar="LOAD", help=f"of {', '.join(LOADS)}; all of them"
    )
    parser.add_argument(
        "--batch-invariant", action="store_true", help="measure steps of such an engine; use --loads steps"
    )
    parser.add_argument("--short", action="store_true", help="measure a little of everything, to see that it works")
    parser.add_argument(
        "--seed",
        type=int,
        default=time.time_ns() % 1_000_000,
        help="seed of the load; another one each time if not given",
    )
    parser.add_argument("--out", type=Path, help="also write the JSON document to this file")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch can use no GPU here; --device cpu measures the CPU (--short: a little of everything)")
    return options


if __name__ == "__main__":
    main()
