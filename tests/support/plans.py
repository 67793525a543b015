"""Owns hand-made plans for executor tests: one request fed in chunks, several side by side.
Never schedules: tests say what each step has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from engine.execution.executor import ModelExecutor
from engine.execution.gpu.executor import DeviceExecutor
from engine.protocol import TokenLogprobs
from engine.step import GraphUse, PromptScoring, RowKind, RowSampling, ScheduledRequest, StateUse, StepPlan


def greedy(num_logprobs: int | None = None) -> RowSampling:
    return RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, num_logprobs=num_logprobs)


def chunk(name: str, tokens: Sequence[int], start: int, end: int, blocks: Sequence[int]) -> ScheduledRequest:
    """Make a chunk of the positions [start, end) of a prompt; its kind is LAST if that completes the prompt."""
    last = end == len(tokens)
    sampling = greedy() if last else None
    kind = RowKind.LAST if last else RowKind.MIDDLE
    return ScheduledRequest(name, kind, start, tuple(tokens[start:end]), tuple(blocks), sampling)


def decode(name: str, token: int, position: int, blocks: Sequence[int]) -> ScheduledRequest:
    return ScheduledRequest(name, RowKind.DECODE, position, (token,), tuple(blocks), greedy())


def stateful(executor: ModelExecutor, row: ScheduledRequest, slot: int = 0) -> ScheduledRequest:
    """Give the row a state slot, if the model has recurrent state."""
    return row._replace(state=StateUse(slot)) if executor.capabilities.recurrent_state else row


def scored(
    name: str, tokens: Sequence[int], start: int, end: int, blocks: Sequence[int], num_logprobs: int = 0
) -> ScheduledRequest:
    """Make a chunk of the positions [start, end) of a prompt that is only scored:
    each predicts the prompt's next token, if it has one."""
    scoring = PromptScoring(start, tuple(tokens[start + 1 : end + 1]), num_logprobs)
    return chunk(name, tokens, start, end, blocks)._replace(sampling=None, scoring=scoring)


def prompt_scores(
    executor: ModelExecutor, tokens: Sequence[int], blocks: Sequence[int], ends: Sequence[int], num_logprobs: int = 0
) -> list[TokenLogprobs]:
    """Return log-probabilities of a prompt fed in chunks that end at `ends`,
    in the order in which the chunks return them."""
    found: list[TokenLogprobs] = []
    for start, end in pairwise((0, *ends)):
        executor.launch(StepPlan(start, (scored("a", tokens, start, end, blocks, num_logprobs),)))
        output = executor.collect()
        assert output.sampled == ((),)
        found += output.prompt_logprobs[0]
    return found


def run(executor: ModelExecutor, *rows: ScheduledRequest, step_id: int = 0) -> tuple[tuple[int, ...], ...]:
    executor.launch(StepPlan(step_id, rows))
    return executor.collect().sampled


def forced_logits(
    executor: ModelExecutor, tokens: Sequence[int], blocks: Sequence[int], chunk_size: int | None = None
) -> Tensor:
    """Return logits at each position of one sequence, fed in chunks. # [len(tokens), vocab] float32"""
    size = chunk_size or len(tokens)
    steps = [chunk("a", tokens, start, min(start + size, len(tokens)), blocks) for start in range(0, len(tokens), size)]
    plans = [StepPlan(number, (stateful(executor, row),)) for number, row in enumerate(steps)]
    return torch.cat([executor.logits(plan) for plan in plans]).float()


def forced_logits_together(
    executor: ModelExecutor, sequences: Sequence[Sequence[int]], tables: Sequence[Sequence[int]], chunk_size: int
) -> list[Tensor]:
    """Do as `forced_logits` for several sequences that share every step."""
    parts: list[list[Tensor]] = [[] for _ in sequences]
    for start in range(0, max(map(len, sequences)), chunk_size):
        live = [number for number, tokens in enumerate(sequences) if start < len(tokens)]
        rows = [chunk(str(n), sequences[n], start, min(start + chunk_size, len(sequences[n])), tables[n]) for n in live]
        rows = [stateful(executor, row, slot=n) for n, row in zip(live, rows, strict=True)]
        logits = executor.logits(StepPlan(start, tuple(rows))).float()
        for number, part in zip(live, logits.split([len(row.token_ids) for row in rows]), strict=True):
            parts[number].append(part)
    return [torch.cat(part) for part in parts]


@torch.inference_mode()
def forced_steps(
    executor: DeviceExecutor, sequences: Sequence[Sequence[int]], tables: Sequence[Sequence[int]], begins: Sequence[int]
) -> list[tuple[Tensor, GraphUse | None]]:
    """Return logits of every token of each step, and which capture the step was. # [num_tokens, vocab] float32

    The tokens of each sequence before `begins` are a step of their own. Then all sequences decode side by side, one
    known token a step, as long as they have any."""
    steps = [
        [chunk(str(number), tokens, 0, begin, table)]
        for number, (tokens, table, begin) in enumerate(zip(sequences, tables, begins, strict=True))
    ]
    for more in range(max(len(tokens) - begin for tokens, begin in zip(sequences, begins, strict=True))):
        live = [number for number, tokens in enumerate(sequences) if begins[number] + more < len(tokens)]
        steps.append([decode(str(n), sequences[n][begins[n] + more], begins[n] + more, tables[n]) for n in live])
    found = []
    for step_id, rows in enumerate(steps):
        plan = StepPlan(step_id, tuple(rows))
        computed, use = executor.model.start(plan, {}, ())
        every = torch.arange(plan.num_tokens, device=computed.hidden.device)
        found.append((computed.logits_at(every).float().cpu(), use))
    return found


def greedy_text(
    executor: ModelExecutor, prompt: Sequence[int], blocks: Sequence[int], count: int, chunk_size: int | None = None
) -> list[int]:
    """Return `count` greedy tokens of one request that has the executor to itself."""
    tokens = list(prompt)
    size = chunk_size or len(prompt)
    for start in range(0, len(prompt), size):
        sampled = run(executor, chunk("a", prompt, start, min(start + size, len(prompt)), blocks))
    tokens += sampled[0]
    while len(tokens) < len(prompt) + count:
        tokens += run(executor, decode("a", tokens[-1], len(tokens) - 1, blocks))[0]
    return tokens[len(prompt) :]
