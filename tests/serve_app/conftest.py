"""Owns the async backend of these tests: asyncio alone, which is what the server runs on.
Never holds helpers; those are in `harness`."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
