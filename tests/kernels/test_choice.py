"""Owns the tests of which kernels are chosen, and of the reason that is given.
Never compiles: whether there is a library is set by hand."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import kernels
from kernels import choice
from kernels.choice import ATTENTION, KERNELS, TRITON_TABLE, choose_attention, choose_kernels, forward_pass
from kernels.cpu.native.library import NoLibraryError
from kernels.eager.forward import EagerPass
from kernels.eager.ops import TORCH
from kernels.forward import HeadShape
from tests.kernels.rows import paged_case, seeded_generator
from tests.support.fake_flash import FakeFlash


@pytest.fixture(params=[0, 1, 2], ids=["vectors", "matrix unit", "not granted"])
def library(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    monkeypatch.setattr(choice, "load_library", lambda: SimpleNamespace(matrix_unit=lambda: request.param))
    return int(request.param)


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NoLibraryError("there is no C++ compiler")

    monkeypatch.setattr(choice, "load_library", fail)


def test_native_kernels_are_chosen_where_they_run(library: int) -> None:
    chosen = choose_kernels(head_dim=64, block_size=16)
    assert chosen.name == "native"
    assert ["matrix unit" in chosen.reason, "does not grant" in chosen.reason] == [library > 0, library == 2]
    assert chosen == choose_kernels("native", head_dim=64, block_size=16)


@pytest.mark.usefixtures("no_library")
def test_without_a_library_torch_runs_and_the_reason_is_given() -> None:
    chosen = choose_kernels(head_dim=64, block_size=16)
    assert chosen.name == "torch_cpu"
    assert chosen.reason.endswith("not native: there is no C++ compiler")


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("head_dim", "block_size", "why"),
    [
        (72, 16, "head_dim is 72"),
        (272, 16, "head_dim is 272"),
        (64, 8, "block_size is 8"),
        (64, 24, "block_size is 24"),
    ],
)
def test_a_shape_that_the_kernels_do_not_take_is_named(head_dim: int, block_size: int, why: str) -> None:
    assert why in choose_kernels(head_dim=head_dim, block_size=block_size).reason
    with pytest.raises(ValueError, match=f"native kernels cannot run: {why}"):
        choose_kernels("native", head_dim=head_dim, block_size=block_size)


@pytest.mark.usefixtures("no_library")
def test_kernels_asked_for_by_name_are_never_replaced() -> None:
    with pytest.raises(ValueError, match="cannot run: there is no C"):
        choose_kernels("native", head_dim=64, block_size=16)
    for name in ("torch_cpu", "reference"):
        assert choose_kernels(name, head_dim=64, block_size=16).name == name


def test_unknown_kernels_are_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=f"'warp'.*auto, {', '.join(KERNELS)}"):
        choose_kernels("warp", head_dim=64, block_size=16)


@pytest.mark.usefixtures("library")
def test_a_matrix_with_an_odd_number_of_inputs_is_left_to_torch() -> None:
    chosen = choose_kernels(head_dim=64, block_size=16, inputs=(576, 1537))
    assert (chosen.name, "a matrix has 1537 inputs" in chosen.reason) == ("torch_cpu", True)


# --- attention for a GPU ---------------------------------------------------------------------------------------------

TRITON = replace(TORCH, name="triton")


def choose(asked: str = "auto", present: tuple[str, ...] = (), **changes: Any) -> Any:
    def load(module: str) -> object:
        if module not in present:
            raise ImportError(f"No module named '{module}'")
        return SimpleNamespace(TRITON=TRITON) if module == TRITON_TABLE else FakeFlash()

    model: dict[str, Any] = dict(dtype=torch.bfloat16, head_dim=128, block_size=16, capability=(9, 0), load=load)
    return choose_attention(asked, **model | changes)


def test_attention_is_the_fastest_that_is_there_and_the_reason_names_what_is_not() -> None:
    chosen, table = choose(present=("vllm_flash_attn", TRITON_TABLE))
    assert (chosen.name, table.name) == ("vllm_flash_attn", "vllm_flash_attn")
    assert table.rms_norm is TRITON.rms_norm
    chosen, table = choose(present=(TRITON_TABLE,))
    assert (chosen.name, table) == ("triton", TRITON)
    assert "not vllm_flash_attn: flash_attn_interface does not import" in chosen.reason
    assert "vllm_flash_attn does not import" in chosen.reason
    chosen, table = choose()
    assert (chosen.name, table) == ("torch", TORCH)
    assert f"not triton: {TRITON_TABLE} does not import" in chosen.reason


@pytest.mark.parametrize("capability", [None, (9, 0)])
def test_the_reference_runs_anywhere_and_is_never_captured(capability: tuple[int, int] | None) -> None:
    chosen, table = choose("torch", (TRITON_TABLE, "vllm_flash_attn"), capability=capability)
    assert (chosen.name, chosen.reason, table.capturable) == ("torch", "torch: asked for by name", False)
    assert table.attention is TORCH.attention


@pytest.mark.parametrize(
    ("asked", "changes", "why"),
    [
        ("vllm_flash_attn", {"capability": None}, "vllm_flash_attn attention cannot run: there is no GPU"),
        ("vllm_flash_attn", {"dtype": torch.float32}, "cannot run: dtype is float32"),
        ("triton", {"capability": None}, "triton attention cannot run: there is no GPU"),
        ("triton", {"capability": (7, 5)}, "triton attention cannot run: compute capability is 7.5"),
        ("triton", {}, f"triton attention cannot run: {TRITON_TABLE} does not import"),
        ("warp", {}, f"Unknown attention 'warp'; there are: auto, {', '.join(ATTENTION)}"),
    ],
)
def test_attention_asked_for_by_name_is_never_replaced(asked: str, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        choose(asked, **changes)


NARROW_TRITON = replace(TRITON, narrow_cache=True)


def choose_narrow(asked: str = "auto", present: tuple[str, ...] = (TRITON_TABLE, "flash_attn"), **changes: Any) -> Any:
    def load(module: str) -> object:
        if module not in present:
            raise ImportError(f"No module named '{module}'")
        return SimpleNamespace(TRITON=NARROW_TRITON) if module == TRITON_TABLE else FakeFlash()

    return choose(asked, **{"narrow_cache": True, "block_size": 256, "load": load} | changes)


def test_a_cache_in_8_bits_is_left_to_triton_and_the_reason_says_so() -> None:
    assert choose("auto", ("flash_attn", TRITON_TABLE), block_size=256)[0].name == "vllm_flash_attn"
    chosen, table = choose_narrow()
    assert (chosen.name, table) == ("triton", NARROW_TRITON)
    assert chosen.reason.endswith("not vllm_flash_attn: it does not read a KV cache in 8 bits")


@pytest.mark.parametrize("asked", ["vllm_flash_attn", "torch"])
def test_other_attention_says_that_it_reads_no_cache_in_8_bits_over_tritons_table_too(asked: str) -> None:
    """It is what was asked for by name: whoever compares it with the config refuses it."""
    chosen, table = choose_narrow(asked)
    assert (chosen.name, table.narrow_cache) == (asked, False)
    assert choose_narrow(present=("flash_attn",))[1].narrow_cache is False


def test_scales_between_two_addresses_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"triton attention cannot run: .* block_size times head_dim to be a multiple"):
        choose_narrow("triton", block_size=1, head_dim=6)
    assert choose_narrow("triton", block_size=2, head_dim=6)[0].name == "triton"


@pytest.fixture
def _triton_3_0(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Provide the Triton of torch 2.4, which vllm-flash-attn needs: no knobs, and an autotune without
    `cache_results`."""

    def autotune(configs: list[object], key: list[str]) -> Callable[[object], object]:
        return lambda kernel: kernel

    def same(each: object) -> object:
        return each

    triton, language = ModuleType("triton"), ModuleType("triton.language")
    vars(language).update(constexpr=same)
    vars(triton).update(__version__="3.0.0", language=language, jit=same, autotune=autotune, Config=SimpleNamespace)
    for name in kernel_modules():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(kernels, "triton", None, raising=False)
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    yield
    for name in kernel_modules():  # those imported with this Triton
        del sys.modules[name]


