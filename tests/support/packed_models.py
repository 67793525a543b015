"""Owns tiny checkpoints with packed matrices, written number by number from each format's definition.
Never uses the code that reads them: a packer that shared its shifts with the reader would share its mistakes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.tiny_models import edit_config, save_model

Parts = dict[str, Tensor]
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that each four bits of an int32 hold, the lowest first (AutoAWQ, gemm)."""


@dataclass(frozen=True)
class Format:
    """What `quantization_config` says, and how a matrix [outputs, inputs] is stored: its parts and its weight."""

    config: dict[str, Any]
    pack: Callable[[Tensor, torch.Generator], tuple[Parts, Tensor]]
    by_output: bool = False
    packs_head: bool = False


def save_packed(packed: Path, plain: Path, name: str, kind: str = "llama") -> None:
    """Save a checkpoint of that format, and one of the same weights stored plainly, in float32."""
    form = FORMATS[name]
    save_model(kind, packed)
    shutil.copytree(packed, plain, dirs_exist_ok=True)
    tensors = load_file(packed / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    stored, weights = dict(tensors), dict(tensors)
    for key, weight in tensors.items():
        module = key.removesuffix(".weight")
        if module == key or weight.dim() != 2 or "embed" in key or key.endswith("mlp.gate.weight"):
            continue
        if module == "lm_head" and not form.packs_head:
            continue
        parts, weights[key] = form.pack(weight, generator)
        del stored[key]
        stored |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(stored, packed / "model.safetensors")
    save_file(weights, plain / "model.safetensors")
    edit_config(packed, quantization_config=form.config)


def rounded(weight: Tensor, group: int, low: int, high: int, *, zeros: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Round to integers of `low` to `high`, with a scale and a zero point
    for each `group` inputs of an output, in float16."""
    outputs, inputs = weight.shape
    count = -(-inputs // group)
    q, scales, points = torch.zeros(outputs, inputs), torch.zeros(outputs, count), torch.zeros(outputs, count)
    for number in range(count):
        part = weight[:, number * group : (number + 1) * group]  # [outputs, group], each output by itself
        least, most = part.amin(dim=1), part.amax(dim=1)
        if zeros:
            scale = ((most - least) / (high - low)).half().float()
            points[:, number] = torch.clamp((low - least / scale).round(), low, high)
        else:
            scale = (part.abs().amax(dim=1) / (high if low < 0 else high // 2)).half().float()
            points[:, number] = 0 if low < 0 else (high + 1) // 2
        scales[:, number] = scale
        found = (part / scale[:, None]).round() + points[:, number, None]
        q[:, number * group : (number + 1) * group] = found.clamp(low, high)
    return q.long(), scales, points.long()


def expand(weight_q: Tensor, scales: Tensor, points: Tensor, groups: list[int]) -> Tensor:
    """Compute (q - zero) * scale, one number after the other."""
    weight = torch.zeros(weight_q.shape)
    for column, group in enumerate(groups):
        weight[:, column] = (weight_q[:, column] - points[:, group]).float() * scales[:, group]
    return weight


def in_int32(values: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Pack [rows, columns] to [rows, columns / per int]: bits of a row side by side; `places` says whose come first."""
    per_int = 32 // bits
    packed = torch.zeros(len(values), -(-values.shape[1] // per_int), dtype=torch.int64)
    for column in range(packed.shape[1]):
        for place in range(per_int):
            source = column * per_int + (place if places is None else places[place])
            if source < values.shape[1]:
                packed[:, column] += values[:, source] << (bits * place)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def by_importance(inputs: int) -> Tensor:
    """Return a random order of inputs, the same for all matrices with so many: those that share their inputs share
    their order in a real checkpoint, too."""
    return torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))


def gptq(bits: int, group: int | None, *, ordered: bool, zeros: bool, v2: bool = False) -> Format:
    def pack(weight: Tensor, generator: torch.Generator) -> tuple[Parts, Tensor]:
        outputs, inputs = weight.shape
        size = group or inputs
        order = by_importance(inputs) if ordered else torch.arange(inputs)
        q, scales, points = rounded(weight[:, order], size, 0, 2**bits - 1, zeros=zeros)
        g_idx = torch.zeros(inputs, dtype=torch.int32)
        unsorted = torch.zeros_like(q)
        for place, source in enumerate(order.tolist()):
            g_idx[source], unsorted[:, source] = place // size, q[:, place]
        points = points if v2 else points.clamp(min=1)  # the first version cannot express 0
        stored = points if v2 else points - 1
        parts = {
            "qweight": in_int32(unsorted, bits).T,
            "qzeros": in_int32(stored.T, bits),
            "scales": scales.T.half(),
            "g_idx": g_idx,
        }
        if outputs == 80:
            parts["bias"] = torch.zeros(outputs)  # some packers write one for every matrix
        return parts, expand(unsorted, scales, points, g_idx.tolist())

    config = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": ordered, "sym": not zeros}
    config |= {"checkpoint_format": "gptq_v2"} if v2 else {}
    return Format(config, pack, by_output=bits == 8 and group is None and not zeros)


def awq(group: int) -> Format:
    def pack(weight: Tensor, _: torch.Generator) -> tuple[Parts, Tensor]:
        q, scales, points = rounded(weight, group, 0, 15, zeros=True)
        parts = {
            "qweight": in_int32(q.T, 4, AWQ_PLACES),
            "qzeros": in_int32(points.T, 4, AWQ_PLACES),
            "scales": scales.T.half(),
        }
        return parts, expand(q, scales, points, [column // group for column in range(weight.shape[1])])

    return Format({"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}, pack)


def compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
    }


def int_quantized(group: int | None, *, zeros: bool = False) -> Format:
    def pack(weight: Tensor, _: torch.Generator) -> tuple[Parts, Tensor]:
        size = group or weight.shape[1]
        q, scales, points = rounded(weight, size, -128 if zeros else -127, 127, zeros=zeros)
        parts = {"weight": q.to(torch.int8), "weight_scale": scales.half()}
        if zeros:
            parts["weight_zero_point"] = points.to(torch.int8)
        return parts, expand(q, scales, points, [column // size for column in range(weight.shape[1])])

    strategy = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    weights = {"num_bits": 8, "type": "int", "symmetric": not zeros, "dynamic": False, **strategy}
    dynamic = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    return Format(compressed("int-quantized", weights, dynamic), pack, by_output=group is None and not zeros)


def pack_quantized(bits: int, group: int, *, zeros: bool, actorder: str | None = None) -> Format:
    half = 1 << bits - 1

    def pack(weight: Tensor, generator: torch.Generator) -> tuple[Parts, Tensor]:
        inputs = weight.shape[1]
        order = by_importance(inputs) if actorder == "group" else torch.arange(inputs)
        q, scales, points = rounded(weight[:, order], group, -half, half - 1, zeros=zeros)
        g_idx = torch.zeros(inputs, dtype=torch.int32)
        unsorted = torch.zeros_like(q)
        for place, source in enumerate(order.tolist()):
            g_idx[source], unsorted[:, source] = place // group, q[:, place]
        parts = {
            "weight_packed": in_int32(unsorted + half, bits),
            "weight_scale": scales.half(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if zeros:
            parts["weight_zero_point"] = in_int32((points + half).T, bits).T
        if actorder == "group":
            parts["weight_g_idx"] = g_idx
        return parts, expand(unsorted, scales, points, g_idx.tolist())

    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group, "symmetric": not zeros}
    return Format(compressed("pack-quantized", weights | {"actorder": actorder}), pack)


def float_quantized(strategy: str) -> Format:
    def pack(weight: Tensor, _: torch.Generator) -> tuple[Parts, Tensor]:
        rows = len(weight) if strategy == "channel" else 1
        scales = (weight.abs().view(rows, -1).amax(dim=1, keepdim=True) / 448).float()
        q = (weight / scales).to(torch.float8_e4m3fn)
        stored = scales if strategy == "channel" else scales.flatten()
        # A module of the default format may say how activations are rounded, which does not matter here.
        return {"weight": q, "weight_scale": stored, "input_scale": torch.ones(1)}, q.float() * scales

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    static = {"num_bits": 8, "type": "float", "dynamic": False}
    return Format(compressed("float-quantized", weights, static), pack)


def fp8_tensor() -> Format:
    """What transformers 5 writes without blocks: a scale for each matrix under the name of blocks' scales, and one for
    its activations."""

    def pack(weight: Tensor, _: torch.Generator) -> tuple[Parts, Tensor]:
        scale = weight.abs().max() / 448
        q = (weight / scale).to(torch.float8_e4m3fn)
        return {"weight": q, "weight_scale_inv": scale, "activation_scale": torch.tensor(0.5)}, q.float() * scale

    return Format({"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}, pack)


def fp8_blocks(rows: int, columns: int) -> Format:
    """Block sizes that divide no matrix: the last blocks are smaller."""

    def pack(weight: Tensor, _: torch.Generator) -> tuple[Parts, Tensor]:
        outputs, inputs = weight.shape
        scales = torch.zeros(-(-outputs // rows), -(-inputs // columns))
        q, found = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn), torch.zeros(weight.shape)
        for i in range(len(scales)):
            for j in range(scales.shape[1]):
                here = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = weight[here].abs().max() / 448
                q[here] = (weight[here] / scales[i, j]).to(torch.float8_e4m3fn)
                found[here] = q[here].float() * scales[i, j]
        return {"weight": q, "weight_scale_inv": scales}, found

    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [rows, columns]}
    return Format(config | {"activation_scheme": "dynamic"}, pack, packs_head=True)


FP8_BLOCK = 64
"""The block size of `save_in_fp8`. It divides all matrices of the default model,
as blocks of 128 do those of larger ones."""


def to_fp8_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers, and a scale for each block of FP8_BLOCK x FP8_BLOCK: its largest magnitude is 448."""
    rows, columns = (size // FP8_BLOCK for size in weight.shape)
    blocks = weight.float().view(rows, FP8_BLOCK, columns, FP8_BLOCK)
    scales = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
    return (blocks / scales).to(torch.float8_e4m3fn).view(weight.shape), scales.view(rows, columns)


def from_fp8_blocks(q: Tensor, scales: Tensor) -> Tensor:
    wide = scales.repeat_interleave(FP8_BLOCK, dim=0).repeat_interleave(FP8_BLOCK, dim=1)
    return q.float() * wide


def save_in_fp8(source: Path, directory: Path) -> None:
    """Save the checkpoint of `source` with all matrices but embedding and LM head in blocks of fp8."""
    stored = load_file(source / "model.safetensors")
    for key in [key for key in stored if key.endswith("_proj.weight")]:
        q, scales = to_fp8_blocks(stored.pop(key))
        stored |= {key: q, f"{key}_scale_inv": scales}
    directory.mkdir()
    shutil.copy(source / "config.json", directory)
    save_file(stored, directory / "model.safetensors")
    block = [FP8_BLOCK, FP8_BLOCK]
    edit_config(directory, quantization_config={"quant_method": "fp8", "weight_block_size": block})


FORMATS = {
    "gptq_4": gptq(4, 16, ordered=False, zeros=True),
    "gptq_4_v2": gptq(4, 16, ordered=False, zeros=True, v2=True),
    "gptq_4_ordered": gptq(4, 16, ordered=True, zeros=False),
    "gptq_8": gptq(8, 16, ordered=False, zeros=True),
    "gptq_8_by_output": gptq(8, None, ordered=False, zeros=False),
    "awq": awq(16),
    "int_by_output": int_quantized(None),
    "int_groups": int_quantized(16),
    "packed_4": pack_quantized(4, 16, zeros=False),
    "packed_4_zeros": pack_quantized(4, 16, zeros=True),
    "packed_4_ordered": pack_quantized(4, 16, zeros=False, actorder="group"),
    "packed_4_weight": pack_quantized(4, 16, zeros=False, actorder="weight"),
    "packed_8": pack_quantized(8, 16, zeros=True),
    "float_tensor": float_quantized("tensor"),
    "float_channel": float_quantized("channel"),
    "fp8_tensor": fp8_tensor(),
    "fp8_blocks": fp8_blocks(32, 20),
    "fp8_blocks_16": fp8_blocks(32, 16),
}
