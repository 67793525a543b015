"""Owns random matrices whose weights have 8 or 4 bits, in the layout that kernels.forward.Linear describes.
Never uses the code that packs or reads them."""

from __future__ import annotations

import torch

from kernels.forward import Linear
from tests.kernels.rows import seeded_generator


def narrow_case(
    kind: str,
    outputs: int,
    inputs: int,
    *,
    group: int | None = None,
    zeros: bool = False,
    bias: torch.dtype | None = None,
) -> Linear:
    """Return a random matrix, and a bias if its type is given. kind: int8, fp8 or int4."""
    generator = seeded_generator()
    groups = -(-inputs // (group or inputs))
    if kind == "int4":
        weight = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, generator=generator)
        low, high, unit = 0, 16, 8.0
    elif kind == "int8":
        weight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, generator=generator)
        low, high, unit = -128, 128, 128.0
    else:
        wide = torch.randn(outputs, inputs, generator=generator) * torch.logspace(-6, 2, inputs, base=2)
        weight, low, high, unit = (wide * 100).clamp(-448, 448).to(torch.float8_e4m3fn), 0, 1, 448.0
    scales = (torch.rand(outputs, groups, generator=generator) + 0.5) / unit
    points = torch.randint(low, high, (outputs, groups), dtype=torch.int8, generator=generator) if zeros else None
    return Linear(
        weight,
        None if bias is None else torch.randn(outputs, generator=generator).to(bias),
        scales.flatten() if group is None else scales,
        points,
        group,
    )
