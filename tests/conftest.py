"""What all tests share: the order in which workers take them, their seeds, their loggers, and the default server."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from loadtest.server import Server
from tests.support.gpu_runs import DRIVER, hide_gpu, is_of_the_gpu, show_gpu
from tests.support.quick_interpreter import quicken
from tests.support.seeds import FIXED, VARIABLE, run_seed, seed_globals
from tests.support.serve_process import serve_run

# Read when torch is imported: threads that wait for each other must not keep the cores from another worker's threads.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


if find_spec("hypothesis") is not None:  # a machine with a GPU may have none
    from hypothesis import settings

    # A deadline of 200 ms, which is the default, would measure the machine.
    settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
    settings.register_profile("drawn", derandomize=False, database=None, deadline=None, print_blob=True)
    settings.load_profile("fixed" if run_seed() == FIXED else "drawn")


def pytest_report_header() -> str:
    return f"{VARIABLE}={run_seed()}"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if run_seed() != FIXED and "hypothesis_seed" in config.option and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(run_seed())  # hypothesis's own plugin reads it after us
    # Before a test imports triton or torch, which read this once.
    if is_of_the_gpu(config.args, config.invocation_params.dir):
        show_gpu(os.environ)
    elif DRIVER.exists():
        hide_gpu(os.environ)
    else:
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    seed_globals(item.nodeid)
    quicken()


def pytest_collection_finish() -> None:
    """Keep the tests and what they import out of later garbage collections, of which each took seconds."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.support.workers import WholeModules  # which needs pytest-xdist; a machine with a GPU may have none

    return WholeModules(config, log)


_LOGGERS = {
    own: (own.handlers[:], own.level, own.propagate, own.disabled)
    for own in map(logging.getLogger, ("engine", "serve_app", "ray.serve"))
}


@pytest.fixture(autouse=True)
def own_loggers() -> Iterator[None]:
    """Undo what a replica that ran in this process did to the loggers, in a fixture of a whole module, too: pytest
    hands the records of a logger that does not propagate to `caplog` by a handler of its own, so a later test would
    find none, or each of them twice."""
    yield
    for own, (handlers, level, propagate, disabled) in _LOGGERS.items():
        own.handlers, own.propagate, own.disabled = handlers[:], propagate, disabled
        own.setLevel(level)


@pytest.fixture(scope="module")
def default_server() -> Iterator[Server]:
    """Serve config.yaml as it is, the default model included, on a free port. It ends with its module: an idle server
    takes a tenth of a core, and kept it until the run's end."""
    with serve_run({}) as server:
        yield server
