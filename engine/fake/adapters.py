"""Owns the fake executor's adapters: digests of adapter directories, which change what rows compute.
Never reads a weight: any directory with an adapter_config.json is an adapter here."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

from engine.step import AdapterError, ScheduledRequest

FILES = ("adapter_config.json", "adapter_model.safetensors")


class FakeAdapters:
    """An engine.step.AdapterHost."""

    def __init__(self) -> None:
        self.kept: set[str] = set()
        """Digests of the adapters that rows may use."""

    def read(self, path: str) -> tuple[str, None]:
        files = [Path(path, name) for name in FILES]
        if not os.path.isfile(files[0]):  # Path's own raises for names that are too long
            raise AdapterError(f"{FILES[0]} cannot be read: expected an adapter there.")
        found = b"\0".join(file.read_bytes() for file in files if os.path.isfile(file))
        return blake2b(found, digest_size=16).hexdigest(), None

    def keep(self, digest: str, weights: None) -> None:
        self.kept.add(digest)

    def drop(self, digest: str) -> None:
        self.kept.remove(digest)

    def numbers(self, row: ScheduledRequest, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """What the row leaves in its KV slots: different numbers with each adapter."""
        if not row.adapter:
            return numbers
        if row.adapter not in self.kept:
            raise ValueError(f"Row {row.request_id} needs adapter {row.adapter}, which was not kept.")
        return tuple(number ^ int(row.adapter, 16) & (1 << 63) - 1 for number in numbers)
