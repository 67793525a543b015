"""Owns the demand that a plan is for: requests of a trace or of a few numbers, and the stretches of them that are
simulated. Never simulates; the same seed gives the same requests, whatever the load and the settings are."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import Protocol

from loadtest.sim.workload import Job
from loadtest.traces import Trace

SPREAD = 0.8
"""Standard deviation of the logarithm of lengths where no 95th percentile is given: that percentile is 2.7 times the
mean, as in chats."""
_Z95 = 1.6448536
"""Standard deviations above the mean at the 95th percentile of a normal distribution."""
MOST_RATIO = math.exp(_Z95**2 / 2)
"""Largest ratio of the 95th percentile to the mean that a log-normal distribution can have."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal lengths in tokens, with a mean and a 95th percentile."""

    mean: float
    spread: float = SPREAD

    @staticmethod
    def of(mean: float, p95: float | None = None) -> Lengths:
        """Raises: ValueError: no log-normal distribution has these."""
        if not 1 <= mean < math.inf:
            raise ValueError(f"a mean of {mean:g} tokens: expected 1 or more")
        if p95 is None:
            return Lengths(mean)
        if not mean <= p95 <= MOST_RATIO * mean:
            raise ValueError(
                f"a 95th percentile of {p95:g}: expected from 1 to {MOST_RATIO:.2f} times the mean {mean:g}"
            )
        return Lengths(mean, _Z95 - math.sqrt(max(_Z95**2 - 2 * math.log(p95 / mean), 0.0)))

    def draw(self, random: Random, most: int) -> int:
        """Draw a length of 1 to `most`."""
        drawn = random.lognormvariate(math.log(self.mean) - self.spread**2 / 2, self.spread)
        return min(max(round(drawn), 1), most)


class Demand(Protocol):
    """Requests that arrive over time."""

    @property
    def rate(self) -> float:
        """Mean requests a second."""

    @property
    def left_out(self) -> int:
        """The number of requests that no engine could hold."""

    @property
    def mean_prompt(self) -> float:
        """Mean length of prompts, in tokens."""

    @property
    def mean_answer(self) -> float:
        """Mean length of answers, in tokens."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts begin as earlier ones."""

    def jobs(self, seed: int, load: float, seconds: float) -> list[Job]:
        """Return the requests of a stretch of so many seconds, with `load` times as many a second. A seed gives the
        same requests for every load, closer to each other."""

    def covers(self, seconds: float, seeds: int) -> float:
        """Return the share of the whole demand that the stretches of these seeds are; 1 for numbers."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """Poisson arrivals, and independent log-normal lengths."""

    rate: float
    prompt: Lengths
    answer: Lengths
    longest: int
    """Limit of prompt and answer together, in tokens. Longer requests are cut: there is nothing to leave out."""
    left_out: int = 0

    def jobs(self, seed: int, load: float, seconds: float) -> list[Job]:
        random = Random(f"plan {seed}")
        jobs: list[Job] = []
        at = random.expovariate(1.0)
        while (arrival_s := at / (self.rate * load)) < seconds:
            answer = self.answer.draw(random, max(self.longest // 2, 1))
            jobs.append(Job(arrival_s, self.prompt.draw(random, max(self.longest - answer, 1)), answer))
            at += random.expovariate(1.0)
        return jobs

    @property
    def mean_prompt(self) -> float:
        return self.prompt.mean

    @property
    def mean_answer(self) -> float:
        return self.answer.mean

    @property
    def shares_prefixes(self) -> bool:
        return False

    def covers(self, seconds: float, seeds: int) -> float:
        return 1.0


@dataclass(frozen=True, slots=True)
class Recorded:
    """The requests of a trace. Each seed has another stretch of it, as far from the others as the trace allows; a trace
    that is shorter than a stretch is repeated as a whole."""

    recorded: tuple[Job, ...]
    """In the order of their arrival, the first at 0 s."""
    seconds: float
    """Length of the trace, to the arrival that would come after the last."""
    num_stretches: int
    """Stretches that the trace is divided into, one for each seed."""
    left_out: int = 0

    @staticmethod
    def of(trace: Trace, *, longest: int, num_stretches: int, rate: float | None = None) -> Recorded:
        """`longest`: limit of prompt and answer together, in tokens; longer requests are left out and counted. `rate`:
        requests a second to stretch or squeeze the trace to.

        Raises:
            ValueError: there is no request that fits, or all arrive at the same moment.
        """
        jobs = [
            Job(row.at_s, max(row.prompt_tokens, 1), max(row.output_tokens, 1), row.blocks if row.prompt_tokens else ())
            for row in trace.rows
            if row.prompt_tokens + row.output_tokens <= longest
        ]
        if len(jobs) < 2 or jobs[-1].arrival_s <= jobs[0].arrival_s:
            raise ValueError(
                f"the trace has {len(jobs)} requests of up to {longest} tokens over no time: too few for a plan"
            )
        begin = jobs[0].arrival_s
        span = (jobs[-1].arrival_s - begin) * len(jobs) / (len(jobs) - 1)
        stretch = 1.0 if rate is None else len(jobs) / span / rate
        moved = tuple(replace(job, arrival_s=(job.arrival_s - begin) * stretch) for job in jobs)
        return Recorded(moved, span * stretch, num_stretches, len(trace.rows) - len(jobs))

    @property
    def rate(self) -> float:
        return len(self.recorded) / self.seconds

    def jobs(self, seed: int, load: float, seconds: float) -> list[Job]:
        span = seconds * load
        spare = max(self.seconds - span, 0.0)
        begin = spare * ((seed % self.num_stretches + 0.5) / self.num_stretches)
        rounds = range(math.ceil((begin + span) / self.seconds))
        return [
            replace(job, arrival_s=(job.arrival_s + number * self.seconds - begin) / load)
            for number in rounds
            for job in self.recorded
            if begin <= job.arrival_s + number * self.seconds < begin + span
        ]

    @property
    def mean_prompt(self) -> float:
        return fmean(job.num_prompt_tokens for job in self.recorded)

    @property
    def mean_answer(self) -> float:
        return fmean(job.num_answer_tokens for job in self.recorded)

    @property
    def shares_prefixes(self) -> bool:
        return any(job.hash_ids for job in self.recorded)

    def covers(self, seconds: float, seeds: int) -> float:
        return min(1.0, min(seeds, self.num_stretches) * seconds / self.seconds)
