"""Owns the figures of the transport benchmark: the cost of loads, the evenness of their tokens, and first-token times.
Never measures: it is given answers and CPU times."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from loadtest.client import Answer, Outcome
from loadtest.server import CpuTime

STEP_MS = 20.0
"""Length of a step of all scripted engines."""
HELD_PACE = 1.5
"""A stream keeps pace ("held") if its tokens took at most this many times the engine's steps."""

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """A load's answers, and its CPU time beyond that of the idle server, in seconds by kind of process."""

    outcome: Outcome
    cpu_s: CpuTime
    idle_share: CpuTime
    """CPU seconds a second of the idle server, measured just before; subtracted from `cpu_s`."""
    others_share: float
    """The share of the machine's CPU time that neither server nor client took. If it is not near 0, figures are too
    high."""

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.outcome.answers)

    @property
    def num_requests(self) -> int:
        return len(self.outcome.answers)

    @property
    def errors(self) -> list[str]:
        return [answer.error for answer in self.outcome.answers if answer.error]


def cost_figures(set_up: Measured, long: Measured, tokens: int) -> Figures:
    """Return CPU microseconds a token by kind of process, set-up included. From the difference between answers of one
    token and of `tokens` also derive the microseconds of a token alone and the milliseconds to set up a request."""
    if not long.num_tokens or tokens < 2:
        return {}
    figures = {f"{kind}_us_per_token": 1e6 * spent / long.num_tokens for kind, spent in long.cpu_s.items()}
    figures["us_per_token"] = sum(figures.values())
    whole = sum(long.cpu_s.values()) / long.num_requests
    short = sum(set_up.cpu_s.values()) / set_up.num_requests
    token = (whole - short) / (tokens - 1)
    figures["us_per_further_token"] = 1e6 * token
    figures["set_up_ms"] = 1e3 * (short - token)
    figures["idle_ms_per_s"] = 1e3 * sum(long.idle_share.values())
    figures["others_cpu_percent"] = 100 * long.others_share
    figures["client_us_per_token"] = 1e6 * long.outcome.cpu_s / long.num_tokens
    return figures


def pace_figures(answers: Sequence[Answer]) -> Figures:
    """Return the gaps between arrivals of text on a stream in milliseconds, both while all streams of a wave run and
    over the whole wave; the number of streams that kept the engine's pace; and tokens a second."""
    waves: dict[int, list[Answer]] = defaultdict(list)
    for answer in answers:
        waves[answer.wave].append(answer)
    whole = [answer for answer in answers if answer.arrivals]
    gaps = sorted(1e3 * gap for answer in whole for gap in _gaps(answer))
    steady = sorted(1e3 * gap for wave in waves.values() for gap in _steady_gaps(wave))
    held = [sum(map(_is_held, wave)) for wave in waves.values()]
    figures: Figures = {"held": min(held), "failed": sum(answer.error is not None for answer in answers)}
    if not gaps:
        return figures
    seconds = sum(_length_s(wave) for wave in waves.values())
    figures["tokens_per_s"] = sum(answer.num_tokens for answer in answers) / seconds
    figures["first_token_p50_ms"] = statistics.median(map(_first_token_ms, whole))
    figures["gap_all_max_ms"] = gaps[-1]
    for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        figures[f"gap_{name}_ms"] = percentile(steady or gaps, share)
    late = sum(gap > 2 * STEP_MS for gap in steady)
    figures["late_gaps_percent"] = 100 * late / len(steady) if steady else 100.0
    return figures


def first_token_figures(probes: Sequence[Answer], gap_p50_ms: float) -> Figures:
    """Return the time to the first text of single requests that arrive at random while the streams run. An engine that
    steps without a pause begins such a request half a step after its arrival, on average, and has its first token one
    step later. The median time beyond these one and a half steps is due to the path. Headers alone would say nothing,
    since some paths send them before they call the engine.

    The length of a step is taken from the gaps of the running streams, or from the script if the streams lag behind."""
    found = [_first_token_ms(probe) for probe in probes if probe.arrivals and not probe.error]
    if not found:
        return {}
    median = statistics.median(found)
    step_ms = gap_p50_ms if gap_p50_ms < HELD_PACE * STEP_MS else STEP_MS
    return {"probe_first_token_p50_ms": median, "first_token_added_ms": median - 1.5 * step_ms}


def _first_token_ms(answer: Answer) -> float:
    return 1e3 * (answer.arrivals[0] - answer.sent)


def _gaps(answer: Answer) -> Iterator[float]:
    return (later - earlier for earlier, later in pairwise(answer.arrivals))


def _steady_gaps(wave: Sequence[Answer]) -> Iterator[float]:
    streams = [answer for answer in wave if answer.arrivals]
    if len(streams) < len(wave):
        return
    begun = max(answer.arrivals[0] for answer in streams)
    ending = min(answer.arrivals[-1] for answer in streams)
    for answer in streams:
        for earlier, later in pairwise(answer.arrivals):
            if begun <= earlier and later <= ending:
                yield later - earlier


def _is_held(answer: Answer) -> bool:
    if answer.error is not None or not answer.arrivals:
        return False
    took_ms = 1e3 * (answer.arrivals[-1] - answer.arrivals[0])
    return took_ms <= HELD_PACE * STEP_MS * (answer.num_tokens - 1)


def _length_s(wave: Sequence[Answer]) -> float:
    ends = [answer.arrivals[-1] for answer in wave if answer.arrivals]
    return max(ends, default=0.0) - min(answer.sent for answer in wave) if ends else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """Interpolate linearly between the two nearest ranks of sorted values."""
    rank = (len(values) - 1) * share
    low = int(rank)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (rank - low)
