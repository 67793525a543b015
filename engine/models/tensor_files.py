"""Owns which of a checkpoint's files each tensor is read from, and the comparison of two stored tensors.
Never knows what a tensor is for, and never chooses between two of the same name unless the index does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.models.json_files import CheckpointError, read_json

INDEX_FILE = "model.safetensors.index.json"
TensorFiles = Mapping[Path, Sequence[str]]
"""The names of the tensors to be read from each file."""
TensorNames = Mapping[Path, Mapping[str, str]]
"""The same, with each tensor's name in its family's table."""
BASE = "model."
"""The prefix of the model without an LM head, which its own checkpoints do not have."""
HEAD = "lm_head."
_ROWS = 4096  # compared at a time, so that no whole matrix is in memory


def tensor_files(model_dir: Path) -> TensorFiles:
    """Return the files of a checkpoint's weights, and the tensors to be read from each. Reads only their headers.

    Raises:
        CheckpointError: a file is missing or not readable, or a tensor is in several and the index names none of them.
    """
    index = model_dir / INDEX_FILE
    weight_map = _weight_map(index) if index.exists() else {}
    files = _indexed_files(index, weight_map) if index.exists() else _all_files(model_dir)
    holders: dict[str, list[Path]] = {}
    for file in files:
        for name in _names(file):
            holders.setdefault(name, []).append(file)
    found: dict[Path, list[str]] = {file: [] for file in files}
    for name, held_by in holders.items():
        found[_chosen(name, held_by, weight_map.get(name))].append(name)
    return found


def lacks_head(model_dir: Path) -> bool:
    """Whether the weights are those of a model without an LM head, as models for embeddings are saved. False: there
    are no weights yet.

    Raises:
        CheckpointError: as tensor_files.
    """
    if not any(model_dir.glob("*.safetensors")):
        return False
    names = [name for held in tensor_files(model_dir).values() for name in held]
    return is_base_model(names) and not any(name.startswith(HEAD) for name in names)


def is_base_model(names: Sequence[str]) -> bool:
    """Whether tensors lack the prefix that a model with an LM head gives to the rest of it."""
    return not any(name.startswith(BASE) for name in names)


def equal_tensors(first: tuple[Path, str], second: tuple[Path, str], dtype: torch.dtype) -> bool:
    """Whether two tensors, each a file and a name in it, are the same in `dtype`.

    Raises:
        CheckpointError: a file is not readable.
    """
    (file, name), (other_file, other_name) = first, second
    try:
        with safe_open(file, framework="pt") as held, safe_open(other_file, framework="pt") as other_held:
            mine, other = held.get_slice(name), other_held.get_slice(other_name)
            if mine.get_shape() != other.get_shape():
                return False
            runs = (slice(start, start + _ROWS) for start in range(0, mine.get_shape()[0], _ROWS))
            return all(torch.equal(mine[run].to(dtype), other[run].to(dtype)) for run in runs)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} or {other_file} is not a readable safetensors file: {error}.") from error


def some(names: Mapping[str, object] | Sequence[str]) -> str:
    """List the first names, and say how many there are besides."""
    first = list(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")


def _all_files(model_dir: Path) -> list[Path]:
    whole = model_dir / "model.safetensors"
    files = [whole] if whole.exists() else sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{model_dir} holds no *.safetensors file: expected the weights there.")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise CheckpointError(f"{index} has no weight_map: expected tensor names and the files that hold them.")
    return found


def _indexed_files(index: Path, weight_map: Mapping[str, str]) -> list[Path]:
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.exists():
            lost = [name for name, shard in weight_map.items() if shard == file.name]
            raise CheckpointError(f"{file} is missing: {index.name} says that it holds {some(lost)}.")
    return files


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a readable safetensors file: {error}.") from error


def _chosen(name: str, held_by: Sequence[Path], named: str | None) -> Path:
    if len(held_by) == 1:
        return held_by[0]
    for file in held_by:
        if file.name == named:
            return file
    raise CheckpointError(
        f"{held_by[1]}: {name} is in {held_by[0].name}, too, and no {INDEX_FILE} says which of them to read."
    )
