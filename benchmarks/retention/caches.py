"""Owns simulated caches: one alone, and a device's pool above a tier, with a policy each.
Never simulates time or memory otherwise: what a request finds does not change when it ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush

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
    """Blocks that a policy keeps, `capacity` at most."""

    def __init__(self, capacity: int, policy: Policy, block_tokens: int) -> None:
        self._capacity = capacity
        self._block_tokens = block_tokens
        self.kept = policy()

    def facts(self, turn: Turn, chain: list[bytes], number: int) -> BlockFacts:
        begin = number * self._block_tokens
        cost = COSTS.seconds(begin, begin + self._block_tokens)
        parent = chain[number - 1] if number else b""
        return BlockFacts(begin, parent, cost, turn.tenant, key_of(turn))

    def put(self, turn: Turn, chain: list[bytes], number: int, now: float, *, held: bool = False) -> bool:
        """Store a block of a chain unless it is there; False if there is no room, because all others are held."""
        name = chain[number]
        if name not in self.kept:
            if len(self.kept) >= self._capacity and self.kept.pop_victim(now) is None:
                return False
            self.kept.add(name, self.facts(turn, chain, number), now)
        if held:
            self.kept.hold(name)
        return True


def one_pool(load: Load, capacity: int, policy: Policy) -> Found:
    """Run a load on a device's pool alone. What a running request has is held."""
    pool, found = Pool(capacity, policy, load.block_tokens), Found()
    held: dict[int, list[bytes]] = {}
    for turn, is_end, now in events(load):
        chain = [digest(block) for block in turn.chain]
        prompt = chain[: turn.num_prompt_blocks]
        if is_end:
            for name in held.pop(id(turn)):
                pool.kept.release(name)
            for number in range(len(prompt), len(chain)):
                pool.put(turn, chain, number, now)
            pool.kept.end_turn(key_of(turn), chain, now)
            continue
        num_hit = next((i for i, name in enumerate(prompt) if name not in pool.kept), len(prompt))
        found.count(turn, num_hit * load.block_tokens)
        pool.kept.use(prompt[:num_hit], now)
        held[id(turn)] = mine = []
        for number, name in enumerate(prompt):
            if not pool.put(turn, chain, number, now, held=True):
                break
            mine.append(name)
    return found


def two_tiers(load: Load, device: int, host: int, above: Policy, below: Policy) -> Found:
    """Run a load on a device whose blocks are all stored in a tier below it, too."""
    top, tier, found = Pool(device, above, load.block_tokens), Pool(host, below, load.block_tokens), Found()
    held: dict[int, list[bytes]] = {}
    for turn, is_end, now in events(load):
        chain = [digest(block) for block in turn.chain]
        if is_end:
            for number in range(turn.num_prompt_blocks, len(chain)):
                top.put(turn, chain, number, now)
                tier.put(turn, chain, number, now)
            for name in held.pop(id(turn)):
                top.kept.release(name)
            for pool in (top, tier):
                pool.kept.end_turn(key_of(turn), chain, now)
            continue
        prompt = chain[: turn.num_prompt_blocks]
        hits = (i for i, name in enumerate(prompt) if name not in top.kept and name not in tier.kept)
        num_hit = next(hits, len(prompt))
        found.count(turn, num_hit * load.block_tokens)
        for pool in (top, tier):
            pool.kept.use(prompt[:num_hit], now)
        held[id(turn)] = mine = []
        for number, name in enumerate(prompt):
            if not top.put(turn, chain, number, now, held=True):
                break
            mine.append(name)
        for number in range(len(prompt)):
            tier.put(turn, chain, number, now)
    return found


def furthest_next_use(load: Load, capacity: int) -> Found:
    """Run a load on a pool that knows the future and drops what is needed last (Belady, 1966). It is the most that any
    policy can find: blocks are equal, and a prefix's head is needed no later than its tail."""
    found = Found()
    prompts = [turn.chain[: turn.num_prompt_blocks] for turn in load.turns]
    after: list[dict[int, float]] = []
    next_use: dict[int, float] = {}
    for number in reversed(range(len(prompts))):
        after.append({block: next_use.get(block, float("inf")) for block in prompts[number]})
        next_use.update(dict.fromkeys(prompts[number], number))
    after.reverse()
    kept: dict[int, float] = {}
    queue: list[tuple[float, int, int]] = []
    for number, turn in enumerate(load.turns):
        prompt = prompts[number]
        num_hit = next((i for i, block in enumerate(prompt) if block not in kept), len(prompt))
        found.count(turn, num_hit * load.block_tokens)
        for place, block in enumerate(prompt):
            kept[block] = again = after[number][block]
            heappush(queue, (-again, -place, block))
        while len(kept) > capacity:
            again, _, block = heappop(queue)
            if kept.get(block) == -again:
                del kept[block]
    return found
