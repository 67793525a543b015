"""Counts the bytes of tensors that live at once while a piece of code runs.
Never sees what an operator takes for itself while it runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """`with LiveTensors(known) as live: ...; live.most`. Storages of `known` tensors, such as weights, do not count.
    Gradients must be off, but not by inference mode, which hides operators."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.most = self._now = 0
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            self._now += storage.nbytes()
            self.most = max(self.most, self._now)
            weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, key: int) -> None:
        self._now -= self._sizes.pop(key)
