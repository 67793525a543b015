"""Owns what one model serves in an ingress replica, by the names that clients ask for: itself, adapters, aliases.
Never loads an adapter: engines do, and each request tells them what it needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from engine.protocol import AdapterRef
from serve_app.adapters.aliases import Aliases
from serve_app.engines.engine_client import ServedModel
from serve_app.errors.api_error import model_not_found


class AdapterNames:
    """Finds what serves a name. The model has several names, and answers under the first, which is its id. An adapter
    is named `name` or `<model>:name`. Other names may be aliases. Must be used on a single event loop."""

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

    @property
    def base(self) -> ServedModel:
        """The model itself."""
        return self._base

    def become(self, base: ServedModel) -> None:
        """Replace what is known of the model, whose id stays."""
        self._base = base

    def served(self, asked: str) -> ServedModel:
        """Find the model or adapter that answers to a name.

        Raises:
            ApiError: 404, nothing has that name.
        """
        if (model := self.find(asked)) is None:
            raise model_not_found(asked, self._base.id)
        return model

    def find(self, asked: str) -> ServedModel | None:
        """Find the model or adapter that answers to a name. Answers never give an alias as the model's name."""
        model = self.named(asked)
        if model is None and (target := self._aliases.target(asked)) is not None:
            model = self.named(target)
        return model

    def has_alias(self, asked: str) -> bool:
        """Whether a name is an alias without wildcards."""
        return asked in self._aliases.names

    def get(self, name: str) -> AdapterRef | None:
        return self._known.get(name)

    def is_own(self, name: str) -> bool:
        """Whether the name is the model's own, which no adapter may have."""
        return name in self._own_names

    def put(self, adapter: AdapterRef) -> None:
        """Let the adapter's name mean this adapter from now on. Idempotent."""
        self._known[adapter.name] = adapter

    def restore(self, loaded: AdapterRef, before: AdapterRef | None) -> None:
        """Undo a `put` of `loaded`: let its name mean what it meant `before`. A name that has been removed since, or
        means another adapter, stays so."""
        if self._known.get(loaded.name) != loaded:
            return
        if before is None:
            self.remove(loaded.name)
        else:
            self.put(before)

    def remove(self, name: str) -> None:
        """Forget an adapter. Idempotent."""
        self._known.pop(name, None)

    def listed(self) -> list[tuple[str, ServedModel]]:
        """List the names that clients can ask for, with what answers: the model's names, the adapters in the order in
        which they were added, and the aliases without wildcards whose targets still exist."""
        targets = {name: name for name in (*self._own_names, *self._known)}
        targets = targets | {alias: target for alias, target in self._aliases.names.items() if alias not in targets}
        models = ((name, self.named(target)) for name, target in targets.items())
        return [(name, model) for name, model in models if model is not None]

    def named(self, name: str) -> ServedModel | None:
        """Find the model or adapter that has a name itself, and not by an alias."""
        if name in self._own_names:
            return self._base
        for prefix in ("", *(f"{own}:" for own in self._own_names)):
            if adapter := self._known.get(name.removeprefix(prefix)):
                return replace(self._base, id=name, adapter=adapter, base=self._base.id)
        return None
