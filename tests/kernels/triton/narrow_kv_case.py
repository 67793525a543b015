"""Owns the comparisons of a GPU's 8-bit KV cache with float64 and with the CPU's, on any device.
Never reads the cache by the kernels' own arithmetic: blocks are taken apart by torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels import reference
from kernels.cpu.narrow_cache import narrow
from kernels.eager.forward import EagerPass
from kernels.eager.ops import REFERENCE
from kernels.forward import HeadShape
from kernels.kv_format import LARGEST, SCALE_BYTES, stored_size
from tests.kernels.rows import Case, seeded_generator
from tests.kernels.triton.cases import EPS, attend, close, windowed

from kernels.triton.attention.plan import SPLIT, AttentionPlan  # isort: skip
from kernels.triton.elementwise.cache import write_cache  # isort: skip
from kernels.triton.elementwise.rotate import rotate_and_cache  # isort: skip

NARROW = list(LARGEST)
UNSEEN = 10**9
"""A window that every row fits in."""


def untouched(shape: Sequence[int], kept_in: torch.dtype, device: str = "cpu") -> Tensor:
    """Return K or V in which every scale and every e4m3 is NaN. shape: [num_blocks, block_size, kv_heads, head_dim]"""
    *places, head_dim = shape
    cache = torch.full((*places, stored_size(head_dim, kept_in)), -1, dtype=torch.int8)
    return cache.view(kept_in).to(device)


def parts_of(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Take K or V apart: (numbers [num_blocks, block_size, kv_heads, head_dim] int8, scales [num_blocks, block_size,
    kv_heads] float32)."""
    num_blocks, block_size, kv_heads, size = cache.shape
    places = block_size * kv_heads
    numbers, scales = cache.cpu().view(torch.int8).flatten(1).split((places * (size - SCALE_BYTES), 4 * places), dim=1)
    by_head = scales.contiguous().view(torch.float32).view(num_blocks, kv_heads, block_size)
    return numbers.reshape(num_blocks, block_size, kv_heads, -1), by_head.transpose(1, 2)


def widened(cache: Tensor) -> Tensor:
    """Return what K or V stands for. # [num_blocks, block_size, kv_heads, head_dim] float64"""
    numbers, scales = parts_of(cache)
    return numbers.contiguous().view(cache.dtype).double() * scales.double().unsqueeze(-1)


def stored(case: Case, kept_in: torch.dtype, device: str) -> Case:
    """Return the case with caches in 8 bits, rounded by the CPU. Slots that no row owns have scales of NaN."""
    caches = []
    for whole in (case.k_cache, case.v_cache):
        *places, head_dim = whole.shape
        by_slot = narrow(whole, kept_in)
        scales = by_slot[..., head_dim:].contiguous().view(torch.float32).squeeze(-1).transpose(1, 2)
        parts = by_slot[..., :head_dim].flatten(1), scales.contiguous().flatten(1).view(torch.int8)
        cache = torch.cat(parts, dim=1).view(*places, stored_size(head_dim, kept_in)).view(kept_in)
        assert torch.equal(widened(cache).isnan(), whole.isnan())
        caches.append(cache.to(device))
    return replace(case, k_cache=caches[0], v_cache=caches[1])


