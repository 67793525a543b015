"""Owns the tables of operators that an eager forward pass runs on, by name.
Never computes anything itself, and never chooses: `kernels.choice` does."""

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
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    write_cache: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    prepare_attention: Callable[[PagedRows, int, torch.dtype], Any]
    """(rows, kv_heads, dtype of the queries), once per step; what it returns goes to `attention`."""
    attention: Callable[[Tensor, Tensor, Tensor, Any, float], Tensor]


REFERENCE = Ops(
    name="reference",
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    rope=reference.rope,
    silu_and_mul=reference.silu_and_mul,
    write_cache=reference.write_cache,
    prepare_attention=reference.prepare_attention,
    attention=reference.attention,
)

TORCH_CPU = Ops(
    name="torch_cpu",
    rms_norm=cpu_elementwise.rms_norm,
    add_rms_norm=cpu_elementwise.add_rms_norm,
    rope=cpu_elementwise.rope,
    silu_and_mul=cpu_elementwise.silu_and_mul,
    write_cache=cpu_elementwise.write_cache,
    prepare_attention=cpu_attention.prepare_attention,
    attention=cpu_attention.attention,
)

TABLES = {table.name: table for table in (REFERENCE, TORCH_CPU)}
