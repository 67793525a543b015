"""Owns attention by FlashAttention: which of its packages is there, what it takes, and how rows are handed over.
Never imports one at import, and never falls back: what cannot run is refused with the reason."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.eager.ops import Ops
from kernels.reference import PagedRows
from kernels.rows.device import DeviceRows, on_device

Capability = tuple[int, int]
"""Of a GPU: (9, 0) is Hopper."""

Import = Callable[[str], Any]

MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Package:
    """What one package takes. vllm-flash-attn 2.6.2, flash-attn 2.6 to 2.8, FlashAttention-3's own interface."""

    module: str
    block_multiple: int
    """Of block_size."""
    capabilities: tuple[int, ...]
    """Major numbers; the packages have code for no others."""
    whole: bool = False
    """One call takes mixed rows of a paged cache (FlashAttention-3)."""

    @property
    def calls(self) -> Mapping[str, tuple[str, ...]]:
        """The functions that are called, and what each is given by name."""
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
    Package("vllm_flash_attn", 16, (8, 9)),
    Package("flash_attn_interface", 1, (9,), whole=True),
    Package("flash_attn", 256, (8, 9)),
)


def find_flash(
    *,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    capability: Capability,
    load: Import = importlib.import_module,
) -> tuple[Package, Any] | str:
    """The first package that imports and takes this model, with its module; or why there is none."""
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
    """What the installed release lacks of the calls that are made; not all packages have a version to ask for."""
    version = getattr(module, "__version__", None)
    name = package.module if version is None else f"{package.module} {version}"
    for call, given in package.calls.items():
        function = getattr(module, call, None)
        if function is None:
            return f"{name} has no {call}"
        lacking = [each for each in given if each not in inspect.signature(function).parameters]
        if lacking:
            return f"{name} has a {call} without {', '.join(lacking)}"
    return None


def flash_ops(package: Package, module: Any, others: Ops) -> Ops:
    """Attention by `module`, and everything else by `others`."""
    prepare, run = (_there, _whole) if package.whole else (_kinds, _by_kind)
    return replace(
        others,
        name=package.module,
        prepare_attention=prepare,
        attention=partial(run, module),
        capturable=True,
    )


def _there(rows: PagedRows, kv_heads: int, dtype: torch.dtype) -> DeviceRows:
    return rows if isinstance(rows, DeviceRows) else on_device(rows, rows.block_tables.device)


@dataclass(frozen=True, slots=True)
class _Kinds:
    """Rows that may be decodes stand in both calls. In that of the other kind a row sees one key, its first: how many
    there are of each, nobody knows where a captured step is made."""

    rows: DeviceRows
    is_decode: Tensor
    """[num_decode] bool, of the rows that may be"""
    lengths: Tensor
    """[num_decode] int32, of decodes"""
    first_keys: Tensor
    """[num_rows + 1] int32, of the others"""


def _kinds(rows: PagedRows, kv_heads: int, dtype: torch.dtype) -> _Kinds:
    there = _there(rows, kv_heads, dtype)
    is_decode = torch.arange(len(there.lengths), device=there.lengths.device) < there.decodes
    lengths = there.lengths.where(is_decode, 1)[: there.num_decode]
    first_keys = F.pad(there.lengths.masked_fill(is_decode, 1).cumsum(0, dtype=torch.int32), (1, 0))
    return _Kinds(there, is_decode[: there.num_decode], lengths, first_keys)


def _limits(window: int | None) -> dict[str, tuple[int, int]]:
    """A query's own token is not counted, and there is nothing after it."""
    return {} if window is None else {"window_size": (window - 1, 0)}


def _by_kind(
    module: Any,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kinds: _Kinds,
    scale: float,
    *,
    window: int | None = None,
) -> Tensor:
    """FlashAttention-2: decode rows by the call that splits long contexts, the others by the varlen call."""
    rows, options = kinds.rows, {"softmax_scale": scale, "causal": True, **_limits(window)}
    decoded: Tensor | None = None
    if num_decode := rows.num_decode:
        decoded = module.flash_attn_with_kvcache(
            q[:num_decode].unsqueeze(1),  # [num_decode, 1, heads, head_dim]
            k_cache,
            v_cache,
            cache_seqlens=kinds.lengths,
            block_table=rows.tables[:num_decode],
            **options,
        ).squeeze(1)
    if decoded is not None and not rows.num_chunks:
        return decoded
    out: Tensor = module.flash_attn_varlen_func(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=rows.first_tokens,
        cu_seqlens_k=kinds.first_keys,
        # With 1 it takes it that every row has a query, and padding has none.
        max_seqlen_q=rows.max_count if len(q) == len(rows.lengths) else max(rows.max_count, 2),
        max_seqlen_k=rows.max_length,
        block_table=rows.tables,
        **options,
    )
    if decoded is not None:
        out[:num_decode] = decoded.where(kinds.is_decode[:, None, None], out[:num_decode])
    return out


def _whole(
    module: Any,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: DeviceRows,
    scale: float,
    *,
    window: int | None = None,
) -> Tensor:
    """FlashAttention-3: decode rows and chunks are rows of one call."""
    out: Tensor = module.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=rows.lengths,
        page_table=rows.tables,
        cu_seqlens_q=rows.first_tokens,
        max_seqlen_q=rows.max_count,
        softmax_scale=scale,
        causal=True,
        **_limits(window),
    )
    return out
