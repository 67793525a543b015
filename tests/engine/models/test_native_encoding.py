"""Owns models with images on the native kernels: their log-probabilities beside torch's operators, and their bits.
Never compares with transformers: tests/golden/test_vision.py does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.build.executor import create_executor
from engine.config import EngineConfig
from engine.execution.executor import TorchExecutor
from engine.host import cores
from engine.models.native_encoding import NativeEncodingModel
from engine.multimodal_inputs import EncodeJob, Grid, PlacedInput, overlapping, place_inputs, shift_at
from engine.step import RowInputs, ScheduledRequest, StepPlan
from tests.golden.vision import forced_logits, vision_prompts
from tests.support.compiler import needs_compiler
from tests.support.plans import chunk, decode
from tests.support.tiny_vision import Shown, save_vision_model

pytestmark = needs_compiler

PROMPTS = vision_prompts()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("vision")
    save_vision_model(found)
    return found


def make(directory: Path, **changes: Any) -> TorchExecutor:
    settings = {"dtype": "float32", "num_kv_blocks": 64, "num_threads": 2, "kernels": "native"} | changes
    executor, _ = create_executor(directory, EngineConfig(**settings))
    assert isinstance(executor, TorchExecutor)
    return executor


@pytest.fixture(scope="module")
def native(directory: Path) -> Iterator[TorchExecutor]:
    executor = make(directory)
    yield executor
    executor.shutdown()


def logits(directory: Path, **changes: Any) -> list[Tensor]:
    executor = make(directory, **changes)
    try:
        return [forced_logits(executor, prompt, None) for prompt in PROMPTS]
    finally:
        executor.shutdown()


def distance(got: list[Tensor], want: list[Tensor]) -> float:
    """The root mean square of the differences of log-probabilities."""
    apart = torch.cat(got).double().log_softmax(-1) - torch.cat(want).double().log_softmax(-1)
    return apart.square().mean().sqrt().item()


def with_inputs(row: ScheduledRequest, placed: tuple[PlacedInput, ...]) -> ScheduledRequest:
    return row._replace(inputs=RowInputs(overlapping(placed, row.start, row.end), shift_at(placed, row.start)))


def encodes(prompt: Shown) -> tuple[EncodeJob, ...]:
    return tuple(EncodeJob(one.digest, one.grid, one.data) for one in prompt.inputs)


@pytest.mark.parametrize("kernels", ["torch_cpu", "reference"])
def test_in_float32_log_probabilities_are_those_of_the_other_kernels(
    native: TorchExecutor, directory: Path, kernels: str
) -> None:
    for got, want in zip(
        [forced_logits(native, prompt, None) for prompt in PROMPTS], logits(directory, kernels=kernels), strict=True
    ):
        torch.testing.assert_close(got.log_softmax(-1), want.log_softmax(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_that_end_anywhere_also_inside_of_images_change_no_bit(directory: Path, dtype: str) -> None:
    executor = make(directory, dtype=dtype)
    for prompt in PROMPTS:
        first, *others = (forced_logits(executor, prompt, size) for size in (None, 1, 5, 16))
        assert all(torch.equal(first, other) for other in others)
    executor.shutdown()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neighbours_change_no_bit(directory: Path, dtype: str) -> None:
    """A decode row after images, and chunks that begin inside of an image or in text, share a step."""
    executor = make(directory, dtype=dtype)
    begins = [len(PROMPTS[0].token_ids) - 1, 14, 30, 4]
    want = [forced_logits(executor, prompt, None)[begin:] for prompt, begin in zip(PROMPTS, begins, strict=True)]
    tables = [tuple(range(number, 64, 4)) for number in range(4)]
    rows = []
    for number, (prompt, begin) in enumerate(zip(PROMPTS, begins, strict=True)):
        placed, tokens = place_inputs(prompt.inputs), prompt.token_ids
        before = with_inputs(chunk(str(number), tokens, 0, begin, tables[number]), placed)
        executor.logits(StepPlan(number, (before,), encodes=encodes(prompt)))
        rest = chunk(str(number), tokens, begin, len(tokens), tables[number])
        rows.append(with_inputs(decode("0", tokens[begin], begin, tables[0]) if number == 0 else rest, placed))
    got = executor.logits(StepPlan(9, tuple(rows))).float()
    for one, other in zip(got.split([len(row.token_ids) for row in rows]), want, strict=True):
        assert torch.equal(one, other)
    executor.shutdown()


def test_a_row_whose_image_was_dropped_is_refused(native: TorchExecutor) -> None:
    prompt = PROMPTS[0]
    placed, tokens = place_inputs(prompt.inputs), prompt.token_ids
    row = with_inputs(chunk("a", tokens, 0, len(tokens), tuple(range(8))), placed)
    native.logits(StepPlan(0, (row,), encodes=encodes(prompt)))
    native.logits(StepPlan(1, (row,)))
    with pytest.raises(ValueError, match="its input at 10 was not encoded"):
        native.logits(StepPlan(2, (row,), dropped=(prompt.inputs[0].digest,)))


@pytest.mark.parametrize(
    ("changes", "far"),
    [
        ({"quantize": "int8"}, 0.15),
        ({"quantize": "int8", "activations": "int8"}, 0.2),
        ({"kv_cache_dtype": "int8"}, 0.1),
        ({"kv_cache_dtype": "fp8_e4m3"}, 0.4),
    ],
    ids=str,
)
def test_fewer_bits_of_weights_activations_or_the_kv_cache_change_little(
    directory: Path, changes: dict[str, Any], far: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.build.cpu.cpu_flags", lambda: frozenset({"avx512_vnni"}))
    assert 0.0 < distance(logits(directory, **changes), logits(directory)) < far


def test_a_step_with_more_tokens_than_any_before_is_recorded_with_its_images_again(directory: Path) -> None:
    executor = make(directory, max_num_batched_tokens=80, max_num_seqs=4)
    for prompt in PROMPTS:
        assert torch.equal(forced_logits(executor, prompt, None), forced_logits(executor, prompt, 16))
    assert max(len(prompt.token_ids) for prompt in PROMPTS) > 80
    executor.shutdown()


def test_the_encoder_has_all_threads_and_torch_has_one_again_afterwards(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 3)  # also where there are two
    executor = make(directory, num_threads=3)
    assert isinstance(executor.model, NativeEncodingModel)
    encoder, seen = executor.model.contents.encoder, []
    encode = encoder.encode

    def watched(grid: Grid, data: bytes) -> Tensor:
        seen.append(torch.get_num_threads())
        return encode(grid, data)

    monkeypatch.setattr(encoder, "encode", watched)
    forced_logits(executor, PROMPTS[0], None)
    assert (seen, torch.get_num_threads()) == ([3], 1)
    executor.shutdown()
