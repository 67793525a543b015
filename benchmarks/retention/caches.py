"""Owns simulated caches: one alone, and a device's pool above a tier, with a policy each.
Never simulates time or memory otherwise: what a request finds does not change when it ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from math import inf

from benchmarks.retention.loads import Load, Turn
from engine.protocol import PrefillCosts
from engine.scheduling.retention import BlockFacts, Retention, session_key

COSTS = PrefillCosts(token_s=22e-6, pair_s=22e-6 / 32768)
"""A made-up machine, as in the simulator: roughly one GPU with a model of 8 billion weights."""
Policy = Callable[[], Retention]


@dataclass(slots=True)
class Found:
    """What the prompts of a load found."""

    tokens: int = 0
    hit_tokens: int = 0
    seconds: float = 0.0
    """What computing all prompts would take."""
    saved_s: float = 0.0
    by_tenant: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    """Tokens, and those found."""

    def count(self, turn: Turn, num_hit: int) -> None:
        self.tokens += turn.num_prompt_tokens
        self.hit_tokens += num_hit
        self.seconds += COSTS.seconds(0, turn.num_prompt_tokens)
        self.saved_s += COSTS.seconds(0, num_hit)
        counts = self.by_tenant[turn.tenant]
        counts[0] += turn.num_prompt_tokens
        counts[1] += num_hit


def events(load: Load) -> Iterator[tuple[Turn, bool, float]]:
    """Yield each turn's begin and its end (True), in the order of time, with the time."""
    moments = [(turn.start_s, 1, number) for number, turn in enumerate(load.turns)]
    moments += [(turn.end_s, 0, number) for number, turn in enumerate(load.turns)]
    for now, is_begin, number in sorted(moments):
        yield load.turns[number], not is_begin, now


@cache
def _key(tenant: str, session: str) -> str:
    return session_key(tenant, "", session)


def key_of(turn: Turn) -> str:
    return _key(turn.tenant, turn.session)


def digest(block: int) -> bytes:
    return block.to_bytes(8, "big")


class Pool:
    """Blocks that a policy keeps, `capacity` at most. `holds`: those of running requests are not dropped, as on a
    device."""

    def __init__(self, load: Load, capacity: int, policy: Policy, *, holds: bool) -> None:
        self._block_tokens = load.block_tokens
        self._capacity = capacity
        self._holds = holds
        self._held: dict[int, list[bytes]] = {}
        """What each running turn holds."""
        self.kept = policy()

    def begin(self, turn: Turn, chain: list[bytes], num_hit: int, now: float) -> None:
        self.kept.use(chain[:num_hit], now)
        stored = self._store(turn, chain, turn.num_prompt_blocks, now)
        self._held[id(turn)] = stored

    def end(self, turn: Turn, chain: list[bytes], now: float) -> None:
        for name in self._held.pop(id(turn)):
            self.kept.release(name)
        for name in self._store(turn, chain, len(chain), now):
            self.kept.release(name)
        self.kept.end_turn(key_of(turn), chain, now)

    def _store(self, turn: Turn, chain: list[bytes], count: int, now: float) -> list[bytes]:
        """Store the first `count` blocks of a chain, as far as there is room. Return those that are held now."""
        held = []
        for number, name in enumerate(chain[:count]):
            if name not in self.kept:
                about = self._facts(turn, chain, number)
                if len(self.kept) >= self._capacity and not self._makes_room(name, about, now):
                    if self._holds:
                        break
                    continue
                self.kept.add(name, about, now)
            if self._holds:
                self.kept.hold(name)
                held.append(name)
        return held

    def _makes_room(self, name: bytes, about: BlockFacts, now: float) -> bool:
        """Drop a block for a new one. A device needs the new one; a tier need not take it."""
        if self._holds:
            return self.kept.pop_victim(now) is not None
        return self.kept.pop_victim_for(name, about, now) not in (None, name)

    def _facts(self, turn: Turn, chain: list[bytes], number: int) -> BlockFacts:
        begin = number * self._block_tokens
        cost = COSTS.seconds(begin, begin + self._block_tokens)
        return BlockFacts(begin, chain[number - 1] if number else b"", cost, turn.tenant, key_of(turn))


def run(load: Load, *pools: Pool) -> Found:
    """Run a load on pools that all store what is computed. A prefix may be found in one up to a block, and in another
    from there on."""
    found = Found()
    for turn, is_end, now in events(load):
        chain = [digest(block) for block in turn.chain]
        if is_end:
            for pool in pools:
                pool.end(turn, chain, now)
            continue
        prompt = chain[: turn.num_prompt_blocks]
        misses = (number for number, name in enumerate(prompt) if not any(name in pool.kept for pool in pools))
        num_hit = next(misses, len(prompt))
        found.count(turn, num_hit * load.block_tokens)
        for pool in pools:
            pool.begin(turn, chain, num_hit, now)
    return found


def one_pool(load: Load, capacity: int, policy: Policy) -> Found:
    """Run a load on a device's pool alone."""
    return run(load, Pool(load, capacity, policy, holds=True))


def two_tiers(load: Load, device: int, host: int, above: Policy, below: Policy) -> Found:
    """Run a load on a device's pool and a tier below it."""
    return run(load, Pool(load, device, above, holds=True), Pool(load, host, below, holds=False))


def furthest_next_use(load: Load, capacity: int) -> Found:
    """Run a load on a pool that knows the future and drops what is asked for last (Belady, 1966), even what has just
    come. No policy finds more: blocks are equal, and a prefix's head is asked for no later than its tail."""
    found, kept = Found(), dict[int, float]()
    queue: list[tuple[float, int, int]] = []
    for (turn, is_end, _), again in zip(events(load), _next_uses(load), strict=True):
        if not is_end:
            prompt = turn.chain[: turn.num_prompt_blocks]
            num_hit = next((i for i, block in enumerate(prompt) if block not in kept), len(prompt))
            found.count(turn, num_hit * load.block_tokens)
        for place, block in enumerate(turn.chain if is_end else prompt):
            if is_end and block in kept:
                continue
            kept[block] = again[place]
            heappush(queue, (-again[place], -place, block))
        while len(kept) > capacity:
            use, _, block = heappop(queue)
            if kept.get(block) == -use:
                del kept[block]
    return found


def _next_uses(load: Load) -> list[list[float]]:
    """For each event, return the number of the next one that asks for each of the chain's blocks; infinity if none."""
    moments, next_use = list(events(load)), dict[int, float]()
    found: list[list[float]] = []
    for number in reversed(range(len(moments))):
        turn, is_end, _ = moments[number]
        found.append([next_use.get(block, inf) for block in turn.chain])
        if not is_end:
            next_use |= dict.fromkeys(turn.chain[: turn.num_prompt_blocks], number)
    return found[::-1]
