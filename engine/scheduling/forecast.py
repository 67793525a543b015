"""Owns the forecast of KV memory: how much more memory running requests will hold in the future.
Never moves a block or chooses a request. A share that was added for a request is later subtracted unchanged."""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.config import ResolvedConfig
from engine.scheduling.answer_lengths import ONE, AnswerLengths, LifeTable
from engine.scheduling.request import Request

FIRST_HORIZON = 16
MOST_CAUTION = 4.0
"""Maximum number of standard deviations that preemptions may add to the margin."""
CAUTION_STEPS = 300
"""Number of steps without preemption that undo the addition of one preemption."""
STRIDE = 64
"""Maximum tokens after which a share is computed again, unless the length interval is wider. The error of a stride is
small compared with the uncertainty about when hundreds of answers end."""
COLD_REQUESTS = 16
"""The prior is at most the KV cache divided by this. Otherwise a cold engine with a small cache would serve one request
after another."""

SQUARE = ONE * ONE
Share = tuple[Sequence[int], Sequence[int]]
"""By horizon: the expected additional tokens that a request will hold, times ONE, and their variance."""


def horizons_up_to(clip: int) -> tuple[int, ...]:
    """Return the horizons of the forecast, in tokens from now: 16, 32, 64 and so on, and `clip`."""
    horizons = [FIRST_HORIZON]
    while horizons[-1] < clip:
        horizons.append(horizons[-1] * 2)
    return (*(horizon for horizon in horizons if horizon < clip), clip)


@dataclass(slots=True)
class _Entry:
    """A running request's part in the forecast."""

    table: LifeTable
    own: int
    """Tokens that become free when it ends, without those of its answer. Shared blocks stay with their other
    holders."""
    interval: int
    """The length interval up to which its answer has been counted."""
    renewed_at: int
    """The answer's length at which its share is computed again."""
    share: Share


