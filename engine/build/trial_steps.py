"""Owns the steps that a start on a GPU tries: the largest in each respect that memory or kernels depend on.
Never runs one, and needs no torch: a step is integers."""

from __future__ import annotations

from dataclasses import replace

from engine.config import ResolvedConfig
from engine.step import LogitControls, RowKind, RowSampling, ScheduledRequest, StateUse, StepPlan

DECODE_CONTEXT = 4096
"""Tokens of each row but the first in the trial decode step: enough that the step mostly reads K and V."""
SHORT_CONTEXT = 256
"""Tokens of each row in the other trial decode step: so few that no kernel splits a row's keys where many rows decode,
as a different kernel would."""
CHUNK_SPLIT, MOST_SPLITS, MOST_PARTIALS = 512, 16, 256
"""What Triton's attention has: the fewest keys of a chunk's split, the most splits of a chunk, and the most partial
results, its tokens times its splits. kernels.triton.attention.splits has them, and needs Triton; a test compares."""

UNIT, UNIT_PARTIALS = 1024, 1024
"""The same of batch-invariant attention: keys of a split, and the most partial results."""

# Controls need a copy of the logits in float32.
_CONTROLS = LogitControls(
    allowed_token_ids=(0, 1), logit_bias=((0, 1.0),), repetition_penalty=1.1, prompt_token_ids=(0,)
)
_DEAREST = RowSampling(temperature=1.0, top_k=50, top_p=0.9, min_p=0.0, seed=0, num_logprobs=1, controls=_CONTROLS)


def largest_step(config: ResolvedConfig) -> StepPlan:
    """Return a step with the most tokens and rows, each sampled in the most expensive way except for grammars."""
    num_rows = config.max_num_seqs
    longest = min(config.max_num_batched_tokens - num_rows + 1, config.max_model_len)
    blocks = tuple(range(-(-longest // config.block_size)))
    left, rows = config.max_num_batched_tokens, []
    for number in range(num_rows):
        count = max(1, min(longest, left - (num_rows - number - 1)))
        left -= count
        state = StateUse(number) if config.recurrent_state else None
        rows.append(ScheduledRequest(f"row {number}", RowKind.LAST, 0, (0,) * count, blocks, _DEAREST, state=state))
    return StepPlan(0, tuple(rows))


def decode_blocks(config: ResolvedConfig, num_blocks: int | None) -> list[int]:
    """Return how many of `num_blocks` KV blocks each row of the longest decode step has. None: blocks are unlimited.

    The first row is as long as a row may be, the others have up to DECODE_CONTEXT tokens. With few blocks, the others
    are shorter, so that no two rows read the same block: it would come from the chip's own cache, and kernels would be
    timed on a step unlike any real one. They are never shorter than SHORT_CONTEXT.
    """
    longest, most, least = (
        -(-min(config.max_model_len, length) // config.block_size)
        for length in (config.max_model_len, DECODE_CONTEXT, SHORT_CONTEXT)
    )
    others = config.max_num_seqs - 1
    own = most if num_blocks is None else max(0, num_blocks - longest) // max(1, others)
    return [longest, *[max(least, min(most, own))] * others]


def longest_decode_step(config: ResolvedConfig, num_blocks: int) -> StepPlan:
    """Return a decode row per seat, as long as `decode_blocks` says, with blocks of its own while there are any."""
    rows, first = [], 0
    for number, count in enumerate(decode_blocks(config, num_blocks)):
        length = min(config.max_model_len, count * config.block_size)
        blocks = tuple(block % num_blocks for block in range(first, first + count))
        first += count
        state = StateUse(number) if config.recurrent_state else None
        rows.append(ScheduledRequest(f"row {number}", RowKind.DECODE, length - 1, (0,), blocks, _DEAREST, state=state))
    return StepPlan(1, tuple(rows))


def short_decode_step(config: ResolvedConfig, num_blocks: int) -> StepPlan:
    """Return a decode row of up to SHORT_CONTEXT tokens per seat, with blocks as in `longest_decode_step`."""
    return longest_decode_step(replace(config, max_model_len=min(config.max_model_len, SHORT_CONTEXT)), num_blocks)


def drafts_step(config: ResolvedConfig, num_blocks: int) -> StepPlan:
    """Return the rows of `longest_decode_step` with as many drafts as a step may have.

    No step has the logits of more places, and each is sampled in the most expensive way except for grammars.
    """
    left, rows = max(0, config.max_drafting_tokens - config.max_num_seqs), []
    for row in reversed(longest_decode_step(config, num_blocks).rows):  # rows with drafts come last
        count = 1 + min(config.num_speculative_tokens, left, row.start)
        left -= count - 1
        rows.append(row._replace(start=row.end - count, token_ids=(0,) * count))
    return StepPlan(3, tuple(reversed(rows)))


def longest_rows_step(config: ResolvedConfig, num_blocks: int, *, in_units: bool = False) -> StepPlan:
    """Return a row per seat, each as long as a row may be: as many chunks with the most partial results of attention as
    there are tokens for, and chunks of one token.

    No step has more partial results of attention: decodes have fewer splits where there are many. All rows read the
    same blocks. in_units: attention is batch-invariant.
    """
    length, seats = config.max_model_len, config.max_num_seqs
    if in_units:
        most = max(1, min(UNIT_PARTIALS // -(-length // UNIT), length))
    else:
        most = min(MOST_PARTIALS // min(MOST_SPLITS, -(-length // CHUNK_SPLIT)), length)
    blocks = tuple(block % num_blocks for block in range(-(-length // config.block_size)))
    left, rows = config.max_num_batched_tokens - seats, []
    for number in range(seats):
        count = min(most, 1 + left)
        left -= count - 1
        state = StateUse(number) if config.recurrent_state else None
        tokens, start = (0,) * count, length - count
        rows.append(ScheduledRequest(f"row {number}", RowKind.LAST, start, tokens, blocks, _DEAREST, state=state))
    return StepPlan(2, tuple(rows))
