"""Owns the comparison of the native sampler with the definition of correct, and of its random number with Python's.
Never tests statistics where an exact answer exists, except once, to detect a random number used twice."""

from __future__ import annotations

import ctypes
import math
import random
import subprocess
from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from itertools import product
from pathlib import Path

import pytest
import torch

from engine.batch.sampler import SMALLEST_TEMPERATURE, sample, uniform
from engine.step import RowSampling
from kernels import reference
from kernels.cpu.native.library import FLAGS, SOURCE_DIR, _compiler
from kernels.cpu.native.program import Team
from kernels.cpu.native.sampling import DrawnRow, _DrawnRow, draw_rows
from tests.kernels.rows import seeded_generator
from tests.support.compiler import needs_compiler
from tests.support.seeds import seeded_random

SEEDS = (0, 1, -1, 2**32 - 1, 2**32, -(2**63), 2**63 - 1)
POSITIONS = (0, 1, 131071, 2**32 - 1, 2**32, 2**63 - 1)
NEAR = 1e-12

pytestmark = needs_compiler

PROBE = """
#include "sample.h"
extern "C" double probe_uniform(int64_t seed, int64_t position) { return uniform(seed, position); }
extern "C" int64_t probe_draw(const float* logits, int64_t vocab, const DrawnRow* row, double number) {
    return Sampler{}(logits, vocab, *row, number);
}
extern "C" void probe_exponential(const double* x, double* out) {
    f64x8 value;
    std::memcpy(&value, x, sizeof value);
    value = exponential(value);
    std::memcpy(out, &value, sizeof value);
}
"""


@pytest.fixture(scope="module")
def team() -> Team:
    return make_team(2)


def make_team(num_threads: int) -> Team:
    return Team(num_threads)


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory, team: Team) -> ctypes.CDLL:
    """Compile a library that exposes what is inside sample.h."""
    directory: Path = tmp_path_factory.mktemp("probe")
    source, library = directory / "probe.cpp", directory / "probe.so"
    source.write_text(PROBE)
    subprocess.run(
        [*_compiler(), *FLAGS, "-shared", f"-I{SOURCE_DIR}", str(source), "-o", str(library)], check=True, timeout=120
    )
    found = ctypes.CDLL(str(library))
    found.probe_uniform.restype = ctypes.c_double
    found.probe_uniform.argtypes = [ctypes.c_int64, ctypes.c_int64]
    found.probe_draw.restype = ctypes.c_int64
    found.probe_draw.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_double]
    found.probe_exponential.restype = None
    found.probe_exponential.argtypes = [ctypes.POINTER(ctypes.c_double)] * 2
    return found


def spec(
    row: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    position: int = 0,
) -> DrawnRow:
    return DrawnRow(row, seed, position, top_k, temperature, top_p, min_p)


def defined(logits: torch.Tensor, row: DrawnRow, nudge: Sequence[float] = (0.0, 0.0, 0.0)) -> int:
    """Return the reference's token. nudge: the relative changes of the random number, top_p and min_p."""
    number, top_p, min_p = (
        value * (1 + by)
        for value, by in zip((uniform(row.seed, row.position), row.top_p, row.min_p), nudge, strict=True)
    )
    return reference.sample(
        logits[row.row],
        min(number, 1 - 2.0**-53),
        temperature=max(row.temperature, SMALLEST_TEMPERATURE),
        top_k=row.top_k,
        top_p=top_p if row.top_p < 1 else 1.0,
        min_p=min_p,
    )


def check(logits: torch.Tensor, rows: Sequence[DrawnRow], tokens: Sequence[int]) -> int:
    """Count the rows whose token differs from the reference's; only a boundary next to it excuses that."""
    excused = 0
    assert len(tokens) == len(rows)
    for row, token in zip(rows, tokens, strict=True):
        if token != defined(logits, row):
            nudges = product((-NEAR, 0.0, NEAR), repeat=3)
            assert token in {defined(logits, row, nudge) for nudge in nudges}, (row, token, defined(logits, row))
            excused += 1
    return excused


def some_logits(rng: random.Random, generator: torch.Generator, rows: int, vocab: int) -> torch.Tensor:
    logits = torch.randn(rows, vocab, generator=generator) * rng.choice([1e-3, 0.1, 2.0, 10.0, 100.0])
    logits += rng.choice([0.0, 0.0, 30.0, -30.0])
    if rng.random() < 0.4:
        logits = logits.round()  # ties, and both zeros
    if rng.random() < 0.3:
        keep = torch.randint(vocab, (rows, 1), generator=generator)
        banned = torch.rand(rows, vocab, generator=generator) < rng.choice([0.1, 0.9, 1.0])
        logits = logits.masked_fill(banned.scatter(1, keep, False), -torch.inf)
    return logits


