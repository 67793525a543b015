"""Owns the contract of retention: which block a tier drops, by age and by value, compared with slow oracles.
Never measures how good a policy is; benchmarks.retention does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from engine.scheduling.by_value import ByValue
from engine.scheduling.retention import BlockFacts, LeastRecent, Retention

POLICIES = [LeastRecent, ByValue]


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


# --- both policies ----------------------------------------------------------------------------------------------------


@dataclass
class Life:
    """What a random life did, beside a model of it in plain values."""

    kept: Retention
    present: dict[bytes, float] = field(default_factory=dict)
    """When each block was last used."""
    superseded: set[bytes] = field(default_factory=set)
    holds: dict[bytes, int] = field(default_factory=dict)
    now: float = 0.0

    def ends(self) -> list[bytes]:
        """Return the blocks that may be dropped."""
        parents = {digest[:-1] for digest in self.present}
        return [digest for digest in self.present if digest not in parents and not self.holds.get(digest)]

    def forget(self, digest: bytes) -> None:
        del self.present[digest]
        self.superseded.discard(digest)
        self.holds.pop(digest, None)


CHAINS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(
    lambda path: [name(*path[: i + 1]) for i in range(len(path))]
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "use", "end", "pop", "pop", "remove", "supersede", "hold", "release"]),
        CHAINS,
        st.sampled_from(["", "", "a", "b"]),
        st.sampled_from([0.0, 0.5, 3.0, 40.0, 900.0]),
    ),
    max_size=60,
)


def live(
    kept: Retention, steps: list[tuple[str, list[bytes], str, float]], check: Callable[[Life, bytes | None], None]
) -> None:
    life = Life(kept)
    for what, chain, whose, wait in steps:
        life.now += wait
        _STEPS[what](life, chain, whose, check)
        assert len(kept) == len(life.present)
        assert all(digest in kept for digest in life.present)
    for digest, count in life.holds.items():
        for _ in range(count):
            kept.release(digest)
    life.holds.clear()
    while life.present:
        _pop(life, [], "", check)
    assert kept.pop_victim(life.now) is None


def _store(life: Life, chain: list[bytes], whose: str, check: object) -> None:
    for digest in chain:
        if digest not in life.present:
            life.kept.add(digest, facts(digest, tenant=whose, session=whose, cost_s=0.01 * len(digest)), life.now)
            life.present[digest] = life.now


def _use(life: Life, chain: list[bytes], whose: str, check: object) -> None:
    life.kept.use(chain, life.now)
    life.superseded.difference_update(chain)
    life.present |= dict.fromkeys([digest for digest in chain if digest in life.present], life.now)


def _end(life: Life, chain: list[bytes], whose: str, check: object) -> None:
    life.kept.end_turn("", chain, life.now)
    life.present |= dict.fromkeys([digest for digest in chain if digest in life.present], life.now)


def _pop(life: Life, chain: list[bytes], whose: str, check: Callable[[Life, bytes | None], None]) -> None:
    victim = life.kept.pop_victim(life.now)
    check(life, victim)
    if victim is None:
        assert not life.ends()
        return
    assert victim in life.ends()
    assert victim not in life.kept
    life.forget(victim)


def _remove(life: Life, chain: list[bytes], whose: str, check: object) -> None:
    life.kept.remove(chain[-1])
    if chain[-1] in life.present:
        life.forget(chain[-1])


def _supersede(life: Life, chain: list[bytes], whose: str, check: object) -> None:
    life.kept.supersede(chain[-2:])
    life.superseded.update(digest for digest in chain[-2:] if digest in life.present)


def _hold(life: Life, chain: list[bytes], whose: str, check: object) -> None:
    life.kept.hold(chain[-1])
    if chain[-1] in life.present:
        life.holds[chain[-1]] = life.holds.get(chain[-1], 0) + 1


def _release(life: Life, chain: list[bytes], whose: str, check: object) -> None:
    if life.holds.get(chain[-1]):
        life.kept.release(chain[-1])
        life.holds[chain[-1]] -= 1


_STEPS: dict[str, Callable[..., None]] = {
    "store": _store, "use": _use, "end": _end, "pop": _pop, "remove": _remove, "supersede": _supersede,
    "hold": _hold, "release": _release,
}  # fmt: skip
