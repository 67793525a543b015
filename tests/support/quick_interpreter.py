"""Owns what Triton's interpreter does once and not in each operation: to look for what it replaces in the language, and
to describe shapes and types.
Never changes what is replaced, nor what a kernel computes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

MODULE = "triton.runtime.interpreter"
NEEDED = ("_LangPatchScope", "_patch_attr", "_patch_builtin", "_patch_lang", "_get_np_dtype")
"""What Triton 3.7 has. An interpreter that lacks any of it is left as it is."""


def quicken() -> None:
    """Do so from now on, if this process has imported the interpreter. Whenever one function of a kernel calls another,
    it looks through all names of the language again, which takes half of a kernel's time; of the rest, a third goes
    into objects that say the shape of a result."""
    interpreter: Any = sys.modules.get(MODULE)
    if all(hasattr(interpreter, name) for name in NEEDED) and not isinstance(interpreter._patch_lang, _Once):
        interpreter._patch_builtin = _known(interpreter)
        interpreter._patch_lang = _Once(interpreter)
        interpreter._get_np_dtype = _NumpyTypes(interpreter)
        _describe_shapes_once(interpreter.tl.core)


class _NumpyTypes:
    """NumPy's types by Triton's. The interpreter makes a table of all at every operation."""

    def __init__(self, interpreter: Any) -> None:
        self._find, self._block_type = interpreter._get_np_dtype, interpreter.tl.core.block_type
        self._found: dict[str, Any] = {}

    def __call__(self, dtype: Any) -> Any:
        scalar = dtype.element_ty if type(dtype) is self._block_type else dtype
        found = self._found.get(scalar.name)
        if found is None:
            found = self._found[scalar.name] = self._find(scalar)
        return found


def _describe_shapes_once(core: Any) -> None:
    """Let blocks of the same shape share the objects that describe it, which nobody changes."""
    block_init, tensor_init = core.block_type.__init__, core.tensor.__init__
    blocks: dict[tuple[int, ...], tuple[Any, Any, str]] = {}
    tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(size.value if type(size) is core.constexpr else size for size in shape)
        known = blocks.get(key)
        if known is None:
            block_init(self, element_ty, shape)  # which refuses wrong ones
            blocks[key] = self.shape, self.numel, str(self.shape)
            return
        self.element_ty = element_ty
        self.shape, self.numel, shown = known
        self.name = f"<{shown}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        known = tensors.get(key)
        if known is None:
            tensor_init(self, handle, type)
            tensors[key] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known

    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor


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
