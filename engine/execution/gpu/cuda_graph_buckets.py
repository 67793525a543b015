"""Owns the sizes in which steps are captured, and the choice of the size that a step is padded to.
Never captures anything: the choice can be made without a GPU."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from engine.config import ConfigError

Scope = Literal["none", "decode", "all"]

SMALLEST_MIXED_TOKENS = 64
LAUNCHES_HIDDEN = 2.0
"""How many times as long as the host takes to launch a step must the device work on it, so that the launches are hidden
behind the work. With 1 the host would have no time left to plan, choose tokens and answer others between two steps."""
FEW_ROWS = 8
"""Mixed steps of up to so many rows have buckets of their own: attention has to look at the block table of each row of
padding."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The size of a captured step. Any step of no more tokens and no more rows can run in it."""

    num_tokens: int
    num_rows: int
    decode: bool
    """All rows are decode rows of one token."""
    adapters: bool = False
    """Rows may have LoRA adapters. Steps in which none has one run in a capture without these launches."""

    @property
    def name(self) -> str:
        """The name in metrics."""
        size = f"decode {self.num_rows}" if self.decode else f"mixed {self.num_tokens}x{self.num_rows}"
        return f"{size} with adapters" if self.adapters else size


@dataclass(frozen=True, slots=True)
class LaunchCost:
    """The cost of one eager step; see engine.execution.gpu.launch_cost."""

    launch_ms: float
    """From the host's first call to its last one's return."""
    device_ms: float
    """On the device's clock."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Buckets:
    """All sizes of one engine, each list ascending. There is a bucket for each pair of `mixed_tokens` and
    `mixed_rows`."""

    decode_rows: tuple[int, ...] = ()
    mixed_tokens: tuple[int, ...] = ()
    mixed_rows: tuple[int, ...] = ()
    adapters: bool = False
    """Each size is captured twice: for steps with LoRA adapters, and without."""

    def without_hidden_launches(self, cost: LaunchCost) -> Buckets:
        """Leave out the mixed sizes at which the device works so long that launching a step without a graph costs
        nothing, while padding costs the device up to a quarter. The smallest size stays.

            tokens   64 ........ most ................................. max_num_batched_tokens
                     | captured  | eager: tokens x the device's time for each >= LAUNCHES_HIDDEN x the host's for all |
        """
        if cost.device_ms <= 0.0:
            return self
        most = LAUNCHES_HIDDEN * cost.launch_ms * cost.num_tokens / cost.device_ms
        kept = tuple(size for size in self.mixed_tokens if size <= most)
        return replace(self, mixed_tokens=kept or self.mixed_tokens[:1])

    @property
    def all(self) -> tuple[Bucket, ...]:
        """Largest first: the memory that the largest capture takes serves the smaller ones."""
        decode = [Bucket(rows, rows, True) for rows in self.decode_rows]
        mixed = [Bucket(tokens, rows, False) for tokens in self.mixed_tokens for rows in self.mixed_rows]
        sizes = sorted(decode + mixed, key=lambda bucket: (-bucket.num_tokens, -bucket.num_rows))
        kinds = (True, False) if self.adapters else (False,)
        return tuple(replace(bucket, adapters=adapters) for bucket in sizes for adapters in kinds)

    @property
    def text(self) -> str:
        """Says what is captured, in few words."""
        if not self.all:
            return "nothing is captured"
        decode, tokens, rows = (
            (", ".join(map(str, one))) for one in (self.decode_rows, self.mixed_tokens, self.mixed_rows)
        )
        mixed = f" and mixed {tokens} x {rows}" if tokens else ""
        return f"decode {decode}{mixed} {'is captured with adapters, too' if self.adapters else 'is captured'}"

    def find(self, *, num_tokens: int, num_rows: int, decode: bool, adapters: bool = False) -> Bucket | str:
        """The smallest bucket that holds the step, or why there is none. decode: all rows are decode rows of one
        token. adapters: some row has a LoRA adapter."""
        if decode:
            rows = _at_least(self.decode_rows, num_rows)
            if rows is None:
                return f"more than {_last(self.decode_rows)} decode rows"
            return Bucket(rows, rows, True, adapters)
        if not self.mixed_tokens:
            return "prefill rows or drafts"
        tokens, rows = _at_least(self.mixed_tokens, num_tokens), _at_least(self.mixed_rows, num_rows)
        if tokens is None:
            return f"more than {_last(self.mixed_tokens)} tokens"
        return Bucket(tokens, rows, False, adapters) if rows is not None else f"more than {_last(self.mixed_rows)} rows"


def plan_buckets(
    scope: Scope,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    decode_rows: Sequence[int] | None = None,
    mixed_tokens: Sequence[int] | None = None,
    mixed_rows: Sequence[int] | None = None,
    adapters: bool = False,
) -> Buckets:
    """Buckets for every step that an engine of these limits can plan. Lists that are None are chosen here. adapters:
    whether rows may have LoRA adapters.

    Raises:
        ConfigError: the given sizes are not ascending, leave steps without a bucket, or are larger than any step.
    """
    if scope == "none":
        return Buckets()
    decode = _checked("cuda_graph_decode_rows", decode_rows, _row_sizes(max_num_seqs), "max_num_seqs", max_num_seqs)
    if scope == "decode":
        return Buckets(decode, adapters=adapters)
    tokens = _checked(
        "cuda_graph_mixed_tokens",
        mixed_tokens,
        _token_sizes(max_num_batched_tokens),
        "max_num_batched_tokens",
        max_num_batched_tokens,
    )
    few = (FEW_ROWS, max_num_seqs) if max_num_seqs > FEW_ROWS else (max_num_seqs,)
    rows = _checked("cuda_graph_mixed_rows", mixed_rows, few, "max_num_seqs", max_num_seqs)
    return Buckets(decode, tokens, rows, adapters)


def _row_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, then multiples of 8; beyond 256 each size is a sixteenth larger than the last. So padding stays a small
    share."""
    sizes = [1, 2, 4]
    while sizes[-1] < most:
        sizes.append((sizes[-1] // 8 + 1) * 8 if sizes[-1] < 256 else sizes[-1] + sizes[-1] // 16 // 8 * 8)
    return (*(size for size in sizes if size < most), most)


def _token_sizes(most: int) -> tuple[int, ...]:
    """Multiples of 64 up to 512, then four sizes per doubling: padding is less than 64 tokens, or less than a quarter
    of a step. 8,192 tokens need 24 sizes, and each doubling four more."""
    sizes, size = [], SMALLEST_MIXED_TOKENS
    while size < most:
        sizes.append(size)
        size += max(SMALLEST_MIXED_TOKENS, (1 << size.bit_length() - 1) // 4)
    return (*sizes, most)


def _checked(name: str, asked: Sequence[int] | None, chosen: tuple[int, ...], limit: str, most: int) -> tuple[int, ...]:
    if asked is None:
        return chosen
    if not asked or asked[0] < 1 or any(one >= other for one, other in pairwise(asked)):
        raise ConfigError(f"{name} is {list(asked)}: expected positive sizes, each larger than the one before.")
    if asked[-1] < most:
        raise ConfigError(
            f"{name} ends at {asked[-1]}, but {limit} is {most}: larger steps would have no graph. Add {most}."
        )
    if len(asked) > 1 and asked[-2] >= most:
        raise ConfigError(f"{name} has {asked[-1]}, but {limit} is {most}: no step is larger than {asked[-2]}.")
    return tuple(asked)


def _at_least(sizes: Sequence[int], size: int) -> int | None:
    index = bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None


def _last(sizes: Sequence[int]) -> int:
    return sizes[-1] if sizes else 0
