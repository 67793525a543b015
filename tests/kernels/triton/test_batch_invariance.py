"""Owns the promise of batch-invariant kernels: a row has the same bits alone, in any batch and in a chunk of any size.
Never allows a tolerance between them; how near they are to the reference is asked besides. The interpreter sums up
products in order here, as tensor cores do: what is tested is which sums the kernels make, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.forward import Linear, Routing
from kernels.kv_format import stored_size
from tests.kernels.rows import Case, paged_case, seeded_generator
from tests.support.ordered_products import ordered_products

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

import triton.language as tl

from kernels.eager.ops import Ops
from kernels.rows.step import PagedRows
from kernels.triton.attention import attention as launches
from kernels.triton.attention import splits
from kernels.triton.attention.plan import prepare_attention, prepare_invariant_attention
from kernels.triton.elementwise.cache import write_cache
from kernels.triton.linear import few_rows, linear
from kernels.triton.ops import BATCH_INVARIANT, TRITON
from kernels.triton.shared.pack import pack
from tests.kernels.triton.cases import captured_plan, close, place, poisoned_buffers, slow, windowed

UNIT = 64


@pytest.fixture(autouse=True)
def _in_order() -> Iterator[None]:
    with ordered_products(), poisoned_buffers():
        yield


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Give the fewest keys to units, so that short rows have several; the argument is the most partial results."""

    def set_units(partials: int) -> None:
        for name, value in {"UNIT": UNIT, "UNIT_PARTIALS": partials}.items():
            monkeypatch.setattr(splits, name, value)
            monkeypatch.setattr(splits, f"_{name}", tl.constexpr(value))
        monkeypatch.setattr(launches, "UNIT", UNIT)

    return set_units


def same(got: Tensor, want: Tensor) -> bool:
    assert not got.isnan().any()
    return torch.equal(got, want)


def step_of(case: Case, begin: int, end: int) -> Case:
    """Return the case of the first row's tokens [begin, end) in a step of their own, over the same cache."""
    table = case.rows.block_tables[:1]
    rows = PagedRows(int(end - begin == 1), (begin,), (end - begin,), table, case.rows.block_size)
    return replace(case, q=case.q[begin:end], rows=rows)


def attend(case: Case, window: int | None = None, ops: Ops = BATCH_INVARIANT) -> Tensor:
    plan = ops.prepare_attention(case.rows, case.k_cache.shape[2], case.q.dtype)
    return ops.attention(case.q, case.k_cache, case.v_cache, plan, case.scale, window=window)


def cut(case: Case, ends: list[int], window: int | None = None, ops: Ops = BATCH_INVARIANT) -> Tensor:
    return torch.cat([attend(step_of(case, begin, end), window, ops) for begin, end in pairwise([0, *ends])])


LENGTH = 3 * UNIT + 11
CUTS = [[1, UNIT - 1, UNIT, UNIT + 1, 2 * UNIT + 5, LENGTH - 2, LENGTH - 1, LENGTH], [100, LENGTH - 1, LENGTH]]


@pytest.mark.parametrize(
    ("dtype", "window", "partials"),
    [
        (torch.float32, 90, 1),  # in 16 bits, rounding hides most of what differs
        slow(torch.bfloat16, 90, 1),
        slow(torch.float32, None, 40),
        *(slow(torch.float32, 5, partials) for partials in (1, 40, 10_000)),
        slow(torch.float16, None, 10_000),
    ],
)
def test_a_token_attends_with_the_same_bits_in_a_chunk_of_any_size(
    small_units: Callable[[int], None], dtype: torch.dtype, window: int | None, partials: int
) -> None:
    small_units(10_000)
    case = paged_case([], [(0, LENGTH)], dtype=dtype, kv_heads=1)
    case = replace(case, k_cache=case.k_cache * 3)
    want = attend(case, window)
    close(want, windowed(case, window))
    small_units(partials)
    assert same(attend(case, window), want)
    for ends in CUTS:
        assert same(cut(case, ends, window), want)


@pytest.mark.slow
def test_ordinary_attention_gives_other_bits_in_other_chunks(small_units: Callable[[int], None]) -> None:
    """What the test above would see."""
    case = paged_case([], [(0, 700)], kv_heads=1)
    want = attend(case, ops=TRITON)
    assert not same(cut(case, [699, 700], ops=TRITON), want)


