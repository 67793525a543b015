"""Owns the decision how many drafted tokens a step carries, and for which rows: as many as are expected to pay.
Never reads a clock and keeps no state: it is arithmetic on probabilities, counts and a cost curve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

from engine.scheduling.step_time import StepCosts, StepWork
from engine.step import UNPADDED

CHEAP, DEAR = 0.4, 1.15
"""The slopes of AssumedCosts: `free_tokens` times what one more token adds to a step's time, in units of a step of one
token; CHEAP up to `free_tokens` tokens, DEAR above. Fitted to two cores without a matrix unit
(loadtest/results/engine_step_vectors.json) with the default model: 16.3 ms for 1 row, 23.8 for 8, 42.8 for 16, 78.6 for
32. With a matrix unit (engine_step.json) steps grow less: 32 rows take 2.3 times as long as one row, where this curve
has 4.8. So fewer tokens are drafted there than would pay; `free_tokens` can be set, and with targets steps are
measured. From 8 to 9 tokens the real increase is the largest, half a step of one row, because a second block of rows
begins (MAX_ROWS, kernels)."""
START = 0.06
"""Additional cost of the first drafted token of a step: rows of several tokens are a second kind of row."""
MARGIN = 1.25
"""A token is drafted if its expected gain is at least this many times its cost: the probabilities are guesses."""
LEAST_STEP_S = 1e-6
"""So that a step that takes no time, as of the fake executor, can be compared with others."""
KEPT = 0.9
"""Every row, also one without drafts, keeps at least this share of the speed it would have in a step without drafts."""
GAP = 0.2
"""What it costs to plan a step only when the one before is read back, as a share of a step (overlap): assumed, about 1
ms of Python beside a GPU's 5 ms."""


class Costs(Protocol):
    """How long a step takes, as a multiple of a step with a single token."""

    def duration(self, num_tokens: int) -> float: ...


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Those that were measured on this machine. Contexts are left out, which makes every token a little dearer than it
    is, and parts of tiles and of padded sizes count as parts: a draft that begins a tile is judged as if the tile were
    full."""

    steps: StepCosts
    """With a tile of 1, and without padding; `of` sees to that."""

    @classmethod
    def of(cls, steps: StepCosts) -> MeasuredCosts:
        return cls(replace(steps, tile=1, sizes=UNPADDED))

    def duration(self, num_tokens: int) -> float:
        return self._seconds(num_tokens) / self._seconds(1)

    def _seconds(self, num_tokens: int) -> float:
        return max(self.steps.seconds(StepWork(num_tokens, samples=num_tokens)), LEAST_STEP_S)


@dataclass(frozen=True, slots=True)
class AssumedCosts:
    """Those of a machine on which nothing was measured."""

    free_tokens: int
    """Up to this many tokens, reading the weights takes longer than computing with them."""

    def duration(self, num_tokens: int) -> float:
        beyond = max(0, num_tokens - self.free_tokens)
        return 1 + (CHEAP * (num_tokens - 1 - beyond) + DEAR * beyond) / self.free_tokens


class Wish(NamedTuple):
    """How many tokens may be drafted for one row, and how likely they are right."""

    chance: float
    """Probability that a drafted token is right if those before it are; 0 to 1."""
    most: int
    """Maximum number of tokens to draft; at least 1."""


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """How long the draft model's forward passes take, as a multiple of a step of the model with a single token."""

    ratio: float
    """The time of a pass with a single token."""
    costs: Costs

    def duration(self, num_tokens: int) -> float:
        return self.ratio * self.costs.duration(num_tokens) if num_tokens else 0.0


def may_pay(num_tokens: int, costs: Costs) -> bool:
    """Whether a draft that is certainly right could pay in a step of `num_tokens`."""
    return _pays(1.0, num_tokens, num_tokens, costs, first=True)


@dataclass(frozen=True, slots=True)
class Beside:
    """What else the step carries."""

    num_rows: int
    """Decode rows, including those that may get drafts."""
    num_forced: int
    """Tokens that are drafted already. They are assumed to be right."""
    num_bare: int
    """Decode rows that have no draft and will get none."""


