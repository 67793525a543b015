"""Owns the named tables of operators that an eager forward pass runs on.
Never computes anything itself, and never chooses: `kernels.choice` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels import reference
from kernels.cpu import attention as cpu_attention
from kernels.cpu import elementwise as cpu_elementwise
from kernels.cpu import experts as cpu_experts
from kernels.cpu import linear_attention as cpu_linear
from kernels.forward import Linear, LinearHeads, LowRankStack, Routing
from kernels.rows.adapter_tokens import AdapterTokens
from kernels.rows.row_tokens import RowTokens
from kernels.rows.sampled_row import SampledRow
from kernels.rows.step import PagedRows, StateRows


class Attention(Protocol):
    """See kernels.reference.attention; `plan` is what `prepare_attention` returned."""

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Any, scale: float, /, *, window: int | None = None
    ) -> Tensor: ...


AddLowRank = Callable[[Tensor, Tensor, LowRankStack, AdapterTokens], None]
"""(y, x, stack, tokens) -> y with what the tokens' adapters add, in place. Never waits for the device."""


@dataclass(frozen=True, slots=True)
class NarrowOps:
    """Products with weights that have fewer bits than activations."""

    pack: Callable[[Linear], Linear]
    """A matrix with scales, or one for each expert, in a layout of kernels.forward.Linear -> the same product for
    `linear` or `experts`, in the same memory where that is possible."""
    linear: Callable[[Tensor, Linear], Tensor]
    """(x [num_tokens, inputs], a packed matrix) -> x W^T + b. Never waits for the device."""
    experts: Callable[[Tensor, Tensor, Linear, Linear, Routing], Tensor]
    """Ops.experts, where at least one of the two weights is packed. Never waits for the device."""
    launch_rows: tuple[int, ...]
    """A number of rows for each kernel that `linear` may launch, so that a start can compile all of them."""
    fp8_from: tuple[int, int]
    """The compute capability from which `linear` may be given an input_scale."""


@dataclass(frozen=True, slots=True)
class Ops:
    """The operations of one backend; `kernels.reference` gives each one's meaning and shapes."""

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    gelu_and_mul: Callable[[Tensor], Tensor]
    experts: Callable[[Tensor, Tensor, Tensor, Tensor, Routing], Tensor]
    write_cache: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    prepare_attention: Callable[[PagedRows, int, torch.dtype], Any]
    """(rows, kv_heads, dtype of the queries) -> the plan for `attention`. Called once per step."""
    attention: Attention
    causal_conv: Callable[[Tensor, Tensor, Tensor, StateRows], Tensor]
    delta_rule: Callable[[Tensor, Tensor, Tensor, tuple[Tensor, Tensor], LinearHeads, Tensor, StateRows], Tensor]
    gated_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    sigmoid_gate: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    narrow: NarrowOps | None = None
    """None: weights must have the type of activations."""
    linear: Callable[[Tensor, Linear], Tensor] | None = None
    """(x [num_tokens, inputs], a matrix of x's type) -> x W^T + b. Never waits for the device. None: torch's."""
    gated_linear: Callable[[Tensor, Linear], Tensor] | None = None
    """The same, then `silu_and_mul`. None: one after the other."""
    linear_rows: tuple[int, ...] = ()
    """A number of rows for each kernel that `linear` and `gated_linear` may launch, so that a start can compile all of
    them."""
    sample: Callable[[Tensor, Sequence[SampledRow], Tensor | None, RowTokens | None], Tensor] | None = None
    """(logits [rows, vocab] of any float type, how each row is sampled, what grammars allow: None, or
    [rows, ceil(vocab / 32)] int32, token t at bit t % 32 of word t // 32, the tokens that penalties count) -> [rows]
    int64, -1 for a row whose largest logit is not finite. Never waits for the device. None: the engine samples with
    torch's operators."""
    sample_packed: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    """The same for rows without controls, from numbers that are on the device already, so that it can be captured:
    (logits, [3, rows] float64: temperature, top_p, min_p; [3, rows] int64: top_k, seed, position; where the tokens go,
    [rows] int64) -> these tokens. None: the engine captures the choice of greedy tokens alone."""
    logprobs: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]] | None = None
    """(logits [rows, vocab], token ids [rows], count) -> log-probabilities of these tokens, and the ids and
    log-probabilities of the `count` most likely."""
    add_low_rank: AddLowRank | None = None
    """None: LoRA adapters cannot be in a device's slots."""
    capturable: bool = False
    """`prepare_attention` and `attention` read only the tensors and upper bounds of kernels.rows.device.DeviceRows, so
    that a captured step can be replayed with other rows in the same tensors."""
    states_capturable: bool = False
    """The same for `causal_conv` and `delta_rule`, with kernels.rows.device.DeviceStateRows."""
    experts_capturable: bool = False
    """`experts` never waits for the device: the host never learns which tokens an expert has."""
    narrow_cache: bool = False
    """On a GPU, `write_cache` and `attention` take K and V in 8 bits, in an order of their own."""
    expert_launches: Callable[[int, Routing], tuple[int, ...]] | None = None
    """(number of experts, routing) -> a number of tokens for each kernel that experts may launch, so that a start can
    compile all of them. None: nothing is compiled."""
    fused_rotation: bool = False
    """Per-head norms, rotation and the cache write are one Triton launch, whatever `attention` is:
    kernels.choice.forward_pass takes kernels.triton.forward.TritonPass."""


REFERENCE = Ops(
    name="reference",
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    rope=reference.rope,
    silu_and_mul=reference.silu_and_mul,
    gelu_and_mul=reference.gelu_and_mul,
    experts=reference.experts,
    write_cache=reference.write_cache,
    prepare_attention=reference.prepare_attention,
    attention=reference.attention,
    causal_conv=reference.causal_conv,
    delta_rule=reference.delta_rule,
    gated_rms_norm=reference.gated_rms_norm,
    sigmoid_gate=reference.sigmoid_gate,
)

TORCH_CPU = Ops(
    name="torch_cpu",
    rms_norm=cpu_elementwise.rms_norm,
    add_rms_norm=cpu_elementwise.add_rms_norm,
    rope=cpu_elementwise.rope,
    silu_and_mul=cpu_elementwise.silu_and_mul,
    gelu_and_mul=cpu_elementwise.gelu_and_mul,
    experts=cpu_experts.experts,
    write_cache=cpu_elementwise.write_cache,
    prepare_attention=cpu_attention.prepare_attention,
    attention=cpu_attention.attention,
    causal_conv=cpu_linear.causal_conv,
    delta_rule=cpu_linear.delta_rule,
    gated_rms_norm=cpu_linear.gated_rms_norm,
    sigmoid_gate=cpu_linear.sigmoid_gate,
)

TORCH = replace(TORCH_CPU, name="torch", prepare_attention=reference.prepare_attention, attention=reference.attention)
"""Runs on any device that torch supports, without kernels of ours."""

TABLES = {table.name: table for table in (REFERENCE, TORCH_CPU)}