class Forecast:
    """Expected growth of all running requests' memory (`reserve_mode: learned`), as in the Past-Future scheduler (Gong
    et al., ASPLOS 2025), but with probabilities instead of sampled lengths.

    At each horizon an answer either has ended, and its memory is free, or has grown by that many tokens. The
    probability of each follows from the answer's current length. Admission keeps free the highest sum over the
    horizons, plus a margin of some standard deviations. A request's share is computed again after some tokens of its
    answer, so that a step computes only a few shares and a plan none.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        policy = config.scheduler
        self._policy = policy
        self._block_size = config.block_size
        self.horizons = horizons_up_to(policy.reserve_clip)
        self._lengths = AnswerLengths(
            config.max_model_len,
            self.horizons,
            median=max(min(policy.reserve_prior, config.num_kv_blocks * config.block_size // COLD_REQUESTS), 1),
            window=policy.reserve_window,
            max_tenants=policy.reserve_tenants,
        )
        self._entries: dict[str, _Entry] = {}
        self._growth = [0] * len(self.horizons)
        self._variance = [0] * len(self.horizons)
        self._caution = 0.0

    # --- queries of a plan: change nothing ----------------------------------------------------------------------------

    @property
    def margin(self) -> float:
        """Standard deviations that are kept free as a margin."""
        return self._policy.reserve_margin + self._caution

    def of_others(self, gone: Iterable[Request]) -> Share:
        """Return (growth, variance) by horizon of all running requests except `gone`."""
        growth, variance = self._growth, self._variance
        for request in gone:
            less = self._entries[request.request_id].share
            growth = list(map(operator.sub, growth, less[0]))
            variance = list(map(operator.sub, variance, less[1]))
        return growth, variance

    def candidate(self, request: Request, shared_blocks: int) -> Share:
        """Return the share that a waiting request would have. Others hold `shared_blocks` of its prompt."""
        own = len(request.token_ids) - shared_blocks * self._block_size - _answered(request)
        interval = self._lengths.interval(_answered(request))
        return self._share(self._lengths.table(request.tenant), request, own, self._renewed_at(request, interval))

    def peak(self, growth: Iterable[int], variance: Iterable[int]) -> int:
        """Return the expected shortage at the worst horizon in blocks, including the margin."""
        margin = self.margin
        tokens = max(grown / ONE + margin * math.sqrt(spread) for grown, spread in zip(growth, variance, strict=True))
        return max(math.ceil(tokens / self._block_size), 0)

    # --- updates while a plan is executed
    # ----------------------------------------------------------------------------------

    def admit(self, request: Request, shared_blocks: int) -> None:
        """Add a request that now holds memory. After a preemption its answer is not counted again."""
        answered, lengths = _answered(request), self._lengths
        table, interval = lengths.enter(request.tenant), lengths.interval(answered)
        if _ends_by_itself(request) and not request.was_scheduled:
            lengths.reach(table, interval, interval)
        own = len(request.token_ids) - shared_blocks * self._block_size - answered
        until = self._renewed_at(request, interval)
        entry = _Entry(table, own, interval, until, self._share(table, request, own, until))
        self._entries[request.request_id] = entry
        self._add(entry.share)

    def follow(self, request: Request) -> None:
        """Update the share of a request that takes a block."""
        entry = self._entries[request.request_id]
        if _answered(request) >= entry.renewed_at:
            self._advance(request, entry)
            entry.renewed_at = self._renewed_at(request, entry.interval)
            old, entry.share = entry.share, self._share(entry.table, request, entry.own, entry.renewed_at)
            self._add(entry.share)
            self._take_back(old)

    def _advance(self, request: Request, entry: _Entry) -> None:
        """Count the intervals that the answer has newly reached."""
        interval = self._lengths.interval(_answered(request))
        if _ends_by_itself(request) and interval > entry.interval:
            self._lengths.reach(entry.table, entry.interval + 1, interval)
        entry.interval = interval

    def leave(self, request: Request) -> None:
        """Remove a request that releases its memory."""
        entry = self._entries.pop(request.request_id)
        self._advance(request, entry)
        self._take_back(entry.share)

    def _add(self, share: Share) -> None:
        self._growth = list(map(operator.add, self._growth, share[0]))
        self._variance = list(map(operator.add, self._variance, share[1]))

    def _take_back(self, share: Share) -> None:
        self._growth = list(map(operator.sub, self._growth, share[0]))
        self._variance = list(map(operator.sub, self._variance, share[1]))

    def end(self, request: Request, *, by_itself: bool) -> None:
        """Count the end of a running request, before it leaves. `by_itself` means that it was not cut off."""
        entry = self._entries[request.request_id]
        self._advance(request, entry)
        if _ends_by_itself(request):
            self._lengths.end(entry.table, entry.interval, by_itself=by_itself)

    def after_step(self, *, preempted: int) -> None:
        """Adjust the margin. Preemptions show that it was too small; steps without them slowly undo their addition."""
        if preempted:
            self._caution = min(self._caution + self._policy.reserve_caution, MOST_CAUTION)
        else:
            self._caution = max(self._caution - self._policy.reserve_caution / CAUTION_STEPS, 0.0)

    def reset(self) -> None:
        """Drop the additional margin when the engine is idle. The learned lengths stay."""
        self._caution = 0.0

    # --- a share ------------------------------------------------------------------------------------------------------

    def _renewed_at(self, request: Request, interval: int) -> int:
        """Return the answer's length at which its share is computed again. Probabilities change faster for young
        answers."""
        answered = _answered(request)
        return max(self._lengths.end_of(interval), answered + min(max(answered, FIRST_HORIZON), STRIDE))

    def _share(self, table: LifeTable, request: Request, own: int, until: int) -> Share:
        """Compute a share. Memory is taken at the answer's average length while the share is valid, halfway to `until`;
        probabilities are taken as of now, since the answer may end before."""
        answered, clip = _answered(request), self.horizons[-1]
        middle = (answered + until) // 2
        held = max(own + middle, 0)
        left = max(request.max_tokens - request.num_output - (middle - answered), 1) if request.max_tokens else 0
        mortal = _ends_by_itself(request)
        row: Sequence[int] = table.row(self._lengths.interval(answered)) if mortal else (ONE,) * len(self.horizons)
        more: Sequence[int] = self.horizons
        if left < clip:
            row, more = self._cut(row, left, round(ONE * table.survival(middle, left)) if mortal else ONE)
        base, there = held * ONE, [held + tokens for tokens in more]
        growth = [chance * tokens - base for chance, tokens in zip(row, there, strict=True)]
        spread = [
            chance * (ONE - chance) * tokens * tokens // SQUARE for chance, tokens in zip(row, there, strict=True)
        ]
        return growth, spread

    def _cut(self, row: Sequence[int], left: int, last: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return (probability to be running, additional tokens) by horizon for an answer that is cut off after `left`
        tokens. It counts with all of them at the next horizon, and not at later ones."""
        within = bisect_left(self.horizons, left)
        gone = (0,) * (len(self.horizons) - within - 1)
        return (*row[:within], last, *gone), (*self.horizons[:within], left, *gone)


def _answered(request: Request) -> int:
    """Return the tokens of the answer, including those from another engine."""
    return len(request.token_ids) - request.answer_start


def _ends_by_itself(request: Request) -> bool:
    """Whether the model may end the answer, so that its length is informative. (Not with a benchmark's
    `ignore_eos`.)"""
    return bool(request.stop_token_ids and request.max_tokens)
