"""Owns how often Triton's interpreter replaces the language by its own: once a launch, not in each call of a function.
Never changes what is replaced, nor what a kernel computes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

MODULE = "triton.runtime.interpreter"


def replace_once_a_launch() -> None:
    """Do so from now on, if this process has imported the interpreter. Triton 3.7 looks through all names of the
    language again whenever one function of a kernel calls another, which takes half of an interpreted kernel's time.
    An interpreter that has none of this is left as it is."""
    interpreter: Any = sys.modules.get(MODULE)
    replace = getattr(interpreter, "_patch_lang", None)
    if replace is None or not hasattr(interpreter, "_LangPatchScope") or isinstance(replace, _Once):
        return
    interpreter._patch_lang = _Once(interpreter, replace)


class _Once:
    def __init__(self, interpreter: Any, replace: Callable[[FunctionType], Any]) -> None:
        self._interpreter, self._replace = interpreter, replace
        self._replaced: set[int] | None = None
        """The modules that were replaced in this launch; None: there is none."""
        self._seen_by = cache(self._modules)

    def __call__(self, function: FunctionType) -> Any:
        """Return what takes the replacement back; a launch does that at its end."""
        modules = self._seen_by(function)
        if self._replaced is not None and modules <= self._replaced:
            return self._interpreter._LangPatchScope()
        scope = self._replace(function)
        if self._replaced is None:
            self._replaced = set()
            scope.restore = self._ending(scope.restore)
        self._replaced |= modules
        return scope

    def _modules(self, function: FunctionType) -> frozenset[int]:
        languages = {id(module) for module in (self._interpreter.tl, self._interpreter.tl.core)}
        return frozenset(languages & set(map(id, function.__globals__.values())))

    def _ending(self, restore: Callable[[], None]) -> Callable[[], None]:
        def ended() -> None:
            self._replaced = None
            restore()

        return ended
