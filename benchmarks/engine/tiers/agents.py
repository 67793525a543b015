"""Owns the measurement of agents' sessions in a device pool that is too small for them: what hits, and first tokens.
Never sleeps: turns follow each other in their order, and the engines' clocks skip the pauses."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks.engine.mixed import percentile
from benchmarks.engine.tiers.driver import Asked, DrivenEngine
from benchmarks.engine.tiers.figures import NOT_MEASURED, shown, spreads
from benchmarks.engine.tiers.trace import Turn, longest, working_set
from benchmarks.engine.tiers.warm import WARM_UP, MakeEngine
from engine.config import KvTiersConfig

BLOCK = 16
POOL_SHARE = 0.25
"""The device pool, as a share of the sessions' working set."""
MARGIN = 4
"""Blocks of a pool beyond what its longest request takes."""
NARROW_SHARE = 0.5
"""What a tier in 8 bits gets of the bytes that the others get: it holds about as much."""
UNLIMITED, ALONE = "unlimited", "alone"
LEAST_HIT, MOST_RATIO = 0.95, 1.3


@dataclass(frozen=True, slots=True)
class Pool:
    """One of the engines that are compared."""

    name: str
    share: float
    """The device pool, as a share of the working set."""
    host: float = 0.0
    """The host tier, likewise."""
    retention: str = "value"
    rounds: int | None = None
    """Only so many rounds; None: all."""
    dtype: str = "auto"
    """The host tier's. In fewer bits, answers may differ from those with an unlimited pool."""

    @property
    def is_exact(self) -> bool:
        return self.dtype == "auto"

    def text(self) -> str:
        if not self.host:
            return "all of it" if self.name == UNLIMITED else "a quarter, no tiers"
        kept = "" if self.is_exact else f" in `{self.dtype}`"
        return f"a quarter, host tier of {self.host:.0%}{kept} by `{self.retention}`".replace("%", " %")


def pools(hosts: Sequence[float], few_rounds: int, dtypes: Sequence[str] = ()) -> list[Pool]:
    """Return what is compared: an unlimited pool, a small one alone, with host tiers of several sizes, and with tiers
    in 8 bits of half the bytes of the largest.

    few_rounds: how often those are measured that compute much again, and take long. dtypes: of tiers in 8 bits.
    """
    tiers = [
        Pool(f"{retention} {host:g}", POOL_SHARE, host, retention, None if host >= 1 else few_rounds)
        for host in hosts
        for retention in ("value", "lru")
    ]
    half = NARROW_SHARE * max(hosts)
    narrow = [Pool(f"{dtype} {half:g}", POOL_SHARE, half, dtype=dtype) for dtype in dtypes]
    return [Pool(UNLIMITED, 1.0), *tiers, *narrow, Pool(ALONE, POOL_SHARE, rounds=few_rounds)]


@dataclass(frozen=True, slots=True)
class Played:
    """What came of the turns of a trace, in their order."""

    asked: list[Asked]
    totals: dict[str, int]
    """Totals of the host tier; see TierLoad. Empty if there is none."""


