"""Owns the loading of weights: from safetensors files, or as seeded random numbers.
Never computes with them, and never leaves a tensor unfilled: a checkpoint that does not fit is refused by tensor
name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.models.config import CheckpointError as CheckpointError
from engine.models.config import ModelConfig
from engine.models.cuts import ALL, Cuts, cuts_of
from engine.models.matrix_counts import matrices
from engine.models.narrow import INT8, NARROW_PARTS, InBlocks, Keep, Kept, Narrow, round_by_output
from engine.models.packed_weights import Stored, fill_packed, find_packed, with_order
from engine.models.packing import Gguf, Packing
from engine.models.parameters import (
    DecoderWeights,
    allocate,
    checkpoint_table,
    embedding_name,
    num_bytes,
    settle,
    stacked_table,
)
from engine.models.registry import FAMILIES
from engine.models.stored_forms import form_of
from engine.models.tensor_files import BASE, HEAD, TensorFiles, equal_tensors, is_base_model, some, tensor_files
from kernels.cpu.native.grouped import fitting
from kernels.forward import Linear

DUMMY_SEED = 0
CPU = torch.device("cpu")
NO_OTHERS: Mapping[str, Tensor] = MappingProxyType({})
_HEAD = "lm_head.weight"
_FLOATING = ("F64", "F32", "F16", "BF16")


def load_weights(
    model_dir: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device = CPU,
    *,
    others: Mapping[str, Tensor] = NO_OTHERS,
    keep: Keep = Keep.NOTHING,
    rounded: bool = False,
    round_inputs: bool = False,
) -> DecoderWeights:
    """Load the checkpoint's weights in `dtype` on `device`. config: the whole model, or a rank's part of it.

    Each tensor is copied straight from its file to its place, so the host never holds more of the model than one
    tensor. Of a model in parts, only the rank's part of each tensor is read. others: further tensors to fill, by name.
    keep: which packed matrices stay as stored. rounded: round all others to 8 bits as they are read; a tied LM head
    gets a rounded copy of the embedding. A rank rounds its part by itself: where it has only some of the inputs, by the
    largest magnitude among them. round_inputs: matrices in fp8 get an input_scale, see kernels.forward.Linear.

    Raises:
        CheckpointError: a shard or tensor is missing, left over, corrupt, or of another shape or kind.
    """
    files, taken = tensor_files(model_dir), frozenset[str]()
    names = _own_names(files, config, dtype)
    cuts, shapes = cuts_of(config), _whole_shapes(config, dtype)
    if config.quantization is None:
        weights = allocate(config, dtype, device, Kept(rounded=rounded))
        missing = checkpoint_table(config, weights) | dict(others)
    else:
        with Stored.open(names, device) as stored:
            packed = find_packed(stored, config.quantization)
            kept = _kept(stored, packed, cuts, keep, rounded, round_inputs)
            weights = allocate(config, dtype, device, kept)
            missing = checkpoint_table(config, weights) | dict(others)
            taken = fill_packed(stored, packed, kept.modules, missing, cuts, shapes)
    elsewhere = _modules_elsewhere(config)
    for file, held in names.items():
        _load_file(file, held, config, missing, stacked_table(config, weights), device, taken, cuts, shapes, elsewhere)
    if missing:
        raise CheckpointError(
            f"{model_dir}: {some(missing)} missing from {', '.join(file.name for file in files)}; "
            f"{config.architecture} with this config.json needs them."
        )
    settle(config, weights)
    return _with_rounded_head(weights) if rounded and config.tie_word_embeddings else weights


def weight_bytes(model_dir: Path | None, config: ModelConfig, dtype: torch.dtype, *, keep: Keep) -> int:
    """Return how many bytes load_weights takes, reading only the files' headers. model_dir: None means dummy_weights.

    Raises:
        CheckpointError: a file is missing or not readable.
    """
    return num_bytes(config, _described(model_dir, config, dtype, keep))


def bytes_a_weight(model_dir: Path | None, config: ModelConfig, dtype: torch.dtype, *, keep: Keep) -> float:
    """Return how many bytes a product reads for a weight, on average over the model's matrices. For the rest see
    weight_bytes."""
    found = matrices(_described(model_dir, config, dtype, keep))
    parts = (part for linear in found for part in (linear.weight, linear.scales) if part is not None)
    size: int = sum(part.nbytes for part in parts)
    count: int = sum(linear.weight.numel() for linear in found)
    return size / count


def _whole_shapes(config: ModelConfig, dtype: torch.dtype) -> dict[str, tuple[int, ...]]:
    """Return the shapes that a checkpoint's tensors have before they are cut, by name; {} if they are not cut."""
    whole = config.whole
    if whole is None:
        return {}
    weights = allocate(whole, dtype, torch.device("meta"))
    stacked = {name: linear.weight for name, (linear, _) in stacked_table(whole, weights).items()}
    return {name: tuple(view.shape) for name, view in (checkpoint_table(whole, weights) | stacked).items()}


