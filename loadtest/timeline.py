"""Owns what became of one request of a load: when it was due, sent and answered, and the times that follow from it.
Never measures: stamps are given to it, and a time that has no meaning for a request is None."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

OK, REJECTED, FAILED, CANCELLED = "ok", "rejected", "failed", "cancelled"
OUTCOMES = (OK, REJECTED, FAILED, CANCELLED)
"""Answered as asked; refused because there is too much; anything else that went wrong; left on purpose."""
TOO_MUCH = (429, 503)
"""Of HTTP: the statuses of such a refusal."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request. Stamps in seconds of the worker's monotonic clock, from the beginning of the load.

    due ── lag ── sent ─────────── arrivals[0] ── gap ── arrivals[1] ... arrivals[-1] ── ended
     ├───────────── ttft ───────────────┤
     ├───────────────────────────────── e2e ─────────────────────────────────────────────┤
    """

    due: float
    """When an open load has it begin, whatever the server does; in a closed one, when the client was free for it."""
    sent: float
    ended: float
    outcome: str
    arrivals: tuple[float, ...] = ()
    """Events with text, thoughts or a call; the first token is in the first."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Both as the server's `usage` counts them: an event may carry several."""
    status: int = 0
    """Of HTTP; 0: there was no answer."""
    finish_reason: str | None = None
    queue_ms: float | None = None
    """As the server's `openai-processing-ms` says: from the request's arrival to the beginning of its answer."""
    retry_after: bool = False
    """Whether a refusal said when to come again."""
    error: str | None = None

    @property
    def lag_ms(self) -> float:
        """What the generator itself was late."""
        return 1e3 * max(self.sent - self.due, 0.0)

    @property
    def ttft_ms(self) -> float | None:
        """To the first text, from when the request was due: what waits because the generator or the server lags,
        waits in it, too."""
        return 1e3 * (self.arrivals[0] - self.due) if self.arrivals else None

    @property
    def tpot_ms(self) -> float | None:
        """A token after the first: (last arrival - first) / (output tokens - 1). One token alone has none."""
        if len(self.arrivals) < 1 or self.output_tokens < 2:
            return None
        return 1e3 * (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def e2e_ms(self) -> float | None:
        """From when it was due to the end of the answer, if it is whole."""
        return 1e3 * (self.ended - self.due) if self.outcome == OK else None

    def gaps_ms(self) -> Iterator[float]:
        """Between two arrivals of text."""
        return (1e3 * (later - earlier) for earlier, later in pairwise(self.arrivals))

    def gap_ms(self, share: float) -> float | None:
        """The gap that so large a share of its gaps does not exceed; None: there are none."""
        gaps = sorted(self.gaps_ms())
        return gaps[max(math.ceil(share * len(gaps)), 1) - 1] if gaps else None
