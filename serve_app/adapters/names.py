"""Owns which adapters one ingress replica knows, by the names that clients ask for.
Never loads one: engines do, and each request tells them what it needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from engine.protocol import AdapterRef
from serve_app.engine_client import ServedModel
from serve_app.errors import model_not_found


class AdapterNames:
    """An adapter is asked for as `name`, or as `base:name`. Belongs to the event loop it is used on."""

    def __init__(self, base: ServedModel, known: Iterable[AdapterRef] = ()) -> None:
        self._base = base
        self._known = {adapter.name: adapter for adapter in known}

    def served(self, asked: str) -> ServedModel:
        """The model under the name that a client asks for it by, with its adapter if it has one.

        Raises:
            ApiError: 404, there is none of that name.
        """
        if asked == self._base.id:
            return self._base
        found = self._known.get(asked) or self._known.get(asked.removeprefix(f"{self._base.id}:"))
        if found is None:
            raise model_not_found(asked, self._base.id)
        return self._adapted(asked, found)

    def get(self, name: str) -> AdapterRef | None:
        return self._known.get(name)

    def put(self, adapter: AdapterRef) -> None:
        """From now on its name means this adapter. Idempotent."""
        self._known[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Idempotent."""
        self._known.pop(name, None)

    def listed(self) -> list[ServedModel]:
        """The model itself, and it with each of its adapters, in the order in which their names came."""
        return [self._base, *(self._adapted(name, adapter) for name, adapter in self._known.items())]

    def _adapted(self, name: str, adapter: AdapterRef) -> ServedModel:
        return replace(self._base, id=name, adapter=adapter, base=self._base.id)
