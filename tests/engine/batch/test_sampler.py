"""Owns the sampler's contract: its random numbers, its filters against a naive per-row oracle, its edges.
Never tests statistics where an exact answer exists."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from engine.batch.sampler import NUCLEUS_GUESS, philox4x32, sample, uniform
from engine.step import RowSampling
from kernels import reference
from tests.support.seeds import next_seed


def row(
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    banned: tuple[int, ...] = (),
) -> RowSampling:
    return RowSampling(temperature, top_k, top_p, min_p, seed, banned)


def draw(logits: torch.Tensor, specs: Sequence[RowSampling]) -> list[int | None]:
    return sample(logits, specs, [0] * len(specs), [()] * len(specs))


def oracle(logits: torch.Tensor, spec: RowSampling, position: int = 0) -> int:
    return reference.sample(
        logits,
        uniform(spec.seed, position),
        temperature=spec.temperature,
        top_k=spec.top_k,
        top_p=spec.top_p,
        min_p=spec.min_p,
        banned=spec.banned_token_ids,
    )


def test_philox_gives_the_published_known_answers() -> None:
    """The vectors are those of Random123's kat_vectors for philox4x32-10."""
    ones = 0xFFFFFFFF
    assert philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox4x32((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox4x32(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_the_number_of_a_seed_and_position_never_changes() -> None:
    recorded = {
        (0, 0): 0.3990464708489645,
        (0, 1): 0.9722412015223156,
        (1, 0): 0.8902591729757107,
        (-1, 7): 0.4301902469608202,
        (2**63 - 1, 131071): 0.2855025431596755,
        (1234567890123, 42): 0.9870501765537985,
    }
    assert {key: uniform(*key) for key in recorded} == recorded


def test_random_numbers_are_spread_evenly_below_one() -> None:
    numbers = [uniform(seed, position) for seed in (0, 1, 2**40) for position in range(2000)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    tenths = [sum(int(number * 10) == tenth for number in numbers) for tenth in range(10)]
    assert all(500 <= count <= 700 for count in tenths)  # 600 ± 4.3 standard deviations


@pytest.mark.parametrize("vocab", [3, 50, 700])
def test_a_batch_of_mixed_rows_equals_the_naive_oracle(vocab: int) -> None:
    seed = next_seed()
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(6):
        logits = torch.randn(8, vocab, generator=generator) * rng.choice([0.1, 2.0, 10.0])
        specs = [
            row(
                temperature=rng.choice([0.0, 0.3, 1.0, 2.0]),
                top_k=rng.choice([0, 0, 1, 2, 40, vocab, vocab + 5]),
                top_p=rng.choice([1.0, 1.0, 0.9, 0.5, 0.01]),
                min_p=rng.choice([0.0, 0.0, 0.05, 0.5]),
                seed=rng.randrange(-(2**63), 2**63),
                banned=tuple(rng.sample(range(vocab), rng.choice([0, 0, 2]))),
            )
            for _ in range(8)
        ]
        positions = [rng.randrange(200_000) for _ in specs]
        assert sample(logits, specs, positions, [()] * len(specs)) == list(map(oracle, logits, specs, positions))


def test_neighbours_do_not_change_a_row() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    specs = [row(top_k=9), row(temperature=0), row(top_p=0.8, seed=3), row(min_p=0.1, seed=4), row(seed=5)]
    assert draw(logits, specs) == [draw(logits[i : i + 1], [spec])[0] for i, spec in enumerate(specs)]


def test_a_nucleus_wider_than_the_guess_falls_back_to_the_whole_vocabulary() -> None:
    vocab = 4 * NUCLEUS_GUESS
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(2)) * 0.01
    specs = [row(top_p=0.95, seed=seed) for seed in range(3)]
    assert draw(logits, specs) == [oracle(line, spec) for line, spec in zip(logits, specs, strict=True)]
    narrow = torch.cat((logits[:1], logits[1:2] * 1000))  # one row falls back, the other does not
    assert draw(narrow, specs[:2]) == [oracle(line, spec) for line, spec in zip(narrow, specs, strict=False)]


@pytest.mark.parametrize("spec", [row(top_k=1), row(top_p=1e-9), row(min_p=1.0), row(temperature=1e-30)])
def test_the_tightest_filter_equals_greedy(spec: RowSampling) -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(3))
    assert draw(logits, [spec]) == draw(logits, [row(temperature=0)])


@pytest.mark.parametrize("spec", [row(temperature=0), row(top_k=1), row(top_p=1e-9)])
def test_ties_go_to_the_lowest_token_id(spec: RowSampling) -> None:
    assert draw(torch.tensor([[0.0, 2.0, 2.0, 1.0]]), [spec]) == [1]


def test_ties_at_the_edge_keep_exactly_top_k() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0]])
    drawn = {draw(logits, [row(top_k=2, temperature=5.0, seed=seed)])[0] for seed in range(60)}
    assert drawn == {0, 1}


