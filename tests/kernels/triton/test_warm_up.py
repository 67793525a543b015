"""Owns the proof that an engine's start compiles whatever it launches later, by Triton's own rule for recompiling.
Never runs a kernel: launches are recorded, and nothing is computed."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch.logit_controls import Within
from engine.build.gpu import start_on_device
from engine.config import EngineConfig
from engine.execution.gpu import token_counts
from engine.execution.gpu.sampler import choose_on_device
from engine.execution.gpu.token_counts import TokenCounts
from engine.step import LogitControls, RowSampling, StepPlan
from tests.support.fake_device import VOCAB, FakeDevice, write_model
from tests.support.plans import chunk, decode

from triton.backends.compiler import GPUTarget  # isort: skip
from triton.backends.nvidia.compiler import CUDABackend  # isort: skip
from triton.runtime.autotuner import Autotuner  # isort: skip
from triton.runtime.interpreter import InterpretedFunction  # isort: skip
from triton.runtime.jit import JITFunction, create_function_from_signature  # isort: skip

from kernels.triton.ops import TRITON  # isort: skip
from kernels.triton.sampling.sampler import ROWS_AT_A_TIME  # isort: skip

BACKEND = CUDABackend(GPUTarget("cuda", 90, 32))
SAMPLER = {
    **{"_copy": 2, "_edit": 2, "_look": 1, "_limit": 1},
    **{"scan_block": 3, "filter_row": 2, "sample_row": 2, "_logprobs": 1},
}
"""How many variants of each are compiled: for logits with and without controls and for log-probabilities, and for rows
with and without allowed tokens."""


def bind(kernel: InterpretedFunction) -> Callable[..., Any]:
    """Return Triton's function from arguments to the variant of the kernel that they need."""
    compiled = JITFunction(kernel.fn, **kernel.kwargs)
    bound: Callable[..., Any] = create_function_from_signature(compiled.signature, compiled.params, BACKEND)
    return bound


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Record (kernel, what it is compiled for) of each launch instead of running it."""
    found: set[tuple[str, str]] = set()
    binders: dict[Any, Callable[..., Any]] = {}

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if self.fn not in binders:
            binders[self.fn] = bind(self)
        _, specialization, left = binders[self.fn](*args, **options)
        found.add((self.__name__, f"{specialization} {left}"))

    monkeypatch.setattr(InterpretedFunction, "run", note)
    return found


def some_row(draw: random.Random) -> RowSampling:
    controls = LogitControls(
        allowed_token_ids=draw.choice([(), (), (1, 2, 3)]),
        logit_bias=draw.choice([(), ((3, 1.5),)]),
        repetition_penalty=draw.choice([1.0, 1.3]),
        prompt_token_ids=tuple(range(draw.randrange(9))),
        frequency_penalty=draw.choice([0.0, 0.4]),
        bad_words=draw.choice([(), ((20,),)]),
    )
    return RowSampling(
        temperature=draw.choice([0.0, 0.7]),
        top_k=draw.choice([0, 1, 16]),
        top_p=draw.choice([1.0, 0.9]),
        min_p=draw.choice([0.0, 0.1]),
        seed=draw.randrange(2**63),
        banned_token_ids=draw.choice([(), (), (7,)]),
        controls=draw.choice([None, controls]),
    )


@pytest.mark.parametrize("vocab", [VOCAB, VOCAB + 16 * 15, VOCAB - 1])
def test_no_step_compiles_a_kernel_of_the_sampler(vocab: int, tmp_path: Path, launches: set[tuple[str, str]]) -> None:
    """Regression guard: a second row count, the first penalty and the first grammar each stalled all streams once."""
    model = write_model(tmp_path, vocab_size=vocab)
    config = EngineConfig(load_format="dummy", attention="triton", max_num_seqs=4, max_num_batched_tokens=40)
    device, draw = FakeDevice(), random.Random(vocab)
    start_on_device(model, config, device, "a test").build()
    at_start = set(launches)
    assert {name: count for name, count in Counter(name for name, _ in at_start).items() if name in SAMPLER} == SAMPLER
    counts = TokenCounts(device, vocab)
    for count in (*range(1, 71), ROWS_AT_A_TIME + 1):
        logits = torch.zeros(count, vocab, dtype=torch.bfloat16)
        answers = [tuple(range(draw.randrange(5))) for _ in range(count)]
        plain = RowSampling(draw.choice([0.0, 1.0]), 0, 1.0, 0.0, seed=1)
        rows = [plain if count % 3 == 0 else some_row(draw) for _ in range(count)]
        within = None
        if count % 4 == 0:
            limited = torch.arange(draw.randrange(1, count + 1))
            within = Within(limited, torch.zeros(len(limited), -(-vocab // 32), dtype=torch.int32))
        names = [f"row {number}" for number in range(count)]
        tokens = counts.rows(names, rows, answers, begun=names)
        choose_on_device(device, TRITON, logits, rows, range(count), answers, within, tokens)
        places = device.upload(torch.zeros(2, count, dtype=torch.int64))  # as the executor does for prompt tokens
        assert TRITON.logprobs is not None
        TRITON.logprobs(logits, places[1], draw.choice([0, 1, 5, 16, 20]))
        assert launches <= at_start, f"{count} rows"


MIXTURE = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 1, "num_experts_per_tok": 1}
"""So few experts that steps of up to 8, 64 and more tokens have other tiles."""


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ({}, {}),
        ({"architectures": ["Qwen3ForCausalLM"]}, {}),
        ({}, {"max_loras": 3}),
        ({}, {"quantize": "int8"}),
        ({}, {"kv_cache_dtype": "fp8_e4m3"}),
        (MIXTURE, {}),
        (MIXTURE, {"quantize": "int8"}),
    ],
    ids=["llama", "norms by head", "adapters", "8 bits", "cache in 8 bits", "experts", "experts in 8 bits"],
)
def test_no_step_that_is_not_captured_compiles_a_kernel_of_the_model(
    kind: dict[str, Any],
    settings: dict[str, Any],
    tmp_path: Path,
    launches: set[tuple[str, str]],
) -> None:
    """Regression guard: what a step reads of its rows begins at an offset given by its number of tokens, and kernels
    were recompiled for offsets of other alignment. Where rows may be long, the start had only long rows, and the first
    step with short ones compiled another kernel."""
    model = write_model(tmp_path, num_hidden_layers=1, max_position_embeddings=2048, **kind)
    config = EngineConfig(
        load_format="dummy",
        attention="triton",
        cuda_graphs="none",
        max_num_seqs=4,
        max_num_batched_tokens=80,
        num_kv_blocks=40,
        **settings,
    )
    max_loras = config.max_loras
    executor, _ = start_on_device(model, config, FakeDevice(), "a test").build()
    at_start = set(launches)
    digests = [f"{number:032x}" for number in range(max_loras)]
    if slots := executor.model.adapters:
        for digest in digests:
            slots.keep(digest, torch.zeros(slots.num_bytes // max_loras // 2, dtype=torch.bfloat16))
    for num_decode in range(4):
        for count in (0, 1, 2, 3, 5, 8, 16, 17, 64, 70):
            rows = [decode(f"row {i}", 5, 16 * i + 3, range(4 * i, 4 * i + i + 1)) for i in range(num_decode)]
            rows += [chunk("chunk", (1,) * count, 0, count, range(30, 35))] if count else []
            rows = [row._replace(adapter=digests[i]) if i < max_loras else row for i, row in enumerate(rows)]
            if rows:
                executor.logits(StepPlan(0, tuple(rows)))
    executor.shutdown()
    assert {name for name, _ in launches} >= {
        "attend",
        "_rotate",
        "_norm",
        *(["multiply"] * (config.quantize == "int8")),
        *(["few_rows"] * (config.quantize != "int8")),
        *(["few_rows_gated"] * (config.quantize != "int8" and "num_local_experts" not in kind)),
    }
    assert sum(name == "gate_up" for name, _ in at_start) == (3 if "num_local_experts" in kind else 0)
    assert ("_expand" in {name for name, _ in at_start}) is bool(max_loras)
    assert sorted(launches - at_start) == []


class NotingDevice(FakeDevice):
    """Notes what had been chosen when the first step was captured."""

    def __init__(self, chosen: set[tuple[Any, ...]]) -> None:
        super().__init__()
        self._chosen, self.before = chosen, set[tuple[Any, ...]]()

    def capture(self, work: Callable[[], None], beside: Any = None) -> Any:
        self.before = self.before or set(self._chosen)
        return super().capture(work, beside)


@pytest.mark.parametrize("settings", [{}, {"max_loras": 2}, {"quantize": "int8"}], ids=["plain", "adapters", "8 bits"])
def test_no_capture_has_a_kernel_whose_configuration_is_not_chosen(
    settings: dict[str, Any], tmp_path: Path, launches: set[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Configurations are timed, for which the host waits, and no capture can hold that. Each shape has its own, and
    each number of rows of a captured step its tile."""
    chosen, real = set[tuple[Any, ...]](), Autotuner.run

    def note(self: Any, *args: Any, **options: Any) -> Any:
        given = dict(zip(self.arg_names, args, strict=False)) | options
        types = [str(value.dtype) for value in given.values() if hasattr(value, "dtype")]
        chosen.add((self.base_fn.__name__, *(given[name] for name in self.keys), *types))
        return real(self, *args, **options)

    monkeypatch.setattr(Autotuner, "run", note)
    device, decode_rows = NotingDevice(chosen), [1, 16, 17, 40, 65, 70]
    config = EngineConfig(
        load_format="dummy",
        attention="triton",
        max_num_seqs=70,
        max_num_batched_tokens=80,
        num_kv_blocks=80,
        cuda_graph_decode_rows=decode_rows,
        **settings,
    )
    start_on_device(write_model(tmp_path, num_hidden_layers=1), config, device, "a test").build()
    few = {key[1:4] for key in device.before if key[0] == "few_rows"}
    if "quantize" not in settings:
        assert {(32, VOCAB, tile) for tile in (16, 32, 64)} <= few, "the LM head is among them"
    assert launches
    assert chosen - device.before == set()


def opcodes_run(work: Callable[[], object]) -> int:
    """Count the Python opcodes that `work` runs in token_counts."""
    count = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != token_counts.__file__:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_no_python_runs_for_each_token_of_a_prompt_or_an_answer() -> None:
    """Regression guard: with a repetition penalty, each step looped over every row's whole prompt token by token."""

    def count(length: int) -> int:
        text = tuple(range(length))
        controls = LogitControls(repetition_penalty=1.2, frequency_penalty=0.5, prompt_token_ids=text)
        row = RowSampling(0.0, 0, 1.0, 0.0, seed=0, controls=controls)
        counts = TokenCounts(FakeDevice(), 5000)
        return opcodes_run(lambda: counts.rows("ab", [row, row], [text, text]))

    assert 0 < count(4000) == count(10)
