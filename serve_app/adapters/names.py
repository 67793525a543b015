"""Owns which models one ingress replica knows, by the names that clients ask for: the model, its adapters, aliases.
Never loads an adapter: engines do, and each request tells them what it needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from engine.protocol import AdapterRef
from serve_app.adapters.aliases import Aliases
from serve_app.engines.engine_client import ServedModel
from serve_app.errors.api_error import model_not_found


class AdapterNames:
    """The model is asked for by each of its names, and answers under the first, its id. An adapter is asked for as
    `name`, or as `<model>:name`. What has neither name may have an alias. Belongs to the event loop it is used on."""

    def __init__(
        self,
        base: ServedModel,
        known: Iterable[AdapterRef] = (),
        *,
        other_names: Sequence[str] = (),
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self._base = base
        self._own_names = (base.id, *other_names)
        self._known = {adapter.name: adapter for adapter in known}
        self._aliases = Aliases(aliases or {})

    def served(self, asked: str) -> ServedModel:
        """What answers a client that asks for this name, under the name that it answers by: an alias is not one.

        Raises:
            ApiError: 404, there is none of that name.
        """
        found = self._named(asked)
        if found is None and (target := self._aliases.target(asked)) is not None:
            found = self._named(target)
        if found is None:
            raise model_not_found(asked, self._base.id)
        return found

    def get(self, name: str) -> AdapterRef | None:
        return self._known.get(name)

    def is_own(self, name: str) -> bool:
        """Whether it is the model's, so that no adapter may have it."""
        return name in self._own_names

    def put(self, adapter: AdapterRef) -> None:
        """From now on its name means this adapter. Idempotent."""
        self._known[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Idempotent."""
        self._known.pop(name, None)

    def listed(self) -> list[tuple[str, ServedModel]]:
        """What can be asked for, with what answers: the model's names, those of its adapters in the order in which they
        came, and the aliases that are no patterns, but for those of adapters that have left."""
        targets = {name: name for name in (*self._own_names, *self._known)}
        targets = targets | {alias: target for alias, target in self._aliases.names.items() if alias not in targets}
        found = ((name, self._named(target)) for name, target in targets.items())
        return [(name, model) for name, model in found if model is not None]

    def _named(self, name: str) -> ServedModel | None:
        if name in self._own_names:
            return self._base
        for prefix in ("", *(f"{own}:" for own in self._own_names)):
            if adapter := self._known.get(name.removeprefix(prefix)):
                return replace(self._base, id=name, adapter=adapter, base=self._base.id)
        return None
