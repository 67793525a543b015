"""Owns what a step costs: the work of its rows, and a cost model that is fitted to measured steps.
Never reads a clock and never runs a step: it is told what steps took."""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from engine.protocol import num_pairs
from engine.step import UNPADDED, PaddedSizes, RowKind, StepPlan

FIRST_KNOT = 8
"""The curve of tokens has no knot between 1 and this: so few tokens wait for the weights to be read."""
TILES = (1, 4, 8, 16, 32)
"""Numbers of tokens that kernels may multiply at a time."""
FIT_SWEEPS = 20_000
"""Maximum number of passes over the factors in a fit, each of some microseconds a factor."""
FIT_PRECISION = 1e-9
"""A fit ends when no factor changes by more, in steps of average length."""


class StepWork(NamedTuple):
    """What a step computes, as far as its duration depends on it. It does not name any request."""

    tokens: int
    """Tokens of all rows."""
    samples: int = 0
    """Positions after which a token is chosen, each of which needs logits over the vocabulary."""
    keys: int = 0
    """Sum over rows of the positions whose keys and values are read, once for all tokens of a row."""
    attended: int = 0
    """Sum over tokens of the positions that they attend to."""
    encoded: int = 0
    """Tokens of inputs, such as images, that are encoded before the rows."""
    mixed: int = 0
    """Tokens of chunks, and drafts. A step with any is padded to other sizes than one of decode rows of one token."""

    def plus(self, other: StepWork) -> StepWork:
        return StepWork(*map(operator.add, self, other))

    def minus(self, other: StepWork) -> StepWork:
        return StepWork(*map(operator.sub, self, other))


def decode_work(num_rows: int, context: int) -> StepWork:
    """Return the work of `num_rows` decode rows of one token after `context` others."""
    return StepWork(num_rows, num_rows, num_rows * (context + 1), num_rows * (context + 1))


def chunk_work(start: int, count: int, *, last: bool) -> StepWork:
    """Return the work of a prompt's chunk of `count` tokens after `start` others; `last` if it completes the prompt."""
    return StepWork(count, int(last), start + count, num_pairs(start, start + count), mixed=count)


