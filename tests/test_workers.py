"""Which worker runs what: building the wheel takes minutes, in which the worker that starts servers must not wait."""

from __future__ import annotations

from loadtest.server import ROOT
from tests.support.workers import NEEDED_SOON, starts_servers


def test_the_wheel_is_built_and_looked_at_beside_the_servers_and_served_from_among_them() -> None:
    assert (ROOT / NEEDED_SOON).is_file()
    assert not starts_servers(NEEDED_SOON)
    assert starts_servers("tests/test_wheel_serves.py")
