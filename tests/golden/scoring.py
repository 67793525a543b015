"""Owns the golden gate's arithmetic: how far one model's teacher-forced log-probabilities are from another's.
Never decides what is close enough; `floors.json` records that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.execution.executor import TorchExecutor
from tests.support.plans import forced_logits, forced_logits_together

CHUNK_SIZES = (4, 64, None)
FLOORS_FILE = Path(__file__).with_name("floors.json")


@dataclass(frozen=True)
class Score:
    """Distances from the reference, in nats, over every position of every prompt."""

    regret_mean: float
    """Reference log-probability of the reference's argmax, less that of ours."""
    delta_mean: float
    """|difference| of the log-probability of the token that really follows."""
    delta_p99: float
    delta_max: float
    """Shown, but never asserted: one unlucky position decides it."""


def compare(got: Sequence[Tensor], want: Sequence[Tensor], sequences: Sequence[Sequence[int]]) -> Score:
    """Compare the logits of both, each [len(tokens), vocab], for the same sequences."""
    regrets, deltas = [], []
    for ours, reference, tokens in zip(got, want, sequences, strict=True):
        a, b = ours.float().log_softmax(-1), reference.float().log_softmax(-1)
        best = b.gather(1, b.argmax(-1, keepdim=True))
        regrets.append((best - b.gather(1, a.argmax(-1, keepdim=True))).flatten())
        following = torch.tensor(tokens[1:]).unsqueeze(1)
        deltas.append((a[:-1].gather(1, following) - b[:-1].gather(1, following)).abs().flatten())
    regret, delta = torch.cat(regrets), torch.cat(deltas)
    return Score(
        regret_mean=regret.mean().item(),
        delta_mean=delta.mean().item(),
        delta_p99=delta.quantile(0.99).item(),
        delta_max=delta.max().item(),
    )


def transformers_logits(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the logits of every position, one sequence at a time."""
    with torch.inference_mode():
        return [model(torch.tensor([list(tokens)])).logits[0].float() for tokens in sequences]


def executor_logits(
    executor: TorchExecutor, sequences: Sequence[Sequence[int]], chunk_size: int | None, *, together: bool
) -> list[Tensor]:
    """Return the same from an executor, alone or with all sequences side by side in each step.
    Blocks are dealt out in turn."""
    blocks = [range(number, 12 * len(sequences), len(sequences)) for number in range(len(sequences))]
    if together:
        size = chunk_size or max(map(len, sequences))
        return forced_logits_together(executor, sequences, blocks, size)
    return [forced_logits(executor, tokens, table, chunk_size) for tokens, table in zip(sequences, blocks, strict=True)]


def check(name: str, score: Score) -> None:
    """Check a score against the recorded multiple of the recorded floor of `name`, and show it."""
    recorded = json.loads(FLOORS_FILE.read_text())[name]
    floor, multiple = recorded["floor"], recorded["multiple"]
    print(f"{name}: {score}, floor {floor}, multiple {multiple}")
    for key in ("regret_mean", "delta_mean", "delta_p99"):
        assert getattr(score, key) <= multiple * floor[key], f"{key} of {name}: {score}, {multiple} x {floor}"
