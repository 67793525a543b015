"""Owns the compilation of every kernel for an absent GPU: `python -m tests.kernels.triton.compiled 9.0 ...`.
Never launches one: what the launch functions would launch is compiled, for the arguments that they pass."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from itertools import accumulate
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels.forward import HeadShape, Linear, LinearHeads, LowRankStack, Routing
from kernels.kv_format import LARGEST, stored_size
from kernels.rows.adapter_tokens import AdapterTokens, pack_tokens
from kernels.rows.sampled_row import SampledRow
from kernels.rows.step import StateRows
from kernels.triton.attention import attention
from kernels.triton.attention import kernel as attention_kernel
from kernels.triton.attention.plan import UNITS, AttentionPlan
from kernels.triton.elementwise import rotate
from kernels.triton.elementwise.activation import silu_and_mul
from kernels.triton.elementwise.cache import write_cache
from kernels.triton.elementwise.gates import gated_rms_norm, sigmoid_gate
from kernels.triton.elementwise.norm import add_rms_norm, rms_norm
from kernels.triton.experts import experts, routing
from kernels.triton.experts import multiply as experts_kernel
from kernels.triton.linear import few_rows, few_rows_kernels, fp8, invariant
from kernels.triton.linear import multiply as linear_kernel
from kernels.triton.linear.linear import LAUNCH_ROWS, narrow_linear
from kernels.triton.linear_attention.causal_conv import causal_conv
from kernels.triton.linear_attention.delta_rule import delta_rule
from kernels.triton.low_rank import expand, shrink
from kernels.triton.sampling.logprobs import token_logprobs
from kernels.triton.sampling.rows import pack_rows
from kernels.triton.sampling.sampler import sample
from kernels.triton.shared import launch
from kernels.triton.shared.pack import pack
from tests.kernels.triton.resources import read_code

FP8_CAPABILITY = fp8.FP8_FROM[0] + fp8.FP8_FROM[1] / 10


SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""What a program may have of shared memory, by capability."""


_READ = re.compile(r"\bld\.global|\bcp\.async\.c")


