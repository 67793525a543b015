"""Owns which FlashAttention packages can be used, and what each accepts.
Never imports one when imported itself, and never falls back: what cannot run is refused with the reason."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Capability = tuple[int, int]
"""A GPU's compute capability: (9, 0) is Hopper."""

Import = Callable[[str], Any]

MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Package:
    """What one package accepts: vllm-flash-attn 2.6.2, flash-attn 2.6 to 2.8, FlashAttention-3's own interface."""

    module: str
    block_multiple: int
    """What block_size must be a multiple of."""
    capabilities: tuple[int, ...]
    """Major compute capabilities; the package has code for no others."""
    whole: bool = False
    """One call takes mixed rows of a paged cache (FlashAttention-3)."""

    @property
    def calls(self) -> Mapping[str, tuple[str, ...]]:
        """The functions that are called, each with its keyword arguments."""
        return WHOLE_CALLS if self.whole else BY_KIND_CALLS


BY_KIND_CALLS = {
    "flash_attn_with_kvcache": ("cache_seqlens", "block_table", "softmax_scale", "causal", "window_size"),
    "flash_attn_varlen_func": (
        *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *("softmax_scale", "causal", "window_size", "block_table"),
    ),
}
WHOLE_CALLS = {
    "flash_attn_with_kvcache": (
        *("cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q"),
        *("softmax_scale", "causal", "window_size"),
    )
}

PACKAGES = (
    Package("flash_attn_interface", 1, (9,), whole=True),
    Package("vllm_flash_attn", 16, (8, 9)),
    Package("flash_attn", 256, (8, 9)),
)
"""In the order in which they are tried. FlashAttention-3 is written for Hopper, where the others run Ampere's code."""


def find_flash(
    *,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    capability: Capability,
    load: Import = importlib.import_module,
) -> tuple[Package, Any] | str:
    """Return the first package that imports and accepts this model, with its module; or why there is none."""
    if dtype not in DTYPES:
        return f"dtype is {str(dtype).removeprefix('torch.')}, and FlashAttention takes float16 and bfloat16"
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return f"head_dim is {head_dim}, and FlashAttention takes multiples of 8 up to {MAX_HEAD_DIM}"
    refused: list[str] = []
    for package in PACKAGES:
        if capability[0] not in package.capabilities:
            refused.append(f"{package.module} has no code for compute capability {capability[0]}.{capability[1]}")
        elif block_size % package.block_multiple:
            refused.append(f"{package.module} takes multiples of {package.block_multiple} as block_size")
        else:
            try:
                module = load(package.module)
            except (ImportError, OSError) as error:  # OSError: built for another torch or CUDA
                refused.append(f"{package.module} does not import ({error})")
                continue
            problem = _why_unlike(package, module)
            if problem is None:
                return package, module
            refused.append(problem)
    return "; ".join(refused)


def _why_unlike(package: Package, module: Any) -> str | None:
    """Return what the installed release lacks of the calls that are made. Not all packages report a version."""
    version = getattr(module, "__version__", None)
    name = package.module if version is None else f"{package.module} {version}"
    for call, given in package.calls.items():
        function = getattr(module, call, None)
        if function is None:
            return f"{name} has no {call}"
        lacking = [argument for argument in given if argument not in inspect.signature(function).parameters]
        if lacking:
            return f"{name} has a {call} without {', '.join(lacking)}"
    return None
