"""Owns the table of the Triton kernels, for `kernels.eager` and whatever else takes a table.
Never imported where kernels are merely listed: it needs the package `triton`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from kernels.eager.ops import TORCH, NarrowOps, Ops
from kernels.forward import Linear
from kernels.rows.row_tokens import RowTokens
from kernels.rows.sampled_row import SampledRow
from kernels.triton.attention.attention import attention
from kernels.triton.attention.plan import prepare_attention, prepare_invariant_attention
from kernels.triton.elementwise.activation import silu_and_mul
from kernels.triton.elementwise.cache import write_cache
from kernels.triton.elementwise.gates import gated_rms_norm, sigmoid_gate
from kernels.triton.elementwise.norm import add_rms_norm, rms_norm
from kernels.triton.elementwise.rotate import rope
from kernels.triton.experts.experts import experts, launch_tokens, narrow_experts
from kernels.triton.linear import few_rows
from kernels.triton.linear.fp8 import FP8_FROM
from kernels.triton.linear.invariant import INVARIANT_LAUNCH_ROWS, invariant_gated_linear, invariant_linear, takes_gated
from kernels.triton.linear.linear import LAUNCH_ROWS, narrow_linear
from kernels.triton.linear_attention.causal_conv import causal_conv
from kernels.triton.linear_attention.delta_rule import delta_rule
from kernels.triton.low_rank.expand import add_low_rank
from kernels.triton.sampling.logprobs import token_logprobs
from kernels.triton.sampling.rows import SampledRows, pack_rows
from kernels.triton.sampling.sampler import sample
from kernels.triton.shared.pack import pack


def _gated_linear(x: Tensor, linear: Linear) -> Tensor:
    if few_rows.takes(x, linear):
        return few_rows.few_row_gated_linear(x, linear)
    return silu_and_mul(few_rows.wide_linear(x, linear))


def _invariant_gated_linear(x: Tensor, linear: Linear) -> Tensor:
    return invariant_gated_linear(x, linear) if takes_gated(x, linear) else silu_and_mul(invariant_linear(x, linear))


def _sample(logits: Tensor, rows: Sequence[SampledRow], within: Tensor | None, tokens: RowTokens | None) -> Tensor:
    return sample(logits, pack_rows(rows, logits.shape[1], logits.device, within, tokens))


def _sample_packed(logits: Tensor, floats: Tensor, integers: Tensor, out: Tensor) -> Tensor:
    return sample(logits, SampledRows(*floats, *integers), out=out)


TRITON = Ops(
    name="triton",
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rope=rope,
    silu_and_mul=silu_and_mul,
    gelu_and_mul=TORCH.gelu_and_mul,
    experts=experts,
    write_cache=write_cache,
    prepare_attention=prepare_attention,
    attention=attention,
    causal_conv=causal_conv,
    delta_rule=delta_rule,
    gated_rms_norm=gated_rms_norm,
    sigmoid_gate=sigmoid_gate,
    narrow=NarrowOps(
        pack=pack, linear=narrow_linear, experts=narrow_experts, launch_rows=LAUNCH_ROWS, fp8_from=FP8_FROM
    ),
    linear=few_rows.wide_linear,
    gated_linear=_gated_linear,
    linear_rows=few_rows.LAUNCH_ROWS,
    sample=_sample,
    sample_packed=_sample_packed,
    logprobs=token_logprobs,
    add_low_rank=add_low_rank,
    capturable=True,  # attention reads DeviceRows as they are, and sizes its launches by their upper bounds
    states_capturable=True,
    experts_capturable=True,
    narrow_cache=True,
    expert_launches=launch_tokens,
    fused_rotation=True,
)

BATCH_INVARIANT = replace(
    TRITON,
    linear=invariant_linear,
    gated_linear=_invariant_gated_linear,
    linear_rows=INVARIANT_LAUNCH_ROWS,
    experts=partial(experts, batch_invariant=True),
    prepare_attention=prepare_invariant_attention,
    narrow=NarrowOps(
        pack=pack,
        linear=partial(narrow_linear, batch_invariant=True),
        experts=partial(narrow_experts, batch_invariant=True),
        launch_rows=LAUNCH_ROWS,
        fp8_from=FP8_FROM,
    ),
    add_low_rank=partial(add_low_rank, batch_invariant=True),
)
"""A request's numbers have the same bits in any step, and on all GPUs of a kind: no library chooses an order of sums by
the number of rows, and nothing is timed. Not linear attention, which sums the tokens of a chunk in blocks."""
