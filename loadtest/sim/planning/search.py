"""Owns the search for the fewest replicas, and the settings, with which a load is held: a function of a function.
Never simulates and never draws a random number: what a trial yields is asked of `evaluate`, and each trial once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

LEAST_GAIN = 5e-3
"""A setting is changed only for more than this share of good answers: what makes no difference stays as it is."""
STEP, FURTHER = 1.25, 2.0
"""With few replicas, settings are compared under a load that is so many times as high, and the second where all hold
the first."""
FEW = 4
"""From so many replicas on, one replica less is about STEP times the load for each of the others, and then settings are
compared with that."""
MOST_LOAD = 4.0
MOST_CLIMBS = 6
FINALISTS = 2
"""Settings that are compared again with all seeds."""

S = TypeVar("S", bound=Hashable)
Axes = Callable[[S], Sequence[Sequence[S]]]
"""Returns, for settings, the other values of each of them: for each axis, settings that differ in it alone."""


class Outcome(Protocol):
    """What a trial yields."""

    @property
    def good_share(self) -> float:
        """The share of requests whose answer kept all targets, 0 to 1."""


Result = TypeVar("Result", bound=Outcome)


@dataclass(frozen=True, slots=True)
class Trial(Generic[S]):
    """A number of replicas with settings, under `load` times the demand."""

    settings: S
    replicas: int
    load: float = 1.0
    thorough: bool = False
    """With all seeds, and not only the first ones."""


Evaluate = Callable[[Sequence[Trial[S]]], Sequence[Result]]
"""Evaluates trials. The same seeds are behind all of them, so that they differ by their settings and not by luck."""


@dataclass(frozen=True, slots=True)
class Found(Generic[S, Result]):
    """The end of a search. `is_held`: the share of good answers is what was wanted, or else no trial's was with the
    most replicas, and this is the one with the highest share."""

    trial: Trial[S]
    result: Result
    is_held: bool
    num_trials: int


class Search(Generic[S, Result]):
    """Searches `least` to `most` replicas for the fewest with which `wanted` of the answers are good.

    More replicas never hold less: replicas are found by bisection. Settings are changed one axis at a time, where it
    hurts: at a load or a number of replicas at which the present ones fail. The best of them are compared again with
    all seeds, which decide.
    """

    def __init__(
        self,
        evaluate: Evaluate[S, Result],
        axes: Axes[S],
        start: S,
        *,
        wanted: float,
        least: int,
        most: int,
        guess: int,
    ) -> None:
        self._evaluate, self._axes, self._start = evaluate, axes, start
        self._wanted, self._least, self._most = wanted, least, most
        self._guess = min(max(guess, least), most)
        self.results: dict[Trial[S], Result] = {}
        """Every trial so far."""

    def run(self) -> Found[S, Result]:
        best = self._start
        replicas = self._fewest(best, self._guess) or self._most
        pressure, rung = Trial(best, replicas), 0
        for _ in range(MOST_CLIMBS):
            ladder = self._ladder(best, replicas)
            if rung >= len(ladder):
                break
            pressure = ladder[rung]
            best, share = self._climb(pressure)
            fewer = self._fewest(best, max(replicas - 1, self._least), most=replicas) or replicas
            if fewer < replicas:
                replicas, rung = fewer, 0
            elif share >= self._wanted:
                rung += pressure != Trial(pressure.settings, replicas)
            else:
                break
        return self._decide(self._finalists(best, pressure), replicas)

    def holds(self, trial: Trial[S]) -> bool:
        return self._try([trial])[0].good_share >= self._wanted

    def highest_load(self, trial: Trial[S], precision: float = 0.1) -> float:
        """Return the highest load at which the trial's replicas and settings hold, to `precision`; at most MOST_LOAD.
        0: not even a hundredth of the demand."""
        if self.holds(replace(trial, load=1.0)):
            low, high = 1.0, 1.0
            while high < MOST_LOAD and low == high:
                high = min(high * 1.5, MOST_LOAD)
                if self.holds(replace(trial, load=high)):
                    low = high
            if low == high:
                return low
        else:
            low, high = 0.5, 1.0
            while not self.holds(replace(trial, load=low)):
                low, high = low / 2, low
                if low < 0.01:
                    return 0.0
        while high / low > 1 + precision:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self.holds(replace(trial, load=middle)) else (low, middle)
        return low

    # --- replicas -----------------------------------------------------------------------------------------------------

    def _fewest(self, settings: S, guess: int, most: int | None = None, *, thorough: bool = False) -> int | None:
        """Return the fewest replicas that hold, up to `most`; None if no number does. Gallops from a guess, and then
        bisects."""
        most = self._most if most is None else most
        low, high = self._least - 1, most + 1  # the first misses, the second holds or is too many
        at, step = min(max(guess, self._least), most), 1
        while low + 1 < high:
            low, high = (low, at) if self.holds(Trial(settings, at, thorough=thorough)) else (at, high)
            if self._least <= low and high <= most:
                at = (low + high) // 2
            else:
                at = max(high - step, low + 1) if high <= most else min(low + step, high - 1)
                step *= 2
        return high if high <= most else None

    # --- settings -----------------------------------------------------------------------------------------------------

    def _ladder(self, settings: S, replicas: int) -> list[Trial[S]]:
        """Return trials at which these settings fail, or soon will, the harder ones last."""
        if not self.holds(Trial(settings, replicas)):
            return [Trial(settings, replicas)]
        if replicas == self._least:
            return [Trial(settings, replicas, load) for load in (STEP, FURTHER)]
        fewer = Trial(settings, replicas - 1)
        return [fewer] if replicas >= FEW else [Trial(settings, replicas, STEP), fewer]

    def _climb(self, pressure: Trial[S]) -> tuple[S, float]:
        """Change one axis after the other for the better, until none helps; return the settings and their share."""
        best, share = pressure.settings, self._try([pressure])[0].good_share
        number = unchanged = 0
        while unchanged < len(self._axes(best)) and share < 1:
            others = [replace(pressure, settings=one) for one in self._axes(best)[number % len(self._axes(best))]]
            before = best
            for trial, result in zip(others, self._try(others), strict=True):
                if result.good_share > share + LEAST_GAIN:
                    best, share = trial.settings, result.good_share
            unchanged = unchanged + 1 if best == before else 1  # the axis that was changed is at its best
            number += 1
        return best, share

    def _decide(self, finalists: Sequence[S], replicas: int) -> Found[S, Result]:
        """Compare settings with all seeds, with as many replicas as one of them then needs."""
        while True:
            trials = [Trial(settings, replicas, thorough=True) for settings in finalists]
            results = self._try(trials)
            held = [trial for trial, result in zip(trials, results, strict=True) if result.good_share >= self._wanted]
            if held or replicas >= self._most:
                break
            replicas += 1
        if not held:
            trial, result = max(zip(trials, results, strict=True), key=lambda pair: pair[1].good_share)
            return Found(trial, result, False, len(self.results))
        settings = held[0].settings
        fewer = self._fewest(settings, max(replicas - 1, self._least), most=replicas, thorough=True) or replicas
        found = replace(held[0], replicas=fewer)
        return Found(found, self._try([found])[0], True, len(self.results))

    def _finalists(self, best: S, pressure: Trial[S]) -> list[S]:
        """Return the best settings, and those with the highest shares where they were compared last."""
        shares = {
            trial.settings: result.good_share
            for trial, result in self.results.items()
            if trial == replace(pressure, settings=trial.settings)
        }
        ranked = sorted(shares, key=lambda one: -shares[one])  # stable: the earlier of equals
        return list(dict.fromkeys([best, *ranked, self._start]))[:FINALISTS]

    # --- trials -------------------------------------------------------------------------------------------------------

    def _try(self, trials: Sequence[Trial[S]]) -> list[Result]:
        """Evaluate those of the trials that are new, all at once."""
        missing = [trial for trial in dict.fromkeys(trials) if trial not in self.results]
        if missing:
            self.results.update(zip(missing, self._evaluate(missing), strict=True))
        return [self.results[trial] for trial in trials]
