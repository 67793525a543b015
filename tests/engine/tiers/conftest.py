"""Owns what tests of the disk tier share: each that takes a `key` runs with plain and with encrypted files.
Never opens a directory."""

import pytest

from tests.support.disk_tiers import KEY


@pytest.fixture(params=[None, KEY], ids=["plain", "encrypted"])
def key(request: pytest.FixtureRequest) -> bytes | None:
    found: bytes | None = request.param
    return found
