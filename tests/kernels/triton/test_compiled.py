"""Owns the proof that the kernels compile to machine code for GPUs, which the interpreter does not show.
Never needs a GPU: Triton brings the assembler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kernels.triton.resources import compile_for

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

from kernels.triton.shared import launch
from tests.kernels.triton.compiled import FP8_CAPABILITY, SHARED_BYTES

EVERY = {
    "_norm", "_silu_and_mul", "_rotate", "_write", "_sum_items", "attend", "_combine", "_copy", "_edit", "_look",
    "_limit", "scan_block", "filter_row", "sample_row", "_logprobs", "_convolve", "_one_step", "_invert", "_scan",
    "_gated_norm", "_sigmoid_gate", "_router_logits", "_choose", "_sort", "gate_up", "down", "gather_inputs",
    "add_parts", "_shrink", "_expand", "multiply", "add_splits", "few_rows", "few_rows_gated", "many_rows",
}  # fmt: skip
FROM_8_9 = {"round_rows", "multiply_fp8"}
"""The kernels that only GPUs with products of fp8 have."""


def every(capability: str) -> set[str]:
    return EVERY | FROM_8_9 if float(capability) >= FP8_CAPABILITY else EVERY


def compile_all(cache: Path, capability: str, *arguments: str) -> list[dict[str, Any]]:
    found = compile_for(capability, str(cache), *arguments)
    assert {kernel["name"] for kernel in found} == every(capability)
    return found


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu(compiled: Path) -> None:
    found = compile_all(compiled, "9.0", "--first-config")
    pipelined = ("attend", "multiply", "gate_up", "multiply_fp8", "few_rows", "few_rows_gated", "many_rows")
    multiplying = (*pipelined, "down", "_shrink", "_expand")
    products = [kernel["tensor_cores"] for kernel in found if kernel["name"] in multiplying]
    assert all(products), "bfloat16 products"
    assert not any(kernel["tensor_cores"] for kernel in found if kernel["name"] == "_router_logits"), "float32 ones"
    # One tile is copied while another is computed on: with fewer stages, every copy of attention was waited for.
    assert all(kernel["copies_in_flight"] for kernel in found if kernel["name"] in pipelined)
    # They may start before what they read is written.
    overlapping = [
        kernel["waits_first"] for kernel in found if kernel["name"] in ("few_rows", "few_rows_gated", "many_rows")
    ]
    assert all(overlapping)
    assert all(kernel["waits_first"] for kernel in found if kernel["name"] == "_rotate")
    assert any(kernel["waits_first"] for kernel in found if kernel["name"] == "add_splits")
    assert {kernel["reads_before_it_waits"] for kernel in found if kernel["name"] == "_norm"} == {1}, "its weight"
    # The smallest experts have one block of inputs, beside which nothing can be copied.
    assert sum(not kernel["copies_in_flight"] for kernel in found if kernel["name"] == "down") <= 1
    # These have no smaller configuration to fall back to: the smallest of the supported GPUs has 99 KiB.
    alone = ("_invert", "_scan", "_one_step", "_router_logits", "_choose", "_sort", "_shrink", "_expand")
    assert max(kernel["shared_bytes"] for kernel in found if kernel["name"] in alone) <= 99 * 1024
    # Their threads exchange values through global memory, and the compiler does not order accesses to it.
    exchanging = [
        kernel["barriers"] for kernel in found if kernel["name"] in ("filter_row", "_logprobs", "_convolve", "_edit")
    ]
    assert all(exchanging), "one thread of these reads what another has written, or writes what it has yet to read"
    # Fused, a product and the subtraction after it would round once, and a penalty would differ from the reference's.
    assert not any(kernel["fused"] for kernel in found if kernel["name"] in ("_copy", "_edit"))


@pytest.mark.slow
def test_attention_of_the_largest_heads_has_a_configuration_for_every_gpu(compiled: Path) -> None:
    """Regression guard: chunks had none that fits Ada and small Ampere GPUs, where no step could run."""
    found = compile_for("8.9", str(compiled), "--head-dims", "256", "--groups", "4", "--least-shared")
    sizes = [kernel["shared_bytes"] for kernel in found if kernel["name"] == "attend"]
    assert len(sizes) == 9, "chunks, decodes and units over K and V in 16 bits, int8 and fp8"
    assert max(sizes) <= 99 * 1024


@pytest.mark.slow
def test_a_numbered_configuration_that_does_not_fit_gives_way_to_one_that_does(
    compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first configuration of decodes and of chunks needs more shared memory than this GPU has."""
    monkeypatch.setenv(launch.TUNING, "0")
    found = compile_for("8.9", str(compiled), "--head-dims", "256", "--groups", "4", "--attention")
    sizes = [kernel["shared_bytes"] for kernel in found if kernel["name"] == "attend"]
    assert len(sizes) == 9, "chunks, decodes and units over K and V in 16 bits, int8 and fp8"
    assert max(sizes) <= SHARED_BYTES[89]


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["8.0", "10.0", "12.0"])
def test_every_kernel_compiles_for_other_gpus(compiled: Path, capability: str) -> None:
    compile_all(compiled, capability, "--head-dims", "80", "256", "--groups", "8", "--first-config")


@pytest.mark.slow
def test_every_configuration_compiles(compiled: Path) -> None:
    """Autotuning skips those that need more shared memory than the GPU has."""
    compile_all(compiled, "9.0", "--head-dims", "80", "256", "--groups", "8")
    compile_all(compiled, "9.0", "--dtypes", "float32", "float16", "--first-config")