def choose_lengths(wishes: Sequence[Wish], beside: Beside, room: int, costs: Costs) -> list[int]:
    """How many tokens to draft for each wish, at most `room` together. O(room * wishes).

    Adds the likeliest token first, as long as tokens per second are expected to rise. Then takes tokens back until no
    row is slower than KEPT allows.
    """
    lengths, gains = [0] * len(wishes), [0.0] * len(wishes)
    chosen: list[int] = []
    num_fair = 0
    tokens = beside.num_rows + beside.num_forced
    expected = float(tokens)
    slowest = costs.duration(tokens) / KEPT
    for number, gain in _likeliest(wishes, room):
        if not _pays(gain, tokens, expected, costs, first=not chosen):
            break
        chosen.append(number)
        lengths[number] += 1
        gains[number] += gain
        tokens, expected = tokens + 1, expected + gain
        least_gain = 0.0 if beside.num_bare else min(gains)
        if costs.duration(tokens) + START <= slowest * (1 + least_gain):
            num_fair = len(chosen)
    for number in chosen[num_fair:]:
        lengths[number] -= 1
    return lengths


def pace_aside(wish: Wish, length: int, *, in_flight: bool) -> float:
    """Return how many tokens a draft is expected to win for each step that its row misses, standing aside (overlap).

    It misses one while the draft is verified. If the token before the draft is `in_flight`, it misses another until
    that is read, once for a run of drafts, which ends at the first that is not right as a whole; and it wins only if
    that token is the expected one.
    """
    gain = sum(wish.chance**number for number in range(1, length + 1))
    return gain * wish.chance / (2 - wish.chance**length) if in_flight else gain


def keep_aside(lengths: Sequence[int], paces: Sequence[float], beside: Beside) -> list[int]:
    """Drop the drafts that win less than the steps that their rows miss (overlap).

    If all rows draft, none misses a step: each step is read back before the next is planned, which costs each of them
    GAP.
    """
    together = all(lengths) and not beside.num_bare and sum(paces) >= MARGIN * GAP * beside.num_rows
    return [length if together or pace >= MARGIN else 0 for length, pace in zip(lengths, paces, strict=True)]


def _likeliest(wishes: Sequence[Wish], room: int) -> Iterator[tuple[int, float]]:
    """(index of the wish, expected gain) of up to `room` tokens that may be drafted: the likeliest first, and each
    after the token that it follows."""
    heap = [(-wish.chance, number, 1) for number, wish in enumerate(wishes)]
    heapify(heap)
    while heap and room > 0:
        gain, number, length = heappop(heap)
        yield number, -gain
        room -= 1
        if length < wishes[number].most:
            heappush(heap, (gain * wishes[number].chance, number, length + 1))


def _pays(gain: float, tokens: int, expected: float, costs: Costs, *, first: bool) -> bool:
    """Whether one more token in a step of `tokens` pays, if it adds `gain` to the `expected` tokens of the step."""
    now = costs.duration(tokens)
    price = costs.duration(tokens + 1) - now + (START if first else 0.0)
    return gain * now >= MARGIN * price * expected


def choose_model_lengths(
    wishes: Sequence[Wish], beside: Beside, room: int, costs: Costs, drafter: ModelCosts
) -> list[int]:
    """Like `choose_lengths`, for tokens that a draft model proposes: its i-th pass gives a token to every row that has
    i or more. O(room * wishes).

    The first row of a pass costs much and further rows little, so tokens are not judged one by one. Instead this tries
    every number of tokens, likeliest first, and takes the number with the most tokens per second.
    """
    lengths, gains = [0] * len(wishes), [0.0] * len(wishes)
    chosen: list[int] = []
    passes: list[int] = []  # number of rows of each pass
    num_best = 0
    tokens = beside.num_rows + beside.num_forced
    plain, plain_took = float(tokens), costs.duration(tokens)
    expected, drafting, best_pace = plain, 0.0, plain / plain_took
    for number, gain in _likeliest(wishes, room):
        if lengths[number] == len(passes):
            passes.append(0)
        drafting -= drafter.duration(passes[lengths[number]])
        passes[lengths[number]] += 1
        drafting += drafter.duration(passes[lengths[number]])
        chosen.append(number)
        lengths[number] += 1
        gains[number] += gain
        tokens, expected = tokens + 1, expected + gain
        took = costs.duration(tokens) + START + drafting
        pays = (expected - plain) * plain_took >= MARGIN * (took - plain_took) * plain
        least_gain = 0.0 if beside.num_bare else min(gains)
        if pays and expected / took > best_pace and took <= plain_took / KEPT * (1 + least_gain):
            num_best, best_pace = len(chosen), expected / took
    for number in chosen[num_best:]:
        lengths[number] -= 1
    return lengths


def reading_pays(num_unread: int, num_left: int, chance: float, drafter: ModelCosts) -> bool:
    """Whether it pays that the draft model reads a request's `num_unread` tokens if up to `num_left` answer tokens
    remain.

    The gain is the number of rows that one drafted token per row would save.
    """
    return num_left * chance / (1 + chance) >= MARGIN * drafter.duration(num_unread)
