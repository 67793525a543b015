"""Owns which kernels are chosen, and the reason that is given.
Never compiles: whether there is a library is set by hand."""

from __future__ import annotations

import pytest

from kernels import choice
from kernels.choice import KERNELS, choose_kernels
from kernels.cpu.native.library import NoLibraryError


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "load_library", lambda: None)


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NoLibraryError("there is no C++ compiler")

    monkeypatch.setattr(choice, "load_library", fail)


@pytest.mark.usefixtures("library")
def test_native_kernels_are_chosen_where_they_run() -> None:
    chosen = choose_kernels(head_dim=64, block_size=16)
    assert (chosen.name, chosen.batch_invariant) == ("native", True)
    assert chosen == choose_kernels("native", head_dim=64, block_size=16)


@pytest.mark.usefixtures("no_library")
def test_without_a_library_torch_runs_and_the_reason_is_given() -> None:
    chosen = choose_kernels(head_dim=64, block_size=16)
    assert (chosen.name, chosen.batch_invariant) == ("torch_cpu", False)
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