class NoGpu:
    """Answers what Triton asks of a driver before it compiles, and before it launches."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)
        self.utils = self

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        return lambda *_: None

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES[self._target.arch]}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[object, object, int, int, int]:
        return self, self, 0, 0, 1024

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., tuple[float, ...]]:
        def once(call: Callable[[], None], **_: object) -> tuple[float, ...]:
            call()
            return (1.0, 1.0, 1.0)

        return once


def variant_of(kernel: Any, name: str) -> str:
    """Name what distinguishes a compiled kernel: the types of its arguments, its constants and its configuration."""
    parameters = list(kernel.src.signature)
    constants = {parameters[place]: value for (place,), value in kernel.src.constants.items() if value is not None}
    types = [kind.replace("*", "") for kind in kernel.src.signature.values() if kind.startswith("*")]
    sizes = " ".join(f"{parameter}={value}" for parameter, value in constants.items())
    limit = f" registers<={kernel.metadata.maxnreg}" if kernel.metadata.maxnreg else ""
    fused = "" if kernel.metadata.enable_fp_fusion else " unfused"
    how = f"warps={kernel.metadata.num_warps} stages={kernel.metadata.num_stages}{limit}{fused}"
    return f"{name}({','.join(types)}) {sizes} {how}"


def compile_instead(found: list[dict[str, Any]], *, resources: bool) -> None:
    """Make every later launch compile its kernel instead of running it, and append to `found` what was."""
    run = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if warmup:
            return kernel
        ptx = kernel.asm["ptx"]
        access = re.search(r"\b(?:ld|st)\.global|\bcp\.async\.c", ptx)
        found.append(
            {
                "name": self.fn.__name__,
                "cubin_bytes": len(kernel.asm["cubin"]),
                "shared_bytes": kernel.metadata.shared,
                "tensor_cores": "mma" in ptx,
                "fused": "fma.rn.f32" in ptx,
                "reads_before_it_waits": len(_READ.findall(ptx.partition("griddepcontrol.wait")[0])),
                "waits_first": access is not None and "griddepcontrol.wait" in ptx[: access.start()],
                "barriers": len(re.findall(r"^ *(?:ttg|gpu)\.\w*barrier\b", kernel.asm["ttgir"], re.MULTILINE)),
                "copies_in_flight": max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)), default=0),
            }
        )
        if resources:
            found[-1] |= {
                "variant": variant_of(kernel, self.fn.__name__),
                "warps": kernel.metadata.num_warps,
                "tensor_columns": getattr(kernel.metadata, "tmem_size", None) or 0,
                "code": asdict(read_code(kernel.asm["cubin"])),
            }
        return kernel

    JITFunction.run = compiled


def launch_all(dtype: torch.dtype, head_dim: int, group: int) -> None:
    """Launch each kernel once, and attention for decodes and for chunks."""
    x = torch.zeros(5, 576, dtype=dtype)
    rms_norm(x, x[0], 1e-5)
    add_rms_norm(x, x.float(), x[0], 1e-5)
    add_rms_norm(x, None, x[0], 1e-5)
    silu_and_mul(x)
    heads = HeadShape(num_heads=2 * group, num_kv_heads=2, head_dim=head_dim)
    qkv = torch.zeros(5, (2 * group + 4) * head_dim, dtype=dtype)
    angles = torch.zeros(5, head_dim // 2)
    cache, norm = torch.zeros(9, 16, 2, head_dim, dtype=dtype), torch.zeros(head_dim, dtype=dtype)
    for norms in (None, (norm, norm)):
        rotate.rotate_and_cache(qkv, (angles, angles), heads, (cache, cache), torch.arange(5), norms, 1e-5)
    rotate.rope(qkv.view(5, -1, head_dim), angles, angles)
    write_cache(cache[0, :5], cache[0, :5], cache, cache, torch.arange(5))
    launch_attention(dtype, head_dim, group, cache)
    for kept_in in LARGEST:
        launch_narrow_cache(dtype, head_dim, group, kept_in)


def launch_narrow_cache(dtype: torch.dtype, head_dim: int, group: int, kept_in: torch.dtype) -> None:
    """Launch what writes and reads K and V in 8 bits, alone: the rest of a step does not know of it."""
    heads = HeadShape(num_heads=2 * group, num_kv_heads=2, head_dim=head_dim)
    qkv = torch.zeros(5, (2 * group + 4) * head_dim, dtype=dtype)
    angles, norm = torch.zeros(5, head_dim // 2), torch.zeros(head_dim, dtype=dtype)
    cache = torch.zeros(9, 16, 2, stored_size(head_dim, kept_in), dtype=torch.int8).view(kept_in)
    for norms in (None, (norm, norm)):
        rotate.rotate_and_cache(qkv, (angles, angles), heads, (cache, cache), torch.arange(5), norms, 1e-5)
    k = torch.zeros(5, 2, head_dim, dtype=dtype)
    write_cache(k, k, cache, cache, torch.arange(5))
    launch_attention(dtype, head_dim, group, cache)


def launch_attention(dtype: torch.dtype, head_dim: int, group: int, cache: torch.Tensor) -> None:
    """Launch a captured step that may have decodes and chunks, and rows of several splits among both; then the same in
    batch-invariant units."""
    numbers = torch.zeros(5, dtype=torch.int32)
    plan_tensors = numbers, numbers[:4], numbers.expand(4, 5).contiguous(), numbers[:1]
    plan = AttentionPlan(*plan_tensors, 2, 2, max_length=5000)
    queries = torch.zeros(5, 2 * group, head_dim, dtype=dtype)
    attention.attention(queries, cache, cache, plan, 0.1)
    plan = AttentionPlan(*plan_tensors, 0, 4, max_length=5000, split=UNITS)
    attention.attention(queries, cache, cache, plan, 0.1)


def launch_linear_attention(dtype: torch.dtype) -> None:
    """Launch decode rows alone and beside a chunk, with Qwen3-Next's heads."""
    heads = LinearHeads(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128)
    rates = (torch.zeros(32), torch.zeros(32))
    for counts in ((1, 1), (1, 70)):
        rows = StateRows(1, (3, 3), counts, (0, 1), torch.arange(2))
        qkv = torch.zeros(sum(counts), heads.channels, dtype=dtype)
        causal_conv(
            qkv, torch.zeros(heads.channels, 4, dtype=dtype), torch.zeros(2, 3, heads.channels, dtype=dtype), rows
        )
        step = torch.zeros(sum(counts), 32, dtype=dtype)
        x = delta_rule(qkv, step, step, rates, heads, torch.zeros(2, 32, 128, 128), rows)
        gated_rms_norm(x, x, torch.zeros(128, dtype=dtype), 1e-6)
        for gate in (x, step[:, :1]):
            sigmoid_gate(x, gate)
            sigmoid_gate(x, gate, x)


