"""Owns hybrids on the native kernels: their log-probabilities beside those of torch's operators, and their bits.
Never compares with transformers: the golden tests do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.build.executor import check_executor, create_executor
from engine.build.host_fit import host_use
from engine.config import EngineConfig
from engine.models.config import read_model_config
from engine.models.narrow import Keep
from engine.models.stored_matrix import StoredMatrix
from engine.models.weights import load_weights
from tests.engine.models.test_integer_rows import save
from tests.engine.models.test_recurrent_state import follow, states_at
from tests.support.compiler import needs_compiler
from tests.support.packed_models import int_quantized, save_packed
from tests.support.plans import decode, forced_logits, forced_logits_together, run, stateful
from tests.support.tiny_models import HYBRIDS, VOCAB, edit_config, renamed_slow, save_model

GENERATOR = torch.Generator().manual_seed(5)
TOKENS, OTHERS = (torch.randint(0, VOCAB, (count,), generator=GENERATOR).tolist() for count in (90, 41))
BLOCKS, OTHER_BLOCKS = (9, 3, 11, 0, 7, 5), (1, 2, 4)

pytestmark = needs_compiler


def settings(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"dtype": "float32", "num_kv_blocks": 12, "num_threads": 2, "kernels": "native"} | changes)


def logits(directory: Path, chunk: int | None = 16, **changes: Any) -> Tensor:
    executor, _ = create_executor(directory, settings(**changes))
    try:
        return forced_logits(executor, TOKENS, BLOCKS, chunk)
    finally:
        executor.shutdown()


def distance(got: Tensor, want: Tensor) -> float:
    """The root mean square of the differences of log-probabilities."""
    apart = got.double().log_softmax(-1) - want.double().log_softmax(-1)
    return apart.square().mean().sqrt().item()


@pytest.mark.parametrize("kind", renamed_slow(HYBRIDS))
def test_in_float32_log_probabilities_are_those_of_torch_s_operators_and_so_is_greedy_text(
    kind: str, tmp_path: Path
) -> None:
    save_model(kind, tmp_path)
    want = logits(tmp_path, kernels="torch_cpu").log_softmax(-1)
    torch.testing.assert_close(logits(tmp_path).log_softmax(-1), want, atol=1e-4, rtol=0)
    texts = []
    for kernels in ("native", "torch_cpu"):
        executor, _ = create_executor(tmp_path, settings(kernels=kernels))
        texts.append(follow(executor, TOKENS[:33], BLOCKS, 0, 24))
        executor.shutdown()
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_in_bfloat16_they_are_no_further_from_float32_than_torch_s_operators_are(kind: str, tmp_path: Path) -> None:
    save_model(kind, tmp_path)
    want = logits(tmp_path, kernels="reference")
    native, torch_cpu = (
        distance(logits(tmp_path, dtype="bfloat16", kernels=name), want) for name in ("native", "torch_cpu")
    )
    print(f"{kind}: native {native:.4f}, torch_cpu {torch_cpu:.4f}")
    assert 0.0 < native < 1.25 * torch_cpu


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5"])
def test_neither_chunks_nor_neighbours_change_a_bit(kind: str, dtype: str, quantize: str, tmp_path: Path) -> None:
    save_model(kind, tmp_path)
    whole, *cut = (logits(tmp_path, chunk, dtype=dtype, quantize=quantize) for chunk in (None, 1, 7, 64))
    assert all(torch.equal(whole, other) for other in cut)
    executor, _ = create_executor(tmp_path, settings(dtype=dtype, quantize=quantize))
    together = forced_logits_together(executor, [OTHERS, TOKENS], [OTHER_BLOCKS, BLOCKS], 13)
    assert torch.equal(together[1], whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5"])
def test_weights_rounded_to_int8_cost_little(kind: str, dtype: str, tmp_path: Path) -> None:
    save_model(kind, tmp_path)
    whole, rounded = (logits(tmp_path, dtype=dtype, quantize=how) for how in ("none", "int8"))
    assert 0.0 < distance(rounded, whole) < 0.3


def test_bytes_of_a_checkpoint_are_multiplied_as_they_are(tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", "int_by_output", "qwen3_next")
    got, want = logits(tmp_path / "packed"), logits(tmp_path / "plain", kernels="torch_cpu")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(("kind", "stays"), [("qwen3_5", True), ("qwen3_next", False)])
def test_projections_of_linear_attention_stay_in_groups_unless_their_outputs_are_reordered(
    kind: str, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of attention are reordered, because of its gate."""
    save(tmp_path, int_quantized(32), monkeypatch, kind)
    packed = tmp_path / "packed"
    weights = load_weights(packed, read_model_config(packed), torch.float32, keep=Keep.GROUPED)
    kept = [isinstance(layer.qkv.weight, StoredMatrix) for layer in weights.layers]
    assert kept == [stays, False, stays]
    got, want = logits(packed, quantize="stored"), logits(tmp_path / "plain", kernels="reference")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_activations_in_int8_go_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.build.cpu.cpu_flags", lambda: frozenset({"avx512_vnni"}))
    save(tmp_path, int_quantized(32), monkeypatch, "qwen3_5")
    whole, *rounded = (
        logits(tmp_path / "packed", chunk, quantize="stored", activations=how)
        for chunk, how in ((16, "auto"), (16, "int8"), (1, "int8"))
    )
    assert 0.0 < distance(rounded[0], whole) < 0.3
    assert torch.equal(*rounded)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_after_drafts_has_the_bits_of_one_that_never_saw_them(dtype: str, tmp_path: Path) -> None:
    """Steps have more and more drafts, and no memory was reserved: the programs are recorded again between them."""
    save_model("qwen3_next", tmp_path)
    asked = settings(dtype=dtype, num_speculative_tokens=0)
    plain, drafted = (create_executor(tmp_path, asked)[0] for _ in "ab")
    prompt, count = TOKENS[:20], 24
    text = follow(plain, prompt, BLOCKS, 0, count)
    found = follow(drafted, prompt, BLOCKS, 0, 1)
    for wrong in (1, 0, 3, 2, 7):
        right = text[len(found) :][:wrong]
        guess = (text[len(found) + wrong] + 1) % VOCAB
        row = decode("a", found[-1], 19 + len(found), BLOCKS)._replace(token_ids=(found[-1], *right, guess, guess))
        found += run(drafted, stateful(drafted, row))[0]
    assert found == text[: len(found)]
    assert len(found) == 1 + 2 + 1 + 4 + 3 + 8
    follow(plain, prompt, BLOCKS, 0, len(found))
    for got, want in zip(states_at(drafted, 0), states_at(plain, 0), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_memory_of_drafts_is_counted_and_taken_at_the_start(kind: str, dtype: str, tmp_path: Path) -> None:
    """Regression guard: steps with drafts took it, uncounted; where there was none, all requests lost their states."""
    save_model(kind, tmp_path)
    asked = settings(dtype=dtype, max_num_seqs=5)
    executor, resolved = create_executor(tmp_path, asked)
    model = executor.model  # type: ignore[attr-defined]
    recorded, rewind = model._recorded, model._recorded.rewind
    assert rewind.capacity == resolved.max_drafting_tokens == 25
    kept = {tensor.data_ptr(): tensor for tensor in rewind.program._kept if len(tensor) == 25}
    taken = sum(tensor.nbytes for tensor in kept.values())
    said = host_use(tmp_path, read_model_config(tmp_path), asked, model.decoder.dtype, native=True).drafts
    assert taken <= said < 1.2 * taken
    row = decode("a", 3, 20, BLOCKS)._replace(token_ids=tuple(TOKENS[:25]))
    run(executor, stateful(executor, row))
    assert model._recorded is recorded
    executor.shutdown()


@pytest.mark.parametrize(
    "changes", [{"num_speculative_tokens": 0}, {"kernels": "torch_cpu"}, {"overlap": True}], ids=str
)
def test_without_drafts_or_on_other_kernels_they_take_no_memory(changes: dict[str, Any], tmp_path: Path) -> None:
    save_model("qwen3_5", tmp_path)
    executor, resolved = create_executor(tmp_path, settings(**changes))
    native = resolved.kernels == "native"
    used = host_use(tmp_path, read_model_config(tmp_path), settings(**changes), torch.float32, native=native)
    assert used.drafts == 0
    if native:
        assert executor.model._recorded.rewind is None  # type: ignore[attr-defined]
    executor.shutdown()


def test_a_size_that_no_product_takes_is_the_reason_for_other_kernels(tmp_path: Path) -> None:
    save_model("qwen3_5", tmp_path)
    edit_config(tmp_path, linear_num_key_heads=1, linear_num_value_heads=3, linear_value_head_dim=5)
    resolved = check_executor(tmp_path, settings(kernels="auto", load_format="dummy"))
    assert resolved.kernels == "torch_cpu"
    assert "a matrix has 15 inputs, and they take even numbers" in resolved.reasons["kernels"]