def test_a_decode_attends_with_the_same_bits_beside_any_rows_and_in_a_captured_step(
    small_units: Callable[[int], None],
) -> None:
    small_units(40)
    case = paged_case([2 * UNIT + 3, 0, UNIT - 1, 70, 250], [(130, 9), (0, 150), (1, 1)], kv_heads=1)
    together, first = attend(case), 0
    for number, (context, count) in enumerate(zip(case.rows.contexts, case.rows.counts, strict=True)):
        for as_decode in (True, False) if count == 1 else (False,):
            table = case.rows.block_tables[number : number + 1]
            rows = PagedRows(int(as_decode), (context,), (count,), table, case.rows.block_size)
            alone = attend(replace(case, q=case.q[first : first + count], rows=rows))
            assert same(alone, together[first : first + count])
        first += count
    plan = captured_plan(11, 40, "cpu", block_size=16)
    place(case, plan)
    captured = replace(plan, decodes=torch.zeros_like(plan.decodes), num_decode=0, num_chunks=22, split=splits.UNITS)
    out = torch.full_like(case.q, 7)
    launches.attention(case.q, case.k_cache, case.v_cache, captured, case.scale, out=out)
    assert same(out, together)


def test_the_plan_of_batch_invariant_attention_has_the_rows_of_the_ordinary_one() -> None:
    case = paged_case([3, 4], [(5, 6)])
    ordinary, plan = (
        prepare(case.rows, 2, torch.float32) for prepare in (prepare_attention, prepare_invariant_attention)
    )
    assert (plan.num_decode, plan.num_chunks, plan.decodes.tolist(), plan.split) == (0, 3, [0], splits.UNITS)
    assert (plan.rows, plan.max_length) == (ordinary.rows, ordinary.max_length)
    assert torch.equal(plan.begins, ordinary.begins)


@pytest.mark.slow
@pytest.mark.parametrize("kept_in", [torch.int8, torch.float8_e4m3fn])
def test_a_token_attends_to_keys_in_8_bits_with_the_same_bits(
    small_units: Callable[[int], None], kept_in: torch.dtype
) -> None:
    small_units(40)
    case = paged_case([], [(0, LENGTH)], kv_heads=1, head_dim=32)
    k, v = (cache.nan_to_num(0).flatten(0, 1) for cache in (case.k_cache, case.v_cache))
    shape = (*case.k_cache.shape[:3], stored_size(32, kept_in))
    narrow = [torch.zeros(shape, dtype=torch.int8).view(kept_in) for _ in "kv"]
    write_cache(k, v, narrow[0], narrow[1], torch.arange(len(k)))
    case = replace(case, k_cache=narrow[0], v_cache=narrow[1])
    want = attend(case)
    for ends in CUTS:
        assert same(cut(case, ends), want)


# --- products ---------------------------------------------------------------------------------------------------------

ROWS = [1, 2, 16, 17, 33, 64, 65, 128, 129, 200]


