"""Owns the comparison of Triton's sampler with the reference, decision by decision, in the interpreter.
Never judges by frequencies: the same draw must give the same token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.batch import sampler as engine_sampler
from engine.execution.device import HostDevice
from engine.execution.gpu.sampler import choose_on_device
from engine.execution.gpu.token_counts import TokenCounts
from engine.step import LogitControls, RowSampling
from kernels import reference
from tests.kernels.rows import seeded_generator
from tests.kernels.triton.cases import (
    Text,
    check_logprobs,
    check_sampling,
    controlled,
    expected_token,
    sampled,
    slow,
    tokens_of,
)
from tests.support.seeds import seeded_random

import triton  # isort: skip
import triton.language as tl  # isort: skip

from kernels.triton.sampling import controls, numbers, sampler  # isort: skip
from kernels.rows.row_tokens import RowTokens  # isort: skip
from kernels.rows.sampled_row import SampledRow  # isort: skip
from kernels.triton.ops import TRITON  # isort: skip
from kernels.triton.sampling.rows import pack_rows  # isort: skip

BLOCK = 256
VOCAB = BLOCK + 44
SEEDS = [0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63), 123456789012345]
POSITIONS = [0, 1, 2**31, 2**32 + 7, 2**40]


def random_logits(rows: int, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=seeded_generator()) * 3


def rows_like(count: int, **options: object) -> list[SampledRow]:
    """Return rows with different seeds and positions."""
    rng = seeded_random()
    fields = {"temperature": 1.0} | options
    return [SampledRow(**fields, seed=rng.randrange(-(2**63), 2**63), position=i) for i in range(count)]  # type: ignore[arg-type]


@triton.jit
def _uniforms(seeds, positions, out):  # type: ignore[no-untyped-def]
    i = tl.program_id(0)
    tl.store(out + i, numbers.uniform(tl.load(seeds + i), tl.load(positions + i)))


def test_the_random_number_is_the_engines_to_the_last_bit(device: str) -> None:
    pairs = [(seed, position) for seed in SEEDS for position in POSITIONS]
    seeds, positions = torch.tensor(pairs, device=device).T.contiguous()
    out = torch.full((len(pairs),), torch.nan, dtype=torch.float64, device=device)
    _uniforms[(len(pairs),)](seeds, positions, out)
    assert out.tolist() == [engine_sampler.uniform(seed, position) for seed, position in pairs]


@pytest.mark.parametrize(
    "options",
    [
        {},
        slow({"temperature": 0.01}),
        slow({"temperature": 50.0}),
        {"top_k": 1},
        slow({"top_k": 9}),
        {"top_k": VOCAB - 1},
        {"top_k": VOCAB},
        slow({"top_k": VOCAB + 1}),
        slow({"top_p": 1e-9}),
        {"top_p": 0.5},
        slow({"top_p": 0.95, "temperature": 2.0}),
        {"top_p": 1 - 2.0**-53},
        {"min_p": 0.05},
        slow({"min_p": 1.0}),
        {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
    ],
    ids=str,
)
def test_every_filter_draws_the_references_token(device: str, options: dict[str, float]) -> None:
    check_sampling(random_logits(1), rows_like(1, **options), device)


def test_rows_of_a_batch_have_their_own_filters(device: str) -> None:
    rows = [
        SampledRow(
            temperature=(0.0, 0.7, 1.5)[i % 3],
            top_k=(0, 9)[i % 2],
            top_p=(1.0, 0.8)[i % 5 == 0],
            min_p=0.01,
            seed=i,
            position=i,
            banned=(i, i + 1),
        )
        for i in range(6)
    ]
    logits = random_logits(6)
    check_sampling(logits, rows, device)
    assert sampled(logits[5:6], rows[5:6], device) == [expected_token(logits[5], rows[5])]


def test_numbers_that_are_on_the_device_already_draw_the_references_token(device: str) -> None:
    """A captured step advances the positions there, and writes its tokens to where the next step reads them."""
    filters = [{"temperature": 0.0}, {}, {"top_k": 9, "top_p": 0.8}, {"min_p": 0.05, "temperature": 1.4}]
    rows = [replace(rows_like(1, **options)[0], position=5 + i) for i, options in enumerate(filters)]
    logits = random_logits(len(rows))
    floats = torch.tensor([(row.temperature, row.top_p, row.min_p) for row in rows], dtype=torch.float64)
    integers = torch.tensor([(row.top_k, row.seed, row.position - 1) for row in rows])
    there, counted = floats.T.contiguous().to(device), integers.T.contiguous().to(device)
    counted[2] += 1
    out = torch.full((len(rows),), -7, device=device)
    assert TRITON.sample_packed is not None
    TRITON.sample_packed(logits.to(device), there, counted, out)
    assert out.tolist() == [expected_token(logits[i], row) for i, row in enumerate(rows)]


@pytest.mark.parametrize("vocab", [1, BLOCK - 1, BLOCK, BLOCK + 1, slow(3 * BLOCK + 5)])
def test_vocabularies_at_the_edges_of_a_block_match_the_reference(device: str, vocab: int) -> None:
    for options in ({}, {"top_k": 3, "top_p": 0.9}, {"temperature": 0.0}):
        check_sampling(random_logits(1, vocab), rows_like(1, **options), device)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.02}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 30}], ids=str)
def test_tokens_are_found_in_whatever_block_they_are(device: str, options: dict[str, float]) -> None:
    """Some blocks have no mass, one has nearly all of it and another the rest, and the last block is partial."""
    logits = random_logits(4, 5 * BLOCK + 7)
    logits[:, BLOCK : 2 * BLOCK] = -torch.inf
    logits[0, : 5 * BLOCK] = -torch.inf
    logits[1, 3 * BLOCK : 4 * BLOCK] += 9
    logits[2] += 1e4
    check_sampling(logits, rows_like(4, **options), device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16)])
def test_logits_of_few_bits_have_ties_which_go_to_the_lower_id(device: str, dtype: torch.dtype) -> None:
    logits = (random_logits(2) / 3).round().to(dtype)  # about ten distinct values
    for options in ({"top_p": 0.6}, {"top_k": 150, "top_p": 0.9}):
        check_sampling(logits, rows_like(2, **options), device)


def test_only_the_first_of_equal_tokens_are_kept(device: str) -> None:
    """All logits are equal: the edges of top-k and top-p fall among ties."""
    logits = torch.zeros(2, VOCAB)
    for options, most in (({"top_k": 3}, 3), ({"top_p": 0.01}, 3), ({"top_k": 260, "top_p": 0.5}, 130)):
        rows = rows_like(2, **options)
        got = sampled(logits, rows, device)
        assert got == [expected_token(logits[0], row) for row in rows]
        assert max(got) < most


def test_the_greedy_token_is_the_lowest_of_the_largest(device: str) -> None:
    logits = random_logits(3)
    logits[0, [7, 40, 299]] = logits[1, [255, 256]] = 50.0
    logits[2] = -1.0
    logits[2, 260], logits[2, 3] = 0.0, -0.0  # equal logits with different signs
    rows = rows_like(3, temperature=0.0)
    assert sampled(logits, rows, device) == [7, 255, 3]
    assert sampled(logits, rows_like(3, top_k=1), device) == [7, 255, 3]


def test_a_row_without_a_distribution_has_no_token_and_its_neighbours_theirs(device: str) -> None:
    logits = random_logits(6)
    logits[1, 270] = torch.nan
    logits[2, 5] = torch.inf
    logits[3] = -torch.inf
    logits[4, 1:] = -torch.inf
    for options in ({"temperature": 0.0}, {"top_k": 5, "top_p": 0.5}):
        rows = rows_like(6, **options)
        got = sampled(logits, rows, device)
        assert got[1:5] == [-1, -1, -1, 0]
        assert [got[0], got[5]] == [expected_token(logits[i], rows[i]) for i in (0, 5)]


def test_banned_tokens_are_never_drawn_and_a_row_without_any_left_fails_alone(device: str) -> None:
    logits = random_logits(2, 40)
    rows = [SampledRow(temperature=0.0, banned=range(40)), SampledRow(temperature=1.0, banned=range(39))]
    assert sampled(logits, rows, device) == [-1, 39]


def test_many_rows_are_narrowed_in_pieces(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "ROWS_AT_A_TIME", 3)
    check_sampling(random_logits(4, 50), rows_like(4, top_k=5), device)


@pytest.mark.slow
def test_random_rows_draw_the_references_token(device: str) -> None:
    rng = seeded_random()
    for _ in range(12):
        rows = [
            SampledRow(
                temperature=rng.choice([0.0, 0.3, 0.8, 1.0, 2.0]),
                top_k=rng.choice([0, 1, 20, 200]),
                top_p=rng.choice([1.0, 0.99, 0.9, 0.3]),
                min_p=rng.choice([0.0, 0.02, 0.3]),
                seed=rng.randrange(2**63),
                position=rng.randrange(2**20),
            )
            for _ in range(16)
        ]
        check_sampling(random_logits(16, rng.randrange(2, 1500)), rows, device)


ANSWER, PROMPT = (3, 4, 5, 3, 270, 270, 270), (7, 3, 9, 7, 256)


def controlled_rows() -> list[SampledRow]:
    """Return a row for each control, one with all of them, and one with none."""
    every = {
        "allowed": tuple(range(0, VOCAB, 2)),
        "bias": ((2, 1.5), (3, -2.25), (270, 0.1), (299, 100.0)),
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.37,
        "presence_penalty": 0.21,
        "banned": (8, 2, 8),
        "banned_after": ((270, 6), (5, 10), (0, 3), (270, 299)),
    }
    rows = [SampledRow(temperature=0.0, **{name: value}) for name, value in every.items()]  # type: ignore[arg-type]
    return [*rows, SampledRow(temperature=0.0, **every), SampledRow(temperature=0.0)]  # type: ignore[arg-type]


@pytest.mark.parametrize("num_late", [0, 1, 4, 7])
def test_controls_change_logits_as_the_reference_does_to_the_last_bit(device: str, num_late: int) -> None:
    """Whatever of the answer is counted already; a ban that depends on the newest token needs it to be late."""
    rows = [replace(row, banned_after=row.banned_after if num_late == 1 else ()) for row in controlled_rows()]
    texts = [Text(PROMPT, ANSWER, num_late) for _ in rows]
    logits = random_logits(len(rows))
    out = torch.full(logits.shape, torch.nan, device=device)
    packed = pack_rows(rows, VOCAB, device, tokens=tokens_of(texts, VOCAB, device))
    got = controls.control_logits(logits.to(device), packed, out=out)
    assert got is out
    want = [controlled(logits[i], row, text) for i, (row, text) in enumerate(zip(rows, texts, strict=True))]
    assert torch.equal(out.cpu(), torch.stack(want))


def test_a_row_without_counts_reads_none(device: str) -> None:
    """The host gives -1 as its slot, whatever its neighbours have."""
    rows, texts = rows_like(2, temperature=0.0, frequency_penalty=9.0), [Text(answer=(5,) * 3)] * 2
    tokens = tokens_of(texts, VOCAB, device)
    tokens.slots[0] = -1
    logits = random_logits(2)
    got = controls.control_logits(logits.to(device), pack_rows(rows, VOCAB, device, tokens=tokens)).cpu()
    assert torch.equal(got[0], logits[0])
    assert torch.equal(got[1], controlled(logits[1], rows[1], texts[1]))


def test_logits_without_controls_are_not_copied(device: str) -> None:
    logits = random_logits(2).to(device)
    assert controls.control_logits(logits, pack_rows(rows_like(2), VOCAB, device)) is logits


def words(sets: list[list[int]]) -> Tensor:
    """Pack sets of tokens as grammars do. # [len(sets), words] int32"""
    bits = [[sum(1 << t % 32 for t in tokens if t // 32 == word) for word in range(-(-VOCAB // 32))] for tokens in sets]
    return (torch.tensor(bits) + 2**31).remainder(2**32).sub(2**31).to(torch.int32)


def test_a_grammar_has_the_last_word(device: str) -> None:
    """If the controls leave none of its tokens, all of them get the model's own logits."""
    logits, everything = random_logits(4), list(range(VOCAB))
    within = [[31, 32, 255, 256, 299], [1, 2], [5, 63], everything]
    rows = [
        SampledRow(temperature=0.0, banned=(256,)),
        SampledRow(temperature=0.0, allowed=(7,), bias=((1, 5.0),)),
        SampledRow(temperature=0.0, bias=((5, 100.0),)),
        SampledRow(temperature=0.0, banned=(2,)),
    ]
    packed = pack_rows(rows, VOCAB, device, words(within))
    got = controls.control_logits(logits.to(device), packed).cpu()
    for number, row in enumerate(rows):
        own = controlled(logits[number], row)
        assert torch.equal(got[number], reference.keep_within(own, logits[number], within[number]))


def test_a_grammar_does_not_hide_a_logit_that_is_not_a_number(device: str) -> None:
    logits = random_logits(2)
    logits[0, 5] = torch.nan
    assert sampled(logits, rows_like(2, temperature=0.0), device, words([[5], [6]])) == [-1, 6]


def test_tokens_are_those_of_the_engines_own_sampler(device: str) -> None:
    answers = [(3, 4, 3), (), (9,)]
    how = [
        RowSampling(
            0.8, 20, 0.9, 0.01, -5, (1,), controls=LogitControls(repetition_penalty=1.2, prompt_token_ids=(8, 9))
        ),
        RowSampling(0.0, 0, 1.0, 0.0, 2, controls=LogitControls(logit_bias=((7, 3.5),))),
        RowSampling(1.2, 0, 0.7, 0.0, 3, controls=LogitControls(frequency_penalty=0.5, presence_penalty=0.25)),
    ]
    logits = random_logits(3)
    tokens = TokenCounts(HostDevice(), VOCAB).rows("abc", how, answers)
    assert tokens is not None
    tokens = RowTokens(*(tensor.to(device) for tensor in (tokens.counts, tokens.slots, tokens.latest)))
    got = choose_on_device(HostDevice(), TRITON, logits.to(device), how, range(3), answers, None, tokens)
    assert got.tolist() == engine_sampler.sample(logits, how, range(3), answers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_the_engines(device: str, count: int, dtype: torch.dtype) -> None:
    """In bfloat16 many logits are equal; then the lower id comes first."""
    logits = random_logits(5).to(dtype)
    logits[2, 7] = torch.nan
    logits[3] = -torch.inf
    logits[4, 8] = torch.inf
    check_logprobs(logits, [0, 299, 3, 4, 8], count, device)


def test_as_many_rows_of_logits_as_rows_are_expected(device: str) -> None:
    with pytest.raises(ValueError, match="3 rows of logits for 2 rows"):
        sampler.sample(random_logits(3).to(device), pack_rows(rows_like(2), VOCAB, device))
