"""Owns drafts that are looked up in the requests' own texts: which rows get one, how long, and how well they did.
Never sees a logit, and never makes a token part of an answer: verification does, if it would have been sampled."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine.config import ResolvedConfig, SpeculativeConfig
from engine.scheduling.request import Request
from engine.speculation.draft_budget import (
    AssumedCosts,
    Beside,
    Costs,
    Wish,
    choose_lengths,
    keep_aside,
    may_pay,
    pace_aside,
)
from engine.speculation.prompt_lookup import Match, NgramIndex, SuffixIndex, TextIndex, continuation

GRADES = (4, 8)
"""Matches are graded by length, below the first number, below the second, or longer. Each grade has its own
statistics."""
FIRST_GUESSES = (0.3, 0.5, 0.7)
"""By grade, the share of drafted tokens assumed to be right before any was verified."""
OWN_MEMORY, COMMON_MEMORY = 0.85, 0.98
"""With each new result, older ones are multiplied by this: in the request's own record, and in the record of all
requests."""
COMMON_WEIGHT = 2.0
"""In a request's estimate, the record of all requests counts as much as this many of its own verified tokens."""
MOST_INDEXED = 2048
"""Maximum number of new tokens that are indexed after a step, for all requests together: about 1 ms."""
PROBE_STEPS = 16
"""At most once in this many steps, a token that is not expected to pay is drafted, to see whether it would."""
LONGEST_WAIT = 128
"""Maximum of Turns.wait, which is 1 at first and doubles with every draft of which no token was right."""


@dataclass(slots=True)
class Record:
    """How many drafted tokens were verified lately, and how many were right. Tokens after a wrong one do not count."""

    memory: float
    judged: list[float] = field(default_factory=lambda: [0.0] * len(FIRST_GUESSES))
    right: list[float] = field(default_factory=lambda: [0.0] * len(FIRST_GUESSES))

    def add(self, grade: int, num_drafted: int, num_accepted: int) -> None:
        self.judged[grade] = self.judged[grade] * self.memory + num_accepted + (num_accepted < num_drafted)
        self.right[grade] = self.right[grade] * self.memory + num_accepted

    def chance(self, grade: int, guess: float, weight: float) -> float:
        """Probability that a drafted token is right. `guess` counts as much as `weight` verified tokens."""
        return (self.right[grade] + guess * weight) / (self.judged[grade] + weight)


@dataclass(slots=True)
class Turns:
    """Decides when drafts for a request that gets none are tried again."""

    passed: int = 0
    """Steps since the last draft in which the request could have had one."""
    wait: int = 1
    """How many such steps must pass before a draft that is not expected to pay."""

    def judge(self, num_accepted: int) -> None:
        self.wait = 1 if num_accepted else min(2 * self.wait, LONGEST_WAIT)


class Probes:
    """Tries drafts that are not expected to pay: texts change, and so does how often drafts are right."""

    def __init__(self) -> None:
        self._steps_to_next = PROBE_STEPS

    def add(self, turns: Sequence[Turns], lengths: list[int], room: int) -> None:
        """Count a step. Now and then, add one token for the request that has had no draft for longest."""
        self._steps_to_next -= 1
        waiting = -1
        for number, (turn, length) in enumerate(zip(turns, lengths, strict=True)):
            turn.passed = 0 if length else turn.passed + 1
            if turn.passed >= turn.wait and (waiting < 0 or turn.passed > turns[waiting].passed):
                waiting = number
        if waiting >= 0 and self._steps_to_next <= 0 and sum(lengths) < room:
            lengths[waiting] = 1
            turns[waiting].passed = 0
            self._steps_to_next = PROBE_STEPS


@dataclass(slots=True)
class PromptLookup:
    """A live request's index, and how well its drafts did."""

    index: TextIndex
    record: Record = field(default_factory=lambda: Record(OWN_MEMORY))
    turns: Turns = field(default_factory=Turns)
    grade: int = 0
    """Grade of the match that the drafts now being verified came from."""


class _Candidate(NamedTuple):
    request: Request
    lookup: PromptLookup
    match: Match
    grade: int
    most: int


