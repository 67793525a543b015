"""Fixtures that cost seconds to make, shared by the whole run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from loadtest.server import ROOT, Server
from tests.support.serve_process import serve_run

# Read when triton is imported, which other tests' libraries may do first: without a GPU its kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# So is this: threads of torch that wait for each other must not keep those of the other worker from the cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


SERVERS = "servers"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return WholeModules(config, log)


class WholeModules(LoadScopeScheduling):
    """A worker takes whole modules, whose fixtures are then made once, and one of them takes all that start servers,
    before all else: two at a time would starve each other. (`--dist loadgroup` of pytest-xdist 3.8 finds no groups with
    pytest 9.2.)"""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return SERVERS if starts_servers(module) else module

    def _assign_work_unit(self, node: object) -> None:
        if SERVERS in self.workqueue:
            self.workqueue.move_to_end(SERVERS, last=False)
        super()._assign_work_unit(node)


@cache
def starts_servers(module: str) -> bool:
    """By its text, for it is collected elsewhere. module: its path below the checkout."""
    return "pytest.mark.server" in (ROOT / module).read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def default_server() -> Iterator[Server]:
    """config.yaml as it is, the default model included, on a free port."""
    with serve_run({}) as server:
        yield server
