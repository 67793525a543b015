"""Random lives of two engines on one directory, with every fault: a read is right or a fault, whatever came before."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from engine.tiers.disk import DiskTier
from engine.tiers.faults import TierFault
from tests.support.disk_tiers import (
    FILE_BYTES,
    KEY,
    PLENTY,
    broken_disk,
    bytes_on_disk,
    digest,
    is_right,
    opened,
    path_of,
    store,
)

ENGINES = st.integers(0, 1)
BLOCKS = st.integers(0, 7)
ALL = range(8)


def truncate(path: Path, seed: int) -> None:
    os.truncate(path, seed % path.stat().st_size)


def flip(path: Path, seed: int) -> None:
    data = bytearray(path.read_bytes())
    data[seed % len(data)] ^= 1 << seed % 8
    path.write_bytes(data)


def append(path: Path, seed: int) -> None:
    path.write_bytes(path.read_bytes() + bytes(1 + seed % 9))


DAMAGES: list[Callable[[Path, int], None]] = [truncate, flip, append]


class Lives(RuleBasedStateMachine):
    """What a file should be is known from its digest; which files there should be, from `expected`, as long as none has
    to leave. `views` are what the engines' cores believe of the tier. An engine may be `behind`: the other one has
    reset the directory, and it has not looked since."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="chunkserve-lives-"))
        self.path.chmod(0o700)
        self.open: list[ExitStack] = []
        self.tiers: list[DiskTier] = []
        self.expected: set[int] = set()
        self.damaged: dict[int, int] = {}
        """The length of each file that is not as it was written."""
        self.behind = [False, False]
        self.views: list[set[bytes]] = [set(), set()]

    @initialize(key=st.sampled_from([None, KEY]), capacity=st.sampled_from([PLENTY, 3 * FILE_BYTES]))
    def start(self, key: bytes | None, capacity: int) -> None:
        self.key, self.capacity = key, capacity
        for engine in (0, 1):
            self.open.append(ExitStack())
            self.tiers.append(self.opened(engine))
        self.length = 128 + 1000 + (32 if key is None else 16)

    def opened(self, engine: int) -> DiskTier:
        tier = opened(self.path, key=self.key, capacity_bytes=self.capacity)
        return self.open[engine].enter_context(tier)

    def there(self) -> set[int]:
        return {number for number in ALL if path_of(self.tiers[0], number).exists()}

    @rule(engine=ENGINES, number=BLOCKS)
    def write(self, engine: int, number: int) -> None:
        try:
            store(self.tiers[engine], number)
        except TierFault:
            assert self.behind[engine]
        else:
            self.views[engine].add(digest(number))
            self.expected.add(number)
            if self.damaged.get(number) != self.length:
                self.damaged.pop(number, None)
            assert number in self.there()
        self.behind[engine] = False

    @rule(engine=ENGINES, number=BLOCKS)
    def read(self, engine: int, number: int) -> None:
        right, could = is_right(self.tiers[engine], number), number in self.there() and number not in self.damaged
        assert right <= could
        if not right:
            self.views[engine].discard(digest(number))
        if not self.behind[engine]:
            assert right == could
            if not right:
                self.expected.discard(number)
                assert number not in self.there()
        self.behind[engine] = False

    @rule(engine=ENGINES, numbers=st.sets(BLOCKS, max_size=3))
    def drop(self, engine: int, numbers: set[int]) -> None:
        self.tiers[engine].drop([digest(number) for number in sorted(numbers)])
        self.views[engine] -= {digest(number) for number in numbers}
        if not self.behind[engine]:
            self.expected -= numbers
            assert not numbers & self.there()
        self.expected -= numbers - self.there()

    @rule(number=BLOCKS, damage=st.sampled_from(DAMAGES), seed=st.integers(0, 10_000))
    def damage(self, number: int, damage: Callable[[Path, int], None], seed: int) -> None:
        path = path_of(self.tiers[0], number)
        if path.exists() and number not in self.damaged and path.stat().st_size > 0:
            damage(path, seed)
            self.damaged[number] = path.stat().st_size

    @rule(engine=ENGINES, number=BLOCKS, error=st.sampled_from(["ENOSPC", "EROFS", "EIO"]))
    def write_to_a_broken_disk(self, engine: int, number: int, error: str) -> None:
        tier = self.tiers[engine]
        if number in self.there():
            return
        with broken_disk(error), pytest.raises(TierFault):
            store(tier, number)
        tier._pause.succeeded()
        assert number not in self.there()
        self.expected &= self.there()  # some may have left for it

    @rule(engine=ENGINES)
    def reset(self, engine: int) -> None:
        self.tiers[engine].reset()
        assert self.there() == set()
        self.expected, self.damaged = set(), {}
        self.views[engine] = set()
        self.behind = [other != engine for other in (0, 1)]

    @rule(engine=ENGINES)
    def restart(self, engine: int) -> None:
        self.open[engine].close()
        self.tiers[engine] = self.opened(engine)
        self.views[engine], self.behind[engine] = set(), False

    @rule(engine=ENGINES)
    def look(self, engine: int) -> None:
        """After a look, an engine knows exactly what there is."""
        self.tiers[engine].refresh()
        self.behind[engine] = False
        for found, present in self.tiers[engine].take_changes():
            (self.views[engine].add if present else self.views[engine].discard)(found)
        assert self.views[engine] == {digest(number) for number in self.there()}

    @invariant()
    def nothing_is_lost_nothing_is_left_and_the_bound_holds(self) -> None:
        if not self.tiers:
            return
        there = self.there()
        self.damaged = {number: size for number, size in self.damaged.items() if number in there}
        if self.capacity == PLENTY:
            assert there == self.expected
        self.expected = set(there)
        assert bytes_on_disk(self.path) <= self.capacity
        assert not list(self.path.glob("v2/writing/*.*"))

    def teardown(self) -> None:
        for stack in self.open:
            stack.close()
        shutil.rmtree(self.path)


def test_a_read_is_right_or_a_fault_in_every_life() -> None:
    run_state_machine_as_test(Lives, settings=settings(max_examples=40, stateful_step_count=30, deadline=None))


@pytest.mark.slow
def test_a_read_is_right_or_a_fault_in_many_more_lives() -> None:
    run_state_machine_as_test(Lives, settings=settings(max_examples=150, stateful_step_count=50, deadline=None))
