"""Owns the arrival times of an open load: a seeded random process whose rate may change over time.
Never looks at a clock or a server: slow answers delay no request."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

PROCESSES = ("constant", "poisson", "gamma")


@dataclass(frozen=True, slots=True)
class Profile:
    """A rate that changes in steps. Each step is (seconds, requests a second)."""

    steps: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.steps or not any(seconds * rate > 0 for seconds, rate in self.steps):
            raise ValueError("a profile needs a step with requests in it")
        if any(not 0 <= value < float("inf") for step in self.steps for value in step):
            raise ValueError(f"a profile's seconds and rates are 0 or more, not {self.steps}")

    @staticmethod
    def constant(rate: float, seconds: float) -> Profile:
        return Profile(((seconds, rate),))

    @property
    def seconds(self) -> float:
        return sum(seconds for seconds, _ in self.steps)

    @property
    def expected(self) -> float:
        """The expected number of requests."""
        return sum(seconds * rate for seconds, rate in self.steps)

    def scaled(self, rate: float = 1.0, seconds: float = 1.0) -> Profile:
        return Profile(tuple((length * seconds, height * rate) for length, height in self.steps))


def due_times(profile: Profile, process: str, seed: int, cv: float = 1.0) -> Iterator[float]:
    """Yield the times at which requests are due, in seconds from the beginning, in order, until the profile ends.

    Gaps of mean 1 are drawn and placed along the expected number of requests so far, so that a process keeps its
    character where the rate changes. `cv` is the coefficient of variation of gamma's gaps, their standard deviation
    over their mean: 1 is Poisson, more is burstier.

    Raises:
        ValueError: no such process, or `cv` is not positive.
    """
    gap = _gap(process, random.Random(f"arrivals {seed}"), cv)
    reached, begin, begin_work = 0.0, 0.0, 0.0
    reached += gap()
    for seconds, rate in profile.steps:
        while rate > 0 and reached < begin_work + seconds * rate:
            yield begin + (reached - begin_work) / rate
            reached += gap()
        begin, begin_work = begin + seconds, begin_work + seconds * rate


def _gap(process: str, draw: random.Random, cv: float) -> Callable[[], float]:
    match process:
        case "constant":
            return lambda: 1.0
        case "poisson":
            return lambda: draw.expovariate(1.0)
        case "gamma":
            if not cv > 0:
                raise ValueError(f"a coefficient of variation is positive, not {cv:g}")
            return lambda: draw.gammavariate(1 / cv**2, cv**2)
    raise ValueError(f"arrivals are {', '.join(PROCESSES)}, not {process!r}")


def cv_of(times: Sequence[float]) -> float:
    """Return the coefficient of variation of the gaps between these times: their standard deviation over their mean.

    Raises:
        ValueError: fewer than three times, or all at once.
    """
    gaps = [later - earlier for earlier, later in pairwise(times)]
    if len(gaps) < 2 or not sum(gaps):
        raise ValueError("burstiness needs three times or more, not all at once")
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    return math.sqrt(variance) / mean
