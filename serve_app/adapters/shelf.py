"""Owns the adapters of one engine replica by name: those of the settings, and what was loaded while it ran.
Never decides who may change them, and never tells another replica."""

from __future__ import annotations

from collections.abc import Mapping

from engine.async_engine import AsyncEngine
from engine.protocol import AdapterRef, RequestRejected


class NamedAdapters:
    """Belongs to the event loop it is used on. An engine knows adapters by their digests; two names may share one."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._known: dict[str, AdapterRef] = {}

    @property
    def known(self) -> list[AdapterRef]:
        return list(self._known.values())

    async def load_all(self, paths: Mapping[str, str]) -> None:
        """name -> directory.

        Raises:
            RequestRejected: one cannot be used.
        """
        for name, path in paths.items():
            try:
                await self.load(name, path)
            except RequestRejected as error:
                raise RequestRejected(error.code, f"lora_adapters, {name} ({path}): {error}", error.param) from error

    async def load(self, name: str, path: str) -> AdapterRef:
        """Have the directory's adapter in memory, under a name that may have meant another until now.

        Raises:
            RequestRejected: it cannot be used, and the name means what it meant.
        """
        digest = await self._engine.adapters.load(path)
        before, self._known[name] = self._known.get(name), AdapterRef(name, path, digest)
        if before is not None:
            self._drop(before)
        return self._known[name]

    def unload(self, name: str) -> None:
        """Requests that run keep it until they end. Idempotent."""
        if (known := self._known.pop(name, None)) is not None:
            self._drop(known)

    def restore(self, name: str, before: AdapterRef | None) -> None:
        """Undo a load: another replica refused it."""
        loaded = self._known.pop(name, None)
        if before is not None:
            self._known[name] = before  # its weights are read again when a request asks for them
        if loaded is not None:
            self._drop(loaded)

    def _drop(self, adapter: AdapterRef) -> None:
        if all(other.digest != adapter.digest for other in self._known.values()):
            self._engine.adapters.unload(adapter.digest)
