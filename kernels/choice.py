"""Owns the choice of the kernels that a model runs on, made once per engine, and its reason.
Never fails unless kernels were asked for by name: there is always something that runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kernels.collectives.group import Group
from kernels.cpu.native.library import NoLibraryError, load_library, origin
from kernels.cpu.native.program import why_unfit
from kernels.eager.forward import Adapters, EagerPass
from kernels.eager.ops import TORCH, Ops
from kernels.flash.attention import flash_ops
from kernels.flash.packages import Capability, Import, find_flash
from kernels.forward import ForwardPass
from kernels.kv_format import SCALE_BYTES
from kernels.rows.step import StateRows

NATIVE, TORCH_CPU, REFERENCE = "native", "torch_cpu", "reference"
KERNELS = (NATIVE, TORCH_CPU, REFERENCE)
FLASH, TRITON, TORCH_ATTENTION = "vllm_flash_attn", "triton", "torch"
ATTENTION = (FLASH, TRITON, TORCH_ATTENTION)
TRITON_TABLE = "kernels.triton.ops"


MATRIX_UNITS = (
    "",
    ", bfloat16 by its matrix unit (AMX)",
    ", though not for its matrix unit (AMX), which Linux does not grant",
)
"""Indexed by what the library reports: compiled for none, in use, refused."""


@dataclass(frozen=True, slots=True)
class Choice:
    name: str
    """One of KERNELS or ATTENTION."""
    reason: str


def choose_kernels(asked: str = "auto", *, head_dim: int, block_size: int, inputs: Iterable[int] = ()) -> Choice:
    """Choose kernels for a CPU. `auto` takes the fastest that can run this model on this machine. Compiles the native
    library if needed.

    inputs: the input sizes of the model's matrices.

    Raises:
        ValueError: the kernels asked for by name do not exist, or cannot run here. The message says why.
    """
    if asked not in ("auto", *KERNELS):
        raise ValueError(f"Unknown kernels {asked!r}; there are: auto, {', '.join(KERNELS)}.")
    if asked in (TORCH_CPU, REFERENCE):
        return Choice(asked, f"{asked}: asked for by name")
    problem = why_unfit(head_dim, block_size, inputs) or _why_no_library()
    if problem is None:
        unit = MATRIX_UNITS[load_library().matrix_unit()]
        return Choice(NATIVE, f"native: {origin()}{unit}, one call a step")
    if asked == NATIVE:
        raise ValueError(f"The native kernels cannot run: {problem}.")
    return Choice(TORCH_CPU, f"torch_cpu: torch's own operators; not native: {problem}")


def _why_no_library() -> str | None:
    try:
        load_library()
    except NoLibraryError as error:
        return str(error)
    return None


def choose_attention(
    asked: str = "auto",
    *,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    capability: Capability | None,
    narrow_cache: bool = False,
    batch_invariant: bool = False,
    load: Import = importlib.import_module,
) -> tuple[Choice, Ops]:
    """Choose attention for a GPU of `capability` (None: another device, such as the CPU), and the table that it is
    part of.

    `auto` takes the first of ATTENTION that can run; if K and V are in 8 bits (narrow_cache), the first that reads
    those, where there is any; if sums must have one order (batch_invariant), Triton where it can be imported. Norms,
    rotation and activation are Triton's where it can be imported, else torch's.

    Raises:
        ValueError: the attention asked for by name does not exist, or cannot run here. The message says why.
    """
    if asked not in ("auto", *ATTENTION):
        raise ValueError(f"Unknown attention {asked!r}; there are: auto, {', '.join(ATTENTION)}.")
    triton = _triton_table(capability, load, batch_invariant)
    others = TORCH if isinstance(triton, str) else triton
    refused: list[str] = []
    without_triton = (
        [f"all else by torch, not triton: {triton}"] if capability is not None and isinstance(triton, str) else []
    )
    for name in ATTENTION if asked == "auto" else (asked,):
        found: Ops | str
        if name == FLASH:
            found = _flash_table(others, dtype, head_dim, block_size, capability, load)
        elif name == TRITON:
            found = triton
        else:
            found = replace(
                others,
                name=TORCH.name,
                prepare_attention=TORCH.prepare_attention,
                attention=TORCH.attention,
                capturable=False,
                narrow_cache=False,
            )
        if batch_invariant and name == FLASH and asked == "auto":
            found = "the order of its sums depends on the batch"
        if narrow_cache and not isinstance(found, str):
            found = _why_not_narrow(name, asked, found, head_dim, block_size) or found
        if not isinstance(found, str):
            rest = without_triton if f"not {TRITON}: {triton}" not in refused else []
            return Choice(name, "; ".join([_reason(name, asked, found), *refused, *rest])), found
        refused.append(f"not {name}: {found}")
    raise ValueError(f"{asked} attention cannot run: {refused[0].removeprefix(f'not {asked}: ')}.")


def _reason(name: str, asked: str, table: Ops) -> str:
    if asked != "auto":
        return f"{name}: asked for by name"
    return {
        FLASH: f"{name}: FlashAttention by the package {table.name}",
        TRITON: f"{name}: kernels compiled for this GPU at their first use",
        TORCH_ATTENTION: f"{name}: the reference, row after row",
    }[name]


def _why_not_narrow(name: str, asked: str, table: Ops, head_dim: int, block_size: int) -> str | None:
    """Return why this attention is not for K and V in 8 bits. What was asked for by name, and the last, are left to
    whoever compares the table with the config."""
    if not table.narrow_cache:
        return "it does not read a KV cache in 8 bits" if asked == "auto" and name != ATTENTION[-1] else None
    if block_size * head_dim % SCALE_BYTES:
        return f"a KV cache in 8 bits needs block_size times head_dim to be a multiple of {SCALE_BYTES}"
    return None


def _flash_table(
    others: Ops, dtype: torch.dtype, head_dim: int, block_size: int, capability: Capability | None, load: Import
) -> Ops | str:
    if capability is None:
        return "there is no GPU"
    found = find_flash(dtype=dtype, head_dim=head_dim, block_size=block_size, capability=capability, load=load)
    return found if isinstance(found, str) else flash_ops(*found, others)


def _triton_table(capability: Capability | None, load: Import, batch_invariant: bool) -> Ops | str:
    if capability is None:
        return "there is no GPU"
    if capability < (8, 0):
        return f"compute capability is {capability[0]}.{capability[1]}, and it needs 8.0"
    try:
        tables = load(TRITON_TABLE)
        table: Ops = tables.BATCH_INVARIANT if batch_invariant else tables.TRITON
    except ImportError as error:
        return f"{TRITON_TABLE} does not import ({error})"
    return table


class PassMaker(Protocol):
    """Makes the forward pass of one step. The arguments are those of EagerPass, without `rewind`: a pass on a device
    records no states to roll back."""

    def __call__(
        self,
        *,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: object,
        states: StateRows | None = None,
        adapters: Adapters | None = None,
        group: Group | None = None,
    ) -> ForwardPass: ...


def forward_pass(table: Ops) -> PassMaker:
    """Return what runs a model's operations on `table`, step by step."""
    if not table.fused_rotation:
        return partial(EagerPass, table)
    fused: Callable[..., ForwardPass] = importlib.import_module("kernels.triton.forward").TritonPass
    return partial(fused, table)
