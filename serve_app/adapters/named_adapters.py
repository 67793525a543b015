"""Owns the adapters of one engine replica by name: those of the settings, and those loaded while it runs.
Never decides who may change them, and never informs another replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.async_engine import AsyncEngine
from engine.protocol import AdapterRef, ErrorCode, RequestRejected


@dataclass(slots=True, eq=False)
class _Load:
    """A load that is under way."""

    name: str
    path: str
    is_withdrawn: bool = False


class NamedAdapters:
    """Maps names to adapters. Must be used on a single event loop. The engine itself knows adapters by their digests,
    which two names may share."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._known: dict[str, AdapterRef] = {}
        self._loads: list[_Load] = []

    @property
    def known(self) -> list[AdapterRef]:
        return list(self._known.values())

    async def load_all(self, paths: Mapping[str, str]) -> None:
        """Load all adapters. `paths`: name -> directory.

        Raises:
            RequestRejected: an adapter cannot be used.
        """
        for name, path in paths.items():
            try:
                await self.load(name, path)
            except RequestRejected as error:
                raise RequestRejected(error.code, f"lora_adapters, {name} ({path}): {error}", error.param) from error

    async def load(self, name: str, path: str) -> AdapterRef:
        """Load the directory's adapter into memory under a name, which may have meant another adapter until now.

        Raises:
            RequestRejected: the adapter cannot be used, or the name was withdrawn meanwhile; it keeps its previous
                meaning.
        """
        this = _Load(name, path)
        self._loads.append(this)
        try:
            loaded = AdapterRef(name, path, await self._engine.adapters.load(path))
        finally:
            self._loads.remove(this)
        if this.is_withdrawn:
            self._drop(loaded)
            text = f"The adapter {name} was unloaded, or its load was undone, while it was loaded."
            raise RequestRejected(ErrorCode.ADAPTER_WITHDRAWN, text, "lora_name")
        before, self._known[name] = self._known.get(name), loaded
        if before is not None:
            self._drop(before)
        return loaded

    def unload(self, name: str) -> None:
        """Forget an adapter. Running requests keep it until they end. Idempotent."""
        for load in self._loads:
            load.is_withdrawn |= load.name == name
        if (known := self._known.pop(name, None)) is not None:
            self._drop(known)

    def restore(self, name: str, path: str, before: AdapterRef | None) -> None:
        """Undo a load that failed at another replica, or that takes too long here. A name that has been unloaded since,
        or means another adapter, stays so.

        `path`: the directory that was loaded. `before`: what the name meant.
        """
        for load in self._loads:
            load.is_withdrawn |= (load.name, load.path) == (name, path)
        loaded = self._known.get(name)
        if loaded is None or loaded.path != path:
            return
        if before is None:
            del self._known[name]
        else:
            self._known[name] = before  # a request that needs its weights will have them read again
        self._drop(loaded)

    def _drop(self, adapter: AdapterRef) -> None:
        if all(other.digest != adapter.digest for other in self._known.values()):
            self._engine.adapters.unload(adapter.digest)
