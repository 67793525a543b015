"""Owns the contract of the ranks that compute one model together: sums, gathered columns, messages, exchanged rows.
Never moves a byte: a group of shared memory, gloo or NCCL does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

LEADER = 0
"""The rank that plans, samples and answers."""

MAX_RANKS = 64
"""The same as in kernels/cpu/native/ranks.h."""


class RankLostError(Exception):
    """A rank has died, has given up or does not answer, so that this group can compute nothing more. The message names
    the rank."""


def check_ranks(rank: int, size: int, timeout_s: float) -> None:
    """Raise ValueError if a group cannot be of these."""
    if not 2 <= size <= MAX_RANKS or not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {size}: expected 2 to {MAX_RANKS} ranks, numbered from 0")
    if timeout_s <= 0:
        raise ValueError(f"timeout_s is {timeout_s}: expected a positive number of seconds")


def check_exchange(rows: Tensor, counts: Sequence[int], size: int) -> None:
    """Check what a rank brings to an exchange."""
    assert rows.is_contiguous()
    assert rows.device.type == "cpu"
    assert len(counts) == size
    assert sum(counts) == len(rows)


def no_reason() -> str | None:
    """Say that there is no reason to wait no longer."""
    return None


def stop_if(why_not: Callable[[], str | None]) -> None:
    """Raise RankLostError if there is a reason."""
    if (why := why_not()) is not None:
        raise RankLostError(why)


class Group(Protocol):
    """One rank's end. All ranks make the same calls in the same order, each rank one call at a time.

    Every call raises RankLostError, on every rank that is left, once a rank is lost: within a second if its process has
    died or it gave up, and after the group's timeout if it does not arrive. All name the same rank. A rank that has
    closed its group is lost, too, but what was sent before is still received.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int:
        """How many ranks there are; more than one."""

    @property
    def late_s(self) -> Sequence[float]:
        """Seconds that the others have waited for each rank so far: the last to arrive is charged with what it came
        after the one before it. Empty if the group does not measure it. Any thread."""

    def join(self, why_not: Callable[[], str | None] = no_reason) -> None:
        """Join, and wait until all ranks have. A rank may have weights to load before, which takes its time; a pass may
        be recorded before, too. No other call but `close` comes before. why_not: is asked now and then, and says why to
        wait no longer; None: there is no reason.

        Raises:
            RankLostError: a rank that had joined has died, or why_not had a reason.
        """

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place, and return x: [...] contiguous, float32 or bfloat16, of the same size on all.

        The ranks' numbers are added in float32 in the order of ranks, and the sum is rounded once. So each rank gets
        the same bits, and a number's sum does not depend on what else is in x. On GPUs the order is NCCL's: each rank
        gets the same bits there, too, but a sum may depend on what else is in x; see kernels.collectives.nccl.
        """

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor | None:
        """Lay the ranks' columns beside each other: x is [rows, sizes[rank]] float32. The others do not wait until the
        leader has them. # the leader: [rows, sum(sizes)]; the others: None"""

    def send(self, message: bytes) -> None:
        """Tell all other ranks. The leader alone. It does not wait for them, unless they have not received the message
        before the last one."""

    def receive(self) -> bytes:
        """Return the leader's next message, waiting for as long as all ranks live. All ranks but the leader."""

    def check(self) -> None:
        """Wait for nothing, and raise RankLostError if a rank is known to be lost: so an idle leader learns it. Any
        thread."""

    def give_up(self, reason: str) -> None:
        """Let all ranks' next or current calls raise RankLostError with this rank and reason. Any thread."""

    def close(self) -> None:
        """Give back what the group holds. A call that follows raises RankLostError. One that another thread is in may
        be waited for: let `give_up` end it."""


class Exchanging(Protocol):
    """What ranks need that have the experts of a mixture between them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def give_up(self, reason: str) -> None:
        """See Group."""

    def exchange(self, rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Give each rank its rows, and return those that all have for this one, with how many are from each rank.

        rows: [sum(counts), width] contiguous, of any type, which is the same on all ranks, as the width is; those for
        rank 0 come first. counts: [size] how many are for each rank, this one too. # [sum(received), width], rank 0's
        first; received: [size]

        The rows are moved as they are. A rank without any takes part like all others: an exchange is over for nobody
        before all have come to it. A rank that has come, and then cannot take its rows, gives up.
        """


def rows_of_all(ranks: Exchanging, row: Tensor) -> Tensor:
    """Return what each rank says: all give all the same row. row: [width] of any type. # [size, width]

    Raises:
        RankLostError: see Group.
    """
    found, _ = ranks.exchange(row.repeat(ranks.size, 1), [1] * ranks.size)
    return found


TAKE_ROWS = "take the rows that others have for it"
"""What a rank could not do that fails within an exchange; see given_up."""


@contextmanager
def given_up(ranks: Exchanging, what: str) -> Iterator[None]:
    """Let an error be the end of all ranks: what others have begun, or believe complete, cannot be repeated. what: this
    rank could not do.

    Raises:
        RankLostError: in place of any error.
    """
    try:
        yield
    except RankLostError:
        raise
    except Exception as error:
        reason = f"it could not {what}: {type(error).__name__}: {error}"
        ranks.give_up(reason)
        raise RankLostError(f"Rank {ranks.rank} gave up: {reason}.") from error


class ExchangeGroup(Group, Exchanging, Protocol):
    """A group that exchanges rows, too."""