def launch_experts(dtype: torch.dtype) -> None:
    """Launch Qwen3-MoE's shape in each tile: weights of 16 bits, int8, fp8 in blocks, 4 bits with zeros, of which the
    last also in an order of their own. Then sizes that fill no block. No weight is read, so one expert's are enough."""
    shape, count, routing = (1, 2048, 768), 128, Routing(8, renormalize=True)
    for numbers, group, zeros, ordered in (
        (dtype, None, False, False),
        (torch.int8, None, False, False),
        (torch.float8_e4m3fn, 128, False, False),
        (torch.uint8, 128, True, False),
        (torch.uint8, 128, True, True),
    ):
        for tokens in experts.launch_tokens(count, routing)[: 1 if ordered else None]:
            weights = _experts_weights(*shape, numbers, group, zeros=zeros, ordered=ordered)
            x = torch.zeros(tokens, shape[1], dtype=dtype)
            router = torch.zeros(count, shape[1])
            for batch_invariant in (False, True):
                experts.narrow_experts(x, router, *weights, routing, batch_invariant=batch_invariant)
    weights = _experts_weights(5, 72, 40, dtype)
    experts.narrow_experts(torch.zeros(5, 72, dtype=dtype), torch.zeros(5, 72), *weights, Routing(2, renormalize=False))


