"""Owns the record of one request of a load: when it was due, sent and answered, and the latencies that follow.
Never measures: it is given timestamps, and a latency that has no meaning for a request is None."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

OK, REJECTED, FAILED, CANCELLED = "ok", "rejected", "failed", "cancelled"
OUTCOMES = (OK, REJECTED, FAILED, CANCELLED)
"""Answered as asked; refused because of overload; failed in any other way; cancelled by the client on purpose."""
TOO_MUCH = (429, 503)
"""The HTTP statuses of a refusal because of overload."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request. Timestamps are seconds of the worker's monotonic clock, from the beginning of the load.

    due ── lag ── sent ─────────── arrivals[0] ── gap ── arrivals[1] ... arrivals[-1] ── ended
     ├───────────── ttft ───────────────┤
     ├───────────────────────────────── e2e ─────────────────────────────────────────────┤
    """

    due: float
    """In an open load, the scheduled time, whatever the server does; in a closed one, when the client became free."""
    sent: float
    ended: float
    outcome: str
    arrivals: tuple[float, ...] = ()
    """Times of events with text, reasoning or a tool call. The first carries the first token."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Both counts are from the server's `usage`, since an event may carry several tokens."""
    status: int = 0
    """HTTP status; 0 if there was no answer."""
    finish_reason: str | None = None
    queue_ms: float | None = None
    """The server's `openai-processing-ms`: from the request's arrival to the beginning of its answer."""
    retry_after: bool = False
    """Whether a refusal carried a Retry-After header."""
    error: str | None = None

    @property
    def lag_ms(self) -> float:
        """The lateness of the generator itself."""
        return 1e3 * max(self.sent - self.due, 0.0)

    @property
    def ttft_ms(self) -> float | None:
        """Time from when the request was due to its first text. So it includes any wait because the generator or the
        server lags."""
        return 1e3 * (self.arrivals[0] - self.due) if self.arrivals else None

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first: (last arrival - first) / (output tokens - 1). None for a single
        token."""
        if len(self.arrivals) < 1 or self.output_tokens < 2:
            return None
        return 1e3 * (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def e2e_ms(self) -> float | None:
        """Time from when the request was due to the end of its answer, if that is complete."""
        return 1e3 * (self.ended - self.due) if self.outcome == OK else None

    def gaps_ms(self) -> Iterator[float]:
        """Yield the gaps between successive arrivals."""
        return (1e3 * (later - earlier) for earlier, later in pairwise(self.arrivals))

    def gap_ms(self, share: float) -> float | None:
        """Return the gap that this share of the gaps does not exceed; None if there are no gaps."""
        gaps = sorted(self.gaps_ms())
        return gaps[max(math.ceil(share * len(gaps)), 1) - 1] if gaps else None
