"""Owns the tests of which configurations are timed, and which choices are kept for other processes.
Never times one: a GPU does."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

import torch
import triton
import triton.language as tl

from kernels.triton.attention.kernel import DECODE_CONFIGS
from kernels.triton.shared import launch


@pytest.mark.parametrize(
    ("tuning", "numbers"), [("keep", None), ("forget", None), ("0", [0]), ("3", [3]), ("99", [-1])]
)
def test_the_environment_says_which_configurations_are_timed(tuning: str, numbers: list[int] | None) -> None:
    """Regression guard: GPU tests timed a thousand of them, and left engines the choices of their tiny shapes."""
    want = DECODE_CONFIGS if numbers is None else [DECODE_CONFIGS[number] for number in numbers]
    assert launch.candidates(DECODE_CONFIGS, tuning) == want


def test_another_word_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"CHUNKSERVE_TRITON_TUNING is 'first': expected keep, forget or the number"):
        launch.candidates(DECODE_CONFIGS, "first")


@pytest.mark.parametrize(("tuning", "kept"), [(None, True), ("keep", True), ("forget", False), ("0", False)])
def test_only_an_engines_choices_are_kept_on_disk(
    tuning: str | None, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(launch.triton, "autotune", lambda **options: asked.append(options))
    monkeypatch.delenv(launch.TUNING, raising=False)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    launch.tuned(DECODE_CONFIGS, ["HEAD_DIM"], tuning)
    if tuning is not None:
        monkeypatch.setenv(launch.TUNING, tuning)
        launch.tuned(DECODE_CONFIGS, ["HEAD_DIM"])
    assert {options["cache_results"] for options in asked} == {kept}
    assert {len(options["configs"]) for options in asked} == {1 if tuning == "0" else len(DECODE_CONFIGS)}


@triton.jit
def _note_order(order, count):
    """Each program writes its number to the next free place, which no program of ours may do."""
    place = tl.load(count)
    number = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(order + place, number)
    tl.store(count, place + 1)


def test_the_programs_of_a_launch_run_in_any_order_but_each_once() -> None:
    """Otherwise the interpreter would hide that one program needs what another has written. All tests of the kernels
    run so."""
    order, count = torch.zeros(60, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    _note_order[5, 4, 3](order, count)
    assert sorted(order.tolist()) == list(range(60)) != order.tolist()
