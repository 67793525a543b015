"""Owns a GPU that is none without Triton: where it can be imported, a fake device's norms would run in its interpreter,
for minutes. Never hides it from tests that name its table themselves, such as those of its kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def without_triton() -> Iterator[None]:
    """Undone with each module, since tests of the kernels run in the same process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernels.choice.TRITON_TABLE", "kernels.triton.absent")
        yield