def work_of(plan: StepPlan) -> StepWork:
    """Return the work of a planned step."""
    tokens = samples = keys = attended = mixed = 0
    for row in plan.rows:
        count = len(row.token_ids)
        tokens += count
        keys += row.start + count
        attended += num_pairs(row.start, row.start + count)
        if row.kind is RowKind.DECODE:  # with drafts, a token is chosen after each
            samples += count
            mixed += count - 1
        else:
            samples += row.sampling is not None
            mixed += count
    encoded = sum(math.prod(job.grid) for job in plan.encodes)
    return StepWork(tokens, samples, keys, attended, encoded, mixed)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """How long a step takes.

        seconds = curve(tiles * tile) + sample_s * samples + key_s * keys + attended_s * attended + encoded_s * encoded
        tiles = ceil(padded tokens / tile)

    `curve` is linear between its knots and goes on from the last two: few tokens wait for the weights to be read, many
    for the arithmetic, and where one becomes the other is the machine's affair. It never falls, and no factor is
    negative, so that more work never takes less time. Kernels multiply so many tokens at a time as a tile has, and a
    part of a tile takes as long as a whole one.
    """

    knots: tuple[int, ...]
    """Numbers of tokens, ascending, at least two."""
    curve_s: tuple[float, ...]
    """Seconds at each knot."""
    sample_s: float = 0.0
    key_s: float = 0.0
    attended_s: float = 0.0
    encoded_s: float = 0.0
    tile: int = 1
    """Number of tokens."""
    sizes: PaddedSizes = UNPADDED
    """What steps are padded to."""

    def seconds(self, work: StepWork) -> float:
        """Return the predicted duration."""
        return self._curve(self.sizes.padded(work.tokens, mixed=work.mixed > 0)) + self.rest_s(work)

    def tokens_within(self, left_s: float, beside: int, start: int, most: int) -> int:
        """Return how many tokens of a prompt, after `start` others, fit into a step beside `beside` tokens: 0 to
        `most`. `left_s` is the step's time without what its rows cost besides their number of tokens. A bisection, so
        that it agrees with `seconds` to the token."""
        curve, padded = self._curve, self.sizes.padded

        def fits(count: int) -> bool:
            return curve(padded(beside + count, mixed=True)) + self.reading_s(start, count) <= left_s

        if fits(most):
            return most
        least = 0
        while most - least > 1:
            middle = (least + most) // 2
            if fits(middle):
                least = middle
            else:
                most = middle
        return least

    def reading_s(self, start: int, count: int) -> float:
        """Return what the tokens of a chunk cost besides their number: what they read and attend to."""
        return self.key_s * (start + count) + self.attended_s * num_pairs(start, start + count)

    def padding_beside(self, tokens: int) -> int:
        """Return how many tokens of a prompt take no longer than one beside so many others, but for what they read:
        those that a step of these and one more is padded to. At least 1."""
        return self.sizes.padded(tokens + 1, mixed=True) - tokens

    def token_s(self, tokens: int) -> float:
        """Return what one token more takes in a step of so many: the slope of the curve there."""
        right = min(max(bisect_left(self.knots, tokens), 1), len(self.knots) - 1)
        return (self.curve_s[right] - self.curve_s[right - 1]) / (self.knots[right] - self.knots[right - 1])

    def _curve(self, tokens: int) -> float:
        tokens = _rounded(tokens, self.tile)
        right = min(max(bisect_left(self.knots, tokens), 1), len(self.knots) - 1)
        x0, x1 = self.knots[right - 1], self.knots[right]
        y0, y1 = self.curve_s[right - 1], self.curve_s[right]
        return max(y0 + (y1 - y0) * (tokens - x0) / (x1 - x0), 0.0)

    def rest_s(self, work: StepWork) -> float:
        """Return what a step's work costs besides its number of tokens."""
        return (
            self.sample_s * work.samples
            + self.key_s * work.keys
            + self.attended_s * work.attended
            + self.encoded_s * work.encoded
        )

    def document(self) -> dict[str, Any]:
        """Return the costs as JSON's types; `read_costs` is its counterpart."""
        return asdict(self)


def read_costs(document: Mapping[str, Any]) -> StepCosts:
    """Read what `StepCosts.document` returned.

    Raises:
        ValueError: it is something else, or its factors are no costs.
    """
    try:
        knots = tuple(int(one) for one in document["knots"])
        curve = tuple(float(one) for one in document["curve_s"])
        rest = {name: float(document[name]) for name in _FACTORS}
        tile = int(document["tile"])
        sizes = PaddedSizes(*(tuple(int(one) for one in found) for found in document.get("sizes", ())))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"these are no step costs: {type(error).__name__}: {error}") from error
    rising = all(x0 < x1 for x0, x1 in pairwise(knots)) and all(y0 <= y1 for y0, y1 in pairwise(curve))
    rising &= all(x0 < x1 for found in sizes for x0, x1 in pairwise((0, *found)))
    sound = all(math.isfinite(one) and one >= 0 for one in (*curve, *rest.values()))
    if len(knots) < 2 or len(knots) != len(curve) or not rising or not sound or tile < 1:
        raise ValueError(
            "these are no step costs: expected rising knots with rising times, rising sizes, and no negative factor"
        )
    return StepCosts(knots, curve, **rest, tile=tile, sizes=sizes)


_FACTORS = ("sample_s", "key_s", "attended_s", "encoded_s")
_AMOUNTS = ("samples", "keys", "attended", "encoded")
"""What each factor is multiplied by."""


class Measured(NamedTuple):
    work: StepWork
    seconds: float


