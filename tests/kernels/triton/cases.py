"""Owns the comparisons of Triton kernels with the reference, on any device: the CPU makes inputs and judges outputs.
Never compares with stored numbers: every input is random, and every output is poisoned first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch.logprobs import token_logprobs
from engine.batch.sampler import uniform
from kernels import reference
from kernels.eager.forward import EagerPass
from kernels.eager.ops import REFERENCE
from kernels.forward import HeadShape
from tests.kernels.rows import Case, seeded_generator
from tests.support.distances import assert_close

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

from kernels.rows.row_tokens import RowTokens
from kernels.rows.sampled_row import SampledRow
from kernels.triton.attention.attention import attention
from kernels.triton.attention.plan import SPLIT, AttentionPlan, prepare_attention
from kernels.triton.elementwise import norm
from kernels.triton.elementwise.activation import silu_and_mul
from kernels.triton.elementwise.cache import write_cache
from kernels.triton.elementwise.rotate import rotate_and_cache
from kernels.triton.sampling import logprobs
from kernels.triton.sampling.rows import pack_rows
from kernels.triton.sampling.sampler import sample

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
EPS = 1e-5
POISON = 12288.0
"""What outputs are filled with first. Not NaN, which a faulty kernel may also write. Exact in every type."""


def slow(*values: object) -> object:
    """Mark a case beyond the edges that every run covers: the interpreter takes milliseconds for each tile."""
    return pytest.param(*values, marks=pytest.mark.slow)


def close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert_close(got.cpu(), want, atol=TOLERANCE[want.dtype], rtol=TOLERANCE[want.dtype])


def poisoned(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    return torch.full(tuple(shape), POISON, dtype=dtype, device=device)


@contextmanager
def poisoned_buffers() -> Iterator[None]:
    """Poison all new buffers, so that reading a number or an index that no program wrote shows."""
    real = torch.empty

    def empty(*size: Any, **options: Any) -> Tensor:
        tensor = real(*size, **options)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max // 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.empty", empty)
        yield


def plan_of(case: Case, device: str, split: int = SPLIT) -> AttentionPlan:
    rows = replace(case.rows, block_tables=case.rows.block_tables.to(device))
    return replace(prepare_attention(rows, case.k_cache.shape[2], case.q.dtype), split=split)


def captured_plan(rows: int, blocks: int, device: str, *, block_size: int, split: int = SPLIT) -> AttentionPlan:
    """Return the plan of a captured step with room for so many rows, any of them decodes, and blocks of each."""
    numbers = torch.zeros(2 * rows + 2, dtype=torch.int32, device=device)
    return AttentionPlan(
        numbers[: rows + 1],
        numbers[rows + 1 : -1],
        torch.zeros(rows, blocks, dtype=torch.int32, device=device),
        decodes=numbers[-1:],
        num_decode=rows,
        num_chunks=rows,
        max_length=blocks * block_size,
        split=split,
    )


def place(case: Case, plan: AttentionPlan) -> None:
    """Put the case's rows where the captured step reads them; the others become padding without tokens."""
    made, count = plan_of(case, str(plan.lengths.device)), len(case.rows.counts)
    plan.begins.fill_(len(case.q))
    plan.begins[: count + 1] = made.begins
    plan.lengths.zero_()
    plan.lengths[:count] = made.lengths
    plan.block_tables[:count, : made.block_tables.shape[1]] = made.block_tables
    plan.decodes.copy_(made.decodes)


def attend(
    case: Case, device: str, *, window: int | None = None, split: int = SPLIT, plan: AttentionPlan | None = None
) -> Tensor:
    out = poisoned(case.q.shape, case.q.dtype, device)
    tensors = (x.to(device) for x in (case.q, case.k_cache, case.v_cache))
    got = attention(*tensors, plan or plan_of(case, device, split), case.scale, window=window, out=out)
    assert got is out
    return out.cpu()


def check_attention(case: Case, device: str, *, window: int | None = None, split: int = SPLIT) -> None:
    want = windowed(case, window)
    assert not want.isnan().any()
    close(attend(case, device, window=window, split=split), want)


