"""What tests of native kernels share: teams of threads, and products of bytes by a matrix unit where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from kernels.cpu.native.library import ByteTiles, NoLibraryError, load_library
from kernels.cpu.native.program import Team


@contextmanager
def by_tiles() -> Iterator[None]:
    """Multiply 16 rows and more by bytes with the matrix unit, if there is one, though it was timed to be slower."""
    library = load_library()
    library.choose_byte_tiles(ByteTiles.ALWAYS)
    try:
        yield
    finally:
        library.choose_byte_tiles(ByteTiles.IF_FASTER)


@pytest.fixture(autouse=True, scope="module")
def tiles_of_bytes() -> Iterator[None]:
    """Fewer rows are multiplied by vectors, so that every test that compares numbers of rows compares both ways."""
    with ExitStack() as stack:
        with suppress(NoLibraryError):
            stack.enter_context(by_tiles())
        yield


@pytest.fixture(scope="module", params=[1, 3])
def team(request: pytest.FixtureRequest) -> Team:
    """A result must not depend on the number of threads."""
    return Team(request.param)


@pytest.fixture(scope="module")
def team_of_three() -> Team:
    """For what one thread does not do differently."""
    return Team(3)
