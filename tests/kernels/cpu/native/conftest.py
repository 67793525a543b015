"""Teams of threads for the tests of native kernels: a result must not depend on their number."""

from __future__ import annotations

import pytest

from kernels.cpu.native.program import Team


@pytest.fixture(scope="module", params=[1, 3])
def team(request: pytest.FixtureRequest) -> Team:
    return Team(request.param)


@pytest.fixture(scope="module")
def team_of_three() -> Team:
    """For what one thread does not do differently."""
    return Team(3)