def check_attention(
    case: Case,
    kept_in: torch.dtype,
    device: str,
    *,
    window: int | None = None,
    split: int = SPLIT,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """Compare attention over 8 bits with float64 over the same numbers; return its result."""
    narrowed = stored(case, kept_in, device)
    wide = replace(case, k_cache=widened(narrowed.k_cache), v_cache=widened(narrowed.v_cache))
    want = windowed(wide, UNSEEN if window is None else window)
    assert not want.isnan().any()
    got = attend(narrowed, device, window=window, split=split, plan=plan)
    close(got[: len(want)], want)
    return got


def difficult(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Draw vectors of many magnitudes, the largest and the smallest of `dtype` among them, zeros, and vectors whose
    values lie halfway between two numbers of 8 bits. shape: [num_tokens, kv_heads, head_dim], at least eight tokens"""
    generator = seeded_generator()
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    info = torch.finfo(dtype)
    x[0], x[1] = x[0] / x[0].abs().max() * info.max, x[1] * info.tiny
    x[2] = 0
    x[3, :, 1:] = 0
    x[4] = info.tiny / 4
    halves = torch.randint(-127, 127, shape[1:], generator=generator) + 0.5
    x[5] = halves.where(torch.arange(shape[2]) > 0, 127.0)
    steps = torch.randint(0, 128, shape[1:], generator=generator).to(torch.uint8)
    steps = steps.clamp(max=125)  # 126 is the largest, and 127 is NaN
    low, high = (bits.view(torch.float8_e4m3fn).double() for bits in (steps, steps + 1))
    x[6] = ((low + high) / 2).where(torch.arange(shape[2]) > 0, 448.0)
    x[7] = x[7] * 2.0 ** torch.randint(-10, 10, shape[1:], generator=generator)
    found = x.to(dtype)
    # Triton's interpreter widens subnormal numbers of bfloat16 wrongly.
    return found if dtype != torch.bfloat16 else found.where(found.abs() >= info.tiny, 0.0)


def check_write(kept_in: torch.dtype, dtype: torch.dtype, device: str, *, block_size: int = 4) -> None:
    """Check that numbers and scales are the CPU's to the bit, where two tokens are padding and V is a view."""
    k = difficult((11, 3, 80), dtype)
    v = difficult((11, 5, 80), dtype)[:, 1:4]
    slots = torch.randperm(40, generator=seeded_generator())[:11]
    slots[[8, 10]] = -1
    shape = (-(-40 // block_size) + 1, block_size, 3, 80)
    guarded = [untouched(shape, kept_in, device) for _ in "kv"]
    write_cache(k.to(device), v.to(device), *(whole[1:] for whole in guarded), slots.to(device))
    for whole, x in zip(guarded, (k, v), strict=True):
        numbers, scales = (part.flatten(0, 1) for part in parts_of(whole))  # [slots, kv_heads, ...]
        want = narrow(x, kept_in)
        written = torch.zeros(len(numbers), dtype=torch.bool)
        written[slots[slots >= 0] + block_size] = True
        places = slots[slots >= 0] + block_size
        assert torch.equal(numbers[places], want[slots >= 0][..., :-SCALE_BYTES])
        of_cpu = want[slots >= 0][..., -SCALE_BYTES:].contiguous().view(torch.float32).squeeze(-1)
        assert torch.equal(scales[places], of_cpu)
        assert (numbers[~written] == -1).all(), "another slot was written"
        assert scales[~written].isnan().all(), "another slot's scale was written"


def check_rotation(
    heads: HeadShape, kept_in: torch.dtype, device: str, *, tokens: int = 6, normed: bool = False
) -> None:
    """Check the fused launch in float32 against the reference's operations, rounded in float64; a token is padding."""
    generator = seeded_generator()
    qkv = torch.randn(tokens, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim, generator=generator)
    angles = torch.rand(tokens, heads.head_dim // 2, generator=generator) * 100
    norms = tuple(torch.rand(heads.head_dim, generator=generator) for _ in "qk") if normed else None
    slots = torch.randperm(tokens * 3, generator=generator)[:tokens]
    slots[1] = -1
    real = slots >= 0
    shape = (-(-tokens * 3 // 4), 4, heads.num_kv_heads, heads.head_dim)
    wide = [torch.full(shape, torch.nan) for _ in "kv"]
    run = EagerPass(REFERENCE, token_ids=slots[real], positions=slots[real], slots=slots[real], plan=None)
    rotations = (angles[real].cos(), angles[real].sin())
    want = run.rotate_and_cache(qkv[real], rotations, heads, (wide[0], wide[1]), norms, EPS)  # type: ignore[arg-type]

    guarded = [untouched((shape[0] + 1, *shape[1:]), kept_in, device) for _ in "kv"]
    cache = [whole[1:] for whole in guarded]
    there = None if norms is None else (norms[0].to(device), norms[1].to(device))
    turned = (angles.cos().to(device), angles.sin().to(device))
    got = rotate_and_cache(qkv.to(device), turned, heads, (cache[0], cache[1]), slots.to(device), there, EPS)
    close(got[real.to(device)], want)
    for whole, expected in zip(guarded, wide, strict=True):
        assert parts_of(whole)[1][0].isnan().all(), "padding was written"
        near(widened(whole)[1:], reference.round_token(expected, kept_in))


def near(got: Tensor, want: Tensor) -> None:
    """Check that numbers of 8 bits are the same but for one or two in a thousand that lie halfway between two others,
    where float32 and float64 round differently. NaN: a slot that nobody wrote."""
    owned = ~want.isnan()
    assert got[~owned].isnan().all(), "another slot was written"
    apart = (got[owned] - want[owned]).abs() > 1e-5 * want[owned].abs()
    assert apart.double().mean() < 5e-3
