"""Owns how often Triton's interpreter looks for what it replaces in the language: once, not in each call of a function.
Never changes what is replaced, nor what a kernel computes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

MODULE = "triton.runtime.interpreter"
NEEDED = ("_LangPatchScope", "_patch_attr", "_patch_builtin", "_patch_lang")
"""What Triton 3.7 has. An interpreter that lacks any of it is left as it is."""


def replace_once_a_launch() -> None:
    """Do so from now on, if this process has imported the interpreter. Whenever one function of a kernel calls another,
    it looks through all names of the language again, which takes half of a kernel's time."""
    interpreter: Any = sys.modules.get(MODULE)
    if all(hasattr(interpreter, name) for name in NEEDED) and not isinstance(interpreter._patch_lang, _Once):
        interpreter._patch_builtin = _known(interpreter)
        interpreter._patch_lang = _Once(interpreter)


def _known(interpreter: Any) -> Callable[[Any, Any, Any], None]:
    """Return the replacement of a module's or class's names, which looks for them in the first launch alone."""
    found = cache(lambda place: inspect.getmembers(place, interpreter.tl.core.is_builtin))

    def replace(place: Any, builder: Any, scope: Any) -> None:
        for name, member in found(place):
            interpreter._patch_attr(place, name, member, builder, scope)

    return replace


class _Once:
    def __init__(self, interpreter: Any) -> None:
        self._interpreter, self._replace = interpreter, interpreter._patch_lang
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
