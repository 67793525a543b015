"""Owns the comparison of the CPU's paged attention with the reference, in edge cases.
Never compares with stored numbers: every input is random."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.eager.ops import TORCH_CPU
from kernels.rows.step import PagedRows
from tests.kernels.rows import Case, paged_case

BLOCK = 16
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def attend(case: Case, rows: PagedRows, q: torch.Tensor, window: int | None = None) -> torch.Tensor:
    plan = TORCH_CPU.prepare_attention(rows, case.k_cache.shape[2], q.dtype)
    return TORCH_CPU.attention(q, case.k_cache, case.v_cache, plan, case.scale, window=window)


def check(case: Case, window: int | None = None) -> None:
    got = attend(case, case.rows, case.q, window)
    want = reference.attention(case.q, case.k_cache, case.v_cache, case.rows, case.scale, window=window)
    tolerance = TOLERANCE[case.q.dtype]
    assert not want.isnan().any()
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 255, 256, 257, 700])
def test_a_decode_row_of_any_length_matches_the_reference(length: int, dtype: torch.dtype) -> None:
    check(paged_case([length - 1], [], dtype=dtype))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("context", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 300])
@pytest.mark.parametrize("count", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 64])
def test_a_chunk_of_any_length_after_any_context_matches_the_reference(
    context: int, count: int, dtype: torch.dtype
) -> None:
    check(paged_case([], [(context, count)], dtype=dtype))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_every_gqa_ratio_matches_the_reference(group: int, kv_heads: int, dtype: torch.dtype) -> None:
    case = paged_case([5, BLOCK], [(0, 9), (33, 2)], group=group, kv_heads=kv_heads, dtype=dtype)
    check(case)
    check(case)  # would show if the first pass had written into a mask


def test_a_chunk_too_large_for_its_scores_is_done_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.cpu.attention.MOST_SCORES", 6 * 60 * 7)
    check(paged_case([], [(40, 20)], dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_mixed_rows_match_the_reference(dtype: torch.dtype) -> None:
    """Decode rows in three length buckets, chunks with and without context, and a chunk of one token."""
    check(paged_case([0, 15, 16, 300, 255, 256, 1030], [(0, 40), (17, 1), (0, 1), (48, 33)], dtype=dtype))


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_every_block_size_matches_the_reference(block_size: int) -> None:
    check(paged_case([0, 70], [(5, 11)], block_size=block_size))


def test_equally_long_decode_rows_match_the_reference() -> None:
    """Without padding there is no mask: a synchronised benchmark takes this path."""
    check(paged_case([20] * 5, []))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [1, BLOCK - 1, BLOCK, 100, 256, 1100])
def test_a_window_matches_the_reference(window: int, dtype: torch.dtype) -> None:
    """Decode rows are shorter and longer than the window; chunks begin before, within and after it."""
    check(paged_case([0, 15, 16, 99, 100, 300, 1030], [(0, 40), (17, 1), (0, 1), (48, 133)], dtype=dtype), window)
    check(paged_case([40] * 3, [], dtype=dtype), window)


def test_layers_of_several_windows_share_a_plan() -> None:
    case = paged_case([30, 41], [(20, 9)])
    plan = TORCH_CPU.prepare_attention(case.rows, 2, case.q.dtype)
    for window in (None, 7, None, 20, 7):
        got = TORCH_CPU.attention(case.q, case.k_cache, case.v_cache, plan, case.scale, window=window)
        torch.testing.assert_close(got, attend(case, case.rows, case.q, window), atol=0, rtol=0)


@pytest.mark.parametrize("window", [1, 5, 36, 37, 50])
def test_the_reference_of_a_window_equals_dense_attention_in_a_band(window: int) -> None:
    case = paged_case([], [(0, 37)], group=1)
    slots = case.rows.slots(0)
    k = case.k_cache.flatten(0, 1)[slots].transpose(0, 1)  # [heads, 37, head_dim]
    v = case.v_cache.flatten(0, 1)[slots].transpose(0, 1)
    band = torch.ones(37, 37).tril().triu(1 - window).bool()
    scores = (case.q.transpose(0, 1) @ k.transpose(1, 2) * case.scale).masked_fill(~band, -torch.inf)
    want = (scores.softmax(-1) @ v).transpose(0, 1)
    got = reference.attention(case.q, case.k_cache, case.v_cache, case.rows, case.scale, window=window)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_neighbours_do_not_change_a_row_in_float32() -> None:
    case = paged_case([30, 41, 700], [(20, 9)])
    rows = case.rows
    together = attend(case, rows, case.q)
    alone = PagedRows(1, rows.contexts[1:2], (1,), rows.block_tables[1:2], rows.block_size)
    single = attend(case, alone, case.q[1:2])
    torch.testing.assert_close(together[1:2], single, atol=2e-6, rtol=2e-6)


def test_the_reference_equals_dense_attention_on_one_sequence() -> None:
    """Checks the reference itself against the formula without blocks."""
    case = paged_case([], [(0, 37)], group=1)
    slots = case.rows.slots(0)
    k = case.k_cache.flatten(0, 1)[slots].transpose(0, 1)  # [heads, 37, head_dim]
    v = case.v_cache.flatten(0, 1)[slots].transpose(0, 1)
    scores = case.q.transpose(0, 1) @ k.transpose(1, 2) * case.scale
    scores += torch.full((37, 37), -torch.inf).triu(1)
    want = (scores.softmax(-1) @ v).transpose(0, 1)
    got = reference.attention(case.q, case.k_cache, case.v_cache, case.rows, case.scale)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
