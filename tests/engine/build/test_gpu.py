"""Owns the start on a device: what is measured, what follows from it, what is refused and why. Long: each refusal.
Never needs a GPU: a fake one answers with memory that the test makes up."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from engine.batch.inputs import check_plan
from engine.batch.logit_controls import apply_controls
from engine.batch.row_order import sampled_positions
from engine.build import trial_steps
from engine.build.engine import build_engine
from engine.build.gpu import start_on_device
from engine.build.trial_steps import (
    DECODE_CONTEXT,
    SHORT_CONTEXT,
    drafts_step,
    largest_step,
    longest_decode_step,
    longest_rows_step,
    short_decode_step,
)
from engine.config import ConfigError, EngineConfig, ResolvedConfig
from engine.execution.device import CudaDevice, HostDevice, choose_device, device_faults
from engine.execution.gpu.adapters import slots_bytes
from engine.execution.gpu.cuda_graph_buckets import LaunchCost
from engine.execution.gpu.executor import DeviceExecutor
from engine.execution.gpu.launch_cost import measure_launch
from engine.execution.gpu.memory import MemoryUse, blocks_to_time_with
from engine.execution.gpu.model import DeviceModel
from engine.models.config import ModelConfig, read_model_config
from engine.models.decoder import Decoder
from engine.models.kv_cache import KVCache
from engine.models.weights import dummy_weights, load_weights
from engine.step import ExecutorFatalError, ExecutorOutOfMemoryError, GraphUse, RowKind, StepPlan
from kernels.choice import Choice, choose_attention
from kernels.eager.ops import Ops
from tests.support.engines import resolved_config
from tests.support.fake_device import CachingDevice, FakeDevice, write_model
from tests.support.fake_flash import FakeFlash
from tests.support.plans import chunk
from tests.support.tiny_models import save_model
from tests.support.tiny_vision import save_vision_model

BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 2  # K and V, layers, tokens, KV heads, head_dim, bfloat16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def _flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_flash_attn", FakeFlash())  # type: ignore[arg-type]


def create(model: Path, device: FakeDevice | None = None, **settings: Any) -> tuple[DeviceExecutor, ResolvedConfig]:
    engine = {"load_format": "dummy", "num_threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 40}
    return start_on_device(model, EngineConfig(**engine | settings), device or FakeDevice(), "a test").build()


MIB = 1 / 1024


@pytest.mark.usefixtures("_flash")
def test_kv_blocks_follow_from_what_is_measured_at_the_start(model: Path) -> None:
    # What is free: at the start, with weights, with the probe's cache, after the largest steps, after the captures' own
    # work, once that is released, and after captures.
    free = [15, 12, 11.5, 10, 9.75, 11.5, 10.75]
    executor, resolved = create(model, FakeDevice(free), gpu_memory_utilization=0.75)
    left = 12 - 1 - 3 - 1.75 - 0.75  # others, weights, the largest step, captures
    assert resolved.num_kv_blocks == int(left * 2**20) // BLOCK_BYTES - 1
    assert len(executor.model.cache.layers[0][0]) == resolved.num_kv_blocks + 1, "one is for padding"
    assert "what gpu_memory_utilization 0.75 leaves; others 0.00, weights" in resolved.reasons["num_kv_blocks"]
    assert (resolved.device, resolved.kernels, resolved.dtype) == ("fake GPU", "vllm_flash_attn", "bfloat16")
    assert resolved.reasons["cuda_graphs"].startswith("all: the attention can be captured; ")


WEIGHTS, OF_A_TOKEN = 3 * 2**20, 64 * 2**10
"""Bytes that a CachingDevice is told of: in all, and for each token of a forward pass."""


def watched(monkeypatch: pytest.MonkeyPatch) -> CachingDevice:
    """Make a device of 16 MiB that is told of weights, KV caches and forward passes."""
    device, allocate, forward = CachingDevice(16 * 2**20), KVCache.allocate, Decoder.forward

    def weights(*args: Any, **options: Any) -> Any:
        device.hold(WEIGHTS)
        return dummy_weights(*args, **options)

    def cache(*args: Any) -> KVCache:
        made = allocate(*args)
        for tensor in (tensor for pair in made.layers for tensor in pair):
            device.hold(tensor.nbytes)
            weakref.finalize(tensor, device.give_up, tensor.nbytes)
        return made

    def run(self: Decoder, *args: Any) -> Any:
        device.use(len(args[0]._token_ids) * OF_A_TOKEN)
        return forward(self, *args)

    monkeypatch.setattr("engine.build.model.dummy_weights", weights)
    monkeypatch.setattr(KVCache, "allocate", cache)
    monkeypatch.setattr(Decoder, "forward", run)
    monkeypatch.setattr(FakeFlash, "_record", lambda *_: None)  # it would keep the caches
    return device


@pytest.mark.usefixtures("_flash")
@pytest.mark.parametrize(("scope", "kept"), [("none", 0), ("decode", 4), ("all", 40)])
def test_what_captures_keep_is_counted_beside_what_steps_use(
    model: Path, monkeypatch: pytest.MonkeyPatch, scope: str, kept: int
) -> None:
    """Regression: what captures keep was counted less what the largest step had left in the allocator's cache. With
    only decode steps captured, that was nothing."""
    device = watched(monkeypatch)
    executor, resolved = create(model, device, cuda_graphs=scope)
    spare, left = scope != "none", int(0.9 * 16 * 2**20) - WEIGHTS - (40 + kept) * OF_A_TOKEN
    assert resolved.num_kv_blocks == left // BLOCK_BYTES - spare
    held = WEIGHTS + kept * OF_A_TOKEN + (resolved.num_kv_blocks + spare) * BLOCK_BYTES
    assert device.held == held, "nothing is left of what was for measuring"
    executor.shutdown()


@pytest.mark.usefixtures("_flash")
@pytest.mark.parametrize("num_drafts", [0, 4])
def test_the_logits_of_drafts_are_counted_in_what_steps_use(
    model: Path, monkeypatch: pytest.MonkeyPatch, num_drafts: int
) -> None:
    """Regression: no trial step had a row that samples more than once, so no memory was kept for the logits of
    drafts."""
    device, logits, of_a_place = watched(monkeypatch), DeviceModel._logits, 5 * OF_A_TOKEN

    def run(self: DeviceModel, hidden: torch.Tensor) -> torch.Tensor:
        device.use(len(hidden) * of_a_place)
        return logits(self, hidden)

    monkeypatch.setattr(DeviceModel, "_logits", run)
    _, resolved = create(model, device, cuda_graphs="none", num_speculative_tokens=num_drafts)
    most = max(40 * OF_A_TOKEN, 4 * (1 + num_drafts) * of_a_place)
    assert resolved.num_kv_blocks == (int(0.9 * 16 * 2**20) - WEIGHTS - most) // BLOCK_BYTES


@pytest.fixture
def _adapters(_flash: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a table without Triton take adapters. It adds nothing, and no test below asks what is computed."""
    monkeypatch.setattr("engine.build.gpu.choose_attention", _with_adapters)


