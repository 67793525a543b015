"""Owns the table of operations that a model runs on, chosen once per engine, with the reason.
Never computes anything itself, and never changes after it was chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import reference
from kernels.cpu import attention as cpu_attention
from kernels.cpu import elementwise as cpu_elementwise
from kernels.reference import PagedRows


@dataclass(frozen=True, slots=True)
class Ops:
    """The operations of one backend; `kernels.reference` gives each one's meaning and shapes."""

    name: str
    reason: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    write_cache: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    prepare_attention: Callable[[PagedRows, int, torch.dtype], Any]
    """(rows, kv_heads, dtype of the queries), once per step; what it returns goes to `attention`."""
    attention: Callable[[Tensor, Tensor, Tensor, Any, float], Tensor]


def _reference(reason: str) -> Ops:
    return Ops(
        name="reference",
        reason=reason,
        rms_norm=reference.rms_norm,
        add_rms_norm=reference.add_rms_norm,
        rope=reference.rope,
        silu_and_mul=reference.silu_and_mul,
        write_cache=reference.write_cache,
        prepare_attention=reference.prepare_attention,
        attention=reference.attention,
    )


def _torch_cpu(reason: str) -> Ops:
    return Ops(
        name="torch_cpu",
        reason=reason,
        rms_norm=cpu_elementwise.rms_norm,
        add_rms_norm=cpu_elementwise.add_rms_norm,
        rope=cpu_elementwise.rope,
        silu_and_mul=cpu_elementwise.silu_and_mul,
        write_cache=cpu_elementwise.write_cache,
        prepare_attention=cpu_attention.prepare_attention,
        attention=cpu_attention.attention,
    )


_BACKENDS: dict[str, Callable[[str], Ops]] = {"reference": _reference, "torch_cpu": _torch_cpu}


def select_ops(backend: str = "auto") -> Ops:
    """The operations to run on. `auto` takes the fastest backend that this machine has.

    Raises:
        ValueError: no backend has that name; the message lists those that exist.
    """
    if backend == "auto":
        return _torch_cpu("torch_cpu: batched torch operators; the fastest backend for a CPU in this build")
    if backend not in _BACKENDS:
        raise ValueError(f"Unknown backend {backend!r}; there are: {', '.join(_BACKENDS)}.")
    return _BACKENDS[backend](f"{backend}: asked for by name")
