"""Owns the seam between a model on a device and the other ranks that compute it: what is told, joined and shared.
Never knows how ranks talk: engine.parallel does. Without others, nothing is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.execution.device import Download
from engine.step import StepPlan
from kernels.collectives.group import Group


class Way(StrEnum):
    """How a step runs. All ranks go the same way, because each queues the same sums."""

    COMPUTE = "compute"
    """Logits alone; nobody chooses a token."""
    CHOOSE = "choose"
    """The leader chooses tokens from joined logits, outside of captures."""
    BEGIN = "begin"
    """A decode step whose choice is captured."""
    GO_ON = "go on"
    """The same, from the inputs and tokens of the one before."""


class Pending(NamedTuple):
    """An input token of the step that an earlier step sampled and that was not read yet: `tokens[number]`, on the
    device."""

    place: int
    """The token's index within the step."""
    tokens: Tensor
    number: int


class DeviceRanks(Protocol):
    """This rank's end of what all ranks do in a step, each on its own device."""

    @property
    def group(self) -> Group | None:
        """What sums over the ranks; None: there are no others."""

    @property
    def chooses(self) -> bool:
        """Whether this rank chooses tokens."""

    def tell(self, way: Way, plan: StepPlan, newest: Mapping[str, int], pending: Sequence[Pending]) -> None:
        """Tell the others how the step that comes runs. Any failure of this rank from now on is one of all."""

    def tell_scored(self, index: Sequence[int]) -> None:
        """Tell the others of which tokens of the last step, one of Way.COMPUTE, the logits are joined next."""

    def joined(self, logits: Tensor) -> Tensor:
        """Join the ranks' columns. A rank that does not choose gets its own back. # [n, vocab]"""

    def broadcast(self, tokens: Tensor) -> None:
        """Give all ranks the chosen tokens, in place, without waiting."""

    def keep(self, tokens: Tensor) -> None:
        """Note the tokens of a step, which a later plan may name as pending. They are no longer written to."""

    def together(self, *, advances: bool = False) -> AbstractContextManager[None]:
        """Return a context for one step: what fails in it once the others were told is fatal. advances: recurrent
        states move in it, also before the others are told; then any failure is.

        Raises:
            ExecutorFatalError: in the body's place.
        """

    def wait(self, download: Download) -> Sequence[Tensor]:
        """Wait for a step's results.

        Raises:
            ExecutorFatalError: a rank is lost, and the results may be wrong.
        """


class Alone:
    """The DeviceRanks of a model on one device."""

    group: Group | None = None
    chooses = True

    def tell(self, way: Way, plan: StepPlan, newest: Mapping[str, int], pending: Sequence[Pending]) -> None: ...

    def tell_scored(self, index: Sequence[int]) -> None: ...

    def joined(self, logits: Tensor) -> Tensor:
        return logits

    def broadcast(self, tokens: Tensor) -> None: ...

    def keep(self, tokens: Tensor) -> None: ...

    @contextmanager
    def together(self, *, advances: bool = False) -> Iterator[None]:
        yield

    def wait(self, download: Download) -> Sequence[Tensor]:
        return download.wait()


ALONE = Alone()
