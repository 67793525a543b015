"""Owns the tests of how a step's rows reach FlashAttention: a stand-in for each package checks its calls.
Never runs FlashAttention itself: tests/gpu does."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels import reference
from kernels.eager.ops import TORCH
from kernels.flash.attention import flash_ops
from kernels.flash.packages import PACKAGES, find_flash
from kernels.rows.device import on_device
from kernels.rows.step import PagedRows
from tests.kernels.rows import Case, paged_case
from tests.support.fake_flash import FakeFlash, FakeFlash3

BLOCK = 16
FAKES: dict[str, type[FakeFlash]] = {
    "vllm_flash_attn": FakeFlash,
    "flash_attn_interface": FakeFlash3,
    "flash_attn": FakeFlash,
}
STEPS: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "mixed": ([5, 40, 0], [(0, 17), (33, 2)]),
    "decode only": ([0, BLOCK - 2, BLOCK - 1, BLOCK, 100], []),
    "one-token last chunk": ([], [(BLOCK, 1)]),
    "one-token last chunk beside a decode": ([7], [(20, 1)]),
    "one-token chunks only": ([], [(4, 1), (BLOCK - 1, 1)]),
    "chunks only": ([], [(0, BLOCK + 1), (2 * BLOCK - 1, BLOCK)]),
}


def package(name: str) -> Any:
    return next(known for known in PACKAGES if known.module == name)


def attend(name: str, fake: FakeFlash, case: Case, rows: PagedRows, window: int | None = None) -> torch.Tensor:
    ops = flash_ops(package(name), fake, TORCH)
    plan = ops.prepare_attention(rows, case.k_cache.shape[2], case.q.dtype)
    return ops.attention(case.q, case.k_cache, case.v_cache, plan, case.scale, window=window)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", FAKES)
def test_every_kind_of_step_is_handed_over_so_that_the_reference_comes_back(name: str, step: str) -> None:
    decodes, chunks = STEPS[step]
    block_size = 256 if name == "flash_attn" else BLOCK
    case = paged_case(decodes, chunks, block_size=block_size, dtype=torch.bfloat16)
    want = reference.attention(case.q, case.k_cache, case.v_cache, case.rows, case.scale)
    for rows in (case.rows, on_device(case.rows, torch.device("cpu"))):
        got = attend(name, FAKES[name](block_multiple=package(name).block_multiple), case, rows)
        torch.testing.assert_close(got, want, atol=0, rtol=0)


@pytest.mark.parametrize("step", ["mixed", "decode only"])
@pytest.mark.parametrize("name", FAKES)
def test_a_window_is_handed_over_as_the_tokens_before_a_query(name: str, step: str) -> None:
    case = paged_case(*STEPS[step], block_size=256 if name == "flash_attn" else BLOCK, dtype=torch.bfloat16)
    for window in (1, BLOCK, 1000):
        got = attend(name, FAKES[name](block_multiple=package(name).block_multiple), case, case.rows, window)
        want = reference.attention(case.q, case.k_cache, case.v_cache, case.rows, case.scale, window=window)
        torch.testing.assert_close(got, want, atol=0, rtol=0)


def calls(decodes: list[int], chunks: list[tuple[int, int]]) -> list[tuple[str, dict[str, Any]]]:
    fake = FakeFlash()
    case = paged_case(decodes, chunks, dtype=torch.bfloat16)
    attend("vllm_flash_attn", fake, case, case.rows)
    return fake.calls


def test_decode_rows_alone_take_the_call_that_splits_long_contexts() -> None:
    ((call, given),) = calls([3, 30], [])
    assert (call, given["cache_seqlens"].tolist()) == ("kvcache", [4, 31])


@pytest.mark.parametrize("step", [name for name in STEPS if name != "decode only"])
def test_a_chunk_of_one_token_is_never_taken_for_a_decode_row(step: str) -> None:
    """Regression guard: decode rows beside chunks took the varlen call, where one program reads all keys of a row."""
    decodes, chunks = STEPS[step]
    *of_decodes, (call, given) = calls(decodes, chunks)
    assert [(name, options["cache_seqlens"].tolist()) for name, options in of_decodes] == (
        [("kvcache", [context + 1 for context in decodes])] if decodes else []
    )
    assert call == "varlen"
    counts = [1] * len(decodes) + [count for _, count in chunks]
    lengths = [context + 1 for context in decodes] + [sum(chunk) for chunk in chunks]
    assert given["cu_seqlens_q"].diff().tolist() == counts
    assert given["cu_seqlens_k"].diff().tolist() == [1] * len(decodes) + lengths[len(decodes) :]
    assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (max(counts), max(lengths))


def test_how_many_rows_are_decodes_is_read_from_the_device() -> None:
    """A captured mixed step with room for four decodes has two, and chunks of one token and of six."""
    case = paged_case([40, 7], [(20, 1), (3, 6)], dtype=torch.bfloat16)
    rows = replace(on_device(case.rows, torch.device("cpu")), num_decode=4, num_chunks=4, contexts=(), counts=())
    fake = FakeFlash()
    got = attend("vllm_flash_attn", fake, case, rows)
    want = reference.attention(case.q, case.k_cache, case.v_cache, case.rows, case.scale)
    torch.testing.assert_close(got, want, atol=0, rtol=0)
    (_, decodes), (_, others) = fake.calls
    assert decodes["cache_seqlens"].tolist() == [41, 8, 1, 1]
    assert others["cu_seqlens_k"].diff().tolist() == [1, 1, 21, 9]


def test_a_captured_step_of_one_token_has_rows_without_any() -> None:
    """Told that no row has two tokens, the varlen call assumes that each has one, and refuses q."""
    case = paged_case([], [(20, 1)], dtype=torch.bfloat16)
    rows = on_device(case.rows, torch.device("cpu"))
    first_tokens, tables = torch.cat((rows.first_tokens, rows.first_tokens[-1:])), rows.tables.repeat(2, 1)
    lengths, first_keys = rows.lengths.new_tensor([21, 0]), rows.lengths.new_tensor([0, 21, 21])
    more = {"first_tokens": first_tokens, "lengths": lengths, "first_keys": first_keys, "tables": tables}
    got = attend("vllm_flash_attn", FakeFlash(), case, replace(rows, num_decode=1, num_chunks=2, **more))
    want = reference.attention(case.q, case.k_cache, case.v_cache, case.rows, case.scale)
    torch.testing.assert_close(got, want, atol=0, rtol=0)


def test_what_the_rows_hold_is_read_from_the_tensors_and_not_remembered() -> None:
    """A captured step is replayed with other rows in the same tensors."""
    first, second = paged_case([5, 9], [], dtype=torch.bfloat16), paged_case([12, 3], [], dtype=torch.bfloat16)
    ops = flash_ops(package("vllm_flash_attn"), FakeFlash(), TORCH)
    rows, others = (on_device(case.rows, torch.device("cpu")) for case in (first, second))
    for mine, other in ((rows.lengths, others.lengths), (rows.tables, others.tables)):
        mine.copy_(other)
    plan = ops.prepare_attention(rows, 2, torch.bfloat16)
    got = ops.attention(second.q, second.k_cache, second.v_cache, plan, second.scale)
    want = reference.attention(second.q, second.k_cache, second.v_cache, second.rows, second.scale)
    torch.testing.assert_close(got, want, atol=0, rtol=0)


# --- which package, and why not the others -----------------------------------------------------------------------


def find(present: set[str], **changes: Any) -> Any:
    def load(module: str) -> object:
        if module not in present:
            raise ImportError(f"No module named '{module}'")
        return FAKES[module]()

    asked: dict[str, Any] = dict(dtype=torch.bfloat16, head_dim=128, block_size=16, capability=(9, 0), load=load)
    return find_flash(**asked | changes)


def test_the_first_package_that_imports_and_takes_the_model_is_found() -> None:
    everything = {known.module for known in PACKAGES}
    assert find(everything)[0].module == "flash_attn_interface", "on Hopper, for which it was written"
    assert find(everything - {"flash_attn_interface"})[0].module == "vllm_flash_attn"
    assert find(everything, capability=(8, 0))[0].module == "vllm_flash_attn"
    assert find({"flash_attn"}, block_size=256)[0].module == "flash_attn"
    assert find(everything - {"vllm_flash_attn"}, capability=(8, 0), block_size=512)[0].module == "flash_attn"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": torch.float32}, "dtype is float32, and FlashAttention takes float16 and bfloat16"),
        ({"head_dim": 264}, "head_dim is 264, and FlashAttention takes multiples of 8 up to 256"),
        ({"head_dim": 100}, "head_dim is 100"),
        ({"capability": (7, 5)}, "vllm_flash_attn has no code for compute capability 7.5"),
        ({"capability": (10, 0)}, "flash_attn_interface has no code for compute capability 10.0"),
        ({"capability": (8, 9)}, "flash_attn_interface has no code for compute capability 8.9"),
        ({"block_size": 24}, "vllm_flash_attn takes multiples of 16 as block_size"),
        ({}, "flash_attn takes multiples of 256 as block_size"),
        ({}, "vllm_flash_attn does not import (No module named 'vllm_flash_attn')"),
    ],
)
def test_each_refusal_has_its_reason(changes: dict[str, Any], why: str) -> None:
    assert why in find(set(), **changes)


class FakeFlash25(FakeFlash):
    """Stands in for flash-attn 2.5.6, which has a paged cache for decode rows, but not for the varlen call."""

    __version__ = "2.5.6"

    def flash_attn_varlen_func(  # type: ignore[override]
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:
        raise AssertionError("this one has no block tables")


def test_a_release_that_lacks_what_it_would_be_given_is_refused_and_the_next_package_taken() -> None:
    """Regression guard: such a release was taken, and raised a TypeError in the first step with a chunk."""

    def load(module: str) -> object:
        return {"vllm_flash_attn": FakeFlash25(), "flash_attn_interface": SimpleNamespace()}.get(module) or FakeFlash()

    why = find(set(), load=load)
    assert "vllm_flash_attn 2.5.6 has a flash_attn_varlen_func without block_table; " in why
    assert "flash_attn_interface has no flash_attn_with_kvcache; " in why
    assert find(set(), load=load, block_size=256)[0].module == "flash_attn"


@pytest.mark.parametrize("name", FAKES)
def test_releases_are_checked_for_what_steps_give_them(name: str) -> None:
    given: dict[str, tuple[str, ...]] = {}

    def recorder(call: str) -> Any:
        def record(q: torch.Tensor, *_: torch.Tensor, **options: Any) -> torch.Tensor:
            given[call] = tuple(sorted(options))
            return q

        return record

    module: Any = SimpleNamespace(**{call: recorder(call) for call in package(name).calls})
    for decodes, chunks in (STEPS["decode only"], STEPS["mixed"]):
        case = paged_case(decodes, chunks, block_size=256, dtype=torch.bfloat16)
        attend(name, module, case, case.rows, window=8)
    assert given == {call: tuple(sorted(names)) for call, names in package(name).calls.items()}
