"""Owns what leaves a tier first.
Never holds a block: it orders their digests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


class BlockFacts(NamedTuple):
    """What is known of a block when it is stored."""

    position: int
    """Tokens before it."""
    cost_s: float | None = None
    """Predicted seconds to compute it again; None if nothing is predicted."""
    tenant: str = ""
    session: str = ""


class Retention(Protocol):
    def add(self, digest: bytes, facts: BlockFacts, now: float) -> None: ...
    def use(self, digest: bytes, now: float) -> None: ...
    def remove(self, digest: bytes) -> None: ...
    def pop_victim(self, now: float) -> bytes: ...
    def end_turn(self, session: tuple[str, ...], chain: Sequence[bytes], now: float) -> None: ...
    def __len__(self) -> int: ...
    def __contains__(self, digest: bytes) -> bool: ...


class LeastRecent:
    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def add(self, digest: bytes, facts: BlockFacts, now: float) -> None:
        self._order[digest] = None

    def use(self, digest: bytes, now: float) -> None:
        self._order.move_to_end(digest)

    def remove(self, digest: bytes) -> None:
        del self._order[digest]

    def pop_victim(self, now: float) -> bytes:
        return self._order.popitem(last=False)[0]

    def supersede(self, digests: Iterable[bytes]) -> None: ...
    def end_turn(self, session: tuple[str, ...], chain: Sequence[bytes], now: float) -> None: ...
    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._order


class ByValue(LeastRecent): ...
