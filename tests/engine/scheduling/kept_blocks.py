"""Owns chains of blocks for tests of retention, and random lives of a tier beside a model of it.
Never says which block is to be dropped; a test does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from engine.scheduling.retention import BlockFacts, Retention


def name(*path: int) -> bytes:
    """Return the digest of a block, given the choices that lead to it from the first block on."""
    return bytes(path)


def path_of(length: int, *fork: int) -> list[bytes]:
    """Return a chain of `length` blocks that begins with the blocks of `fork`."""
    return [name(*(*fork, *[0] * length)[: number + 1]) for number in range(length)]


def facts(digest: bytes, **fields: object) -> BlockFacts:
    values: dict[str, object] = {"cost_s": 0.01, **fields}
    return BlockFacts(16 * (len(digest) - 1), digest[:-1], **values)  # type: ignore[arg-type]


def store(kept: Retention, chain: Sequence[bytes], now: float, **fields: object) -> None:
    for digest in chain:
        if digest not in kept:
            kept.add(digest, facts(digest, **fields), now)


def drain(kept: Retention, now: float) -> list[bytes]:
    victims = []
    while (victim := kept.pop_victim(now)) is not None:
        victims.append(victim)
    return victims


@dataclass
class Life:
    """What a random life did, beside a model of it in plain values."""

    kept: Retention
    used_at: dict[bytes, float] = field(default_factory=dict)
    """The blocks that are there, and when each was last used."""
    tenants: dict[bytes, str] = field(default_factory=dict)
    superseded: set[bytes] = field(default_factory=set)
    holds: dict[bytes, int] = field(default_factory=dict)
    now: float = 0.0

    def ends(self) -> list[bytes]:
        """Return the blocks that may be dropped."""
        parents = {digest[:-1] for digest in self.used_at}
        return [digest for digest in self.used_at if digest not in parents and not self.holds.get(digest)]

    def age_order(self, digest: bytes) -> tuple[float, int]:
        return self.used_at[digest], -len(digest)

    def store(self, chain: list[bytes], whose: str) -> None:
        for digest in chain:
            if digest not in self.used_at:
                about = facts(digest, tenant=whose, session=whose, cost_s=0.01 * len(digest))
                self.kept.add(digest, about, self.now)
                self.used_at[digest], self.tenants[digest] = self.now, whose

    def use(self, chain: list[bytes], whose: str) -> None:
        self.kept.use(chain, self.now)
        self._touch(chain)

    def end(self, chain: list[bytes], whose: str) -> None:
        self.kept.end_turn("", chain, self.now)
        self._touch(chain)

    def _touch(self, chain: list[bytes]) -> None:
        self.superseded.difference_update(chain)
        self.used_at |= dict.fromkeys((digest for digest in chain if digest in self.used_at), self.now)

    def supersede(self, chain: list[bytes], whose: str) -> None:
        self.kept.supersede(chain[-2:])
        self.superseded.update(digest for digest in chain[-2:] if digest in self.used_at)

    def remove(self, chain: list[bytes], whose: str) -> None:
        self.kept.remove(chain[-1])
        self._forget(chain[-1])

    def _forget(self, digest: bytes) -> None:
        for kept in (self.used_at, self.tenants, self.holds):
            kept.pop(digest, None)
        self.superseded.discard(digest)

    def hold(self, chain: list[bytes], whose: str) -> None:
        self.kept.hold(chain[-1])
        if chain[-1] in self.used_at:
            self.holds[chain[-1]] = self.holds.get(chain[-1], 0) + 1

    def release(self, chain: list[bytes], whose: str) -> None:
        if self.holds.get(chain[-1]):
            self.kept.release(chain[-1])
            self.holds[chain[-1]] -= 1

    def pop(self, expected: Callable[[Life], bytes]) -> None:
        ends = self.ends()
        wanted = expected(self) if ends else None
        victim = self.kept.pop_victim(self.now)
        assert (victim is None) == (not ends)
        assert wanted in (victim, ANY)
        if victim is not None:
            assert victim in ends
            assert victim not in self.kept
            self._forget(victim)


ANY = b"any"
Step = tuple[str, list[bytes], str, float]
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "use", "end", "pop", "pop", "remove", "supersede", "hold", "release"]),
        PATHS.map(lambda path: [name(*path[: number + 1]) for number in range(len(path))]),
        st.sampled_from(["", "", "a", "b"]),
        st.sampled_from([0.01, 0.5, 3.0, 40.0, 900.0]),
    ),
    max_size=60,
)


def live(kept: Retention, steps: list[Step], expected: Callable[[Life], bytes]) -> None:
    """Live a random life, and drop what is left. `expected`: what is to be dropped next; ANY if it does not matter."""
    life = Life(kept)
    for what, chain, whose, wait in steps:
        life.now += wait
        if what == "pop":
            life.pop(expected)
        else:
            getattr(life, what)(chain, whose)
        assert len(kept) == len(life.used_at)
        assert all(digest in kept for digest in life.used_at)
    while held := next((digest for digest, count in life.holds.items() if count), None):
        life.release([held], "")
    while life.used_at:
        life.pop(expected)
    assert kept.pop_victim(life.now) is None
