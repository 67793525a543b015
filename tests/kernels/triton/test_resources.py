"""Owns the contract of what the compiled kernels take of a GPU: the table is what the compiler gives, and not worse.
Never needs a GPU, and never says how fast a kernel is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

import triton

from tests.kernels.triton.every_kernel import every
from tests.kernels.triton.resources import (
    CAPABILITIES,
    SHAPE,
    TABLE,
    compile_for,
    programs_per_multiprocessor,
    table_of,
    written,
)

DOCUMENT: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
OVER_8_BITS, BY_SPANS = "attend over 8 bits", "multiply by spans"
SPILLS = {
    **{"_scan": 1400, "attend": 160, OVER_8_BITS: 6100, "multiply": 10, "multiply_fp8": 10, "filter_row": 12},
    **{BY_SPANS: 110, "sample_row": 10, "gate_up": 50, "down": 340, "few_rows": 6},
}
"""The kernels that use local memory in some variant, and how often at most in its code."""
PRODUCTS = {"8.0": {"mma"}, "9.0": {"wgmma"}, "10.0": {"tcgen05"}}


def rows(capability: str, name: str = "") -> dict[str, dict[str, Any]]:
    return {
        variant: row for variant, row in DOCUMENT[capability].items() if variant.startswith(f"{name}(" if name else "")
    }


def spilling(variant: str) -> str:
    """Return a variant's name in SPILLS. On Ampere, tiles of 128 queries by 128 keys spill with K and V in 8 bits, and
    those of 128 rows by 128 outputs with weights in 4 bits and sums of spans, which only batch-invariant ones have."""
    name, _, types = variant.partition("(")
    if name == "multiply" and " SPANS=1 " not in types:
        return BY_SPANS
    return OVER_8_BITS if name == "attend" and not types.startswith("bf16,bf16,") else name


@pytest.mark.parametrize(
    ("capability", "registers", "shared_bytes", "warps", "programs"),
    [
        ("8.0", 32, 0, 4, 16),  # 2,048 threads
        ("9.0", 16, 0, 1, 32),  # the most that one holds
        ("9.0", 255, 0, 4, 2),  # 8,192 registers a warp
        ("9.0", 33, 0, 8, 6),  # 40 registers a thread: a warp gets them by 256
        ("9.0", 64, 115_712, 4, 2),
        ("8.0", 64, 115_712, 4, 1),
        ("8.0", 64, 170_000, 4, 0),
    ],
)
def test_as_many_programs_fit_as_registers_shared_memory_and_threads_allow(
    capability: str, registers: int, shared_bytes: int, warps: int, programs: int
) -> None:
    assert programs_per_multiprocessor(capability, registers, shared_bytes, warps) == programs


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_table_has_every_kernel_and_each_has_a_configuration_that_fits(capability: str) -> None:
    assert {variant.partition("(")[0] for variant in rows(capability)} == every(capability)
    for name in every(capability):
        assert max(row["programs"] for row in rows(capability, name).values()) >= 1, name


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_registers_are_spilled_only_where_that_is_known(capability: str) -> None:
    spilled = {variant: row["local_accesses"] for variant, row in rows(capability).items() if row["local_accesses"]}
    assert {variant: count for variant, count in spilled.items() if count > SPILLS.get(spilling(variant), 0)} == {}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("part", ["DECODE=True", "DECODE=False"])
@pytest.mark.parametrize("cache", ["bf16", "i8", "fp8"])
def test_attention_has_configurations_that_spill_nothing(capability: str, part: str, cache: str) -> None:
    """Before 8.9 there is no type of fp8: its numbers are bytes."""
    kept_in = cache if cache != "fp8" else "u8" if capability == "8.0" else "fp8e4nv"
    of_cache = f"attend(bf16,{kept_in},{kept_in},"
    found = [
        row for variant, row in rows(capability).items() if variant.startswith(of_cache) and f" {part} " in variant
    ]
    assert any(not row["local_accesses"] and row["programs"] >= 2 for row in found)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_attention_over_chunks_uses_the_newest_tensor_cores_and_copies_sixteen_bytes_at_a_time(capability: str) -> None:
    chunks = {variant: row for variant, row in rows(capability, "attend").items() if "DECODE=False" in variant}
    assert chunks
    assert {row["products"] for row in chunks.values()} == PRODUCTS[capability]
    assert all(row["wide_copies"] for row in rows(capability, "attend").values())


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_products_of_adapters_use_the_newest_tensor_cores(capability: str) -> None:
    found = {**rows(capability, "_shrink"), **rows(capability, "_expand")}
    assert {row["products"] for row in found.values()} == PRODUCTS[capability]
    assert all(row["wide_copies"] for row in rows(capability, "_shrink").values())


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("tile", [16, 64, 128])
def test_products_with_narrow_weights_spill_nothing_and_copy_sixteen_bytes_at_a_time(
    capability: str, kind: str, tile: int
) -> None:
    shape = f" KIND={kind} PER_WORD={4 if kind == 'int4' else 2} TILE={tile} "
    found = [row for variant, row in rows(capability, "multiply").items() if shape in variant]
    kept = [row for row in found if not row["local_accesses"] and row["programs"]]
    assert any(row["products"] in PRODUCTS[capability] for row in kept), "by the newest tensor cores"
    assert all(row["wide_copies"] for row in found if row["programs"])


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", ["few_rows", "few_rows_gated"])
@pytest.mark.parametrize("tile", [16, 32, 64])
def test_products_of_few_rows_spill_nothing_copy_sixteen_bytes_at_a_time_and_fit_every_gpu(
    capability: str, name: str, tile: int
) -> None:
    found = [
        row
        for variant, row in rows(capability, name).items()
        if f" TILE={tile} " in variant and " WHOLE=True " in variant
    ]
    kept = [row for row in found if not row["local_accesses"] and row["programs"]]
    assert any(row["products"] in PRODUCTS[capability] for row in kept), "by the newest tensor cores"
    assert all(row["wide_copies"] for row in found)
    assert min(row["shared_bytes"] for row in kept) <= 99 * 1024, "for the smallest of the supported GPUs"


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", ["gate_up", "down"])
@pytest.mark.parametrize("kind", ["plain", "int8", "fp8", "int4"])
@pytest.mark.parametrize("tile", [16, 64, 128])
def test_products_of_experts_spill_nothing_and_copy_sixteen_bytes_at_a_time(
    capability: str, name: str, kind: str, tile: int
) -> None:
    per_word = {"plain": 1, "int4": 4}.get(kind, 2)
    shape = f" KIND={kind} PER_WORD={per_word} TILE={tile} "
    found = [row for variant, row in rows(capability, name).items() if shape in variant and "SIZE=768" in variant]
    kept = [row for row in found if not row["local_accesses"] and row["programs"]]
    assert any(row["products"] in PRODUCTS[capability] for row in kept), "by the newest tensor cores"
    assert all(row["wide_copies"] for row in found if row["programs"])
    assert min(row["shared_bytes"] for row in found) <= 99 * 1024, "for the smallest of the supported GPUs"


@pytest.mark.parametrize("capability", ["9.0", "10.0"])
@pytest.mark.parametrize("group", [0, 128])
def test_products_of_fp8_by_fp8_spill_nothing_and_use_the_newest_tensor_cores(capability: str, group: int) -> None:
    found = [row for variant, row in rows(capability, "multiply_fp8").items() if f" GROUP={group} " in variant]
    kept = [row for row in found if not row["local_accesses"] and row["programs"]]
    assert any(row["products"] in PRODUCTS[capability] for row in kept)
    assert all(row["wide_copies"] for row in found)


@pytest.mark.slow
def test_the_table_is_what_the_compiler_gives(compiled: Path) -> None:
    if triton.__version__ != DOCUMENT["triton"]:
        pytest.skip(f"the table is of Triton {DOCUMENT['triton']}, and this is {triton.__version__}")
    found = table_of("9.0", compile_for("9.0", str(compiled), "--resources", *SHAPE, "--first-config"))
    kept = {variant: DOCUMENT["9.0"].get(variant) for variant in found}
    assert found == kept, "run `python -m tests.kernels.triton.resources`, and read what has changed"


def test_the_table_is_written_with_a_line_for_each_variant() -> None:
    assert written(DOCUMENT) == TABLE.read_text(encoding="utf-8")