def some_row(rng: random.Random, row: int, vocab: int) -> DrawnRow:
    return spec(
        row,
        temperature=rng.choice([1e-30, 1e-5, 0.01, 0.3, 0.7, 1.0, 1.0, 2.0, 50.0]),
        top_k=rng.choice([0, 0, 0, 1, 2, rng.randint(1, vocab), vocab - 1, vocab, vocab + 5, 2**40]),
        top_p=rng.choice([1.0, 1.0, 1.0, 1 - 2.0**-53, 0.999, 0.9, 0.5, 0.1, 1e-9, 5e-324]),
        min_p=rng.choice([0.0, 0.0, 0.0, 1e-300, 1e-6, 0.05, 0.5, 1.0]),
        seed=rng.randrange(-(2**63), 2**63),
        position=rng.randrange(200_000),
    )


@pytest.mark.parametrize("vocab", [1, 2, 3, 8, 15, 16, 17, 63, 64, 65, 130, 257])
def test_every_row_has_the_token_of_the_reference(team: Team, vocab: int) -> None:
    generator = seeded_generator()
    rng = random.Random(generator.initial_seed())
    excused = drawn = 0
    for _ in range(30):
        logits = some_logits(rng, generator, 6, vocab)
        rows = [some_row(rng, rng.randrange(6), vocab) for _ in range(10)]
        excused += check(logits, rows, draw_rows(team, logits, rows))
        drawn += len(rows)
    assert excused <= drawn // 20  # frequent excuses would hide a wrong filter


@pytest.mark.parametrize("scale", [0.01, 3.0, 30.0])
def test_rows_of_a_whole_vocabulary_have_the_tokens_of_the_reference(team: Team, scale: float) -> None:
    generator = seeded_generator()
    logits = torch.randn(1, 49_152, generator=generator) * scale
    logits[0, torch.randint(49_152, (500,), generator=generator)] = -torch.inf
    limits = [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 20_000, "top_p": 0.95, "min_p": 0.01}]
    rows = [spec(seed=generator.initial_seed(), position=i, **limit) for i, limit in enumerate(limits)]
    assert check(logits, rows, draw_rows(team, logits, rows)) <= 1


def test_ties_at_the_edge_go_to_the_lower_ids_under_every_filter(team: Team) -> None:
    logits = torch.full((1, 100), 1.0)
    logits[0, 70] = 2.0
    for limits, kept in (({"top_k": 3}, {0, 1, 70}), ({"top_p": 3.5 / 100, "temperature": 1e6}, {0, 1, 2, 70})):
        rows = [spec(seed=seed, **{"temperature": 1e6, **limits}) for seed in range(300)]
        assert set(draw_rows(team, logits, rows)) == kept


def test_the_two_zeros_are_one_logit(team: Team) -> None:
    logits = torch.tensor([[-0.0, 0.0, -0.0, -1.0]])
    rows = [spec(top_k=2, seed=seed) for seed in range(100)]
    assert set(draw_rows(team, logits, rows)) == {0, 1}


def test_a_temperature_below_the_smallest_is_the_smallest(team: Team) -> None:
    logits = torch.tensor([[0.0, 1e-5]])
    smallest, tiny = (
        draw_rows(team, logits, [spec(temperature=temperature, seed=seed) for seed in range(100)])
        for temperature in (SMALLEST_TEMPERATURE, 1e-30)
    )
    assert set(smallest) == {0, 1}
    assert tiny == smallest


@pytest.mark.parametrize("limits", [{}, {"top_k": 40}, {"top_p": 0.999}, {"min_p": 1e-9}])
def test_a_banned_token_is_never_drawn(team: Team, limits: dict[str, float]) -> None:
    logits = torch.zeros(1, 50)
    logits[0, ::2] = -torch.inf
    tokens = draw_rows(team, logits, [spec(seed=seed, **limits) for seed in range(2000)])
    assert all(token % 2 for token in tokens)
    assert len(set(tokens)) >= 24


def test_a_row_has_the_same_token_alone_and_among_others_and_with_any_number_of_threads() -> None:
    generator = seeded_generator()
    rng = random.Random(generator.initial_seed())
    logits = some_logits(rng, generator, 40, 1000)
    rows = [some_row(rng, number, 1000) for number in range(40)]
    teams = [make_team(num_threads) for num_threads in (1, 2, 3, 5)]
    alone = [draw_rows(teams[0], logits, [row])[0] for row in rows]
    for team in teams:
        assert draw_rows(team, logits, rows) == alone
        assert draw_rows(team, logits, rows[::-1]) == alone[::-1]


def test_a_wide_row_leaves_nothing_behind_for_a_narrow_one() -> None:
    """Regression guard: threads keep their buffers, and what lies beyond a narrow row's end must not count."""
    team = make_team(1)
    wide, narrow = torch.zeros(1, 5000), torch.zeros(1, 5)
    for limits in ({}, {"top_k": 3}, {"top_p": 0.7}):
        draw_rows(team, wide, [spec()])
        rows = [spec(seed=seed, **limits) for seed in range(50)]
        assert draw_rows(team, narrow, rows) == [defined(narrow, row) for row in rows]


