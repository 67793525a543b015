"""Owns the server that most faults are done to: scripted engines and some replicas of each kind, all healthy before
each test.
Never holds helpers; those are in `support`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loadtest.server import Server
from tests.chaos.support import ENGINE, INGRESS, fake, until_free, until_replicas
from tests.support.serve_process import serve_run

NUM_ENGINES, NUM_INGRESSES = 3, 2


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def scripted_server() -> Iterator[Server]:
    # More moves than a user would allow: here a replica dies every few seconds.
    args = fake(step_delay_ms=100, engine_replicas=NUM_ENGINES, ingress_replicas=NUM_INGRESSES, max_migrations=10)
    with serve_run(args) as server:
        yield server


@pytest.fixture
async def server(scripted_server: Server) -> Server:
    """Return the scripted server once every replica works and is idle, whatever the test before did to it."""
    await until_replicas(scripted_server, ENGINE, NUM_ENGINES)
    await until_replicas(scripted_server, INGRESS, NUM_INGRESSES)
    await until_free(scripted_server, NUM_ENGINES)
    return scripted_server
