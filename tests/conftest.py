"""Fixtures that cost seconds to make, shared by the whole run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.server import Server
from tests.support.serve_process import serve_run

# Read when triton is imported, which other tests' libraries may do first: without a GPU its kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def default_server() -> Iterator[Server]:
    """config.yaml as it is, the default model included, on a free port."""
    with serve_run({}) as server:
        yield server
