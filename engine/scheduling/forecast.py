"""Owns the forecast of KV memory: how much more the requests that run will hold, a number of tokens from now on.
Never moves a block or chooses a request; a share that was added for a request is taken back as it was."""

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
"""Deviations that preemptions may add to the margin."""
CAUTION_STEPS = 300
"""Good steps that take back what one preemption added."""
STRIDE = 64
"""Tokens, at most, after which a share is made anew, unless the interval of length is wider: errors of a stride are
small beside those of hundreds of answers whose ends nobody knows."""
COLD_REQUESTS = 16
"""The prior is at most this share of the KV cache: in a small one, a cold engine would else serve one request after the
other."""

SQUARE = ONE * ONE
Share = tuple[Sequence[int], Sequence[int]]
"""By horizon: the tokens that a request is expected to hold more than now, times ONE, and their variance."""


def horizons_up_to(clip: int) -> tuple[int, ...]:
    """Tokens from now at which memory is looked at: 16, twice that and so on, and `clip`."""
    horizons = [FIRST_HORIZON]
    while horizons[-1] < clip:
        horizons.append(horizons[-1] * 2)
    return (*(horizon for horizon in horizons if horizon < clip), clip)


@dataclass(slots=True)
class _Entry:
    """A running request's part in the forecast."""

    table: LifeTable
    own: int
    """Tokens that become free when it ends, less those of its answer: shared blocks stay with who else holds them."""
    interval: int
    """The interval of its answer's length, as far as it was counted."""
    renewed_at: int
    """The answer's length at which its share is made anew."""
    share: Share


class Forecast:
    """Expected growth of all running requests' memory (`reserve_mode: learned`), as in the Past-Future scheduler (Gong
    et al., ASPLOS 2025), but by chances and not by drawn lengths.

    At each horizon an answer either has ended, and its memory is free, or has grown by as much; how likely each is
    follows from what it has answered already. The highest sum over the horizons, and a margin of some standard
    deviations, is what admission keeps free. A request's share is made anew after some tokens of its answer, so that a
    step costs a few of them and a plan none.
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

    # --- what a plan asks: changes nothing ----------------------------------------------------------------------------

    @property
    def margin(self) -> float:
        """Standard deviations that are kept free."""
        return self._policy.reserve_margin + self._caution

    def of_others(self, gone: Iterable[Request]) -> Share:
        """(growth, variance) by horizon, of all who run but these."""
        growth, variance = self._growth, self._variance
        for request in gone:
            less = self._entries[request.request_id].share
            growth = list(map(operator.sub, growth, less[0]))
            variance = list(map(operator.sub, variance, less[1]))
        return growth, variance

    def candidate(self, request: Request, shared_blocks: int) -> Share:
        """The share that a waiting request would have; others hold `shared_blocks` of its prompt."""
        own = len(request.token_ids) - shared_blocks * self._block_size - _answered(request)
        interval = self._lengths.interval(_answered(request))
        return self._share(self._lengths.of(request.tenant), request, own, self._renewed_at(request, interval))

    def peak(self, growth: Iterable[int], variance: Iterable[int]) -> int:
        """Blocks that are expected to be missing at the worst horizon, with the margin."""
        margin = self.margin
        tokens = max(grown / ONE + margin * math.sqrt(spread) for grown, spread in zip(growth, variance, strict=True))
        return max(math.ceil(tokens / self._block_size), 0)

    # --- what executing a plan tells ----------------------------------------------------------------------------------

    def admit(self, request: Request, shared_blocks: int) -> None:
        """The request holds memory from now on. After a preemption it is no other answer than before."""
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
        """The request takes a block."""
        entry = self._entries[request.request_id]
        if _answered(request) >= entry.renewed_at:
            self._advance(request, entry)
            entry.renewed_at = self._renewed_at(request, entry.interval)
            old, entry.share = entry.share, self._share(entry.table, request, entry.own, entry.renewed_at)
            self._add(entry.share)
            self._take_back(old)

    def _advance(self, request: Request, entry: _Entry) -> None:
        """Count the intervals that its answer got into."""
        interval = self._lengths.interval(_answered(request))
        if _ends_by_itself(request) and interval > entry.interval:
            self._lengths.reach(entry.table, entry.interval + 1, interval)
        entry.interval = interval

    def leave(self, request: Request) -> None:
        """The request gives its memory back."""
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
        """A request that runs is over, and leaves. `by_itself`: and not because it was cut off."""
        entry = self._entries[request.request_id]
        self._advance(request, entry)
        if _ends_by_itself(request):
            self._lengths.end(entry.table, entry.interval, by_itself=by_itself)

    def after_step(self, *, preempted: int) -> None:
        """Preemptions say that the margin was too small. What they add to it goes again in as many good steps."""
        if preempted:
            self._caution = min(self._caution + self._policy.reserve_caution, MOST_CAUTION)
        else:
            self._caution = max(self._caution - self._policy.reserve_caution / CAUTION_STEPS, 0.0)

    def reset(self) -> None:
        """The engine is idle: nobody is to be careful of. What was learned stays."""
        self._caution = 0.0

    # --- a share ------------------------------------------------------------------------------------------------------

    def _renewed_at(self, request: Request, interval: int) -> int:
        """Young answers' chances change fast, old ones' slowly."""
        answered = _answered(request)
        return max(self._lengths.end_of(interval), answered + min(max(answered, FIRST_HORIZON), STRIDE))

    def _share(self, table: LifeTable, request: Request, own: int, until: int) -> Share:
        """Memory as of halfway to `until`, where the answer is on average while this share counts; chances as of now,
        for it may end before."""
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
        """(chance to be there, tokens more) by horizon of an answer that is cut off after `left` tokens: it counts
        with all of them at the horizon that comes next, and not from there on."""
        within = bisect_left(self.horizons, left)
        gone = (0,) * (len(self.horizons) - within - 1)
        return (*row[:within], last, *gone), (*self.horizons[:within], left, *gone)


def _answered(request: Request) -> int:
    """Tokens of its answer, those of another engine included."""
    return len(request.token_ids) - request.answer_start


def _ends_by_itself(request: Request) -> bool:
    """Whether the model may end it, so that its length says something of others'. (A benchmark's `ignore_eos`.)"""
    return bool(request.stop_token_ids and request.max_tokens)