def test_all_mass_in_one_token_is_always_that_token() -> None:
    logits = torch.full((1, 50), -torch.inf)
    logits[0, 17] = 3.0
    assert {draw(logits, [row(seed=seed)])[0] for seed in range(20)} == {17}


def test_a_draw_near_one_stays_on_a_token_with_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: u * total may round to total, which no cumulative sum exceeds."""
    logits = torch.tensor([[0.0, 0.3, 0.7, -torch.inf, -torch.inf]])
    for value, token in ((1 - 2.0**-53, 2), (0.0, 0)):
        monkeypatch.setattr("engine.batch.sampler.uniform", lambda seed, position, value=value: value)
        assert draw(logits, [row()]) == [token]


def test_a_draw_of_zero_skips_leading_tokens_without_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.batch.sampler.uniform", lambda seed, position: 0.0)
    assert draw(torch.tensor([[-torch.inf, 1.0, 0.0]]), [row()]) == [1]


def test_banned_tokens_are_never_chosen_by_either_path() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0]]).expand(2, 3)
    specs = [row(temperature=0, banned=(0,)), row(temperature=1e-9, banned=(0, 1))]
    assert draw(logits, specs) == [1, 2]
    assert logits[0].tolist() == [5.0, 4.0, 3.0]


def test_bfloat16_logits_are_widened_before_they_are_filtered() -> None:
    logits = (torch.randn(2, 100, generator=torch.Generator().manual_seed(4)) * 3).bfloat16()
    specs = [row(seed=9), row(top_p=0.7, seed=8)]
    assert draw(logits, specs) == [oracle(line.float(), spec) for line, spec in zip(logits, specs, strict=True)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_logit_has_no_token_and_its_neighbours_have_theirs(temperature: float) -> None:
    logits = torch.tensor([[0.0, 9.0], [torch.nan, 0.0], [-torch.inf, -torch.inf], [9.0, 0.0]])
    assert draw(logits, [row(temperature=temperature, top_k=1)] * 4) == [1, None, None, 0]
    assert draw(logits[:1], [row(temperature=temperature, banned=(0, 1))]) == [None]


def test_a_models_own_draw_is_asked_for_sound_drawn_rows_alone_and_sees_controlled_logits() -> None:
    asked: list[tuple[list[int], list[int], list[int]]] = []

    def own(
        logits: torch.Tensor, numbers: Sequence[int], specs: Sequence[RowSampling], positions: Sequence[int]
    ) -> list[int]:
        assert logits.is_contiguous()
        assert logits.dtype == torch.float32
        assert logits.tolist()[4] == [-torch.inf, 2.0, 3.0]
        asked.append((list(numbers), [spec.seed for spec in specs], list(positions)))
        return [2, 0]

    lines = [[0.0, 9.0, 1.0], [torch.nan, 0.0, 0.0], [1.0, 2.0, 3.0], [-torch.inf] * 3, [1.0, 2.0, 3.0]]
    logits = torch.tensor(lines, dtype=torch.bfloat16).T.contiguous().T
    specs = [row(temperature=0), row(seed=1), row(seed=2), row(seed=3), row(seed=4, banned=(0,))]
    assert sample(logits, specs, [10, 11, 12, 13, 14], [()] * 5, draw=own) == [1, None, 2, None, 0]
    assert asked == [([2, 4], [2, 4], [12, 14])]


def test_a_models_own_draw_is_not_asked_where_no_row_is_drawn() -> None:
    def own(*_: object) -> list[int]:
        raise AssertionError("asked")

    logits = torch.tensor([[0.0, 9.0], [torch.nan, 0.0]])
    assert sample(logits, [row(temperature=0), row()], [0, 0], [()] * 2, draw=own) == [1, None]


def test_sampled_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(3000, 3)
    tokens = sample(logits, [row(seed=11)] * 3000, range(3000), [()] * 3000)
    for token, share in enumerate((0.5, 0.3, 0.2)):
        assert abs(tokens.count(token) / 3000 - share) < 0.04
