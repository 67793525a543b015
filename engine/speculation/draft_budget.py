"""Owns the decision how many drafted tokens a step carries, and for which rows: as many as are expected to pay.
Never reads a clock and keeps nothing: it is arithmetic on chances, on plain counts and on a curve of costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

CHEAP, DEAR = 0.4, 1.15
"""What another token adds to the time of a step of one token, times `free_tokens`: below that many, and above. Fitted
to two cores without a matrix unit (loadtest/results/engine_step_vectors.json), the default model: 16.3 ms for 1 row,
23.8 for 8, 42.8 for 16, 78.6 for 32. With a matrix unit (engine_step.json) steps grow less, 32 rows to 2.3 times one
row where this curve has 4.8, so that fewer tokens are drafted there than would pay; `free_tokens` can be set.
The step from 8 to 9 is the steepest, half a step of one row: a second block of rows begins (MAX_ROWS, kernels)."""
START = 0.06
"""What the first drafted token of a step costs besides: rows of several tokens are a second kind of row."""
MARGIN = 1.25
"""A token is drafted if it is expected to yield this much more than it costs: chances are guesses."""
KEPT = 0.9
"""No row is to be slower than this, of what it would be in a step without drafts: not even one that has none."""


@dataclass(frozen=True, slots=True)
class Costs:
    """How long a step takes, as a multiple of one with a single token."""

    free_tokens: int
    """Up to so many tokens, reading the weights takes longer than computing with them."""

    def of(self, num_tokens: int) -> float:
        beyond = max(0, num_tokens - self.free_tokens)
        return 1 + (CHEAP * (num_tokens - 1 - beyond) + DEAR * beyond) / self.free_tokens


class Wish(NamedTuple):
    """What may be drafted for one row."""

    chance: float
    """That a drafted token is right, those before it being right; 0 to 1."""
    most: int
    """Tokens that may be drafted; at least 1."""


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """How long the draft model's forward passes take, as a multiple of a step of the model with a single token."""

    ratio: float
    """Of a pass with a single token."""
    costs: Costs

    def of(self, num_tokens: int) -> float:
        return self.ratio * self.costs.of(num_tokens) if num_tokens else 0.0


def may_pay(num_tokens: int, costs: Costs) -> bool:
    """Whether any draft could pay beside `num_tokens`, were it right for certain."""
    return _pays(1.0, num_tokens, num_tokens, costs, first=True)


@dataclass(frozen=True, slots=True)
class Beside:
    """What the step carries already."""

    num_rows: int
    """Decode rows, those with a wish for drafts included."""
    num_forced: int
    """Tokens that are drafted already. They are taken for right."""
    num_bare: int
    """Decode rows that have no draft and no wish for one."""


def choose_lengths(wishes: Sequence[Wish], beside: Beside, room: int, costs: Costs) -> list[int]:
    """How many tokens to draft for each of the wishes: `room` at most. O(room * wishes).

    The likeliest token first, as long as tokens a second are expected to rise; then as many are taken back as it takes
    that no row is slowed down beyond KEPT.
    """
    lengths, gains = [0] * len(wishes), [0.0] * len(wishes)
    chosen: list[int] = []
    num_fair = 0
    tokens = beside.num_rows + beside.num_forced
    expected = float(tokens)
    slowest = costs.of(tokens) / KEPT
    for number, gain in _likeliest(wishes, room):
        if not _pays(gain, tokens, expected, costs, first=not chosen):
            break
        chosen.append(number)
        lengths[number] += 1
        gains[number] += gain
        tokens, expected = tokens + 1, expected + gain
        least_gain = 0.0 if beside.num_bare else min(gains)
        if costs.of(tokens) + START <= slowest * (1 + least_gain):
            num_fair = len(chosen)
    for number in chosen[num_fair:]:
        lengths[number] -= 1
    return lengths


def _likeliest(wishes: Sequence[Wish], room: int) -> Iterator[tuple[int, float]]:
    """(whose, how many it is expected to yield) of tokens that may be drafted, up to `room`: the likeliest first, and
    none before the one that it follows."""
    heap = [(-wish.chance, number, 1) for number, wish in enumerate(wishes)]
    heapify(heap)
    while heap and room > 0:
        gain, number, length = heappop(heap)
        yield number, -gain
        room -= 1
        if length < wishes[number].most:
            heappush(heap, (gain * wishes[number].chance, number, length + 1))


def _pays(gain: float, tokens: int, expected: float, costs: Costs, *, first: bool) -> bool:
    """Whether `gain` more tokens beside `expected` ones are worth another token of a step of `tokens`."""
    now = costs.of(tokens)
    price = costs.of(tokens + 1) - now + (START if first else 0.0)
    return gain * now >= MARGIN * price * expected


def choose_model_lengths(
    wishes: Sequence[Wish], beside: Beside, room: int, costs: Costs, drafter: ModelCosts
) -> list[int]:
    """As `choose_lengths`, of tokens that a draft model proposes: its i-th pass gives a token to every row that has i
    or more. O(room * wishes).

    A pass costs much for its first row and little for others, so tokens are not judged one by one: of all the numbers
    of tokens that might be taken, likeliest first, the one with the most tokens a second is.
    """
    lengths, gains = [0] * len(wishes), [0.0] * len(wishes)
    chosen: list[int] = []
    passes: list[int] = []  # rows of each
    num_best = 0
    tokens = beside.num_rows + beside.num_forced
    plain, plain_took = float(tokens), costs.of(tokens)
    expected, drafting, best_pace = plain, 0.0, plain / plain_took
    for number, gain in _likeliest(wishes, room):
        if lengths[number] == len(passes):
            passes.append(0)
        drafting -= drafter.of(passes[lengths[number]])
        passes[lengths[number]] += 1
        drafting += drafter.of(passes[lengths[number]])
        chosen.append(number)
        lengths[number] += 1
        gains[number] += gain
        tokens, expected = tokens + 1, expected + gain
        took = costs.of(tokens) + START + drafting
        pays = (expected - plain) * plain_took >= MARGIN * (took - plain_took) * plain
        least_gain = 0.0 if beside.num_bare else min(gains)
        if pays and expected / took > best_pace and took <= plain_took / KEPT * (1 + least_gain):
            num_best, best_pace = len(chosen), expected / took
    for number in chosen[num_best:]:
        lengths[number] -= 1
    return lengths


def reading_pays(num_unread: int, num_left: int, chance: float, drafter: ModelCosts) -> bool:
    """Whether a request whose answer has up to `num_left` tokens left is worth the draft model's reading of what it has
    not read: with one drafted token a row, so many rows are saved."""
    return num_left * chance / (1 + chance) >= MARGIN * drafter.of(num_unread)