def play(engines: Mapping[str, DrivenEngine], turns: Sequence[Turn], right: str) -> dict[str, Played]:
    """Ask all engines for a turn, one after another, and then for the next: what else the machine does slows all
    alike. Each turn begins with another engine. Sessions go on with the answers of the engine `right`, so that one that
    differs is not asked about by the next turn."""
    chains: dict[str, tuple[int, ...]] = defaultdict(tuple)
    asked: dict[str, list[Asked]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.ask(WARM_UP, 16)
    began = {name: engine.clock() for name, engine in engines.items()}
    for number, turn in enumerate(turns):
        prompt = chains[turn.session] + turn.tokens if turn.continues else turn.tokens
        for name in in_turns([*engines], number):
            engine = engines[name]
            engine.clock.skip_to(began[name] + turn.at)
            asked[name].append(engine.ask(prompt, turn.answer, session=turn.session, salt=turn.salt))
        chains[turn.session] = prompt + asked[right][-1].token_ids
    return {name: Played(asked[name], _totals(engine)) for name, engine in engines.items()}


def in_turns(names: Sequence[str], number: int) -> list[str]:
    """Return the names from another one on for each number."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def _totals(engine: DrivenEngine) -> dict[str, int]:
    names = ("hit_blocks", "stored_blocks", "evicted_blocks", "late_loads", "failed_loads")
    return {name: getattr(load, name) for load in engine.load().tiers for name in names}


def prompt_lengths(turns: Sequence[Turn]) -> list[int]:
    sizes: dict[str, int] = defaultdict(int)
    lengths = []
    for turn in turns:
        lengths.append((sizes[turn.session] if turn.continues else 0) + len(turn.tokens))
        sizes[turn.session] = lengths[-1] + turn.answer
    return lengths


def figures(turns: Sequence[Turn], played: Played, unlimited: Played, *, is_exact: bool = True) -> dict[str, float]:
    """Return the figures of the sessions' turns. Times are milliseconds; ratios are those of the same turn. is_exact:
    see Pool.

    Raises:
        RuntimeError: an answer differs from that with an unlimited pool, and must not.
    """
    differ = [
        turn.session
        for turn, one, best in zip(turns, played.asked, unlimited.asked, strict=True)
        if one.token_ids != best.token_ids
    ]
    if differ and is_exact:
        raise RuntimeError("answers differ from those with an unlimited pool")
    lengths = prompt_lengths(turns)
    found = zip(turns, played.asked, unlimited.asked, lengths, strict=True)
    ours = [(one, best, size) for turn, one, best, size in found if turn.session]
    first = [1000 * one.first_s for one, _, _ in ours]
    ratios = [one.first_s / best.first_s for one, best, _ in ours]
    return {
        "hit_share": sum(one.cached_tokens for one, _, _ in ours) / sum(size for _, _, size in ours),
        "first_p50_ms": statistics.median(first),
        "first_p90_ms": percentile(first, 0.9),
        "ratio_p50": statistics.median(ratios),
        "ratio_p90": percentile(ratios, 0.9),
        "other_answers": float(sum(session != "" for session in differ)),
        **{name: float(count) for name, count in played.totals.items()},
    }


def measure_trace(
    make: MakeEngine, name: str, traces: Sequence[Sequence[Turn]], compared: Sequence[Pool], block_bytes: int
) -> dict[str, Any]:
    """Play a trace for each round, in all pools at the same time. block_bytes: of a block of KV on the device."""
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for number, turns in enumerate(traces):
        due = [pool for pool in compared if pool.rounds is None or number < pool.rounds]
        with ExitStack() as ended:
            engines = {pool.name: ended.enter_context(make(**_settings(pool, turns, block_bytes))) for pool in due}
            played = play(engines, turns, UNLIMITED)
        for pool in due:
            found[pool.name].append(figures(turns, played[pool.name], played[UNLIMITED], is_exact=pool.is_exact))
            print(name, pool.name, {key: round(value, 3) for key, value in found[pool.name][-1].items()}, flush=True)
    cells = [
        {"pool": pool.name, "text": pool.text(), "rounds": len(found[pool.name]), **spreads(found[pool.name])}
        for pool in compared
        if found[pool.name]
    ]
    return {"trace": name, **_facts(traces[0]), "cells": cells}


def _settings(pool: Pool, turns: Sequence[Turn], block_bytes: int) -> dict[str, Any]:
    """Return the settings of an engine with such a pool. No pool is too small for the longest request."""
    sessions = working_set(turns, BLOCK)
    least = -(-longest(turns) // BLOCK) + MARGIN
    once = sum(len(turn.tokens) + turn.answer + BLOCK for turn in turns if not turn.session) // BLOCK
    blocks = max(round(pool.share * sessions), least) + (once if pool.name == UNLIMITED else 0)
    tiers = KvTiersConfig()
    if pool.host:
        host_gib = pool.host * sessions * block_bytes / 2**30
        tiers = KvTiersConfig(host_memory_gib=host_gib, retention=pool.retention, dtype=pool.dtype)  # type: ignore[arg-type]
    return {"num_kv_blocks": blocks, "max_model_len": longest(turns) + 1, "kv_tiers": tiers}


def _facts(turns: Sequence[Turn]) -> dict[str, Any]:
    """Describe the first round's trace."""
    sessions = {turn.session for turn in turns if turn.session}
    lengths = [length for turn, length in zip(turns, prompt_lengths(turns), strict=True) if turn.session]
    return {
        "sessions": len(sessions),
        "turns": len(lengths),
        "once": len(turns) - len(lengths),
        "prompt_tokens_per_session": round(sum(lengths) / len(sessions)),
        "answer_tokens_per_session": round(sum(turn.answer for turn in turns if turn.session) / len(sessions)),
        "longest_prompt": max(lengths),
        "working_set_tokens": working_set(turns, BLOCK) * BLOCK,
    }


def table(phase: Mapping[str, Any] | None) -> str:
    """Render the table of a trace, below what it consists of: the share of prompt tokens that hit, milliseconds to
    first tokens, ratios to the same turn's with an unlimited pool, and how many answers differ from it."""
    if phase is None:
        return NOT_MEASURED
    told = (
        f"{phase['sessions']} sessions, {phase['turns']} turns and {phase['once']} prompts that come once. A session "
        f"has {phase['prompt_tokens_per_session']:,} tokens in its prompts together and "
        f"{phase['answer_tokens_per_session']} in its answers; the longest prompt has {phase['longest_prompt']:,}. The "
        f"working set is {phase['working_set_tokens']:,} tokens."
    )
    lines = [
        told,
        "",
        "| device pool, of the working set | hit, % | first token p50, ms | p90, ms | ÷ unlimited, p50 | p90 "
        "| other answers |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for cell in phase["cells"]:
        hit = shown([100 * share for share in cell["hit_share"]], 1)
        times = f"{shown(cell['first_p50_ms'])} | {shown(cell['first_p90_ms'])}"
        ratios = f"{shown(cell['ratio_p50'], 2)} | {shown(cell['ratio_p90'], 2)}"
        other = shown(cell["other_answers"]) if any(cell.get("other_answers", ())) else "0"  # it may be older
        lines.append(f"| {cell['text']} | {hit} | {times} | {ratios} | {other} |")
    return "\n".join(lines)
