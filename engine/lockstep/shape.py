"""Owns the shape of a step: all that the exchanges of experts in it depend on, as a few integers.
Never holds what only one rank needs to know: a shape says how much is exchanged, and of nobody."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class StepShape(NamedTuple):
    """What ranks that share experts must agree on, because it decides which exchanges a step makes, and how large.

    Whoever samples, scores or pools, and which images are encoded, is no part of it: every rank has the LM head and the
    encoder for itself. All fields are reduced by the maximum.
    """

    forwards: int = 0
    """Forward passes of the model. 0: there is no step, and all other fields are 0. More than 1 only with
    `chunk_owner: engine`."""
    tokens: int = 0
    """Tokens of the largest of them; never more than max_num_batched_tokens."""
    mixed: int = 0
    """1 if a step has any row but decode rows of one token: such steps are padded to other sizes (PaddedSizes)."""
    draft_passes: int = 0
    """Passes of the draft model before each forward pass."""
    draft_tokens: int = 0
    """Tokens of the first of these; the others have no more."""

    def covers(self, other: StepShape) -> bool:
        """Whether a step of this shape has room for one of the other shape."""
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))


NO_STEP = StepShape()


def joint_shape(shapes: Iterable[StepShape]) -> StepShape:
    """Return the smallest shape that covers all of these."""
    return StepShape(*map(max, zip(*shapes, strict=True)))