def _modules_elsewhere(config: ModelConfig) -> frozenset[str]:
    """Return the modules of experts that other ranks have, as a checkpoint names them one by one."""
    names = [name for name in FAMILIES[config.architecture].names if "{expert}" in name]
    return frozenset(
        name.format(layer=number, expert=expert)
        for number, layer in enumerate(config.layers)
        if layer.experts is not None and layer.experts.held is not None
        for expert in range(layer.experts.count)
        if expert not in layer.experts.held
        for name in names
    )


def _described(model_dir: Path | None, config: ModelConfig, dtype: torch.dtype, keep: Keep) -> DecoderWeights:
    """Return what load_weights would, without memory."""
    kept = Kept()
    if model_dir is not None and config.quantization is not None and keep is not Keep.NOTHING:
        with Stored.open(_own_names(tensor_files(model_dir), config, dtype), CPU) as stored:
            kept = _kept(stored, find_packed(stored, config.quantization), cuts_of(config), keep)
    return allocate(config, dtype, torch.device("meta"), kept)


def _kept(
    stored: Stored,
    packed: Mapping[str, Packing],
    cuts: Cuts,
    keep: Keep,
    rounded: bool = False,
    round_inputs: bool = False,
) -> Kept:
    """Return which matrices stay as they are stored."""
    layouts = {
        module: _layout(stored, module, packing, cuts.of_module(module).inputs, keep)
        for module, packing in packed.items()
    }
    modules = {module: layout for module, layout in layouts.items() if layout is not None}
    for module, layout in modules.items() if round_inputs else ():
        if isinstance(layout, Narrow) and layout.dtype == torch.float8_e4m3fn:
            modules[module] = replace(layout, input_scale=True)
    for module in _gated_apart(modules):
        del modules[module]
    return Kept(modules=modules, rounded=rounded)


def embedding_in_blocks(config: ModelConfig) -> bool:
    """Whether the checkpoint has the embedding in blocks of a GGUF format."""
    quantization = config.quantization
    return quantization is not None and isinstance(quantization.packing(embedding_name(config)), Gguf)


def _gated_apart(modules: Mapping[str, Narrow | InBlocks]) -> list[str]:
    """Return the halves of gated matrices in blocks of two formats, which no panel can have beside each other."""
    pairs = [(gate, gate.replace("gate_proj", "up_proj")) for gate in modules if gate.endswith("gate_proj")]
    return [
        name
        for pair in pairs
        if modules[pair[0]] != modules.get(pair[1])
        for name in pair
        if isinstance(modules.get(name), InBlocks)
    ]