def windowed(case: Case, window: int | None) -> Tensor:
    """Compute the reference for a window, token by token from the visible keys alone, so that no mask is trusted."""
    if window is None:
        return reference.attention(case.q, case.k_cache, case.v_cache, case.rows, case.scale)
    out, token = torch.empty_like(case.q), 0
    group = case.q.shape[1] // case.k_cache.shape[2]
    for row, (context, count) in enumerate(zip(case.rows.contexts, case.rows.counts, strict=True)):
        slots = case.rows.slots(row)
        for position in range(context, context + count):
            seen = slots[max(0, position - window + 1) : position + 1]
            k, v = (
                cache.flatten(0, 1)[seen].double().repeat_interleave(group, dim=1)  # [seen, heads, head_dim]
                for cache in (case.k_cache, case.v_cache)
            )
            scores = torch.einsum("hd,khd->hk", case.q[token].double(), k) * case.scale
            out[token] = torch.einsum("hk,khd->hd", scores.softmax(dim=-1), v).to(out.dtype)
            token += 1
    return out


def check_norm(size: int, dtype: torch.dtype, device: str) -> None:
    """Check the norm with a residual, which is added first."""
    generator = seeded_generator()
    x = (torch.randn(5, size, generator=generator) * 5).to(dtype)
    residual, weight = torch.randn(5, size, generator=generator), torch.rand(size, generator=generator).to(dtype)
    out = (poisoned(x.shape, dtype, device), poisoned(x.shape, torch.float32, device))
    got = norm.add_rms_norm(x.to(device), residual.to(device), weight.to(device), EPS, out=out)
    assert got[0] is out[0]
    assert got[1] is out[1]
    for found, want in zip(got, reference.add_rms_norm(x, residual, weight, EPS), strict=True):
        close(found, want)


def check_silu_and_mul(size: int, dtype: torch.dtype, device: str) -> None:
    x = (torch.randn(3, 2 * size, generator=seeded_generator()) * 4).to(dtype)
    out = poisoned((3, size), dtype, device)
    assert silu_and_mul(x.to(device), out=out) is out
    close(out, reference.silu_and_mul(x))


def check_write_cache(dtype: torch.dtype, device: str) -> None:
    """Check cache writes where two tokens are padding, and V is a view of stacked heads."""
    generator = seeded_generator()
    k = torch.randn(7, 3, 80, generator=generator).to(dtype)
    v = torch.randn(7, 5, 80, generator=generator).to(dtype)[:, 1:4]
    slots = torch.randperm(40, generator=generator)[:7]
    want, guarded = ([poisoned((n, 4, 3, 80), dtype, at) for _ in "kv"] for n, at in ((10, "cpu"), (11, device)))
    got = [whole[1:] for whole in guarded]
    real = [0, 1, 2, 4, 5]
    reference.write_cache(k[real], v[real], want[0], want[1], slots[real])
    slots[[3, 6]] = -1
    write_cache(k.to(device), v.to(device), got[0], got[1], slots.to(device))
    for found, expected in zip(guarded, want, strict=True):
        assert torch.equal(found[1:].cpu(), expected)
        assert (found[0] == POISON).all(), "slot -1 was written"


