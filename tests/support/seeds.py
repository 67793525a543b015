"""Owns the seeds of random tests: the same in every run, or others where CHUNKSERVE_TEST_SEED names them.
Never draws one: `make test-seeds` does, and prints it."""

from __future__ import annotations

import hashlib
import os
import random
import secrets
import sys

import pytest

VARIABLE = "CHUNKSERVE_TEST_SEED"
FIXED = 0
"""The value of the variable where it is unset. Then hypothesis tries the same examples in every run, too."""

_drawn = ("", 0)
"""The test that drew last, and how often it did."""


def run_seed() -> int:
    text = os.environ.get(VARIABLE) or str(FIXED)
    if not text.isdecimal():
        raise pytest.UsageError(f"{VARIABLE} is {text!r}: expected a whole number that is not negative.")
    return int(text)


def derived_seed(*names: object) -> int:
    """Derive a seed from this run and these names; it is below 2**31, which every library takes."""
    text = repr((run_seed(), *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def next_seed() -> int:
    """Return the running test's own next seed, whatever ran before it, and print it."""
    global _drawn
    current = os.environ.get("PYTEST_CURRENT_TEST")
    assert current, "drawn outside of a test: it would depend on what else is collected"
    test = current.rpartition(" ")[0]
    count = _drawn[1] if _drawn[0] == test else 0
    _drawn = (test, count + 1)
    seed = derived_seed(test, count)
    print(f"seed {seed} ({VARIABLE}={run_seed()})")
    return seed


def seeded_random() -> random.Random:
    return random.Random(next_seed())


def seed_globals(test: str) -> None:
    """Seed, before each test, what is drawn from without a generator being given: weights of a new model, for example,
    or the seed of a request that names none. Import nothing that the test would not import."""
    seed = derived_seed("globals", test)
    random.seed(seed)
    secrets.randbits = random.Random(seed).getrandbits
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
