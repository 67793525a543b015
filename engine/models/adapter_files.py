"""Owns the reader of LoRA adapters in PEFT's format: their factors, and deltas for a decoder's stacked matrices.
Never guesses: an adapter that would not be computed as it was trained is refused by the name of its key or tensor."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from engine.models.cuts import Cut, cuts_of
from engine.models.description import LayerConfig, ModelConfig
from engine.models.parameters import attended_size, qkv_sizes, settle_qkv
from engine.models.registry import FAMILIES
from engine.models.tensor_files import BASE, is_base_model
from engine.step import AdapterError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
STACKS = ("qkv", "output", "gate_up", "down")
"""The matrices of a layer that adapters can add to, by their names in LayerWeights."""
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_READ = ("peft_type", "r", "lora_alpha", "use_rslora", "init_lora_weights")
# These matter only for training, or follow from the tensors' names.
_HARMLESS = (
    "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version",
    "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "eva_config",
    "megatron_core", "runtime_config", "qalora_group_size",
)  # fmt: skip
_NEUTRAL: tuple[object, ...] = (None, False, "none", [], {})
_PLAIN_STARTS: tuple[object, ...] = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base model unchanged; with others, training changes it, too."""
_MOST = sys.float_info.max
"""JSON has larger integers."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The adapter's part in one stacked matrix: y += (x a^T) b^T."""

    a: Tensor  # [ranks, inputs]: the ranks of the stack's parts one after another
    b: Tensor  # [outputs, ranks]: zero except where a part's ranks meet its own outputs; includes the scale


Deltas = Mapping[tuple[int, str], Delta]
"""(layer, stack) -> its delta."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module of the checkpoint belongs: outputs [first, first + outputs) of a layer's stack."""

    layer: int
    stack: str
    first: int
    outputs: int
    inputs: int


@dataclass(frozen=True, slots=True)
class Factors:
    """The adapter's part in one module: y += (x a^T) b^T."""

    a: Tensor  # [rank, inputs]
    b: Tensor  # [outputs, rank] float32: includes the scale


@dataclass(frozen=True, slots=True)
class _Scaling:
    rank: int
    alpha: float
    scale: float


def digest_of(config: bytes, weights: bytes) -> str:
    """Return the digest of an adapter's two files."""
    return blake2b(len(config).to_bytes(8, "little") + config + weights, digest_size=16).hexdigest()


def read_adapter(directory: Path, model: ModelConfig, dtype: torch.dtype, max_rank: int) -> tuple[str, Deltas]:
    """Read an adapter; return (the digest of its files, its deltas). max_rank: the highest rank that is allowed.

    Raises: as read_factors.
    """
    digest, factors = read_factors(directory, model, dtype, max_rank)
    return digest, _deltas(factors, model, dtype)


def read_factors(
    directory: Path, model: ModelConfig, dtype: torch.dtype, max_rank: int
) -> tuple[str, Mapping[Place, Factors]]:
    """Read an adapter; return (the digest of its files, the factors of each module that it adapts). dtype: of the
    computation, in which all factors are finite.

    Raises:
        AdapterError: there is no adapter, it needs something that is not supported, it is for a model of another
            shape, or its numbers are too large for `dtype`.
    """
    if not os.path.isdir(directory):  # Path.is_dir raises for names that are too long
        raise AdapterError("There is no such directory on the engine's machine: expected an adapter there.")
    config, weights = _bytes_of(directory / CONFIG_FILE), _bytes_of(directory / WEIGHTS_FILE)
    digest = digest_of(config, weights)
    scaling = _read_config(config, max_rank)
    try:
        tensors = load(weights)
    except SafetensorError as error:
        raise AdapterError(f"{WEIGHTS_FILE} is not a readable safetensors file: {error}.") from error
    pairs = _by_module(tensors, model, dtype, scaling)
    return digest, {place: Factors(a, b.float() * scaling.scale) for place, (a, b) in pairs.items()}


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise AdapterError(f"{path.name} cannot be read: {error.strerror}.") from error


