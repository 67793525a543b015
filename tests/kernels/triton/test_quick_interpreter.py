"""Owns the contract that an interpreted launch replaces Triton's language once, computes the same, and restores it, and
that shapes and types are described as Triton does it.
Never measures how much faster that is."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from kernels.triton.shared.launch import INTERPRETED
from tests.support.quick_interpreter import MODULE, quicken

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the kernels are compiled")


@triton.jit
def _doubled(x):
    return x + x


@triton.jit
def _sum_of_doubles(x, out, SIZE: tl.constexpr):
    program = tl.program_id(0)
    values = _doubled(tl.load(x + program * SIZE + tl.arange(0, SIZE)))
    tl.store(out + program, tl.sum(values, axis=0))  # `sum` is a function of Triton's own, in another module


def launch(programs: int) -> None:
    x = torch.arange(4 * programs, dtype=torch.float32).view(programs, 4)
    out = torch.full((programs,), torch.nan)
    _sum_of_doubles[(programs,)](x, out, SIZE=4)
    assert out.tolist() == (2 * x.sum(dim=1)).tolist()


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Note whatever is searched for what to replace."""
    found: list[object] = []
    real = interpreter._patch_builtin

    def noted(package: object, *others: Any) -> None:
        found.append(package)
        real(package, *others)

    monkeypatch.setattr(interpreter, "_patch_builtin", noted)
    return found


def test_functions_that_call_each_other_replace_the_language_no_more_often_in_many_programs(
    replaced: list[object],
) -> None:
    launch(1)  # the first rewrites the functions, and adds to what they see
    replaced.clear()
    launch(1)
    once = len(replaced)
    assert {id(tl), id(tl.core)} <= set(map(id, replaced)), "the caller sees one, and Triton's own function the other"
    launch(9)
    assert len(replaced) == 2 * once


def test_after_a_launch_the_language_is_what_it_was() -> None:
    names = ("arange", "load", "store", "program_id", "static_range", "reduce")
    before = [getattr(tl, name) for name in names]
    launch(3)
    assert [getattr(tl, name) for name in names] == before


def test_what_is_found_by_the_first_launch_is_all_that_is_builtin() -> None:
    launch(1)
    scope = interpreter._LangPatchScope()
    try:
        for place in (tl, tl.math):
            names = {name for name, member in inspect.getmembers(place) if tl.core.is_builtin(member)}
            interpreter._patch_builtin(place, interpreter.interpreter_builder, scope)
            assert names
            assert not [name for name in names if tl.core.is_builtin(getattr(place, name))]
    finally:
        scope.restore()


def test_after_a_launch_that_fails_the_next_one_replaces_it_again() -> None:
    with pytest.raises(interpreter.InterpreterError):
        _sum_of_doubles[(1,)](None, None, SIZE=4)
    launch(2)


@pytest.mark.parametrize("shape", [[4, 8], (tl.constexpr(4), 8), tl.tuple([4, 8])])
def test_a_shape_is_described_as_ever_however_it_is_given_and_by_the_same_objects(shape: Any) -> None:
    first, second = tl.block_type(tl.float32, [4, 8]), tl.block_type(tl.int8, shape)
    assert (second.name, second.numel) == ("<['4', '8'], int8>", 32)
    assert list(second.shape) == [4, 8]
    assert second.shape is first.shape
    tensors = [tl.tensor(None, type) for type in (first, second, tl.int32)]
    assert [tensor.dtype for tensor in tensors] == [tl.float32, tl.int8, tl.int32]
    assert [[size.value for size in tensor.shape] for tensor in tensors] == [[4, 8], [4, 8], []]
    assert [tensor.numel.value for tensor in tensors] == [32, 32, 1]


@pytest.mark.parametrize(("shape", "error"), [([], TypeError), ([3], ValueError), ([2**21], ValueError)])
def test_a_shape_that_is_none_is_refused_each_time(shape: list[int], error: type[Exception]) -> None:
    for _ in range(2):
        with pytest.raises(error):
            tl.block_type(tl.float32, shape)


def test_each_type_has_the_numpy_type_that_the_interpreter_gives_it() -> None:
    known = {tl.int1: bool, tl.bfloat16: np.uint16, tl.float8e4nv: np.uint8, tl.float32: np.float32}
    for _ in range(2):
        for dtype, want in known.items():
            assert interpreter._get_np_dtype(dtype) == want
            assert interpreter._get_np_dtype(tl.block_type(dtype, [2])) == want
            pointer = tl.pointer_type(dtype)
            assert interpreter._get_np_dtype(pointer) == np.uint64
            assert interpreter._get_np_dtype(tl.block_type(pointer, [2])) == np.uint64


def test_to_ask_twice_or_without_an_interpreter_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken()
    first = interpreter._patch_lang
    quicken()
    assert interpreter._patch_lang is first
    monkeypatch.delitem(sys.modules, MODULE)
    quicken()
    assert MODULE not in sys.modules
