"""Owns blocks of K and V for tests of 8 bits: vectors of every size, and those that have no scale.
Never narrows one."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.narrow_blocks import BlockForm
from kernels.kv_format import LARGEST
from tests.kernels.rows import seeded_generator

DTYPES = [torch.float32, torch.bfloat16]
NARROW = [*LARGEST]


def vectors(count: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return vectors of very different sizes, some of whose elements are tiny beside others, and which begin with
    `special`. # [count, head_dim]"""
    generator = seeded_generator()
    x = torch.randn(count, head_dim, generator=generator) * torch.logspace(-30, 30, count)[:, None]
    x *= 10 ** -(4 * torch.rand(x.shape, generator=generator) ** 4)
    x = x.to(dtype)
    own = special(head_dim, dtype)[:count]
    x[: len(own)] = own
    return x


def special(head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return vectors that are zeros, denormal, about as small as a scale may be, as large as a number may be, or no
    numbers at all. # [vectors, head_dim]"""
    most, x = torch.finfo(dtype).max, torch.linspace(-1, 1, head_dim)
    made = [x * scale for scale in (0.0, 1e-42, 1e-38, 2.0**-110 * 127, 2.0**-110 * 126, 2.0**-102, 1e30)]
    made += [torch.full((head_dim,), value) for value in (-0.0, most, -most, torch.inf, -torch.inf, torch.nan)]
    one_of_them = [(0, torch.nan), (head_dim - 1, torch.inf), (head_dim // 2, -torch.inf), (1, most)]
    for place, value in one_of_them:
        made.append(x.clone())
        made[-1][place] = value
    return torch.stack(made).to(dtype)


def block_of(form: BlockForm) -> Tensor:
    """Return a block whose tensors all differ. # [tensors, tokens, heads, head_dim]"""
    x = vectors(form.tensors * form.vectors, form.head_dim, form.dtype)
    mixed = x[torch.randperm(len(x), generator=seeded_generator())]
    return mixed.view(form.tensors, form.tokens, form.heads, form.head_dim)
