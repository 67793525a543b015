"""Fixtures that cost seconds to make, shared by the whole run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from loadtest.server import Server
from tests.support.gpu_runs import DRIVER, hide_gpu, is_of_the_gpu
from tests.support.serve_process import serve_run

# Read when torch is imported: threads that wait for each other must not keep those of the other worker from the cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_configure(config: pytest.Config) -> None:
    # Before a test imports triton or torch, which read this once.
    if not DRIVER.exists():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    elif not is_of_the_gpu(config.args, config.invocation_params.dir):
        hide_gpu(os.environ)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.support.workers import WholeModules  # which needs pytest-xdist; a GPU's machine may have none

    return WholeModules(config, log)


@pytest.fixture(scope="session")
def default_server() -> Iterator[Server]:
    """config.yaml as it is, the default model included, on a free port."""
    with serve_run({}) as server:
        yield server