def test_the_engine_gets_the_definitions_tokens_from_the_native_draw(team: Team) -> None:
    def draw(
        logits: torch.Tensor, numbers: Sequence[int], how: Sequence[RowSampling], positions: Sequence[int]
    ) -> list[int]:
        return draw_rows(
            team,
            logits,
            [
                DrawnRow(number, row.seed, position, row.top_k, row.temperature, row.top_p, row.min_p)
                for number, row, position in zip(numbers, how, positions, strict=True)
            ],
        )

    generator = seeded_generator()
    logits = torch.randn(30, 77, generator=generator) * 3
    rows = [
        RowSampling((0.0, 0.7, 1.5)[i % 3], (0, 9)[i % 2], (1.0, 0.8)[i % 5 == 0], 0.01, i, (i, i + 1))
        for i in range(30)
    ]
    got = sample(logits, rows, range(30), [()] * 30, draw=draw)
    assert got == [
        reference.sample(
            logits[i],
            uniform(row.seed, i),
            temperature=row.temperature,
            top_k=row.top_k,
            top_p=row.top_p,
            min_p=row.min_p,
            banned=row.banned_token_ids,
        )
        for i, row in enumerate(rows)
    ]


def test_no_rows_have_no_tokens(team: Team) -> None:
    assert draw_rows(team, torch.zeros(2, 8), []) == []


@pytest.mark.parametrize("logits", [torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(8, 2).T])
def test_logits_that_the_library_would_misread_are_refused(team: Team, logits: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="contiguous float32 dimensions"):
        draw_rows(team, logits, [spec()])


def test_a_row_that_the_logits_do_not_have_is_refused(team: Team) -> None:
    for number in (-1, 2):
        with pytest.raises(ValueError, match=rf"row {number} of 2"):
            draw_rows(team, torch.zeros(2, 8), [spec(number)])


def test_frequencies_follow_the_probabilities_over_seeds_and_over_positions(team: Team) -> None:
    shares = torch.tensor([0.5, 0.25, 0.15, 0.09, 0.01])
    for by in ("seed", "position"):
        rows = [spec(**{by: number}) for number in range(20_000)]
        counts = torch.tensor(draw_rows(team, shares.log().unsqueeze(0), rows)).bincount(minlength=5)
        bound = 5 * (20_000 * shares * (1 - shares)).sqrt()  # five standard deviations
        assert ((counts - 20_000 * shares).abs() < bound).all()


def test_the_random_number_is_pythons_to_the_last_bit(probe: ctypes.CDLL) -> None:
    rng = seeded_random()
    pairs = list(product(SEEDS, POSITIONS))
    pairs += [(rng.randrange(-(2**63), 2**63), rng.randrange(2**40)) for _ in range(500)]
    assert [probe.probe_uniform(*pair) for pair in pairs] == [uniform(*pair) for pair in pairs]


@pytest.mark.parametrize("limits", [{}, {"top_k": 150}, {"top_p": 1 - 2.0**-53}, {"min_p": 0.3}])
def test_the_largest_and_smallest_numbers_stay_on_tokens_that_are_kept(
    probe: ctypes.CDLL, limits: dict[str, float]
) -> None:
    """Regression guard: number * total may round to total, and a block's sum is added in another order than its tokens.
    If no cumulative mass exceeds the target, the last kept token is drawn, not a banned one after it."""
    generator = seeded_generator()
    for size in (1, 3, 40, 64, 100, 128, 190):
        logits = torch.full((300,), -torch.inf)
        logits[50 : 50 + size] = torch.rand(size, generator=generator)
        row = _DrawnRow(*spec(**limits))
        kept = [
            probe.probe_draw(logits.data_ptr(), len(logits), ctypes.byref(row), number)
            for number in (0.0, 1 - 2.0**-53)
        ]
        order = logits.argsort(descending=True, stable=True)[: 150 if "top_k" in limits else 300]
        first, last = (f(token for token in order.tolist() if logits[token].isfinite()) for f in (min, max))
        assert kept == [first, last]


def test_a_mass_is_within_two_units_of_the_last_place_and_vanishes_below_normal_numbers(probe: ctypes.CDLL) -> None:
    def exponential(scores: Sequence[float]) -> list[float]:
        found = (ctypes.c_double * 8)()
        probe.probe_exponential((ctypes.c_double * 8)(*scores), found)
        return list(found)

    rng = seeded_random()
    widths: list[Callable[[], float]] = [
        lambda: -rng.random(),
        lambda: -rng.random() * 708,
        lambda: -(2.0 ** -rng.randrange(60)),
    ]
    assert exponential([0.0, -0.0] * 4) == [1.0] * 8
    assert exponential([-708.5, -1e9, -1e300, -math.inf] * 2) == [0.0] * 8
    with localcontext() as context:
        context.prec = 40
        for _ in range(500):
            scores = [rng.choice(widths)() for _ in range(8)]
            for score, got in zip(scores, exponential(scores), strict=True):
                assert abs(Decimal(got) - Decimal(score).exp()) <= 2 * Decimal(math.ulp(got)), score
