"""Fixtures that cost seconds to make, shared by the whole run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loadtest.server import Server
from tests.support.serve_process import serve_run


@pytest.fixture(scope="session")
def default_server() -> Iterator[Server]:
    """config.yaml as it is, the default model included, on a free port."""
    with serve_run({}) as server:
        yield server
