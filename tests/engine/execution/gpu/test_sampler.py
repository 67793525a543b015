"""Owns the comparison of tokens chosen on a device with those of the engine's sampler, by torch and by Triton.
Never judges by frequencies: the same draw must give the same token."""

from __future__ import annotations

import random
from importlib.util import find_spec

import pytest
import torch

from engine.batch.logit_controls import Within
from engine.batch.sampler import sample
from engine.execution.gpu.sampler import NO_TOKEN, choose_on_device
from engine.execution.gpu.token_counts import TokenCounts
from engine.step import LogitControls, RowSampling
from kernels.choice import TRITON_TABLE
from kernels.eager.ops import TORCH, Ops
from tests.support.fake_device import FakeDevice

VOCAB = 300


@pytest.fixture(params=["torch", "triton"])
def table(request: pytest.FixtureRequest) -> Ops:
    """Return Triton's kernels, which run in its interpreter."""
    if request.param == "torch":
        return TORCH
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: it is for Linux on x86-64")
    from importlib import import_module

    found: Ops = import_module(TRITON_TABLE).TRITON
    return found


@pytest.mark.parametrize("seed", range(30))
def test_tokens_chosen_on_the_device_are_those_of_the_sampler(seed: int) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    vocab = draw.choice([3, 50, 700, 5000])
    logits = torch.randn(9, vocab, generator=generator) * draw.choice([0.1, 3.0, 30.0])
    logits = logits.round() if seed % 3 == 0 else logits  # many ties
    logits[2] = torch.nan
    logits[3] = -torch.inf
    logits[4, 1:] = -torch.inf
    rows = [
        RowSampling(
            temperature=draw.choice([0.0, 1e-9, 0.7, 1.0, 5.0]),
            top_k=draw.choice([0, 1, 5, vocab, vocab + 3]),
            top_p=draw.choice([1.0, 0.95, 0.5, 1e-6]),
            min_p=draw.choice([0.0, 0.0, 0.2, 1.0]),
            seed=draw.randrange(-5, 5),
        )
        for _ in range(9)
    ]
    positions = [draw.randrange(10_000) for _ in rows]
    want = [NO_TOKEN if token is None else token for token in sample(logits, rows, positions, [()] * 9)]
    assert choose_on_device(FakeDevice(), TORCH, logits, rows, positions, [()] * 9, None, None).tolist() == want


def test_controls_and_grammars_are_applied_before_the_draw(table: Ops) -> None:
    """Rows have every control, a grammar alone, a grammar beside another control, or no more than a ban."""
    generator = torch.Generator().manual_seed(11)
    logits = (torch.randn(6, VOCAB, generator=generator) * 4).round(decimals=2)
    controls = LogitControls(
        allowed_token_ids=tuple(range(0, VOCAB, 2)),
        logit_bias=((8, 3.5), (10, -100.0)),
        repetition_penalty=1.3,
        prompt_token_ids=(4, 8, 12),
        frequency_penalty=0.4,
        presence_penalty=0.7,
        bad_words=((20,), (6, 22)),
    )
    drawn = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
    rows = [
        RowSampling(**drawn, seed=1),
        RowSampling(**drawn, seed=2, controls=controls, banned_token_ids=(2, 30)),
        RowSampling(0.0, 0, 1.0, 0.0, seed=3, controls=controls),
        RowSampling(**drawn, seed=4, controls=LogitControls(grammar="a")),
        RowSampling(**drawn, seed=5, controls=LogitControls(grammar="b", allowed_token_ids=(1,))),
        RowSampling(0.0, 0, 1.0, 0.0, seed=6, banned_token_ids=(7,)),
    ]
    answers = [(), (4, 4, 6), (8, 14, 6), (), (3,), ()]
    words = torch.zeros(2, -(-VOCAB // 32), dtype=torch.int32)
    words[0, 3], words[1, 5] = 0b1011, 0b110  # the second allows none of its row's allowed_token_ids
    within = Within(torch.tensor([3, 4]), words)
    tokens = TokenCounts(FakeDevice(), VOCAB).rows("abcdef", rows, answers)
    for position in (0, 2**40):  # the interpreter takes seconds for each
        positions = [position] * len(rows)
        want = sample(logits, rows, positions, answers, within)
        got = choose_on_device(FakeDevice(), table, logits, rows, positions, answers, within, tokens)
        assert got.tolist() == want