def _experts_weights(
    num_experts: int,
    hidden: int,
    size: int,
    numbers: torch.dtype,
    group: int | None = None,
    *,
    zeros: bool = False,
    ordered: bool = False,
) -> tuple[Linear, Linear]:
    """Return weights that nobody reads: gate_up and down."""
    found = []
    for outputs, inputs in ((2 * size, hidden), (hidden, size)):
        weight = torch.empty(num_experts, outputs, inputs // (2 if numbers == torch.uint8 else 1), dtype=numbers)
        if numbers.itemsize > 1:
            found.append(Linear(weight))
            continue
        by_group = torch.empty(num_experts, outputs, *([] if group is None else [inputs // group]))
        order = torch.zeros(num_experts, inputs, dtype=torch.int32) if ordered else None
        points = by_group.to(torch.int8) if zeros else None
        found.append(pack(Linear(weight, None, by_group, points, group, order)))
    return found[0], found[1]


def launch_low_rank(dtype: torch.dtype) -> None:
    """Launch adapters of rank 16 on an 8B model's stacks (Llama 3.1), one of rank 64, and sizes that fill no block."""
    llama = ((4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,)))
    tokens = AdapterTokens.of(pack_tokens([0], [5], 5, 1), 5)
    for inputs, parts, ranks in (*((*sizes, 16) for sizes in llama), (4096, (4096,), 64), (72, (40, 24, 24), 48)):
        outputs = sum(parts)
        a = torch.empty(2, len(parts), ranks, inputs, dtype=dtype)
        b = torch.empty(2, outputs, ranks, dtype=dtype)
        stack = LowRankStack(a, b, tuple(accumulate(parts[:-1], initial=0)))
        y, x = (torch.empty(5, size, dtype=dtype) for size in (outputs, inputs))
        expand.add_low_rank(y, x, stack, tokens)
        expand.add_low_rank(y, x, stack, tokens, batch_invariant=True)


def launch_few_rows(dtype: torch.dtype) -> None:
    """Launch an 8B model's queries, keys and values, attention output, and gate and up (Llama 3.1), for each tile of
    rows, where the type is one of 16 bits. Then sizes that fill no block, with a bias."""
    if dtype not in few_rows.TYPES:
        return
    for rows in few_rows.LAUNCH_ROWS:
        x = torch.zeros(rows, 4096, dtype=dtype)
        for outputs in (6144, 4096):
            few_rows.few_row_linear(x, Linear(torch.empty(outputs, 4096, dtype=dtype)))
        few_rows.few_row_gated_linear(x, Linear(torch.empty(28672, 4096, dtype=dtype)))
    odd = Linear(torch.empty(160, 208, dtype=dtype), torch.empty(160, dtype=dtype))
    few_rows.few_row_linear(torch.zeros(5, 208, dtype=dtype), odd)
    few_rows.few_row_gated_linear(torch.zeros(5, 208, dtype=dtype), odd)


def launch_invariant_rows(dtype: torch.dtype) -> None:
    """Launch the same by batch-invariant kernels, which take any type and any number of rows."""
    for rows in invariant.INVARIANT_LAUNCH_ROWS:
        x = torch.zeros(rows, 4096, dtype=dtype)
        for outputs in (6144, 4096):
            invariant.invariant_linear(x, Linear(torch.empty(outputs, 4096, dtype=dtype)))
        invariant.invariant_gated_linear(x, Linear(torch.empty(28672, 4096, dtype=dtype)))
    odd = Linear(torch.empty(160, 208, dtype=dtype), torch.empty(160, dtype=dtype))
    for rows in (5, 70):
        invariant.invariant_linear(torch.zeros(rows, 208, dtype=dtype), odd)
    invariant.invariant_gated_linear(torch.zeros(5, 208, dtype=dtype), odd)


def launch_narrow_linear(dtype: torch.dtype) -> None:
    """Launch an 8B model's attention output for few, some and many rows: int8, fp8 in blocks, 4 bits with zeros."""
    size, group = 4096, 128
    by_group, zeros = torch.empty(size, size // group), torch.empty(size, size // group, dtype=torch.int8)
    for linear in (
        Linear(torch.empty(size, size, dtype=torch.int8), scales=torch.empty(size)),
        Linear(torch.empty(size, size, dtype=torch.float8_e4m3fn), scales=by_group, group=group),
        Linear(torch.empty(size, size // 2, dtype=torch.uint8), scales=by_group, zeros=zeros, group=group),
    ):
        packed = pack(linear)
        for rows in LAUNCH_ROWS:
            narrow_linear(torch.zeros(rows, size, dtype=dtype), packed)
            narrow_linear(torch.zeros(rows, size, dtype=dtype), packed, batch_invariant=True)


def launch_fp8_linear(dtype: torch.dtype) -> None:
    """Launch the same product by rounded activations: a scale for each output, and for blocks of 128 inputs."""
    size, group, given = 4096, 128, torch.zeros(1)
    for scales, inputs in ((torch.empty(size), None), (torch.empty(size, size // group), group)):
        weight = torch.empty(size, size, dtype=torch.float8_e4m3fn)
        packed = pack(Linear(weight, scales=scales, group=inputs, input_scale=given))
        narrow_linear(torch.zeros(LAUNCH_ROWS[-1], size, dtype=dtype), packed)


def launch_sampler(dtype: torch.dtype) -> None:
    """Launch a vocabulary within one block, and Qwen3's."""
    for vocab in (700, 151_936):
        logits = torch.zeros(2, vocab, dtype=dtype)
        words = torch.zeros(2, -(-vocab // 32), dtype=torch.int32)
        for allowed in ((1, 2, 3), None):
            row = SampledRow(temperature=0.5, top_k=3, banned=(1,), allowed=allowed)
            sample(logits, pack_rows([row] * 2, vocab, "cpu", words))
        sample(logits, pack_rows([SampledRow(temperature=0.5)] * 2, vocab, "cpu"))
        token_logprobs(logits, torch.zeros(2, dtype=torch.int64), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile every Triton kernel for GPUs that need not be present.")
    parser.add_argument("capability", type=float)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64])
    parser.add_argument("--groups", nargs="+", type=int, default=[3])
    parser.add_argument("--first-config", action="store_true", help="of those among which a kernel chooses")
    parser.add_argument("--attention", action="store_true", help="alone, with what surrounds it")
    parser.add_argument("--least-shared", action="store_true", help="attention alone, by its smallest configurations")
    parser.add_argument("--resources", action="store_true", help="say what each kernel takes of a multiprocessor")
    args = parser.parse_args()
    assert not launch.INTERPRETED, "TRITON_INTERPRET is set"
    driver.set_active(NoGpu(round(args.capability * 10)))
    of_attention = (attention_kernel.attend_decodes, attention_kernel.attend_chunks)
    if args.least_shared:
        for kernel in of_attention:
            kernel.configs = [min(kernel.configs, key=lambda config: (config.kwargs["BLOCK_N"], config.num_stages))]
    if args.first_config:
        of_linear = (linear_kernel.multiply_few, linear_kernel.multiply_many, fp8.multiply_fp8, shrink.shrink_tuned)
        of_experts = (*experts_kernel.GATE_UP.values(), *experts_kernel.DOWN.values(), routing.router_logits)
        of_few_rows = (few_rows_kernels.few_rows, few_rows_kernels.few_rows_gated)
        for kernel in (*of_attention, *of_linear, *of_few_rows, *of_experts):
            kernel.configs = kernel.configs[:1]
    found: list[dict[str, Any]] = []
    compile_instead(found, resources=args.resources)
    for dtype in args.dtypes:
        if not (args.least_shared or args.attention):
            launch_sampler(getattr(torch, dtype))
            launch_linear_attention(getattr(torch, dtype))
            launch_experts(getattr(torch, dtype))
            launch_low_rank(getattr(torch, dtype))
            launch_few_rows(getattr(torch, dtype))
            launch_invariant_rows(getattr(torch, dtype))
            launch_narrow_linear(getattr(torch, dtype))
            if args.capability >= FP8_CAPABILITY:
                launch_fp8_linear(getattr(torch, dtype))
        for head_dim in args.head_dims:
            for group in args.groups:
                launch_all(getattr(torch, dtype), head_dim, group)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
