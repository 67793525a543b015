"""Owns reading a GGUF file: typed metadata, and tensors by name as packed rows.
Never interprets a model: callers decide which keys and tensors must exist."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize

from engine.checkpoints.model_cache import ModelError

T = TypeVar("T", int, float, str, bool, list[Any])
# What GGUFReader raises if a file is no GGUF, or is damaged or truncated.
_READ_ERRORS = (ValueError, IndexError, KeyError, OverflowError, TypeError, OSError, MemoryError)


class _BoundedReader(GGUFReader):  # type: ignore[misc]
    """Checks bounds. gguf slices a memory map without checking its end: a truncated file would give short arrays, and a
    damaged array length an endless loop."""

    def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **keywords: Any) -> Any:
        values = super()._get(offset, dtype, count, *order, **keywords)
        if len(values) < int(count):
            raise ValueError(f"{int(count)} values are described at byte {int(offset)}, past the end")
        return values


class GGUFFile:
    """An open GGUF file.

    Raises:
        ModelError: on opening, the file is unreadable, truncated or no GGUF.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = _BoundedReader(path)
            self._metadata = {name: field.contents() for name, field in reader.fields.items()}
        except _READ_ERRORS as error:
            size = path.stat().st_size if path.exists() else 0
            raise ModelError(
                f"{path} ({size} bytes) cannot be read: expected a whole GGUF file of version 2 or 3; "
                f"{type(error).__name__}: {error}"
            ) from error
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}

    def get(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """The metadata value, or `default` if the file has none. Raises ModelError if it is not of type `kind`."""
        value = self._metadata.get(key)
        if value is None:
            return default
        if kind is float and isinstance(value, float | int):
            # Stored as float32: 9.999999747378752e-06 was written as 1e-05.
            return kind(str(np.float32(value)))
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelError(
                f"{self.path}: metadata {key} is of type {type(value).__name__}; expected {kind.__name__}."
            )
        return value

    def require(self, key: str, kind: type[T]) -> T:
        """The metadata value. Raises ModelError if there is none or it is not of type `kind`."""
        value = self.get(key, kind)
        if value is None:
            raise ModelError(f"{self.path}: metadata {key} is missing; expected {kind.__name__}.")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape in C order (the file stores it reversed)."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def values(self, name: str, rows: Any = slice(None)) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Dequantised rows of a tensor, of all experts where it has theirs. Each row is packed by itself.

        Raises:
            ModelError: gguf cannot dequantise its type, or a value is not finite, which means a damaged file.
        """
        tensor = self.tensors[name]
        try:
            values = np.asarray(dequantize(self._rows(name)[rows], tensor.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            raise ModelError(f"{self.path}: tensor {name} is of type {tensor.tensor_type.name}: {error}") from error
        if not np.isfinite(values).all():
            raise ModelError(f"{self.path}: tensor {name} holds values that are not finite: the file is damaged.")
        return values

    def blocks(self, name: str, rows: Any = slice(None)) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Rows of a tensor as they are packed, of all experts where it has theirs. # [rows, bytes]"""
        return np.asarray(self._rows(name)[rows]).view(np.uint8)

    def _rows(self, name: str) -> np.ndarray[Any, Any]:
        """A tensor's rows, or the numbers of a vector, in the file's pages."""
        data: np.ndarray[Any, Any] = self.tensors[name].data
        return data.reshape(-1, data.shape[-1]) if data.ndim > 1 else data

    def num_rows(self, name: str) -> int:
        return len(self._rows(name))

    def num_values(self, name: str) -> int:
        return math.prod(self.shape(name))