def kernel_modules() -> list[str]:
    return [name for name in sys.modules if name.split(".")[:2] == ["kernels", "triton"]]


def load_beside_flash(module: str) -> object:
    return FakeFlash() if module == "vllm_flash_attn" else importlib.import_module(module)


@pytest.mark.usefixtures("_triton_3_0")
def test_a_triton_that_is_too_old_leaves_the_other_attentions_as_they_are() -> None:
    """Regression guard: it ended every engine on the only torch that vllm-flash-attn supports."""
    old = f"{TRITON_TABLE} does not import (Triton is 3.0.0, and the kernels need 3.6)"
    for asked in ("auto", "vllm_flash_attn"):
        chosen, table = choose(asked, load=load_beside_flash)
        assert (chosen.name, table.rms_norm, table.sample) == ("vllm_flash_attn", TORCH.rms_norm, None)
        assert chosen.reason.endswith(f"; all else by torch, not triton: {old}")
    chosen, table = choose("torch", load=load_beside_flash)
    assert (chosen.name, table) == ("torch", TORCH)
    assert chosen.reason == f"torch: asked for by name; all else by torch, not triton: {old}"
    with pytest.raises(ValueError, match=re.escape(f"triton attention cannot run: {old}")):
        choose("triton", load=load_beside_flash)


