"""Owns what is known of how long answers get: life tables, one for each of a bounded number of tenants and one for all.
Never reads a clock or a request: it is told which lengths an answer reached, and whether it ended there by itself."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

ONE = 1024
"""Chances are whole numbers of this many: sums of them are exact, and can be taken back."""
PRIOR_WEIGHT = 4.0
"""The prior counts as this many answers at each length, in the table of all answers."""
POPULATION_WEIGHT = 16.0
"""The table of all answers counts as this many at each length, in a tenant's table."""


def edges_up_to(longest: int) -> tuple[int, ...]:
    """Where the intervals of length begin: 4 tokens wide at first, an eighth of the length from 32 tokens on. The last
    edge, `longest` or more, only ends an interval."""
    edges = [0]
    while edges[-1] <= longest:
        edges.append(edges[-1] + max(4, edges[-1] // 8))
    return tuple(edges)


class LifeTable:
    """How many answers reached each interval of length, and how many of them ended in it: an occurrence/exposure table.

    Answers that still run count as far as they got, and so do those that were cut off (by `max_tokens`, by their
    client): they raise the number that reached an interval and not the number that ended. Finished answers alone would
    be too short, for the short ones finish first.
    """

    def __init__(self, edges: Sequence[int], horizons: Sequence[int], median: int, window: int) -> None:
        """`median`: of answers before any was seen. `window`: answers after which the older half of them fades."""
        self._edges, self._horizons, self._window = edges, horizons, window
        self._reached = [0.0] * (len(edges) - 1)
        self._ended = [0.0] * (len(edges) - 1)
        # The median residual answer is `median` plus what was answered: whoever goes on longest goes on longest.
        self._prior = [1 - (median + low) / (median + high) for low, high in pairwise(edges)]
        self.chances = self._prior
        """The chance that an answer which reached an interval ends in it."""
        self._rebuild(self._prior, PRIOR_WEIGHT)

    # --- learning -----------------------------------------------------------------------------------------------------

    def reach(self, first: int, last: int) -> None:
        """An answer got into the intervals from `first` to `last`."""
        for number in range(first, last + 1):
            self._reached[number] += 1
        self._news += last - first + 1

    def end(self, number: int, *, by_itself: bool) -> None:
        """An answer ended in an interval that it reached; cut off, it was there for half of it, as actuaries count."""
        if by_itself:
            self._ended[number] += 1
        else:
            # What faded meanwhile took a part of this answer with it: never below those that ended there.
            self._reached[number] = max(self._reached[number] - 0.5, self._ended[number])
        self._news += 1

    @property
    def is_stale(self) -> bool:
        """Whether enough is new for the chances to be worked out again: a sixteenth of all that is known."""
        return self._news >= self._enough

    def refresh(self, population: LifeTable | None) -> None:
        """Work the chances out again. `population`: what little is known is drawn towards; None: the prior."""
        if population is None:
            self._rebuild(self._prior, PRIOR_WEIGHT)
        else:
            self._rebuild(population.chances, POPULATION_WEIGHT)

    def _rebuild(self, towards: Sequence[float], weight: float) -> None:
        if max(self._reached) > self._window:
            self._reached = [count / 2 for count in self._reached]
            self._ended = [count / 2 for count in self._ended]
        self._news, self._enough = 0, 16 + sum(self._reached) / 16
        known = zip(self._ended, self._reached, towards, strict=True)
        self.chances = [min((ended + weight * chance) / (reached + weight), 1.0) for ended, reached, chance in known]
        # Cumulative hazards, by interval, and each token's share of its interval's.
        self._rates, self._hazards, total = [], [], 0.0
        for chance, (low, high) in zip(self.chances, pairwise(self._edges), strict=True):
            self._hazards.append(total)
            self._rates.append(-math.log(max(1 - chance, 1e-6)) / (high - low))
            total += self._rates[-1] * (high - low)
        self._rows: dict[int, tuple[int, ...]] = {}

    # --- what it says -------------------------------------------------------------------------------------------------

    def survival(self, answered: int, more: int) -> float:
        """The chance that an answer of `answered` tokens has `more` tokens to come, or more than these."""
        return math.exp(self._hazard(answered) - self._hazard(answered + more))

    def _hazard(self, length: int) -> float:
        number = min(bisect_right(self._edges, length), len(self._rates)) - 1  # beyond the last, as in it
        return self._hazards[number] + self._rates[number] * (length - self._edges[number])

    def row(self, number: int) -> tuple[int, ...]:
        """The same for each horizon, in ONEths, from the middle of an interval. Kept until the chances change."""
        row = self._rows.get(number)
        if row is None:
            middle = (self._edges[number] + self._edges[number + 1]) // 2
            row = tuple(round(ONE * self.survival(middle, more)) for more in self._horizons)
            self._rows[number] = row  # a memo, not a decision
        return row


class AnswerLengths:
    """A table for all answers, and one for each of the tenants that had requests last."""

    def __init__(self, longest: int, horizons: Sequence[int], *, median: int, window: int, max_tenants: int) -> None:
        self.edges = edges_up_to(longest)
        self._horizons, self._median, self._window = horizons, median, window
        self._max_tenants = max_tenants
        self.population = self._new()
        self._tenants: OrderedDict[str, LifeTable] = OrderedDict()

    def _new(self) -> LifeTable:
        return LifeTable(self.edges, self._horizons, self._median, self._window)

    def interval(self, length: int) -> int:
        return min(bisect_right(self.edges, length), len(self.edges) - 1) - 1  # beyond the last, as in it

    def end_of(self, interval: int) -> int:
        """Where the next interval begins."""
        return self.edges[interval + 1]

    def middle_of(self, interval: int) -> int:
        return (self.edges[interval] + self.end_of(interval)) // 2

    def of(self, tenant: str) -> LifeTable:
        """What is known of a tenant's answers, or of everybody's where nothing is. Changes nothing. "": no tenant."""
        return self._tenants.get(tenant, self.population)

    def enter(self, tenant: str) -> LifeTable:
        """The table in which a tenant's answer is to be counted. The tenant that was away longest loses its own."""
        if not tenant or not self._max_tenants:
            return self.population
        table = self._tenants.get(tenant)
        if table is None:
            table = self._tenants[tenant] = self._new()
            table.refresh(self.population)
            if len(self._tenants) > self._max_tenants:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        return table

    def reach(self, table: LifeTable, first: int, last: int) -> None:
        self.population.reach(first, last)
        if table is not self.population:
            table.reach(first, last)
        self._keep_fresh(table)

    def end(self, table: LifeTable, number: int, *, by_itself: bool) -> None:
        self.population.end(number, by_itself=by_itself)
        if table is not self.population:
            table.end(number, by_itself=by_itself)
        self._keep_fresh(table)

    def _keep_fresh(self, table: LifeTable) -> None:
        if self.population.is_stale:
            self.population.refresh(None)
        if table is not self.population and table.is_stale:
            table.refresh(self.population)
