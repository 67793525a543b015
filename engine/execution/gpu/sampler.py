"""Owns the choice of tokens on the device, as `engine.batch.sampler` defines it, without waiting for the device.
Never reads a value back: a row that has no token is marked in the result."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from engine.batch.logit_controls import Within, apply_controls, banned_tokens, bans_after
from engine.batch.logprobs import find_logprobs
from engine.batch.sampler import SMALLEST_TEMPERATURE, draw_tokens
from engine.execution.device import Device
from engine.step import LogitControls, RowSampling
from kernels.eager.ops import Ops
from kernels.rows.row_tokens import RowTokens
from kernels.rows.sampled_row import SampledRow

NO_TOKEN = -1
_NO_CONTROLS = LogitControls()


def choose_on_device(
    device: Device,
    ops: Ops,
    logits: Tensor,
    rows: Sequence[RowSampling],
    positions: Sequence[int],
    answers: Sequence[Sequence[int]],
    within: Within | None,
    tokens: RowTokens | None,
) -> Tensor:
    """Choose one token per row, by the kernels of `ops` or else by torch's operators: controls first, then the draw.

    logits: [rows, vocab] of any float type, the model's own; answers: each row's answer tokens so far, with
    PENDING_TOKEN for one in flight; positions: those of the chosen tokens; tokens: what engine.execution.gpu
    .token_counts has for these rows. NO_TOKEN for a row without a finite largest logit. # [rows] int64
    """
    if ops.sample is None:
        look_back = None if tokens is None else partial(apply_tokens, device, rows, answers, tokens)
        controlled = apply_controls(logits.float(), rows, answers, within, look_back)
        return sample_on_device(device, controlled, rows, positions)
    words = None
    if within is not None:  # rows without a grammar may have any token
        words = torch.full((len(rows), within.words.shape[1]), -1, dtype=torch.int32)
        words[within.rows] = within.words
    return ops.sample(logits, list(map(_sampled_row, rows, positions, answers)), words, tokens)


def warm_up_sampler(device: Device, ops: Ops, dtype: torch.dtype, vocab: int) -> None:
    """Choose tokens once in every way: greedy and drawn, with and without controls, with log-probabilities.

    A kernel is compiled when it is first launched with arguments of this kind. In a step, every stream would wait for
    that. dtype, vocab: those of the model's logits.
    """
    biased = LogitControls(logit_bias=((0, 1.0),))
    limited = LogitControls(logit_bias=((0, 1.0),), allowed_token_ids=(0,))
    for count in (1, 2):
        logits = torch.zeros(count, vocab, dtype=dtype, device=device.torch_device)
        any_token = Within(torch.arange(count), torch.full((count, -(-vocab // 32)), -1, dtype=torch.int32))
        for controls, within in ((None, None), (biased, None), (limited, any_token)):
            rows = [
                RowSampling(float(number), top_k=0, top_p=1.0, min_p=0.0, seed=0, controls=controls)
                for number in range(count)
            ]
            tokens = choose_on_device(device, ops, logits, rows, range(count), [()] * count, within, None)
        (ops.logprobs or find_logprobs)(logits, tokens.clamp(min=0), 1)


def _sampled_row(row: RowSampling, position: int, answer: Sequence[int]) -> SampledRow:
    """What the engine asks of the row, with what its kernels cannot look up: its position and its answer so far."""
    controls = row.controls or _NO_CONTROLS
    return SampledRow(
        temperature=max(row.temperature, SMALLEST_TEMPERATURE) if row.temperature > 0 else 0.0,
        top_k=row.top_k,
        top_p=row.top_p,
        min_p=row.min_p,
        seed=row.seed,
        position=position,
        banned=banned_tokens(row, answer),
        banned_after=bans_after(row, answer),
        allowed=controls.allowed_token_ids or None,
        bias=controls.logit_bias,
        repetition_penalty=controls.repetition_penalty,
        frequency_penalty=controls.frequency_penalty,
        presence_penalty=controls.presence_penalty,
    )


def apply_tokens(
    device: Device, rows: Sequence[RowSampling], answers: Sequence[Sequence[int]], tokens: RowTokens, logits: Tensor
) -> None:
    """Apply penalties by the rows' counts, and bans that depend on a token in flight, by torch's operators. In place.

    logits: [rows, vocab] float32. Rounds as engine.batch.logit_controls does.
    """
    penalized = [n for n, row in enumerate(rows) if row.controls is not None and row.controls.penalizes]
    if penalized:
        found = [rows[n].controls or _NO_CONTROLS for n in penalized]
        numbers = [(one.repetition_penalty, one.frequency_penalty, one.presence_penalty) for one in found]
        index = device.upload(torch.tensor(penalized))
        repetition, frequency, presence = device.upload(torch.tensor(numbers)).T.unsqueeze(2)  # [penalized, 1] each
        latest = tokens.latest[index]
        counts = tokens.counts[tokens.slots[index]]  # [penalized, vocab]
        counts.scatter_add_(1, latest.clamp(min=0), 2 * (latest >= 0).to(torch.int32))
        own = logits[index]
        repeated = torch.where(own > 0, own / repetition, own * repetition)
        kept = torch.where(counts > 0, repeated, own)
        times = counts >> 1
        logits[index] = torch.where(times > 0, kept - (times * frequency + presence), kept)
    bans = [(n, *ban) for n, row in enumerate(rows) for ban in bans_after(row, answers[n])]
    if bans:
        number, newest, token = device.upload(torch.tensor(bans)).T
        banned = torch.where(tokens.latest[number, 0] == newest, -torch.inf, torch.inf)
        logits.view(-1).scatter_reduce_(0, number * logits.shape[1] + token, banned, "amin")


def sample_on_device(device: Device, logits: Tensor, rows: Sequence[RowSampling], positions: Sequence[int]) -> Tensor:
    """Choose one token per row, the one at positions[row]; NO_TOKEN for a row without a finite largest logit.
    # [rows] int64

    logits: [rows, vocab] float32, controls applied. The tokens are those of `engine.batch.sampler.sample`, which checks
    before drawing which rows have a finite largest logit. Checking here would mean to wait for the device: every row is
    drawn, and rows without a finite logit are marked afterwards.
    """
    best, tokens = logits.max(dim=-1)  # [rows]
    drawn = [number for number, row in enumerate(rows) if row.temperature > 0]
    if drawn:
        index, wanted, places = (
            device.upload(torch.tensor(drawn)),
            [rows[i] for i in drawn],
            [positions[i] for i in drawn],
        )
        scores = logits[index] - best[index].unsqueeze(1)  # [drawn, vocab], 0 at the most likely
        tokens = tokens.index_copy(0, index, draw_tokens(scores, wanted, places, device.upload))
    return torch.where(best.isfinite(), tokens, NO_TOKEN)
