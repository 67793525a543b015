"""Owns which settings a plan may choose from, and how long its runs are.
Never chooses: the search does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from engine.config import ConfigError, EngineConfig
from engine.config import Targets as EngineTargets
from loadtest.sim.planning.demand import Demand
from loadtest.sim.planning.evaluate import Settings
from loadtest.sim.planning.machine import Engine, Machine
from loadtest.slo import Goal

TOKENS = (64, 128, 256, 512, 1024, 2048, 4096)
"""Values of `max_num_batched_tokens`."""
SEATS = (8, 16, 32, 64, 128, 256, 512)
"""Values of `max_num_seqs`."""
LOAD_FACTORS = (1.25, 2.0)
"""Values of `routing.load_factor`, where prompts share prefixes."""
LOOSER = 1.5
"""A goal is for an answer's mean time a token, and a target for each: the target may be looser than the goal."""
MOST_VALUES = 4
REQUESTS = 150
"""Requests of a run that count."""
LIVES = 3.0
"""A run takes at least so many times as long as a request that just keeps its goal: shorter ones end before queues
have grown."""
LEAST_S, MOST_S = 20.0, 1800.0


class Choices:
    """The values of each setting for one engine. None is beyond what was measured, except where nothing smaller
    exists."""

    def __init__(
        self,
        machine: Machine,
        engine: Engine,
        goal: Goal,
        demand: Demand,
        config: EngineConfig,
        most_values: int = MOST_VALUES,
    ) -> None:
        """`config` has all other settings of an engine, and is what the values must go with. `most_values`: of more
        values of a number than this, the largest."""
        self._config = replace(config, max_model_len=engine.max_model_len)
        tokens = [one for one in TOKENS if one <= machine.measured.tokens][-most_values:] or [TOKENS[0]]
        seats = [one for one in SEATS if one <= machine.measured.samples][-most_values:] or [SEATS[0]]
        longest_batch = max(engine.kv_tokens // engine.block_size, 1)
        self._tokens = tokens
        self._seats = [one for one in seats if one <= longest_batch] or seats[:1]
        self._tpot: list[float | None] = [goal.tpot_ms, goal.tpot_ms * LOOSER, None] if goal.tpot_ms else [None]
        self._ttft: list[float | None] = [goal.ttft_ms, None] if goal.ttft_ms else [None]
        self._factors = LOAD_FACTORS if demand.shares_prefixes else LOAD_FACTORS[:1]

    def start(self) -> Settings:
        """Return the settings to begin with: targets in time, and as much in a step as was measured up to the
        defaults.

        Raises:
            ValueError: no values go with the rest of the config.
        """
        at_most = EngineConfig().max_num_batched_tokens
        tokens = max((one for one in self._tokens if one <= at_most), default=self._tokens[0])
        for seats in sorted(self._seats, reverse=True):
            first = Settings(self._tpot[0], self._ttft[0], tokens, seats, self._factors[0])
            if self._goes(first):
                return first
        raise ValueError(f"no max_num_seqs of {self._seats} goes with max_num_batched_tokens {tokens} and the config")

    def axes(self, at: Settings) -> list[list[Settings]]:
        """Return, axis by axis, the settings that differ from these in one value."""
        found = [
            [replace(at, tpot_ms=one) for one in self._tpot],
            [replace(at, max_num_batched_tokens=one) for one in self._tokens],
            [replace(at, ttft_ms=one) for one in self._ttft],
            [replace(at, max_num_seqs=one) for one in self._seats],
            [replace(at, load_factor=one) for one in self._factors],
        ]
        return [[one for one in axis if one != at and self._goes(one)] for axis in found]

    def every(self) -> list[Settings]:
        """Return all settings, for a sweep."""
        found = [
            Settings(tpot, ttft, tokens, seats, factor)
            for tpot in self._tpot
            for ttft in self._ttft
            for tokens in self._tokens
            for seats in self._seats
            for factor in self._factors
        ]
        return [one for one in found if self._goes(one)]

    def _goes(self, one: Settings) -> bool:
        try:
            engine_settings(self._config, one)
        except ConfigError:
            return False
        return True


def engine_settings(config: EngineConfig, one: Settings) -> EngineConfig:
    """Return a config with these settings. Raises: ConfigError: they do not go together."""
    return replace(
        config,
        targets=EngineTargets(tpot_ms=one.tpot_ms, ttft_ms=one.ttft_ms),
        max_num_batched_tokens=one.max_num_batched_tokens,
        max_num_seqs=one.max_num_seqs,
    )


def run_seconds(demand: Demand, goal: Goal, machine: Machine) -> float:
    """Return how long runs are: as many requests as tell shares apart, and as long as queues take to grow."""
    ttft_s = (goal.ttft_ms or 1000.0) / 1000
    tpot_s = (goal.tpot_ms or 1000 * machine.costs.curve_s[0]) / 1000
    life_s = ttft_s + demand.mean_answer * tpot_s
    return min(max(REQUESTS / demand.rate, LIVES * life_s, LEAST_S), MOST_S)


def guess_replicas(demand: Demand, machine: Machine, seats: int) -> int:
    """Estimate how many replicas are busy for seven tenths of the time."""
    busy_s = demand.rate * machine.seconds_of(demand.mean_prompt, demand.mean_answer, max(seats // 2, 1))
    return max(1, math.ceil(busy_s / 0.7))


def settings_of(every: Sequence[Settings]) -> dict[str, list[object]]:
    """Return the values of each setting among these, for a report."""
    names = ("tpot_ms", "ttft_ms", "max_num_batched_tokens", "max_num_seqs", "load_factor")
    return {name: list(dict.fromkeys(getattr(one, name) for one in every)) for name in names}
