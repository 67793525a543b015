"""Owns the requests of the study of targets, and what studies share to make requests: log-normal lengths, whole traces.
Never sends any; the same seed gives the same requests."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from math import log
from random import Random

from loadtest.sim.traces import trace_jobs
from loadtest.sim.workload import Job, poisson, thinned, window


@dataclass(frozen=True, slots=True)
class Chats:
    """Requests to one GPU_LIKE engine. Lengths are log-normal around their means, but a share of prompts is long:
    uniform between 8,000 and 16,000 tokens."""

    rate: float
    prompt: int
    answer: int
    long_share: float = 0.0
    bursty: bool = False
    """Whether three quarters of the requests come in the first quarter of every 10 seconds."""


TIMED = {
    "chat": Chats(25.0, 1000, 200),
    "bursty": Chats(12.0, 1000, 200, bursty=True),
    "rag": Chats(6.0, 1000, 200, long_share=0.2),
}
TIMED_RATES = {"azure_conv": 3.0, "azure_code": 1.0, "mooncake_conv": 0.3}
"""The rate at which one GPU_LIKE engine gets the requests of each trace, relative to the trace's own."""
FIRST_STRETCH = 3
"""The stretch of a trace with which seeds begin: Azure's code completions have minutes without any request."""


def timed_jobs(name: str, seconds: float, size: float, seed: int) -> list[Job]:
    """Return the requests of a run: of one of TIMED, or of a trace. Of a trace, each seed takes another stretch."""
    random = Random(seed)
    if name in TIMED_RATES:
        rate, begin = TIMED_RATES[name] * size, (FIRST_STRETCH + seed) * seconds
        sooner = max(rate, 1.0)
        kept = thinned(whole_trace(name), min(rate, 1.0), seed)
        return window([replace(job, arrival_s=job.arrival_s / sooner) for job in kept], begin, begin + seconds)
    load = TIMED[name]
    jobs = []
    for job in poisson(load.rate * size, seconds, 1, 1, seed):
        at, is_long = job.arrival_s, random.random() < load.long_share
        if load.bursty and random.random() < 2 / 3:
            at = at // 10 * 10 + at % 10 / 4
        prompt = random.randint(8000, 16_000) if is_long else log_normal(random, load.prompt, 8000)
        jobs.append(Job(at, prompt, log_normal(random, load.answer, 2000)))
    return sorted(jobs, key=lambda job: job.arrival_s)


def log_normal(random: Random, mean: int, most: int) -> int:
    spread = 0.8
    return min(max(round(random.lognormvariate(log(mean) - spread**2 / 2, spread)), 8), most)


@functools.cache
def whole_trace(name: str) -> list[Job]:
    return trace_jobs(name)