def _with_adapters(*args: Any, **options: Any) -> tuple[Choice, Ops]:
    choice, ops = choose_attention(*args, **options)
    return choice, replace(ops, add_low_rank=lambda *_: None)


@pytest.mark.usefixtures("_adapters")
@pytest.mark.parametrize("scope", ["none", "all"])
def test_slots_of_adapters_are_reserved_before_kv_blocks(
    model: Path, monkeypatch: pytest.MonkeyPatch, scope: str
) -> None:
    device = watched(monkeypatch)
    executor, resolved = create(model, device, cuda_graphs=scope, max_loras=5, max_lora_rank=20)
    slots = executor.model.adapters
    assert slots is not None
    size = slots_bytes(read_model_config(model), torch.bfloat16, num_slots=5, max_rank=20)
    assert slots.num_bytes == size > 0
    spare = scope != "none"
    left = int(0.9 * 16 * 2**20) - WEIGHTS - (40 + 40 * spare) * OF_A_TOKEN - size
    assert resolved.num_kv_blocks == left // BLOCK_BYTES - spare
    assert "adapters 0.00" in resolved.reasons["num_kv_blocks"]
    assert len(slots._free) == 5, "the adapter of the trial steps is gone"
    executor.shutdown()


@pytest.mark.usefixtures("_adapters")
def test_slots_of_adapters_that_do_not_fit_are_refused_by_their_settings(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"^max_loras 5000 adapters of max_lora_rank 64 take .* Lower max_loras or"):
        create(model, max_loras=5000, max_lora_rank=64)

    def fails(*_: Any, **__: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("engine.build.gpu.AdapterSlots", fails)
    with pytest.raises(ConfigError, match=r"^max_loras is 2 and max_lora_rank 16, .* Lower max_loras or max_lora_rank"):
        create(model, max_loras=2)


@pytest.mark.usefixtures("_adapters")
def test_every_size_is_captured_with_adapters_and_without(model: Path) -> None:
    executor, _ = create(model, max_loras=2, cuda_graph_decode_rows=(4,), cuda_graph_mixed_rows=(4,))
    names = [bucket.name for bucket in executor.model._captured]
    assert names == ["mixed 40x4 with adapters", "mixed 40x4", "decode 4 with adapters", "decode 4"]
    executor.shutdown()


@pytest.mark.usefixtures("_flash")
def test_captures_larger_than_any_step_have_memory_to_run_their_work_in(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each capture runs its work first, so the second one of this size runs while the first one keeps its memory."""
    sizes: dict[str, Any] = {"cuda_graph_mixed_tokens": (64,), "cuda_graph_mixed_rows": (2, 4)}
    _, resolved = create(model, watched(monkeypatch), gpu_memory_utilization=1.0, **sizes)
    assert resolved.num_kv_blocks == (16 * 2**20 - WEIGHTS - 2 * 64 * OF_A_TOKEN) // BLOCK_BYTES - 1


@pytest.mark.usefixtures("_flash")
def test_captures_that_do_not_fit_beside_kv_blocks_are_refused_by_their_setting(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture, caches = DeviceModel.capture, list[int]()

    def second_fails(self: DeviceModel, *args: Any) -> None:
        caches.append(len(self.cache.layers[0][0]))
        if len(caches) == 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        capture(self, *args)

    monkeypatch.setattr(DeviceModel, "capture", second_fails)
    with pytest.raises(
        ConfigError, match=r"cuda_graphs is auto, but .* its \d+ graph sizes in addition to .* and 7 KV blocks"
    ):
        create(model, num_kv_blocks=7)
    assert caches[1] == 8


@pytest.mark.usefixtures("_flash")
def test_kv_blocks_whose_memory_was_taken_meanwhile_are_refused_by_their_settings(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the measurement and the allocation another process may take the memory:
    that once ended in a traceback of torch's."""
    allocate = KVCache.allocate

    def second_fails(of: ModelConfig, num_blocks: int, *args: Any) -> KVCache:
        if num_blocks == 8:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return allocate(of, num_blocks, *args)

    monkeypatch.setattr(KVCache, "allocate", second_fails)
    with pytest.raises(ConfigError, match=r"^8 KV blocks of \d+ bytes do not fit: .* num_kv_blocks or gpu_memory"):
        create(model, num_kv_blocks=7)


@pytest.mark.usefixtures("_flash")
def test_the_first_decode_step_of_an_engine_has_long_contexts(model: Path) -> None:
    """Kernels choose their configurations in the first step, for good.
    That step was once the padding that the first capture runs."""
    flash: Any = sys.modules["vllm_flash_attn"]
    create(model)
    first = next(call for name, call in flash.calls if name == "kvcache")
    assert first["cache_seqlens"].tolist() == [256] * 4


def test_the_longest_decode_step_has_a_row_of_any_length_and_others_that_are_bounded() -> None:
    config = resolved_config(max_num_seqs=3, max_num_batched_tokens=8, max_model_len=131_072, block_size=16)
    plan = longest_decode_step(config, 9000)
    check_plan(plan, 16)
    assert [row.end for row in plan.rows] == [131_072, DECODE_CONTEXT, DECODE_CONTEXT]
    check_plan(longest_decode_step(replace(config, recurrent_state=True), 9000), 16, 3)


@pytest.mark.parametrize(
    ("num_blocks", "ends"),
    [(20_000, [8192, *[DECODE_CONTEXT] * 63]), (2048, [8192, *[24 * 16] * 63]), (600, [8192, *[SHORT_CONTEXT] * 63])],
)
def test_rows_of_the_longest_decode_step_are_shorter_rather_than_read_the_same_blocks(
    num_blocks: int, ends: list[int]
) -> None:
    """All were in block 0: kernels were timed on keys that came from the chip's own cache, as no step's do."""
    config = resolved_config(max_num_seqs=64, max_num_batched_tokens=80, max_model_len=8192, block_size=16)
    plan = longest_decode_step(config, num_blocks)
    check_plan(plan, 16)
    assert [row.end for row in plan.rows] == ends
    blocks = [block for row in plan.rows for block in row.block_ids]
    assert max(blocks) < num_blocks
    assert len(set(blocks)) == min(len(blocks), num_blocks)
    short = [block for row in short_decode_step(config, num_blocks).rows[:30] for block in row.block_ids]
    assert len(set(short)) == 30 * SHORT_CONTEXT // 16


@pytest.mark.parametrize(
    ("num_drafts", "limit", "length", "counts"),
    [
        (4, None, 8192, [5] * 8),
        (4, 21, 8192, [1, 1, 1, 1, 2, 5, 5, 5]),
        (4, 5, 8192, [1] * 8),
        (4, None, 3, [3] * 8),
    ],
)
def test_a_step_of_drafts_samples_as_many_places_as_a_step_may(
    num_drafts: int, limit: int | None, length: int, counts: list[int]
) -> None:
    config = resolved_config(
        max_num_seqs=8, max_model_len=length, num_speculative_tokens=num_drafts, drafting_limit=limit, block_size=16
    )
    plan = drafts_step(config, 100)
    check_plan(plan, 16)
    assert [len(row.token_ids) for row in plan.rows] == counts
    assert len(sampled_positions(plan.rows)) == sum(counts)
    decodes = longest_decode_step(config, 100).rows
    assert [(row.end, row.sampling) for row in plan.rows] == [(row.end, row.sampling) for row in decodes]


def test_the_trial_step_has_the_constants_of_attention() -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this machine")
    from kernels.triton.attention import splits

    found = (2 * splits.SPLIT, splits.MOST_CHUNK_SPLITS, splits.CHUNK_PARTIALS)
    assert found == (trial_steps.CHUNK_SPLIT, trial_steps.MOST_SPLITS, trial_steps.MOST_PARTIALS)
    assert (splits.UNIT, splits.UNIT_PARTIALS) == (trial_steps.UNIT, trial_steps.UNIT_PARTIALS)


def partial_results(decodes: int, counts: list[int], length: int, kv_heads: int, *, in_units: bool = False) -> int:
    """Return how many a step of the longest rows has: so many decodes, and chunks of these counts of tokens."""
    from kernels.triton.attention.splits import UNITS, least_split, num_splits

    split = UNITS if in_units else least_split(decodes, kv_heads, chunks=bool(counts))
    splits = {count: num_splits(length, count, split) for count in (1, *counts)}
    return sum(count * splits[count] for count in [1] * decodes + counts if splits[count] > 1)


@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize("length", [1024, 2048, 4096, 32_768])
@pytest.mark.parametrize(("seqs", "tokens"), [(256, 2048), (256, 256), (4, 2048), (64, 512), (64, 8192)])
@pytest.mark.parametrize("in_units", [False, True])
def test_no_step_has_many_more_partial_results_than_that_of_the_longest_rows(
    seqs: int, tokens: int, length: int, kv_heads: int, in_units: bool
) -> None:
    """Otherwise the start would not have measured what they take, in a step that is not captured. Compared with steps
    of so many decodes, chunks of one size, and chunks of one token on all other seats."""
    pytest.importorskip("triton", reason="Triton has no wheel for this machine")
    config = resolved_config(max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=length, block_size=16)
    plan = longest_rows_step(config, 100, in_units=in_units)
    check_plan(plan, 16)
    assert plan.num_tokens <= tokens
    found = partial_results(0, [len(row.token_ids) for row in plan.rows], length, kv_heads, in_units=in_units)
    most = 0
    for decodes in (decodes for decodes in (0, 1, 2, 8, 9, 16, 64, 65, seqs) if decodes <= seqs):
        for count in (1, 2, 5, 8, 16, 32, 64, 128):
            seats = seqs - decodes
            chunks = 0 if count == 1 else max(0, min(seats, (tokens - seqs) // (count - 1)))
            counts = [count] * chunks + [1] * (seats - chunks)
            most = max(most, partial_results(decodes, counts, length, kv_heads, in_units=in_units))
    assert found >= 0.93 * most
    check_plan(longest_rows_step(replace(config, recurrent_state=True), 100), 16, seqs)


def test_blocks_to_time_with_are_a_part_of_what_is_left_and_enough_for_the_largest_step() -> None:
    use = MemoryUse(total=1000, others=100, weights=200, activations=0)
    assert blocks_to_time_with(use, 0.9, 10, least=3, most=99) == (900 - 300) // 4 // 10
    assert blocks_to_time_with(use, 0.9, 10, least=3, most=7) == 7
    assert blocks_to_time_with(use, 0.1, 10, least=3, most=7) == 3


def test_every_row_of_the_largest_step_wants_a_copy_of_its_logits() -> None:
    rows = [row.sampling for row in largest_step(resolved_config(max_num_seqs=3)).rows]
    logits = torch.zeros(3, 9)
    for number, row in enumerate(rows):
        assert row is not None
        alone = logits[number : number + 1]
        assert apply_controls(alone, [row], [()]) is not alone
        assert row.controls is not None
        assert row.controls.penalizes, "the start measures the memory of counts, too"


@pytest.mark.usefixtures("_flash")
def test_steps_that_are_launched_faster_than_they_run_are_not_captured(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression guard: a chunk of 600 tokens was padded to 640, and one of 2,100 to 2,560, to save launches that the
    device's work hides."""
    asked: list[int] = []

    def measured(device: FakeDevice, step: Callable[[], object], num_tokens: int) -> LaunchCost:
        step()
        asked.append(num_tokens)
        return LaunchCost(launch_ms=4.0, device_ms=32.0, num_tokens=num_tokens)

    monkeypatch.setattr("engine.build.gpu.measure_launch", measured)
    device = FakeDevice()
    executor, resolved = create(model, device, max_num_batched_tokens=512)
    assert asked == [512], "the largest step is measured"
    assert {bucket.num_tokens for bucket in executor.model._captured if not bucket.decode} == {64, 128}
    assert "more than 128 tokens run without padding" in resolved.reasons["cuda_graphs"]
    blocks = tuple(range(-(-140 // resolved.block_size)))
    uses = []
    for count in (100, 129):
        device.asked.clear()
        executor.launch(StepPlan(0, (chunk("a", (1,) * 140, 0, count, blocks),)))
        uses.append((executor.collect().graph, device.asked.count("replay")))
    assert uses == [(GraphUse(True, "mixed 128x4"), 1), (GraphUse(False, "more than 128 tokens"), 0)]
    captured = create(model, max_num_batched_tokens=512, cuda_graph_mixed_tokens=(256, 512))[0].model._captured
    assert {bucket.num_tokens for bucket in captured if not bucket.decode} == {256, 512}, "the config names them"
    assert asked == [512]


def test_a_device_that_works_at_once_takes_no_longer_than_its_host() -> None:
    cost = measure_launch(HostDevice(), lambda: sum(range(100_000)), 7)
    assert 0.0 < cost.device_ms <= cost.launch_ms
    assert cost.num_tokens == 7


def test_without_captures_no_block_is_set_aside(model: Path) -> None:
    executor, resolved = create(model, FakeDevice([15, 12, 11.5, 10]), attention="torch")
    assert resolved.num_kv_blocks == int((0.9 * 16 - 1 - 3 - 1.5) * 2**20) // BLOCK_BYTES
    assert len(executor.model.cache.layers[0][0]) == resolved.num_kv_blocks
    assert resolved.reasons["cuda_graphs"] == "none: torch attention cannot be captured in CUDA graphs; 0 sizes"


def test_blocks_that_are_asked_for_are_checked_against_what_is_left(model: Path) -> None:
    assert create(model, num_kv_blocks=7)[1].num_kv_blocks == 7
    _, resolved = create(model, kv_cache_memory_gib=MIB)
    assert resolved.num_kv_blocks == 2**20 // BLOCK_BYTES
    with pytest.raises(ConfigError, match="num_kv_blocks 4096 takes"):
        create(model, FakeDevice([15, 12, 11.5, 10]), num_kv_blocks=4096)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization 0\.3 leaves"):
        create(model, FakeDevice([15, 12, 11.5, 10]), gpu_memory_utilization=0.3)


@pytest.mark.parametrize(("seqs", "tokens", "length"), [(8, 32, 256), (1, 2, 256), (64, 512, 100), (8, 500, 40)])
def test_the_largest_step_is_one_that_can_be_planned(seqs: int, tokens: int, length: int) -> None:
    config = resolved_config(max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=length, block_size=16)
    plan = largest_step(config)
    check_plan(plan, 16)
    assert plan.num_tokens == min(tokens, seqs * length)
    assert len(plan.rows) == seqs
    assert all(row.end <= length for row in plan.rows)
    assert max(max(row.block_ids) for row in plan.rows) < len(plan.rows[0].block_ids)


@pytest.mark.parametrize(
    ("kind", "num_tokens", "why", "settings"),
    [
        (RowKind.LAST, 40, "max_num_batched_tokens is 40, but the GPU has no memory", "max_num_batched_tokens"),
        (
            RowKind.DECODE,
            4,
            "max_num_seqs is 4 and max_model_len 256, but the GPU has no memory for a decode step",
            "max_num_seqs or max_model_len",
        ),
        (
            RowKind.DECODE,
            16,
            "num_speculative_tokens is 3 and max_num_seqs 4, but the GPU has no memory for a step with so",
            "num_speculative_tokens or max_num_seqs",
        ),
    ],
)
def test_a_step_that_does_not_fit_beside_the_weights_is_refused_at_the_start(
    model: Path, monkeypatch: pytest.MonkeyPatch, kind: RowKind, num_tokens: int, why: str, settings: str
) -> None:
    start = DeviceModel.start

    def no_memory(self: DeviceModel, plan: StepPlan, *rest: Any) -> Any:
        if plan.rows[0].kind is kind and plan.num_tokens == num_tokens:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return start(self, plan, *rest)

    monkeypatch.setattr(DeviceModel, "start", no_memory)
    with pytest.raises(ConfigError, match=rf"{why} .* in addition to the weights: .*\. Lower {settings}\.$"):
        create(model, num_speculative_tokens=3)


@pytest.mark.usefixtures("_flash")
@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("engine.build.model.dummy_weights", r"weights of .* in bfloat16 do not fit: 0\.01 of fake GPU's 0\.02 GiB"),
        ("engine.execution.gpu.model.DeviceModel.capture", r"cuda_graphs is auto, but .* capture its \d+ graph sizes"),
    ],
)
def test_weights_and_captures_that_do_not_fit_are_refused_by_what_there_is(
    model: Path, monkeypatch: pytest.MonkeyPatch, place: str, why: str
) -> None:
    def no_memory(*_: Any, **__: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(place, no_memory)
    with pytest.raises(ConfigError, match=why):
        create(model)


@pytest.mark.usefixtures("_flash")
@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"kernels": "native"}, "kernels is native, but this engine runs on fake GPU: this setting has an effect"),
        ({"quantize": "int8"}, "quantize is int8, but torch's operators compute the matrix products: without Triton"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype is int8, but attention is torch: on a GPU, only Triton's"),
        ({"kv_cache_dtype": "fp8_e4m3", "attention": "vllm_flash_attn"}, "fp8_e4m3, but attention is vllm_flash_attn"),
        (
            {"batch_invariant": True},
            "batch_invariant is true, but attention is torch: on a GPU, only the Triton kernels",
        ),
        (
            {"batch_invariant": True, "attention": "vllm_flash_attn"},
            "is true, but attention is vllm_flash_attn: on a GPU",
        ),
        ({"attention": "vllm_flash_attn", "dtype": "float32"}, "attention cannot run: dtype is float32"),
        (
            {"attention": "torch", "cuda_graphs": "all"},
            "cuda_graphs is all, but attention is torch: torch attention cannot be captured in CUDA graphs",
        ),
        ({"attention": "torch", "cuda_graphs": "decode"}, "cuda_graphs is decode, but attention is torch"),
        ({"attention": "torch", "cuda_graph_decode_rows": (4,)}, r"cuda_graph_decode_rows is \[4\], but .* none"),
        ({"cuda_graphs": "none", "cuda_graph_decode_rows": (4,)}, r"cuda_graph_decode_rows is \[4\], but .* none"),
        ({"cuda_graphs": "decode", "cuda_graph_mixed_rows": (4,)}, r"cuda_graph_mixed_rows is \[4\], but .* decode"),
        ({"cuda_graph_decode_rows": (1, 2)}, "cuda_graph_decode_rows ends at 2, but max_num_seqs is 4"),
        ({"cuda_graph_mixed_tokens": (16,)}, "ends at 16, but max_num_batched_tokens is 40"),
        ({"max_loras": 2}, "max_loras is 2, but torch's operators .*: on a GPU, only the Triton kernels compute adap"),
    ],
)
def test_what_cannot_act_on_a_gpu_is_refused_before_weights_are_read(
    model: Path, settings: dict[str, Any], why: str
) -> None:
    device = FakeDevice()
    with pytest.raises(ConfigError, match=why):
        create(model, device, **settings)
    assert device.asked == []


@pytest.mark.usefixtures("_flash")
def test_captures_have_the_sizes_that_are_asked_for(model: Path) -> None:
    executor, _ = create(
        model, cuda_graph_decode_rows=(2, 4), cuda_graph_mixed_tokens=(10, 40), cuda_graph_mixed_rows=(4,)
    )
    names = sorted(bucket.name for bucket in executor.model._captured)
    assert names == ["decode 2", "decode 4", "mixed 10x4", "mixed 40x4"]


# --- which device ----------------------------------------------------------------------------------------------------


def test_a_model_that_takes_images_is_refused_on_a_gpu_by_name(tmp_path: Path) -> None:
    save_vision_model(tmp_path)
    with pytest.raises(
        ConfigError, match="Qwen2_5_VLForConditionalGeneration takes images, but this engine runs on fake GPU"
    ):
        create(tmp_path)


def test_the_fake_executor_has_no_device() -> None:
    with pytest.raises(ConfigError, match="device is cuda, but executor is fake"):
        build_engine("any", EngineConfig(executor="fake", device="cuda"))


def test_a_gpu_that_torch_does_not_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device is cuda, but torch .* sees no GPU"):
        choose_device(EngineConfig(device="cuda"))
    for asked in ("auto", "cpu"):
        assert isinstance(choose_device(EngineConfig(device=asked))[0], HostDevice)


def test_a_gpu_is_taken_where_torch_sees_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("engine.execution.device.CudaDevice", FakeDevice)
    device, reason = choose_device(EngineConfig())
    assert isinstance(device, FakeDevice)
    assert "sees fake GPU" in reason
    assert type(choose_device(EngineConfig(device="cpu"))[0]) is HostDevice


@pytest.mark.parametrize("name", ["num_kv_blocks", "kv_cache_memory_gib"])
def test_only_one_setting_may_say_how_many_blocks_there_are(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{name} is 3, but gpu_memory_utilization is 0.5: both say how many KV blocks"
    ):
        EngineConfig(**{name: 3, "gpu_memory_utilization": 0.5})


def test_faults_of_the_device_are_told_from_want_of_memory_and_from_bugs() -> None:
    """Triton's faults were bugs of one step, one after another, as were those of torch's calls of the driver (for
    expandable segments), and cuBLAS's want of memory ended the engine."""
    faults: list[tuple[type[Exception], RuntimeError]] = [
        (ExecutorOutOfMemoryError, torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")),
        (ExecutorOutOfMemoryError, RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")),
        (ExecutorOutOfMemoryError, RuntimeError("CUDA error: out of memory")),
        (ExecutorOutOfMemoryError, RuntimeError("CUDA driver error: out of memory")),
        (ExecutorOutOfMemoryError, RuntimeError("Triton Error [CUDA]: out of memory")),
        (ExecutorFatalError, RuntimeError("CUDA error: device-side assert triggered")),
        (ExecutorFatalError, RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`")),
        (ExecutorFatalError, RuntimeError("CUDA driver error: an illegal memory access was encountered")),
        (ExecutorFatalError, RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")),
        (RuntimeError, RuntimeError("The size of tensor a (3) must match the size of tensor b (4)")),
    ]
    for kind, error in faults:
        with pytest.raises(kind, match=re.escape(str(error))) as caught, device_faults():
            raise error
        assert type(caught.value) is kind


def test_all_captures_are_on_one_stream_besides_the_steps_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each had one of its own, up to 32, and for each of those cuBLAS keeps a workspace."""
    streams: list[MagicMock] = []
    captured_on: list[object] = []

    def stream() -> MagicMock:
        streams.append(MagicMock())
        return streams[-1]

    def graph(graph: object, pool: object, stream: object) -> MagicMock:
        captured_on.append(stream)
        return MagicMock()

    for name, stand_in in {"Stream": stream, "graph": graph, "get_device_name": str}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    for name in ("current_stream", "stream", "CUDAGraph", "get_device_capability"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    device, runs = CudaDevice(), list[int]()
    first = device.capture(lambda: runs.append(1))
    device.capture(lambda: runs.append(2), first)
    assert runs == [1, 1, 2, 2], "once before it is captured"
    assert captured_on == [*streams, *streams]
    assert len(streams) == 1


def test_weights_are_read_straight_to_the_device_shard_by_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import engine.models.weights as module

    save_model("llama", tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    asked, opened = [], module.safe_open

    def watched(file: Path, *, framework: str, device: str) -> Any:
        asked.append(device)
        return opened(file, framework=framework, device="cpu")

    monkeypatch.setattr(module, "safe_open", watched)
    config = read_model_config(tmp_path)
    weights = load_weights(tmp_path, config, torch.bfloat16, torch.device("meta"))
    assert set(asked) == {"meta"}
    assert len(asked) > 1
    assert weights.embedding.device.type == weights.layers[0].qkv.weight.device.type == "meta"
