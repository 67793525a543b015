"""Owns what all tests of the engine share: a GPU that is none has no Triton.
Never hides it from tests that name its table themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _without_triton() -> Iterator[None]:
    """Where it can be imported, a fake device's norms would run in its interpreter, for minutes; tests/kernels/triton
    holds its kernels. Undone with each module, since tests/kernels runs later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernels.choice.TRITON_TABLE", "kernels.triton.absent")
        yield
