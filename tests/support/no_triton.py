"""Owns a pretended GPU without Triton: where Triton can be imported, a fake device's norms would run in its
interpreter, for minutes.
Never hides it from tests that name its table themselves, such as those of its kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def without_triton() -> Iterator[None]:
    """Hide Triton's table until the module ends, since tests of the kernels run in the same process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernels.choice.TRITON_TABLE", "kernels.triton.absent")
        yield