def check_rotation(
    heads: HeadShape, device: str, *, dtype: torch.dtype = torch.float32, tokens: int = 5, normed: bool = False
) -> None:
    """Check the fused launch against the reference's three operations; a token in the middle is padding."""
    generator = seeded_generator()
    block_size, padding = 4, tokens // 2 if tokens > 1 else -1
    qkv = torch.randn(tokens, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim, generator=generator)
    qkv[padding : padding + 1] = torch.nan
    qkv = qkv.to(dtype)
    angles = torch.rand(tokens, heads.head_dim // 2, generator=generator) * 100
    norms = tuple(torch.rand(heads.head_dim, generator=generator).to(dtype) for _ in "qk") if normed else None
    slots = torch.randperm(tokens * 3, generator=generator)[:tokens]
    slots[padding : padding + 1] = -1
    shape = (-(-tokens * 3 // block_size), block_size, heads.num_kv_heads, heads.head_dim)

    real = [token for token in range(tokens) if token != padding]
    want_cache = [poisoned(shape, dtype, "cpu") for _ in "kv"]
    # One block before the cache's first, where slot -1 would be.
    guarded = [poisoned((shape[0] + 1, *shape[1:]), dtype, device) for _ in "kv"]
    run = EagerPass(REFERENCE, token_ids=slots[real], positions=slots[real], slots=slots[real], plan=None)
    rotations = (angles[real].cos(), angles[real].sin())
    want = run.rotate_and_cache(qkv[real], rotations, heads, (want_cache[0], want_cache[1]), norms, EPS)  # type: ignore[arg-type]

    cache = [whole[1:] for whole in guarded]
    out = poisoned((tokens, heads.num_heads * heads.head_dim), dtype, device)
    on_device = None if norms is None else (norms[0].to(device), norms[1].to(device))
    rotations = (angles.cos().to(device), angles.sin().to(device))
    got = rotate_and_cache(
        qkv.to(device), rotations, heads, (cache[0], cache[1]), slots.to(device), on_device, EPS, out=out
    )
    assert got is out
    close(out[real], want)
    for found, expected in zip(guarded, want_cache, strict=True):
        assert torch.equal(found[1:].cpu() == POISON, expected == POISON), "another slot was written"
        assert (found[0] == POISON).all(), "padding was written"
        close(found[1:], expected)
    if padding >= 0:
        assert (out[padding] == POISON).all(), "queries of padding were written"


@dataclass(frozen=True)
class Text:
    """What a row's penalties look back at."""

    prompt: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()
    num_late: int = 0
    """Tokens at the answer's end that are not counted yet."""


NO_TEXT = Text()


def tokens_of(texts: Sequence[Text], vocab: int, device: str) -> RowTokens:
    """Count the texts in every other slot, the last first. Counts of nobody are poisoned."""
    counts = torch.full((2 * len(texts), vocab), 12288, dtype=torch.int32)
    slots = [2 * (len(texts) - 1 - number) for number in range(len(texts))]
    latest = torch.full((len(texts), max(1, *(text.num_late for text in texts))), -1)
    for text, slot, late in zip(texts, slots, latest, strict=True):
        end = len(text.answer) - text.num_late
        late[: text.num_late] = torch.tensor(text.answer[end:])
        counts[slot] = 0
        counts[slot, list(text.prompt)] = 1
        for token in text.answer[:end]:
            counts[slot, token] += 2
    return RowTokens(counts.to(device), torch.tensor(slots, device=device), latest.to(device))


def sampled(
    logits: Tensor,
    rows: Sequence[SampledRow],
    device: str,
    within: Tensor | None = None,
    texts: Sequence[Text] | None = None,
) -> list[int]:
    before = logits.clone()
    out = torch.full((len(rows),), -7, dtype=torch.int64, device=device)
    on_device, vocab = logits.to(device), logits.shape[1]
    tokens = None if texts is None else tokens_of(texts, vocab, device)
    assert sample(on_device, pack_rows(rows, vocab, device, within, tokens), out=out) is out
    assert torch.equal(on_device.cpu().nan_to_num(), before.nan_to_num()), "the model's logits were changed"
    return out.tolist()


def controlled(logits: Tensor, row: SampledRow, text: Text = NO_TEXT) -> Tensor:
    changed = reference.control_logits(
        logits,
        allowed=row.allowed,
        bias=row.bias,
        repetition_penalty=row.repetition_penalty,
        frequency_penalty=row.frequency_penalty,
        presence_penalty=row.presence_penalty,
        bad_words=row.banned_after if text.num_late else (),
        prompt=text.prompt,
        answer=text.answer,
    )
    changed[list(row.banned)] = -torch.inf
    return changed


def expected_token(logits: Tensor, row: SampledRow, text: Text = NO_TEXT) -> int:
    """Return the reference's token. logits: [vocab]"""
    return reference.sample(
        controlled(logits.float(), row, text),
        uniform(row.seed, row.position),
        temperature=row.temperature,
        top_k=row.top_k,
        top_p=row.top_p,
        min_p=row.min_p,
    )


def check_sampling(
    logits: Tensor, rows: Sequence[SampledRow], device: str, texts: Sequence[Text] | None = None
) -> None:
    of_rows = texts or [NO_TEXT] * len(rows)
    want = [expected_token(logits[i], row, text) for i, (row, text) in enumerate(zip(rows, of_rows, strict=True))]
    assert sampled(logits, rows, device, texts=texts) == want


def check_logprobs(logits: Tensor, token_ids: Sequence[int], count: int, device: str) -> None:
    """Check the log-probabilities of `token_ids`, one per row, and of the `count` likeliest against the engine's."""
    found = logprobs.token_logprobs(logits.to(device), torch.tensor(token_ids, device=device), count)
    own, top_ids, top = (x.cpu() for x in found)
    want = token_logprobs(logits, token_ids, [count] * len(token_ids))
    for row, expected in enumerate(want):
        if expected is None:
            assert own[row].isnan()
            continue
        assert float(own[row]) == pytest.approx(expected.logprob, abs=1e-5)
        assert top_ids[row].tolist() == [token for token, _ in expected.top]
        assert top[row].tolist() == pytest.approx([value for _, value in expected.top], abs=1e-5)
