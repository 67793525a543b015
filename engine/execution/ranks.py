"""Owns what an executor needs of the other ranks that compute its model: their state for metrics, and their end.
Never starts one: engine.build does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from engine.step import ExecutorFatalError, RankStatus
from kernels.collectives.group import RankLostError


class Ranks(RankStatus, Protocol):
    """The ranks that compute a model, as the leader has them."""

    def end(self) -> None:
        """End the others."""


class GivesUp(Protocol):
    """The part of kernels.collectives.group.Group by which a rank ends all."""

    def give_up(self, reason: str) -> None: ...


LOST = "The model's ranks cannot go on"
_FAILED = "The leader failed within a step of several ranks"


@contextmanager
def all_or_none(
    group: GivesUp,
    fatal: type[ExecutorFatalError] = ExecutorFatalError,
    *,
    lost: str = LOST,
    failed: str = _FAILED,
    is_mine_alone: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Let what fails in a step be the end of all ranks: none waits for one that has failed, and no later step runs.

    lost, failed: what happened if another rank is lost, and if this one fails, before the reason. is_mine_alone: asked
    after a failure: whether no other rank knows of the step, so that this rank can go on.

    Raises:
        fatal: in place of any error, unless it is this rank's alone.
    """
    try:
        yield
    except RankLostError as error:
        raise fatal(f"{lost}: {error}") from error
    except fatal as error:
        group.give_up(str(error))
        raise
    except Exception as error:
        if is_mine_alone():
            raise
        group.give_up(f"{type(error).__name__}: {error}")
        raise fatal(f"{failed}: {error}") from error