def _layout(
    stored: Stored, module: str, packing: Packing, inputs: range | None, keep: Keep
) -> Narrow | InBlocks | None:
    """inputs: those that this rank has. Groups that it has only in part are not kept."""
    if keep is Keep.GROUPED and not packing.by_output:
        form = form_of(packing)
        if form is not None and inputs is not None:
            form = fitting(form, math.gcd(inputs.start, len(inputs)))
        return InBlocks(form) if form is not None and _in_order(stored, module, packing, inputs) else None
    if keep.by_output:
        return INT8 if packing.by_output else None
    layout = packing.narrow(zeros=f"{module}.weight_zero_point" in stored.files)
    if keep is Keep.NOTHING or isinstance(layout, str) or layout.why_not is not None:
        return None
    if inputs is not None and layout.group is not None and inputs.start % layout.group:
        return None
    return with_order(stored, module, layout, inputs)


def _in_order(stored: Stored, module: str, packing: Packing, inputs: range | None) -> bool:
    """Whether inputs that share a scale lie beside each other, also where the checkpoint lists each input's group."""
    layout = packing.narrow(zeros=True)
    return not isinstance(layout, Narrow) or with_order(stored, module, layout, inputs) == layout


def _with_rounded_head(weights: DecoderWeights) -> DecoderWeights:
    values, scales = round_by_output(weights.lm_head.weight)
    return replace(weights, lm_head=Linear(values, scales=scales))


def dummy_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    seed: int = DUMMY_SEED,
    *,
    device: torch.device = CPU,
    rounded: bool = False,
) -> DecoderWeights:
    """Make random weights of the model's shapes, scaled so that activations stay near one at any depth. On the same
    kind of device, the same seed gives the same weights, and ranks get the parts of one model. rounded: see
    load_weights."""
    weights = allocate(config, dtype, device, Kept(rounded=rounded))
    generator = torch.Generator(device).manual_seed(seed)
    table, cuts, shapes = checkpoint_table(config, weights), cuts_of(config), _whole_shapes(config, dtype)
    stacked = stacked_table(config, weights)
    for name in table if config.whole is None else (name for name in shapes if name not in stacked):
        view = table.get(name)  # None: other ranks have it, and draw it, too
        if view is not None and name.endswith("norm.weight"):
            view.fill_(1.0)
        elif not name.endswith(("norm.weight", *NARROW_PARTS)):
            shape = shapes.get(name) or tuple(table[name].shape)
            std = 1.0 / math.sqrt(shape[-1]) if len(shape) == 2 else 0.02
            drawn = torch.empty(shape, device=device).normal_(0.0, std, generator=generator)
            if view is not None:
                _store(cuts.of_tensor(name).of(drawn), view, table.get(f"{name}_scale"))
    return _with_rounded_head(weights) if rounded and config.tie_word_embeddings else weights


def _store(tensor: Tensor, view: Tensor, scales: Tensor | None) -> None:
    """Copy a tensor to its place, rounded if that has scales. tensor: [outputs, inputs], or one for each expert."""
    if scales is None:
        view.copy_(tensor)
    elif tensor.dim() == 3:
        for own in zip(tensor, view, scales, strict=True):  # in float32, all experts take as much as several layers
            _store(*own)
    else:
        for mine, part in zip((view, scales), round_by_output(tensor), strict=True):
            mine.copy_(part)


def fill_randomly(tensors: Mapping[str, Tensor], seed: int = DUMMY_SEED) -> None:
    """Fill tensors on the CPU with seeded random numbers that keep activations near one; norms are set to one."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if tensor.dim() == 1 and not name.endswith(".bias"):
            tensor.fill_(1.0)
        else:
            std = 0.02 if tensor.dim() == 1 else 1.0 / math.sqrt(tensor[0].numel())
            tensor.copy_(torch.empty(tensor.shape).normal_(0.0, std, generator=generator))


def _own_names(files: TensorFiles, config: ModelConfig, dtype: torch.dtype) -> dict[Path, dict[str, str]]:
    """Return the tensors to be read from each file, and their names in the family's table."""
    family = FAMILIES[config.architecture]
    is_base = is_base_model([name for held in files.values() for name in held]) and not is_base_model([*family.names])

    def own_name(stored: str) -> str:
        name = BASE + stored if is_base and not stored.startswith((HEAD, *family.unused)) else stored
        nested = next((prefix for prefix in family.nested if name.startswith(prefix)), None)
        return name if nested is None else family.nested[nested] + name.removeprefix(nested)

    names = {file: {stored: own_name(stored) for stored in held} for file, held in files.items()}
    if config.tie_word_embeddings:
        _tie_stored_head(names, config, dtype)
    return names


