"""Owns the comparison of native FP8 numbers with torch's, bit by bit: those of the cache, and those of weights.
Never draws every number at random: all 256 of them are looked at, and all ties between two."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cpu.narrow_cache import narrow, widen
from kernels.cpu.native.grouped import FP8, Grouped
from kernels.cpu.native.program import Program, Team, pack_grouped
from kernels.forward import HeadShape
from kernels.kv_format import LARGEST, stored_size
from tests.kernels.cpu.native.test_grouped import Whole
from tests.kernels.cpu.native.test_program import BLOCK, DTYPES, record, tokens_only
from tests.kernels.rows import seeded_generator
from tests.support.compiler import needs_compiler

pytestmark = needs_compiler

LANES = 16


def every_number() -> Tensor:
    """Return all 256 numbers, among them two NaN. # [256] float8_e4m3fn"""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_a_weight_is_widened_as_torch_does_and_nan_stays_nan(team: Team, dtype: torch.dtype) -> None:
    generator = seeded_generator()
    numbers = every_number()[torch.stack([torch.randperm(256, generator=generator) for _ in range(40)])]
    for form in FP8.values():
        whole = Whole(Grouped(form=form, values=numbers, scales=torch.ones(40, 256 // form.run)))
        table = pack_grouped([whole]).weight
        got = record(team, dtype, lambda program, table=table: program.embed(table))(tokens_only(40))
        assert got.isnan().sum() == 2 * 40
        assert torch.equal(got.nan_to_num(7.0), numbers.to(dtype).nan_to_num(7.0))


def written(team: Team, x: Tensor, kept_in: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Write tokens to a poisoned cache, as keys that are not turned and as values, and attend to them one token at a
    time. x: [tokens, kv_heads, head_dim]. # keys, values, and what each token sees of its own values"""
    tokens, kv_heads, head_dim = x.shape
    heads = HeadShape(num_heads=kv_heads, num_kv_heads=kv_heads, head_dim=head_dim)
    shape = (-(-tokens // BLOCK), BLOCK, kv_heads, stored_size(head_dim, kept_in))
    keys, values = (torch.full(shape, -1, dtype=torch.int8).view(kept_in) for _ in "kv")
    table = torch.cat([torch.zeros_like(x), x, x], 1).flatten(1)

    def model(program: Program) -> object:
        rotations = program.rotations(torch.zeros(head_dim // 2), 1.0)
        qkv = program.embed(table)
        q = program.rotate_and_cache(qkv, rotations, heads, (keys, values), None, 0.0)
        return program.attention(q, heads, (keys, values), 1.0, window=1)

    seen = record(team, x.dtype, model)(tokens_only(tokens))  # type: ignore[arg-type]
    pair = 1 if x.dtype == torch.float32 else 2
    by_group = [
        each.view(torch.int8).view(len(keys), kv_heads, BLOCK // LANES, -1).split(head_dim * LANES, 3)
        for each in (keys, values)
    ]
    (own_keys, key_scales), (own_values, value_scales) = by_group
    # Keys: [.., head_dim / pair, pair, 16]. Values: [.., 16 / pair, head_dim / 16, pair, 16].
    own_keys = own_keys.unflatten(3, (head_dim, LANES)).transpose(3, 4)
    own_values = own_values.unflatten(3, (LANES // pair, head_dim // LANES, pair, LANES))
    own_values = own_values.transpose(4, 5).flatten(5).flatten(3, 4)
    found = [
        torch.cat([own, scales.unflatten(3, (LANES, 4))], 4).permute(0, 2, 3, 1, 4).flatten(0, 2)[:tokens]
        for own, scales in ((own_keys, key_scales), (own_values, value_scales))
    ]
    return found[0], found[1], seen.view(x.shape)


@pytest.mark.parametrize("kept_in", LARGEST)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 48, 128])
def test_a_cache_has_the_bytes_that_the_definition_gives(
    team: Team, head_dim: int, dtype: torch.dtype, kept_in: torch.dtype
) -> None:
    x = torch.randn(37, 3, head_dim, generator=seeded_generator())
    x *= torch.logspace(-8, 8, 37)[:, None, None] * 10 ** -(torch.rand(x.shape, generator=seeded_generator()) ** 4)
    x[5] = 0.0
    x = x.to(dtype)
    keys, values, _ = written(team, x, kept_in)
    assert torch.equal(keys, narrow(x, kept_in))
    assert torch.equal(values, narrow(x, kept_in))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_and_every_tie_is_rounded_and_read_as_torch_does(team: Team, dtype: torch.dtype) -> None:
    """The largest of a head is 448, so that its scale is one: what is read is a number of FP8 itself."""
    finite = every_number().float().unique()
    finite = finite[finite.isfinite()]
    ties = (finite[1:] + finite[:-1]) / 2
    x = torch.cat([finite, ties, ties * 1.001, ties * 0.999])
    x = torch.nn.functional.pad(x, (0, -len(x) % 63)).view(-1, 1, 63)
    x = torch.cat([torch.full((len(x), 1, 1), 448.0), x], 2).to(dtype)
    keys, values, seen = written(team, x, torch.float8_e4m3fn)
    assert torch.equal(keys, narrow(x, torch.float8_e4m3fn))
    assert torch.equal(values, keys)
    assert torch.equal(seen, widen(narrow(x, torch.float8_e4m3fn), torch.float8_e4m3fn, dtype))