def fit_costs(steps: Sequence[Measured], knots: Sequence[int], sizes: PaddedSizes = UNPADDED) -> StepCosts:
    """Fit costs to measured steps, padded to `sizes`, by least squares over relative errors, with no factor below 0.

    A knot beyond which no step was measured has no effect and is left out, and so is one before which no step was
    since the last: padding leaves out sizes. A kind of work that no step has costs nothing. The tile is that of TILES
    with the least errors.

    Raises:
        ValueError: there are too few steps for so many knots, or one took no time.
    """
    found = sorted({sizes.padded(step.work.tokens, mixed=step.work.mixed > 0) for step in steps})
    most = found[-1] if found else 0
    kept = (*(knot for knot in knots if knot < most), most)
    if any(sizes):
        kept = tuple(dict.fromkeys(found[bisect_left(found, knot)] for knot in kept))
    if len(kept) < 2 or len(found) < len(kept):
        raise ValueError(f"{len(steps)} steps of up to {most} tokens are too few for a curve with {len(kept)} knots")
    if min(step.seconds for step in steps) <= 0:
        raise ValueError("a step took no time")
    fits = [_fit(steps, kept, tile, sizes) for tile in TILES if tile <= most]
    return min(fits, key=lambda costs: sum(error**2 for error in relative_errors(costs, steps)))


def _fit(steps: Sequence[Measured], kept: tuple[int, ...], tile: int, sizes: PaddedSizes) -> StepCosts:
    """Solve for the time at the first knot, what each next knot adds, and the factors. None is negative."""
    tokens = [_rounded(sizes.padded(step.work.tokens, mixed=step.work.mixed > 0), tile) for step in steps]
    rows = [
        [1.0, *_shares(kept, count), *(float(getattr(step.work, name)) for name in _AMOUNTS)]
        for count, step in zip(tokens, steps, strict=True)
    ]
    found = _non_negative_least_squares(
        [[x / step.seconds for x in row] for row, step in zip(rows, steps, strict=True)]
    )
    first, added, factors = found[0], found[1 : len(kept)], found[len(kept) :]
    curve = [first]
    for more in added:
        curve.append(curve[-1] + more)
    return StepCosts(kept, tuple(curve), **dict(zip(_FACTORS, factors, strict=True)), tile=tile, sizes=sizes)


def _rounded(tokens: int, tile: int) -> int:
    return -(-tokens // tile) * tile


def _shares(knots: Sequence[int], tokens: int) -> list[float]:
    """Return how much of the way from each knot to the next the tokens have gone: 0 to 1."""
    return [min(max((tokens - x0) / (x1 - x0), 0.0), 1.0) for x0, x1 in pairwise(knots)]


def _non_negative_least_squares(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return x >= 0 that minimizes the sum over rows of (row · x - 1)², by descent along one coordinate at a time."""
    size = len(rows[0])
    scale = [math.sqrt(sum(row[i] ** 2 for row in rows)) or 1.0 for i in range(size)]
    scaled = [[value / by for value, by in zip(row, scale, strict=True)] for row in rows]
    gram = [[sum(row[i] * row[j] for row in scaled) for j in range(size)] for i in range(size)]
    aim = [sum(row[i] for row in scaled) for i in range(size)]
    x = [0.0] * size
    for _ in range(FIT_SWEEPS):
        largest = 0.0
        for i in range(size):
            if not gram[i][i]:
                continue  # no step has this kind of work
            slope = aim[i] - sum(map(float.__mul__, gram[i], x))
            moved = max(x[i] + slope / gram[i][i], 0.0)
            largest = max(largest, abs(moved - x[i]))
            x[i] = moved
        if largest < FIT_PRECISION:
            break
    return [value / by for value, by in zip(x, scale, strict=True)]


def knots_up_to(most: int) -> tuple[int, ...]:
    """Return knots for steps of up to `most` tokens: 1, 8, 16, 32 and so on, and `most`."""
    knots = [1, FIRST_KNOT]
    while knots[-1] * 2 < most:
        knots.append(knots[-1] * 2)
    return (*(knot for knot in knots if knot < most), most)


def relative_errors(costs: StepCosts, steps: Iterable[Measured]) -> list[float]:
    """Return predicted / measured - 1 for each step."""
    return [costs.seconds(step.work) / step.seconds - 1 for step in steps]