def check_rows(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Check that rows have the bits that they have among all, whatever is beside them, and return those."""
    want = product(x)
    for rows in ROWS:
        assert same(product(x[:rows]), want[:rows]), f"{rows} rows"
        assert same(product(x[-rows:]), want[-rows:]), f"the last {rows} rows"
    others = torch.full_like(x[:70], torch.nan)
    others[66] = x[3]
    assert torch.equal(product(others)[66], want[3])
    return want


@pytest.mark.parametrize(
    ("dtype", "inputs", "outputs", "bias"),
    [
        (torch.bfloat16, 640, 48, True),  # three spans
        (torch.float32, 272, 40, False),
        slow(torch.float32, 640, 48, True),
        slow(torch.bfloat16, 256, 128, False),  # multiples of all blocks
        slow(torch.float16, 256, 128, True),
        slow(torch.float16, 100, 7, True),
    ],
)
def test_a_row_has_the_same_product_among_any_number_of_rows(
    dtype: torch.dtype, inputs: int, outputs: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_rows, "LEAST_SPAN", 128)
    spans = -(-inputs // few_rows.span_of(inputs, outputs))
    assert spans == {272: 2, 640: 3, 256: 2, 100: 1}[inputs]
    generator = seeded_generator()
    x, weight = (torch.randn(n, inputs, generator=generator).to(dtype) for n in (200, outputs))
    by = Linear(weight, torch.randn(outputs, generator=generator).to(dtype) if bias else None)
    assert BATCH_INVARIANT.linear is not None
    want = check_rows(lambda rows: BATCH_INVARIANT.linear(rows, by), x)  # type: ignore[misc]
    wide = [None if part is None else part.double() for part in (by.weight, by.bias)]
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.2}[dtype]
    torch.testing.assert_close(
        want.double(), torch.nn.functional.linear(x.double(), *wide), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("least_span", [128, slow(512)], ids=["split inputs", "whole inputs"])
def test_a_row_has_the_same_gated_product_among_any_number_of_rows(
    least_span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_rows, "LEAST_SPAN", least_span)
    generator = seeded_generator()
    x, weight = (torch.randn(n, 272, generator=generator) for n in (200, 80))
    assert BATCH_INVARIANT.gated_linear is not None
    want = check_rows(lambda rows: BATCH_INVARIANT.gated_linear(rows, Linear(weight)), x)  # type: ignore[misc]
    both = reference.silu_and_mul(BATCH_INVARIANT.linear(x, Linear(weight)))  # type: ignore[misc]
    torch.testing.assert_close(want, both, atol=2e-2, rtol=2e-2)


def narrow_weight(kind: torch.dtype, outputs: int, inputs: int, group: int | None, count: int | None = None) -> Linear:
    """Draw a packed matrix, or one for each of `count` experts."""
    generator, before = seeded_generator(), () if count is None else (count,)
    size = (*before, outputs, inputs // (2 if kind == torch.uint8 else 1))
    stored = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    if kind == torch.float8_e4m3fn:
        stored &= 0xBF  # no number beyond 2, and none that is not one
    scales = torch.rand(*before, outputs, *([] if group is None else [-(-inputs // group)]), generator=generator) / 64
    zeros = torch.randint(0, 16, scales.shape, generator=generator).to(torch.int8) if kind == torch.uint8 else None
    return pack(Linear(stored if kind == torch.uint8 else stored.view(kind), None, scales, zeros, group))


@pytest.mark.parametrize(
    ("kind", "group", "programs"),
    [
        (torch.int8, None, 2),
        slow(torch.int8, 64, 1),
        slow(torch.float8_e4m3fn, None, 1),
        slow(torch.float8_e4m3fn, 128, 2),
        slow(torch.uint8, 32, 2),
    ],
)
def test_a_row_has_the_same_product_with_weights_of_fewer_bits_among_any_number_of_rows(
    kind: torch.dtype, group: int | None, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "PROGRAMS", programs)
    packed = narrow_weight(kind, 48, 768, group)
    x = torch.randn(200, 768, generator=seeded_generator())
    assert BATCH_INVARIANT.narrow is not None
    want = check_rows(lambda rows: BATCH_INVARIANT.narrow.linear(rows, packed), x)  # type: ignore[union-attr]
    assert TRITON.narrow is not None
    torch.testing.assert_close(want, TRITON.narrow.linear(x, packed), atol=1e-3, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [None, torch.int8, torch.uint8])
def test_a_token_has_the_same_mixture_of_experts_among_any_number_of_tokens(kind: torch.dtype | None) -> None:
    """Numbers of tokens include those of all three sizes of tiles: up to 8 and 64 pairs for each of 2 experts."""
    generator, count, hidden, size = seeded_generator(), 2, 64, 32
    x = torch.randn(200, hidden, generator=generator)
    router = torch.randn(count, hidden, generator=generator)
    if kind is None:
        gate_up, down = (
            torch.randn(count, *shape, generator=generator) for shape in ((2 * size, hidden), (hidden, size))
        )
        weights = Linear(gate_up), Linear(down)
    else:
        weights = narrow_weight(kind, 2 * size, hidden, 32, count), narrow_weight(kind, hidden, size, 32, count)
    routing = Routing(1, renormalize=False)
    narrow = BATCH_INVARIANT.narrow, TRITON.narrow
    assert narrow[0] is not None
    assert narrow[1] is not None
    want = check_rows(lambda rows: narrow[0].experts(rows, router, *weights, routing), x)  # type: ignore[union-attr]
    torch.testing.assert_close(want, narrow[1].experts(x, router, *weights, routing), atol=1e-3, rtol=1e-3)
