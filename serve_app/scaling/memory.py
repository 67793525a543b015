"""Owns what the autoscaler remembers between two moments: which reports are new, trends, the load share, durations.
Never decides on replicas, and keeps only a few numbers for each, however long it runs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from serve_app.scaling.signals import EngineReport

_LEAST_SHARE = 0.5
_SHARE_RECOVERY_S = 3600.0
_BUSY = 0.5
_TREND_BUCKETS = 4


@dataclass(frozen=True, slots=True)
class StampedReport:
    """A report with a number that differs for each new report. The number is never compared with a local clock."""

    stamp: float
    report: EngineReport


@dataclass(frozen=True, slots=True)
class Sorted:
    """The running replicas, sorted by what is known about them."""

    reports: tuple[EngineReport, ...]
    """The recent reports."""
    num_new: int
    """The number of replicas that have just started and not reported yet."""
    num_stale: int
    """The number of replicas without a recent report, which may be full."""


class Freshness:
    """Recognizes reports that are no longer renewed, independently of other machines' clocks."""

    def __init__(self, stale_after_s: float) -> None:
        self._stale_after_s = stale_after_s
        self._news: dict[str, tuple[float | None, float]] = {}  # replica: its stamp, and when that was first seen

    def sort(self, now_s: float, running: Mapping[str, StampedReport | None]) -> Sorted:
        """Sort replicas. A report is recent if its stamp was first seen within `stale_after_s`. Forgets other
        replicas."""
        self._news = {replica: news for replica, news in self._news.items() if replica in running}
        reports, num_new, num_stale = [], 0, 0
        for replica, stamped in running.items():
            if not self._is_recent(now_s, replica, stamped):
                num_stale += 1
            elif stamped is None:
                num_new += 1
            else:
                reports.append(stamped.report)
        return Sorted(tuple(reports), num_new, num_stale)

    def _is_recent(self, now_s: float, replica: str, stamped: StampedReport | None) -> bool:
        stamp = stamped.stamp if stamped else None
        known = self._news.get(replica)
        if known is None or stamp not in (None, known[0]):
            known = self._news[replica] = (stamp, now_s)
        return now_s - known[1] <= self._stale_after_s


class Trend:
    """Extrapolates a load by `horizon_s`, if its mean rose three times in a row, from quarter to quarter of that time.

    The least of the three rises counts. A step causes two rises at most, so it is not taken for a ramp; with smoothing
    it would be: Holt's method, with such times, overshoots a step by three quarters. Noise seldom rises three times.
    """

    def __init__(self, horizon_s: float, least_bucket_s: float) -> None:
        """`least_bucket_s`: the window over which the load itself is averaged. With shorter buckets, a step would look
        like a ramp."""
        self._horizon_s = horizon_s
        self._bucket_s = max(horizon_s / _TREND_BUCKETS, least_bucket_s)
        self._means: deque[float] = deque(maxlen=_TREND_BUCKETS)
        self._since_s = -math.inf
        self._sum, self._count = 0.0, 0

    def add(self, now_s: float, load: float) -> None:
        if now_s - self._since_s > 2 * self._bucket_s:  # a gap in the observations ends the trend
            self._means.clear()
            self._since_s, self._sum, self._count = now_s, 0.0, 0
        elif now_s - self._since_s >= self._bucket_s and self._count:
            self._means.append(self._sum / self._count)
            self._since_s, self._sum, self._count = now_s, 0.0, 0
        self._sum += load
        self._count += 1

    def forecast(self) -> float:
        """Return the load after `horizon_s`, or 0 without an upward trend."""
        if len(self._means) < _TREND_BUCKETS or not self._horizon_s:
            return 0.0
        rise = min(after - before for before, after in pairwise(self._means))
        # The last mean is the load in the middle of its bucket, which was half a bucket to one and a half ago.
        return self._means[-1] + rise * (self._horizon_s / self._bucket_s + 1) if rise > 0 else 0.0


class LoadShare:
    """Learns the share of the targets to which engines may be loaded: lowered when first tokens are late at less load.

    Merely adding replicas as long as first tokens are late would oscillate forever, so the lowered share must last
    longer than the lateness.
    """

    def __init__(self, objective: float) -> None:
        self._objective = objective
        self.value = 1.0
        self._last_s: float | None = None

    def update(self, now_s: float, need: float, running: int, attainment: float | None) -> float:
        """Return the share from now on, 0.5 to 1. `need`: replicas for the load by the targets. `attainment`: that of
        the requests that `running` replicas served; None while it is unknown.

        A low attainment requests up to twice the replicas. It is ignored if engines have less than half of their target
        load, because then the cause is not a lack of replicas.
        """
        if self._last_s is not None:
            self.value = 1 - (1 - self.value) * math.exp((self._last_s - now_s) / _SHARE_RECOVERY_S)
        self._last_s = now_s
        if attainment is not None and attainment < self._objective and need >= _BUSY * running > 0:
            missed = (self._objective - attainment) / self._objective
            self.value = min(self.value, max(_LEAST_SHARE, need / running / (1 + missed)))
        return self.value


class Lasting:
    """Delays a requested number: it counts when it was requested at the same target for `delay_s` without a break."""

    def __init__(self, delay_s: float, choose: Callable[[int, int], int]) -> None:
        """`choose`: min or max of the numbers requested in that time."""
        self._delay_s = delay_s
        self._choose = choose
        self._since_s: float | None = None
        self._target, self._number = 0, 0

    def end(self) -> None:
        self._since_s = None

    def update(self, now_s: float, target: int, number: int | None) -> int | None:
        """Request a number; None ends the request. Return the number that counts now, if one does."""
        if number is None or target != self._target:
            self.end()
        if number is None:
            return None
        self._number = number if self._since_s is None else self._choose(self._number, number)
        self._since_s = now_s if self._since_s is None else self._since_s
        self._target = target
        return self._number if now_s - self._since_s >= self._delay_s else None
