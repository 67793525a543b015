"""Owns the filling of weight tensors: from safetensors files, or with seeded random numbers.
Never computes with them, and never leaves one unfilled: a checkpoint that does not fit is refused by tensor name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.models.config import CheckpointError as CheckpointError
from engine.models.config import ModelConfig, read_json
from engine.models.parameters import DecoderWeights, allocate, checkpoint_table

INDEX_FILE = "model.safetensors.index.json"
DUMMY_SEED = 0
_FLOATING = ("F64", "F32", "F16", "BF16")


def load_weights(model_dir: Path, config: ModelConfig, dtype: torch.dtype) -> DecoderWeights:
    """The checkpoint's weights in `dtype`, each tensor copied straight from its file into its place.

    Raises:
        CheckpointError: a shard or tensor is missing, left over, corrupt, or of another shape or kind.
    """
    weights = allocate(config, dtype)
    missing = checkpoint_table(config, weights)
    files = _weight_files(model_dir)
    for file in files:
        _load_file(file, config, missing)
    if missing:
        raise CheckpointError(
            f"{model_dir}: {_some(missing)} missing from {', '.join(file.name for file in files)}; "
            f"{config.architecture} with this config.json needs them."
        )
    return weights


def dummy_weights(config: ModelConfig, dtype: torch.dtype, seed: int = DUMMY_SEED) -> DecoderWeights:
    """Random weights of the same shapes, the same for the same seed; activations stay near one at any depth."""
    weights = allocate(config, dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, view in checkpoint_table(config, weights).items():
        if name.endswith("norm.weight"):
            view.fill_(1.0)
        else:
            std = 1.0 / math.sqrt(view.shape[-1]) if view.dim() == 2 else 0.02
            view.copy_(torch.empty(view.shape).normal_(0.0, std, generator=generator))
    return weights


def _weight_files(model_dir: Path) -> list[Path]:
    index = model_dir / INDEX_FILE
    if index.exists():
        return _indexed_files(index)
    whole = model_dir / "model.safetensors"
    files = [whole] if whole.exists() else sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{model_dir} holds no *.safetensors file: expected the weights there.")
    return files


def _indexed_files(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} has no weight_map: expected tensor names and the files that hold them.")
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.exists():
            lost = [name for name, shard in weight_map.items() if shard == file.name]
            raise CheckpointError(f"{file} is missing: {index.name} says that it holds {_some(lost)}.")
    return files


def _load_file(file: Path, config: ModelConfig, missing: dict[str, Tensor]) -> None:
    """Fill what `file` holds and strike it from `missing`."""
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict: it has no iterator)
                found = tensors.get_slice(name)
                if name in missing:
                    _check(file, name, tuple(found.get_shape()), found.get_dtype(), missing[name])
                    missing.pop(name).copy_(tensors.get_tensor(name))
                elif not _harmless(name, config):
                    raise CheckpointError(f"{file}: unexpected tensor {name}, which {config.architecture} has not.")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a readable safetensors file: {error}.") from error


def _check(file: Path, name: str, shape: tuple[int, ...], kind: str, view: Tensor) -> None:
    if shape != tuple(view.shape):
        raise CheckpointError(f"{file}: {name} has shape {list(shape)}, but config.json says {list(view.shape)}.")
    if kind not in _FLOATING:
        raise CheckpointError(f"{file}: {name} is {kind}; supported are {', '.join(_FLOATING)}.")


def _harmless(name: str, config: ModelConfig) -> bool:
    """Old checkpoints store the frequencies; tied ones may store lm_head although it is the embedding."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _some(names: Mapping[str, object] | list[str]) -> str:
    first = list(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")
