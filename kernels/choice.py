"""Owns the choice of the kernels that a model runs on, made once for each engine, with the reason.
Never fails where kernels were not asked for by name: there is always something that runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kernels.cpu.native.library import NoLibraryError, load_library
from kernels.cpu.native.program import why_unfit

NATIVE, TORCH_CPU, REFERENCE = "native", "torch_cpu", "reference"
KERNELS = (NATIVE, TORCH_CPU, REFERENCE)


@dataclass(frozen=True, slots=True)
class Choice:
    name: str
    reason: str
    batch_invariant: bool
    """A row has the same bits whatever rows are beside it, and however its prompt was cut."""


def choose_kernels(asked: str = "auto", *, head_dim: int, block_size: int, inputs: Iterable[int] = ()) -> Choice:
    """`auto` takes the fastest that this machine and this model have. Compiles the native library if it has to.
    `inputs`: of the model's matrices.

    Raises:
        ValueError: the kernels that were asked for by name do not exist, or cannot run here; it says why.
    """
    if asked not in ("auto", *KERNELS):
        raise ValueError(f"Unknown kernels {asked!r}; there are: auto, {', '.join(KERNELS)}.")
    if asked in (TORCH_CPU, REFERENCE):
        return Choice(asked, f"{asked}: asked for by name", batch_invariant=False)
    problem = why_unfit(head_dim, block_size, inputs) or _why_no_library()
    if problem is None:
        return Choice(NATIVE, "native: C++ compiled for this processor, one call a step", batch_invariant=True)
    if asked == NATIVE:
        raise ValueError(f"The native kernels cannot run: {problem}.")
    return Choice(TORCH_CPU, f"torch_cpu: torch's own operators; not native: {problem}", batch_invariant=False)


def _why_no_library() -> str | None:
    try:
        load_library()
    except NoLibraryError as error:
        return str(error)
    return None
