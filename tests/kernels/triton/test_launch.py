"""Owns the tests of which configurations are timed, and which choices are kept for other processes.
Never times one: a GPU does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from kernels.triton.attention.kernel import DECODE_CONFIGS
from kernels.triton.shared import launch


@pytest.mark.parametrize(("tuning", "first"), [("keep", 0), ("forget", 0), ("0", 0), ("3", 3), ("99", -1)])
def test_the_environment_says_which_configuration_is_the_first_to_be_tried(tuning: str, first: int) -> None:
    assert launch.candidates(DECODE_CONFIGS, tuning) == [*DECODE_CONFIGS[first:], *DECODE_CONFIGS[:first]]


class Compiled:
    """A kernel that Triton has compiled: it is loaded, or refused, when it gets a grid."""

    def __init__(self, shared: int) -> None:
        self._shared = shared

    def __getitem__(self, grid: tuple[int, ...]) -> None:
        if self._shared > SHARED:
            raise OutOfResources(self._shared, SHARED, "shared memory")


class Kernel:
    """A kernel before Triton compiles it: a tile of a `BLOCK` takes as many bytes of shared memory."""

    arg_names = ("x", "SIZE")

    def __init__(self) -> None:
        self.fn = lambda x: None
        self.launched: list[int] = []

    def run(self, x: Tensor, *, grid: tuple[int, ...], warmup: bool, SIZE: int, BLOCK: int, **_: Any) -> Compiled:
        compiled = Compiled(BLOCK * SIZE)
        if not warmup:
            _ = compiled[grid]
            self.launched.append(BLOCK)
        return compiled


SHARED = 100


@pytest.mark.parametrize(("tuning", "launched"), [("0", 4), ("1", 2), ("2", 4), ("99", 4)])
def test_a_number_takes_the_next_configuration_that_fits_the_device_and_times_none(
    tuning: str, launched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression guards: the first configuration of decodes does not fit for a head_dim of 256 in float32, and none was
    tried after it. GPU tests timed a thousand, and left engines the choices of their tiny shapes."""
    monkeypatch.setattr(launch, "INTERPRETED", False)
    configs = [triton.Config({"BLOCK": block}) for block in (4, 2, 9)]
    kernel = Kernel()
    tuned = launch.tuned(configs, ["SIZE"], tuning)(kernel)
    for _ in range(2):
        tuned.run(torch.zeros(1), grid=(1,), warmup=False, SIZE=25)
    assert kernel.launched == [launched] * 2


def test_where_no_configuration_fits_the_launch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    tuned = launch.tuned([triton.Config({"BLOCK": block}) for block in (2, 9)], ["SIZE"], "0")(Kernel())
    with pytest.raises(OutOfResources, match="Required: 900, Hardware limit: 100"):
        tuned.run(torch.zeros(1), grid=(1,), warmup=False, SIZE=100)


def test_the_fastest_configuration_is_found_in_a_fifth_of_the_time_that_triton_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton runs each configuration for 125 ms, and an engine of five shapes of matrices has a hundred of them."""
    kernel, asked = Kernel(), list[dict[str, Any]]()

    def benchmark(call: Callable[[], None], quantiles: Sequence[float], **limits: int) -> list[float]:
        call()
        asked.append(limits)
        return [float(kernel.launched[-1] % 4)] * len(quantiles)

    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=SimpleNamespace(get_benchmarker=lambda: benchmark)))
    tuned = launch.tuned([triton.Config({"BLOCK": block}) for block in (2, 4, 3)], ["SIZE"], "forget")(kernel)
    tuned.run(torch.zeros(1), grid=(1,), warmup=False, SIZE=1)
    assert kernel.launched == [2, 4, 3, 4]
    assert {sum(limits.values()) for limits in asked} == {25}


def test_another_word_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"CHUNKSERVE_TRITON_TUNING is 'first': expected keep, forget or the number"):
        launch.candidates(DECODE_CONFIGS, "first")


@pytest.mark.parametrize(("tuning", "kept"), [(None, True), ("keep", True), ("forget", False), ("0", False)])
def test_only_an_engines_choices_are_kept_on_disk(
    tuning: str | None, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(launch.triton, "autotune", lambda **options: lambda _: asked.append(options))
    monkeypatch.delenv(launch.TUNING, raising=False)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    launch.tuned(DECODE_CONFIGS, ["HEAD_DIM"], tuning)(None)
    if tuning is not None:
        monkeypatch.setenv(launch.TUNING, tuning)
        launch.tuned(DECODE_CONFIGS, ["HEAD_DIM"])(None)
    assert {options["cache_results"] for options in asked} == {kept}


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
