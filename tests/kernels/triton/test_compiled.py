"""Owns the proof that the kernels compile to machine code for GPUs, which the interpreter does not show.
Never needs a GPU: Triton brings the assembler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.triton import every_kernel
from tests.kernels.triton.every_kernel import RECORD, ROOT, RUNS, SOURCES, compile_all, sources
from tests.kernels.triton.resources import compile_for

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

from kernels.triton.shared import launch
from tests.kernels.triton.compiled import SHARED_BYTES


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
@pytest.mark.parametrize("name", RUNS)
def test_every_configuration_compiles_and_the_first_for_every_kind_of_gpu(compiled: Path, name: str) -> None:
    """It takes minutes, and depends on the sources alone: what was compiled once need not be again."""
    if json.loads(RECORD.read_text(encoding="utf-8")) == sources():
        pytest.skip("the same sources were compiled before: see tests/kernels/triton/every_kernel.py")
    for capability, *arguments in RUNS[name]:
        compile_all(compiled, capability, *arguments)


def test_the_sources_of_a_kernel_are_all_that_the_compiling_process_imports() -> None:
    code = "import sys; import tests.kernels.triton.compiled; print(*(name for name in sys.modules), sep='\\n')"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    names = {name for name in done.stdout.split() if name.partition(".")[0] in ("kernels", "engine", "tests")}
    of_sources = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for pattern in SOURCES
        for path in ROOT.glob(pattern)
    }
    of_tests = {"tests", "tests.kernels", "tests.kernels.triton", "tests.kernels.triton.resources"}
    assert "kernels.triton.attention.kernel" in names
    assert names - of_sources == of_tests


def test_another_source_is_another_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "kernels" / "triton" / "ops.py"
    source.parent.mkdir(parents=True)
    source.write_text("a = 1")
    monkeypatch.setattr(every_kernel, "ROOT", tmp_path)
    first = sources()
    assert sources() == first
    source.write_text("a = 2")
    assert sources() != first
    assert sources()["triton"] == first["triton"]
