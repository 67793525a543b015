"""Owns the golden gate: teacher-forced log-probabilities against transformers on the same weights.
Never asserts a maximum, and never a tolerance that was not recorded beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.build.cpu import BYTE_FLAGS
from engine.checkpoints.prepare import prepare_model
from engine.config import DEFAULT_MODEL
from engine.execution.executor import TorchExecutor
from kernels.cpu.processor import cpu_flags
from tests.golden.models import FAMILIES, family_sequences, make_executor, tokenized_prompts
from tests.golden.scoring import CHUNK_SIZES, check, compare, executor_logits, transformers_logits
from tests.support.compiler import needs_compiler
from tests.support.packed_models import save_in_fp8
from tests.support.tiny_models import save_model


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    return tokenized_prompts()


@pytest.fixture(scope="module")
def reference(sequences: list[list[int]]) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(prepare_model(DEFAULT_MODEL), dtype=torch.float32)
    return transformers_logits(model, sequences)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def default_model(request: pytest.FixtureRequest) -> tuple[str, TorchExecutor]:
    return request.param, make_executor(prepare_model(DEFAULT_MODEL), request.param)[0]


@pytest.mark.parametrize(("chunk_size", "together"), [(4, True), (64, False), (None, True)])
def test_the_default_model_is_as_close_to_transformers_as_transformers_to_itself(
    default_model: tuple[str, TorchExecutor],
    sequences: list[list[int]],
    reference: list[torch.Tensor],
    chunk_size: int | None,
    together: bool,
) -> None:
    dtype, executor = default_model
    got = executor_logits(executor, sequences, chunk_size, together=together)
    check(f"default_model.{dtype}", compare(got, reference, sequences))


@needs_compiler
@pytest.mark.parametrize("chunk_size", [pytest.param(16, marks=pytest.mark.slow), None])
def test_the_default_model_in_its_files_own_bits_is_as_close_to_transformers_as_in_bfloat16(
    sequences: list[list[int]], reference: list[torch.Tensor], chunk_size: int | None
) -> None:
    """The reference has the file's numbers rounded to bfloat16."""
    executor, _ = make_executor(prepare_model(DEFAULT_MODEL, stored=True), "bfloat16", quantize="stored")
    got = executor_logits(executor, sequences, chunk_size, together=True)
    check("default_model.bfloat16", compare(got, reference, sequences))


@needs_compiler
@pytest.mark.parametrize("chunk_size", [16, None])
def test_the_default_model_in_eight_bits_is_as_close_to_itself_as_transformers_with_rounded_weights(
    sequences: list[list[int]], reference: list[torch.Tensor], chunk_size: int | None
) -> None:
    executor, _ = make_executor(prepare_model(DEFAULT_MODEL), "bfloat16", quantize="int8")
    check(
        "default_model.int8",
        compare(executor_logits(executor, sequences, chunk_size, together=True), reference, sequences),
    )


@needs_compiler
@pytest.mark.skipif(not cpu_flags() & BYTE_FLAGS, reason="this processor has no products of bytes")
@pytest.mark.parametrize("chunk_size", [pytest.param(16, marks=pytest.mark.slow), None])
def test_the_default_model_with_rounded_activations_is_as_close_to_itself_as_transformers_with_the_same(
    sequences: list[list[int]], reference: list[torch.Tensor], chunk_size: int | None
) -> None:
    directory = prepare_model(DEFAULT_MODEL, stored=True)
    executor, _ = make_executor(directory, "bfloat16", quantize="stored", activations="int8")
    got = executor_logits(executor, sequences, chunk_size, together=True)
    check("default_model.rounded_activations", compare(got, reference, sequences))


@pytest.mark.parametrize(
    "quantize", [pytest.param("none", marks=pytest.mark.slow), pytest.param("stored", marks=needs_compiler)]
)
def test_the_default_model_in_fp8_is_as_close_to_itself_as_transformers_with_rounded_weights(
    sequences: list[list[int]], reference: list[torch.Tensor], quantize: str, tmp_path: Path
) -> None:
    save_in_fp8(prepare_model(DEFAULT_MODEL), tmp_path / "fp8")
    executor, _ = make_executor(tmp_path / "fp8", "bfloat16", quantize=quantize)
    got = executor_logits(executor, sequences, None, together=True)
    check("default_model.fp8", compare(got, reference, sequences))


@pytest.mark.parametrize(
    ("kept_in", "kernels"),
    [
        ("int8", "torch_cpu"),
        ("fp8_e4m3", "torch_cpu"),
        pytest.param("int8", "native", marks=needs_compiler),
        pytest.param("fp8_e4m3", "native", marks=needs_compiler),
    ],
)
@pytest.mark.parametrize("chunk_size", [pytest.param(16, marks=pytest.mark.slow), None])
def test_a_narrow_kv_cache_is_as_close_to_a_whole_one_as_that_of_transformers(
    sequences: list[list[int]], reference: list[torch.Tensor], chunk_size: int | None, kept_in: str, kernels: str
) -> None:
    executor, _ = make_executor(prepare_model(DEFAULT_MODEL), "bfloat16", kv_cache_dtype=kept_in, kernels=kernels)
    got = executor_logits(executor, sequences, chunk_size, together=True)
    check(f"default_model.kv_{kept_in}", compare(got, reference, sequences))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_is_as_close_to_transformers_as_transformers_to_itself(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    sequences = family_sequences()
    want = transformers_logits(save_model(kind, tmp_path), sequences)
    executor, _ = make_executor(tmp_path, dtype, num_threads=1)  # too little work for two threads
    for chunk_size in CHUNK_SIZES:
        for together in (False, True):
            got = executor_logits(executor, sequences, chunk_size, together=together)
            check(f"{kind}.{dtype}", compare(got, want, sequences))