class Speculation:
    """Drafts for the requests of one engine. Call `propose` once a step, after its results, and `judge` for each
    draft."""

    def __init__(self, config: ResolvedConfig, costs: Costs | None = None) -> None:
        """`costs`: those that were measured; without them they are assumed."""
        settings = config.speculative
        assert settings.method == "ngram" or settings.method == "suffix", f"{settings.method} looks nothing up"
        assert settings.free_tokens is not None, "it is resolved"
        self.method: Literal["ngram", "suffix"] = settings.method
        self._settings = settings
        self._overlaps = config.overlap
        self._most_tokens = config.max_drafting_tokens
        self._costs = costs or AssumedCosts(settings.free_tokens)
        self._lookups: dict[str, PromptLookup] = {}  # by request id
        self._common = Record(COMMON_MEMORY)
        self._probes = Probes()

    def judge(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Record that `num_accepted` of the `num_drafted` tokens of the request's last row were right."""
        lookup = self._lookups[request.request_id]
        lookup.record.add(lookup.grade, num_drafted, num_accepted)
        self._common.add(lookup.grade, num_drafted, num_accepted)
        lookup.turns.judge(num_accepted)

    def forget(self, request_id: str) -> None:
        self._lookups.pop(request_id, None)

    def propose(self, decoding: Collection[Request]) -> list[tuple[Request, tuple[int, ...]]]:
        """Tokens that may follow the texts of these requests, for requests that have no drafts yet. With overlap, ()
        for a request whose newest token is in flight: drafts are expected to pay if no row is planned before it is
        read.

        If there are so many rows that no draft could pay, it searches none of the texts.
        """
        if not decoding or (self._settings.adaptive and not may_pay(len(decoding), self._costs)):
            return []
        candidates, beside = self._search(decoding)
        if not candidates:
            return []
        lengths = self._lengths(candidates, beside)
        proposals = []
        for candidate, length in zip(candidates, lengths, strict=True):
            if not length:
                continue
            if not candidate.request.num_pending:
                proposals.append((candidate.request, self._taken(candidate, length)))
            elif len(self._taken(candidate, 1 + length)) > 1:  # the token in flight, and what it would be followed by
                proposals.append((candidate.request, ()))
        return proposals

    def _search(self, decoding: Collection[Request]) -> tuple[list[_Candidate], Beside]:
        candidates: list[_Candidate] = []
        num_rows, num_forced, num_bare, to_index = 0, 0, 0, MOST_INDEXED
        for request in decoding:
            if not request.num_decode_tokens:
                continue  # overlap: it stands aside, or its last token is in flight
            num_rows += 1
            if request.drafts is not None:
                num_forced += len(request.drafts.token_ids)
                continue
            lookup = self._lookups.get(request.request_id)
            if lookup is None:
                lookup = self._lookups[request.request_id] = PromptLookup(make_index(self._settings))
            to_index -= lookup.index.extend(request.token_ids, to_index)
            most = min(self._settings.num_tokens, request.most_drafts - request.num_pending)
            match = lookup.index.find(request.token_ids) if most > 0 else None
            if match is None:
                num_bare += 1
            else:
                candidates.append(_Candidate(request, lookup, match, grade_of(match), most))
        return candidates, Beside(num_rows, num_forced, num_bare)

    def _lengths(self, candidates: list[_Candidate], beside: Beside) -> list[int]:
        room = max(0, self._most_tokens - beside.num_rows - beside.num_forced)
        if not self._settings.adaptive:
            return [max(0, min(candidate.most, room // len(candidates))) for candidate in candidates]
        wishes = [Wish(self._chance(candidate), candidate.most) for candidate in candidates]
        lengths = choose_lengths(wishes, beside, room, self._costs)
        if self._overlaps:
            lengths = self._beside_others(candidates, wishes, lengths, beside)
        self._probes.add([candidate.lookup.turns for candidate in candidates], lengths, room)
        return lengths

    def _beside_others(
        self, candidates: Sequence[_Candidate], wishes: Sequence[Wish], lengths: Sequence[int], beside: Beside
    ) -> list[int]:
        """What is left of `lengths` if a row with drafts stands aside while others overlap. A row that has stood aside
        for a draft gets one: that is paid for."""
        requests = [candidate.request for candidate in candidates]
        paces = [
            pace_aside(wish, length, in_flight=request.num_pending > 0)
            for request, wish, length in zip(requests, wishes, lengths, strict=True)
        ]
        kept = keep_aside(lengths, paces, beside)
        return [
            length or int(request.awaits_token and not request.num_pending)
            for request, length in zip(requests, kept, strict=True)
        ]

    def _chance(self, candidate: _Candidate) -> float:
        grade = candidate.grade
        common = self._common.chance(grade, FIRST_GUESSES[grade], COMMON_WEIGHT)
        return candidate.lookup.record.chance(grade, common, COMMON_WEIGHT)

    def _taken(self, candidate: _Candidate, length: int) -> tuple[int, ...]:
        """The drafted tokens, up to one that would end the answer: those after it would be in vain."""
        candidate.lookup.grade = candidate.grade
        drafts = continuation(candidate.request.token_ids, candidate.match.start, length)
        stops = candidate.request.stop_token_ids
        return next((drafts[:end] for end, token in enumerate(drafts) if token in stops), drafts)


def grade_of(match: Match) -> int:
    return sum(match.length >= least for least in GRADES)


def make_index(settings: SpeculativeConfig) -> TextIndex:
    if settings.method == "ngram":
        return NgramIndex(settings.min_match, settings.max_match)
    return SuffixIndex(settings.min_match)