def _read_config(raw: bytes, max_rank: int) -> _Scaling:
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG_FILE} is not JSON: {error}.") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise AdapterError(f"{CONFIG_FILE}: peft_type must be LORA, the only kind of adapter that is served.")
    for key, value in config.items():
        if key not in (*_READ, *_HARMLESS) and value not in _NEUTRAL:
            raise AdapterError(f"{CONFIG_FILE}: {key} is {_short(value)}, and adapters with that are not served.")
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        raise AdapterError(
            f"{CONFIG_FILE}: init_lora_weights is {_short(config['init_lora_weights'])}, which changes the base model: "
            "save the adapter converted to plain LoRA."
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterError(f"{CONFIG_FILE}: r is {_short(rank)}: expected a rank of at least 1.")
    if rank > max_rank:
        raise AdapterError(f"{CONFIG_FILE}: r is {rank}, and this engine takes ranks up to {max_rank} (max_lora_rank).")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not -_MOST <= alpha <= _MOST:
        raise AdapterError(f"{CONFIG_FILE}: lora_alpha is {_short(alpha)}: expected a number.")
    return _Scaling(rank, alpha, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


# --- tensors ----------------------------------------------------------------------------------------------------------

_Pair = tuple[Tensor, Tensor]


def _by_module(
    tensors: Mapping[str, Tensor], model: ModelConfig, dtype: torch.dtype, scaling: _Scaling
) -> dict[Place, _Pair]:
    """Return the two factors of each adapted module, by the module's place: of a model's part, those of the part. An
    adapter that was trained on the model without its LM head, as for embeddings, names modules without its prefix."""
    places = places_of(model.whole or model)
    base = BASE if is_base_model([name.removeprefix(_PREFIX) for name in tensors]) else ""
    sides: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in sorted(tensors.items()):  # sorted, so that the same mistake is always reported first
        found = _TENSOR.fullmatch(name)
        module = base + found["module"].removeprefix(_PREFIX) if found else name
        if found is None or module not in places:
            raise AdapterError(
                f"{name} is not supported for {model.architecture}; supported are lora_A and lora_B of attention and "
                "dense-MLP projections."
            )
        _check(name, tensor, found["side"], places[module], dtype, scaling)
        sides[module][found["side"]] = tensor
    if not sides:
        raise AdapterError(f"{WEIGHTS_FILE} holds no tensor.")
    for module, pair in sides.items():
        if len(pair) < 2:
            has, lacks = ("A", "B") if "A" in pair else ("B", "A")
            raise AdapterError(f"{module} has lora_{has} but lacks lora_{lacks}.")
    own, cuts = places_of(model), cuts_of(model)
    return {own[module]: _cut(pair["A"], pair["B"], cuts.of_module(module)) for module, pair in sides.items()}


def _cut(a: Tensor, b: Tensor, cut: Cut) -> _Pair:
    """Return a rank's inputs of A and outputs of B."""
    return Cut(inputs=cut.inputs).of(a), Cut(outputs=cut.outputs).of(b)


def _check(name: str, tensor: Tensor, side: str, place: Place, dtype: torch.dtype, scaling: _Scaling) -> None:
    want = (scaling.rank, place.inputs) if side == "A" else (place.outputs, scaling.rank)
    if tuple(tensor.shape) != want:
        raise AdapterError(f"{name} has shape {list(tensor.shape)}, but r and this model's shape say {list(want)}.")
    if not tensor.is_floating_point():
        raise AdapterError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}: expected floating-point numbers.")
    numbers = tensor.float()
    if not _is_finite(numbers):
        raise AdapterError(f"{name} contains NaN or infinity.")
    scaled = numbers * scaling.scale if side == "B" else numbers
    if not _is_finite(scaled.to(dtype)):
        limit = f"{str(dtype).removeprefix('torch.')} holds none beyond {torch.finfo(dtype).max:g}"
        if _is_finite(numbers.to(dtype)):
            alpha = _short(scaling.alpha)
            raise AdapterError(
                f"{CONFIG_FILE}: lora_alpha is {alpha}, which makes numbers of {name} too large: {limit}."
            )
        raise AdapterError(f"{name} has numbers that are too large: {limit}.")


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def places_of(model: ModelConfig) -> dict[str, Place]:
    """Return the places of all modules that may be adapted, by name."""
    found = {}
    for name, kind in FAMILIES[model.architecture].names.items():
        if "{layer}" not in name or "{expert}" in name:
            continue
        for number, layer_config in enumerate(model.layers):
            if (place := _layer_places(model, layer_config, number).get(kind)) is not None:
                found[name.replace("{layer}", str(number))] = place
    return found


def _layer_places(model: ModelConfig, layer_config: LayerConfig, number: int) -> dict[str, Place]:
    hidden, sizes = model.hidden_size, qkv_sizes(model)
    places = {"qkv": Place(number, "qkv", 0, sum(sizes), hidden)}
    for i, part in enumerate("qkv"):
        places[part] = Place(number, "qkv", sum(sizes[:i]), sizes[i], hidden)
    places["output"] = Place(number, "output", 0, hidden, attended_size(model, layer_config))
    if layer_config.experts is None:
        wide = model.intermediate_size
        places |= {
            "gate_up": Place(number, "gate_up", 0, 2 * wide, hidden),
            "gate": Place(number, "gate_up", 0, wide, hidden),
            "up": Place(number, "gate_up", wide, wide, hidden),
            "down": Place(number, "down", 0, hidden, wide),
        }
    return places


def stacked_places(model: ModelConfig) -> dict[tuple[int, str], tuple[Place, ...]]:
    """Return the places of each matrix's parts in their order, by (layer, stack)."""
    found: defaultdict[tuple[int, str], list[Place]] = defaultdict(list)
    for place in sorted(places_of(model).values(), key=lambda place: (place.layer, place.stack, place.first)):
        found[place.layer, place.stack].append(place)
    return {key: tuple(parts) for key, parts in found.items()}


def stacked_b(model: ModelConfig, parts: Sequence[Place], factors: Mapping[Place, Factors], ranks: int) -> Tensor:
    """Return B of a stacked matrix, in whose columns each output has the ranks of its own part; what an adapter lacks
    is zero. # [outputs, ranks] float32"""
    wide = torch.zeros(sum(part.outputs for part in parts), ranks)
    for place in parts:
        if (own := factors.get(place)) is not None:
            wide[place.first : place.first + place.outputs, : own.b.shape[1]] = own.b
    if parts[0].stack == "qkv":
        settle_qkv(model, wide)
    return wide


def adapter_bytes(model: ModelConfig, rank: int, dtype: torch.dtype) -> int:
    """Return the bytes of an adapter of this rank that adapts every module it may, as `read_adapter` returns it."""
    columns = sum(place.inputs + stack_outputs(place.stack, model) for place in places_of(model).values())
    return rank * columns * dtype.itemsize


def stack_outputs(stack: str, model: ModelConfig) -> int:
    """Return the number of outputs of a stacked matrix, all its parts together."""
    if stack == "qkv":
        return sum(qkv_sizes(model))
    return 2 * model.intermediate_size if stack == "gate_up" else model.hidden_size


def _deltas(factors: Mapping[Place, Factors], model: ModelConfig, dtype: torch.dtype) -> Deltas:
    stacks: defaultdict[tuple[int, str], list[tuple[Place, Factors]]] = defaultdict(list)
    for place, own in sorted(factors.items(), key=lambda item: (item[0].layer, item[0].stack, item[0].first)):
        stacks[place.layer, place.stack].append((place, own))
    return {key: _stacked(key[1], parts, model, dtype) for key, parts in stacks.items()}


def _stacked(stack: str, parts: list[tuple[Place, Factors]], model: ModelConfig, dtype: torch.dtype) -> Delta:
    rank = len(parts[0][1].a)
    b = torch.zeros(stack_outputs(stack, model), rank * len(parts))
    for number, (place, own) in enumerate(parts):
        columns = slice(number * rank, (number + 1) * rank)
        b[place.first : place.first + place.outputs, columns] = own.b
    if stack == "qkv":
        settle_qkv(model, b)
    a = torch.cat([own.a.to(dtype) for _, own in parts])
    return Delta(a, b.to(dtype))