def _tie_stored_head(names: dict[Path, dict[str, str]], config: ModelConfig, dtype: torch.dtype) -> None:
    """Remove a tied LM head that is stored, too. If the embedding is not stored, the head is taken for it: safetensors'
    save_model leaves out one of two that share memory.

    Raises:
        CheckpointError: both are stored, and differ. transformers 5 does not tie them then.
    """
    places = {own: (file, stored) for file, held in names.items() for stored, own in held.items()}
    if _HEAD not in places:
        return
    (file, stored), module = places[_HEAD], embedding_name(config)
    embedding = f"{module}.weight"
    if not any(own.rpartition(".")[0] == module for own in places):
        names[file][stored] = embedding
    elif embedding in places and equal_tensors(places[_HEAD], places[embedding], dtype):
        del names[file][stored]
    else:
        raise CheckpointError(
            f"{file}: {stored} differs from {embedding}, but config.json ties them: set tie_word_embeddings to false "
            f"in config.json to use both, or remove {stored}."
        )


def _load_file(
    file: Path,
    names: Mapping[str, str],
    config: ModelConfig,
    missing: dict[str, Tensor],
    stacked: Mapping[str, tuple[Linear, tuple[str, ...]]],
    device: torch.device,
    taken: frozenset[str],
    cuts: Cuts,
    shapes: Mapping[str, tuple[int, ...]],
    elsewhere: frozenset[str],
) -> None:
    """Fill the tensors that `file` holds, and remove them from `missing`. names: see _own_names. stacked: see
    stacked_table. taken: those that were read already, by their own names. shapes: of those that are cut. elsewhere:
    modules that other ranks have."""
    try:
        with safe_open(file, framework="pt", device=str(device)) as tensors:
            for stored, name in names.items():
                if name in taken or name.rpartition(".")[0] in elsewhere:
                    continue
                found = tensors.get_slice(stored)
                place, parts = stacked.get(name) or (
                    Linear(missing.get(name), scales=missing.get(f"{name}_scale")),
                    (name,),
                )
                if place.weight is not None and all(part in missing for part in parts):
                    wanted = shapes.get(name, tuple(place.weight.shape))
                    _check(file, stored, tuple(found.get_shape()), found.get_dtype(), wanted)
                    cut = cuts.of_tensor(name)
                    whole = cut == ALL or device.type == "cpu"  # there, it is the file's pages, read when they are used
                    _store(cut.of(tensors.get_tensor(stored) if whole else found), place.weight, place.scales)
                    for part in parts:
                        del missing[part]
                        missing.pop(f"{part}_scale", None)
                elif not _harmless(name, config):
                    raise CheckpointError(
                        f"{file}: unexpected tensor {stored}: {config.architecture} has no such tensor."
                    )
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a readable safetensors file: {error}.") from error


def _check(file: Path, name: str, shape: tuple[int, ...], kind: str, wanted: tuple[int, ...]) -> None:
    if shape != wanted:
        raise CheckpointError(f"{file}: {name} has shape {list(shape)}, but config.json says {list(wanted)}.")
    if kind not in _FLOATING:
        raise CheckpointError(f"{file}: {name} is {kind}; supported are {', '.join(_FLOATING)}.")


def _harmless(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor may be ignored. Old checkpoints store RoPE frequencies."""
    return name.endswith("rotary_emb.inv_freq") or name.startswith(FAMILIES[config.architecture].unused)
