"""Owns the statistics of answer lengths: life tables, one for each of a bounded number of tenants and one for all
answers.
Never reads a clock or a request: it is told which lengths an answer reached, and whether it ended there by itself."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

ONE = 1024
"""The integer that stands for probability 1. Sums of integers are exact, so that a share can be subtracted again."""
PRIOR_WEIGHT = 4.0
"""Weight of the prior in the table of all answers, in observed answers at each length."""
POPULATION_WEIGHT = 16.0
"""Weight of the table of all answers in a tenant's table, in observed answers at each length."""


def edges_up_to(longest: int) -> tuple[int, ...]:
    """Return the lower ends of the length intervals. They are 4 tokens wide at first, and an eighth of the length from
    32 tokens on. The last edge, `longest` or more, only ends an interval."""
    edges = [0]
    while edges[-1] <= longest:
        edges.append(edges[-1] + max(4, edges[-1] // 8))
    return tuple(edges)


class LifeTable:
    """How many answers reached each interval of length, and how many of them ended in it: an occurrence/exposure table.

    Running answers count up to their current length, and so do those that were cut off (by `max_tokens` or by their
    client): they raise the number that reached an interval, but not the number that ended in it. Counting only finished
    answers would give too short lengths, because short answers finish first.
    """

    def __init__(self, edges: Sequence[int], horizons: Sequence[int], median: int, window: int) -> None:
        """`median` is the median length assumed before any answer was seen. After `window` answers, all counts are
        halved."""
        self._edges, self._horizons, self._window = edges, horizons, window
        self._reached = [0.0] * (len(edges) - 1)
        self._ended = [0.0] * (len(edges) - 1)
        # The median residual length is `median` plus the current length: the longer an answer is, the longer it
        # continues.
        self._prior = [1 - (median + low) / (median + high) for low, high in pairwise(edges)]
        self.chances = self._prior
        """By interval: the probability that an answer which reached the interval ends in it."""
        self._rebuild(self._prior, PRIOR_WEIGHT)

    # --- learning -----------------------------------------------------------------------------------------------------

    def reach(self, first: int, last: int) -> None:
        """Count an answer that reached the intervals from `first` to `last`."""
        for number in range(first, last + 1):
            self._reached[number] += 1
        self._news += last - first + 1

    def end(self, number: int, *, by_itself: bool) -> None:
        """Count an answer's end in an interval that it reached. If it was cut off, it counts as exposed for half of the
        interval, as in actuarial tables."""
        if by_itself:
            self._ended[number] += 1
        else:
            # Halving may have removed a part of this answer, so keep the count at least at the number of ends.
            self._reached[number] = max(self._reached[number] - 0.5, self._ended[number])
        self._news += 1

    @property
    def is_stale(self) -> bool:
        """Whether the probabilities should be computed again: new counts are a sixteenth of all counts."""
        return self._news >= self._enough

    def refresh(self, population: LifeTable | None) -> None:
        """Compute the probabilities again. Sparse data is drawn towards `population`; None means towards the prior."""
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

    # --- queries ----------------------------------------------------------------------------------------------------

    def survival(self, answered: int, more: int) -> float:
        """Return the probability that an answer of `answered` tokens has at least `more` tokens to come."""
        return math.exp(self._hazard(answered) - self._hazard(answered + more))

    def _hazard(self, length: int) -> float:
        number = min(bisect_right(self._edges, length), len(self._rates)) - 1  # clamped to the last
        return self._hazards[number] + self._rates[number] * (length - self._edges[number])

    def row(self, number: int) -> tuple[int, ...]:
        """Return `survival` for each horizon, as multiples of 1/ONE, from the middle of an interval. Cached until the
        probabilities change."""
        row = self._rows.get(number)
        if row is None:
            middle = (self._edges[number] + self._edges[number + 1]) // 2
            row = tuple(round(ONE * self.survival(middle, more)) for more in self._horizons)
            self._rows[number] = row  # a memo, not a decision
        return row


class AnswerLengths:
    """A table for all answers, and one for each of the most recent tenants."""

    def __init__(self, longest: int, horizons: Sequence[int], *, median: int, window: int, max_tenants: int) -> None:
        self.edges = edges_up_to(longest)
        self._horizons, self._median, self._window = horizons, median, window
        self._max_tenants = max_tenants
        self.population = self._new()
        self._tenants: OrderedDict[str, LifeTable] = OrderedDict()

    def _new(self) -> LifeTable:
        return LifeTable(self.edges, self._horizons, self._median, self._window)

    def interval(self, length: int) -> int:
        return min(bisect_right(self.edges, length), len(self.edges) - 1) - 1  # clamped to the last

    def end_of(self, interval: int) -> int:
        """Return the length at which the next interval begins."""
        return self.edges[interval + 1]

    def middle_of(self, interval: int) -> int:
        return (self.edges[interval] + self.end_of(interval)) // 2

    def table(self, tenant: str) -> LifeTable:
        """Return a tenant's table, or that of all answers if there is none. Changes nothing. "" means no tenant."""
        return self._tenants.get(tenant, self.population)

    def enter(self, tenant: str) -> LifeTable:
        """Return the table for counting a tenant's answer, creating it if needed. The least recent tenant may lose its
        table."""
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