@pytest.mark.parametrize("asked", ["vllm_flash_attn", "torch"])
def test_another_attention_over_tritons_table_keeps_its_fused_rotation(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression guard: it was dropped with the table's name. One launch must give what torch's single operators do."""
    pytest.importorskip("kernels.triton.shared.launch", reason="no Triton to run the kernels on", exc_type=ImportError)
    forward = importlib.import_module("kernels.triton.forward")
    launches: list[int] = []
    fused = forward.rotate_and_cache

    def counted(qkv: torch.Tensor, *others: Any) -> torch.Tensor:
        launches.append(len(qkv))
        out: torch.Tensor = fused(qkv, *others)
        return out

    monkeypatch.setattr(forward, "rotate_and_cache", counted)
    chosen, table = choose(asked, load=load_beside_flash, dtype=torch.float16, head_dim=16)
    assert chosen.reason == f"{asked}: asked for by name"
    case = paged_case([5, 20], [(3, 6)], group=2, dtype=torch.float16)
    rows, heads, num_tokens = case.rows, HeadShape(num_heads=4, num_kv_heads=2, head_dim=16), len(case.q)
    spans = [(start, start + count) for start, count in zip(rows.contexts, rows.counts, strict=True)]
    inputs = {
        "token_ids": torch.zeros(num_tokens, dtype=torch.int64),
        "positions": torch.cat([torch.arange(*span) for span in spans]),
        "slots": torch.cat([rows.slots(row)[-count:] for row, count in enumerate(rows.counts)]),
    }
    generator = seeded_generator()
    qkv = torch.randn(num_tokens, 8 * 16, generator=generator).half()
    norms = torch.rand(16, generator=generator).half(), torch.rand(16, generator=generator).half()
    frequencies = torch.rand(8, generator=generator)

    def attend(make: Any, ops: Any) -> list[torch.Tensor]:
        run = make(plan=ops.prepare_attention(rows, 2, torch.float16), **inputs)
        cache = case.k_cache.clone(), case.v_cache.clone()
        q = run.rotate_and_cache(qkv, run.rotations(frequencies, 1.0), heads, cache, norms, 1e-5)
        return [q, run.attention(q, heads, cache, case.scale), *cache]

    got = attend(forward_pass(table), table)
    want = attend(lambda **given: EagerPass(TORCH, **given), TORCH)
    assert launches == [num_tokens]
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-2, rtol=1e-2, equal_nan=True)
