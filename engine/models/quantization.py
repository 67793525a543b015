"""Owns the reader of a config.json's `quantization_config`: which packing a matrix has.
Never guesses: a format that would be unpacked wrongly is refused by name, with the list of supported ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.gguf_rows import BLOCK_BYTES
from engine.models.packing import FP8, INT8, INT32, Awq, Gguf, Gptq, Grid, Packing
from engine.models.values import Fields, section

SUPPORTED = (
    "compressed-tensors (int-quantized, float-quantized, naive-quantized, pack-quantized), fp8, gptq (4 and 8 bit), "
    "awq (4 bit, gemm)"
)
_WEIGHTS_OF = {
    "int-quantized": (INT8, "int", (8,)),
    "float-quantized": (FP8, "float", (8,)),
    "pack-quantized": (INT32, "int", (4, 8)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The packings of a checkpoint. Its tensors show which of the covered matrices are really packed."""

    groups: tuple[tuple[tuple[str, ...], Packing], ...]
    """(targets, their packing). A target is a module's name, a pattern `re:...`, or `Linear`, which means all."""
    ignored: tuple[str, ...] = ()
    """Targets that are not packed."""
    activations: str = ""
    """How the checkpoint wants activations rounded; empty: not at all."""

    def packing(self, module: str) -> Packing | None:
        """Return the packing of a module, by its name in the checkpoint, or None if it is not packed."""
        if any(_matches(target, module) for target in self.ignored):
            return None
        # As in compressed-tensors: names before patterns, these in the order of their letters, and all others last.
        for targets, packing in self.groups:
            if module in targets:
                return packing
        like = [
            (target, packing)
            for targets, packing in self.groups
            for target in targets
            if target[:3] == "re:" and _matches(target, module)
        ]
        if like:
            return min(like, key=lambda found: found[0])[1]
        return next((packing for targets, packing in self.groups if "Linear" in targets), None)

    @property
    def by_output(self) -> tuple[bool, ...]:
        """For each packing, see Packing.by_output."""
        return tuple(packing.by_output for _, packing in self.groups)

    @property
    def in_fp8(self) -> bool:
        """Whether any matrix may be in fp8."""
        return any(isinstance(packing, Grid) and packing.kind == FP8 for _, packing in self.groups)

    @property
    def summary(self) -> str:
        return " and ".join(dict.fromkeys(packing.summary for _, packing in self.groups))


def read_quantization(raw: Fields) -> Quantization | None:
    """Read `quantization_config`; None if weights are not packed.

    Raises:
        ValueError: the method, or a variant of it, is not supported.
    """
    nested = section(raw, "text_config")
    found = raw.get("quantization_config") or nested.get("quantization_config") or raw.get("compression_config")
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise ValueError(f"quantization_config is {found!r}: expected an object.")
    method = found.get("quant_method", "compressed-tensors" if "config_groups" in found else "unknown")
    if not isinstance(method, str) or method not in _METHODS:
        raise ValueError(f"quantization_config ({method}) is not supported; supported are {SUPPORTED}.")
    return _METHODS[method](found)


def _gptq(found: Fields) -> Quantization:
    bits = _one_of(found, "gptq", "bits", 4, 8)
    version = _one_of(found, "gptq", "checkpoint_format", "gptq", "gptq_v2")
    _one_of(found, "gptq", "is_marlin_format", False)
    _one_of(found, "gptq", "pack_dtype", "int32", "torch.int32")
    for pattern, changes in _object(found, "gptq", "dynamic").items():
        if not pattern.startswith("-:") and changes:  # others say what is packed or not, which the tensors show
            raise ValueError(
                f"quantization_config (gptq): dynamic has {str(changes)[:80]} for {pattern}, which is not supported; "
                "supported is one format for all matrices."
            )
    packing = Gptq(
        bits=bits,
        group_size=_group_size(found, "gptq", "group_size"),
        ordered=bool(found.get("desc_act")),
        zeros_less_one=version == "gptq",
        symmetric=_one_of(found, "gptq", "sym", True, False),
    )
    return Quantization(groups=((("Linear",), packing),))


def _awq(found: Fields) -> Quantization:
    _one_of(found, "awq", "w_bit" if "w_bit" in found else "bits", 4)
    _one_of({"version": str(found.get("version") or "gemm").lower()}, "awq", "version", "gemm")
    _one_of(found, "awq", "zero_point", True)
    size = _group_size(found, "awq", "q_group_size" if "q_group_size" in found else "group_size")
    return Quantization(groups=((("Linear",), Awq(group_size=size)),))


def _fp8(found: Fields) -> Quantization:
    _one_of(found, "fp8", "fmt", "e4m3", "float8_e4m3fn")
    scheme = _one_of(found, "fp8", "activation_scheme", "dynamic", "static")
    block = found.get("weight_block_size")
    if block is None:
        summary = "fp8 e4m3, a scale for each matrix"
        packing = Grid(summary=summary, kind=FP8, cell=(None, None), other_scale="weight_scale_inv")  # transformers 5's
    else:
        rows, columns = _block(block, "fp8: weight_block_size")
        summary = f"fp8 e4m3, blocks of {rows} x {columns}"
        packing = Grid(summary=summary, kind=FP8, cell=(rows, columns), scale="weight_scale_inv")
    return Quantization(groups=((("Linear",), packing),), activations=f"fp8 ({scheme})")


def _compressed_tensors(found: Fields) -> Quantization:
    method = "compressed-tensors"
    for key in ("kv_cache_scheme", "transform_config"):
        _none_of(found, method, key)
    _one_of(_object(found, method, "sparsity_config"), method, "format", "dense")
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError(f"quantization_config ({method}): config_groups is {groups!r}: expected its groups.")
    read, activations = [], ""
    for name in groups:
        group, where = _object(groups, method, name), f"{method}, {name}"
        stored_as = group.get("format") or found.get("format")
        read.append((_patterns(group, where, "targets"), _grid(_object(group, where, "weights"), stored_as, where)))
        if inputs := _object(group, where, "input_activations"):
            kind = "fp" if inputs.get("type") == "float" else "int"
            activations = f"{kind}{inputs.get('num_bits', 8)} ({'dynamic' if inputs.get('dynamic') else 'static'})"
        _none_of(group, where, "output_activations")
    return Quantization(groups=tuple(read), ignored=_patterns(found, method, "ignore"), activations=activations)


def _gguf(found: Fields) -> Quantization:
    """Read the types of a GGUF file's matrices, which `engine.checkpoints.gguf_convert` lists by module: `*` is the
    number of any expert."""
    modules: dict[str, list[str]] = {}
    for module, kind in _object(found, "gguf", "types").items():
        modules.setdefault(_one_of({module: kind}, "gguf", module, *BLOCK_BYTES), []).append(module)
    return Quantization(groups=tuple((_targets(names), Gguf(kind=kind)) for kind, names in modules.items()))


def _targets(modules: list[str]) -> tuple[str, ...]:
    """Return names, and one pattern for all modules of experts: each of thousands is compared with every target."""
    patterns = [re.escape(module).replace(r"\*", r"\d+") for module in modules if "*" in module]
    joined = [f"re:(?:{'|'.join(patterns)})$"] if patterns else []
    return *joined, *(module for module in modules if "*" not in module)


_METHODS: dict[str, Callable[[Fields], Quantization]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "gguf": _gguf,
}


def _grid(weights: Fields, stored_as: Any, where: str) -> Grid:
    """Read the packing of a group from its `weights`."""
    kind_of = _one_of(weights, where, "type", "int", "float")
    if stored_as == "naive-quantized":  # the same as the other two: one element per value
        stored_as = f"{kind_of}-quantized"
    if not isinstance(stored_as, str) or stored_as not in _WEIGHTS_OF:
        raise ValueError(
            f"quantization_config ({where}): format is {stored_as!r}; supported are {', '.join(_WEIGHTS_OF)} and "
            "naive-quantized."
        )
    kind, type_name, widths = _WEIGHTS_OF[stored_as]
    _one_of(weights, f"{where}, {stored_as}", "type", type_name)
    bits = _one_of(weights, f"{where}, {stored_as}", "num_bits", *widths)
    _one_of(weights, where, "dynamic", False)
    symmetric = _one_of(weights, where, "symmetric", *((True,) if kind == FP8 else (True, False)))
    # With `weight` and `static`, inputs are stored in the order of their groups, as without actorder.
    order = _one_of(weights, where, "actorder", None, "weight", "static", "group", "dynamic", True, False)
    cell, shared = _cell(weights, where)
    ordered = order in ("group", "dynamic", True) and cell[1] is not None
    if ordered and cell[0] != 1:
        raise ValueError(
            f"quantization_config ({where}): actorder {order!r} is not supported for strategy block, only for group."
        )
    return Grid(
        summary=f"compressed-tensors {stored_as} {bits} bit, {shared}",
        kind=kind,
        bits=bits,
        cell=cell,
        zero_points=not symmetric,
        ordered=ordered,
    )


def _cell(weights: Fields, where: str) -> tuple[tuple[int | None, int | None], str]:
    """Return (how many outputs and inputs share a scale, a description for messages)."""
    size = weights.get("group_size")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.get("strategy") or default
    if strategy == "tensor":
        return (None, None), "a scale for each matrix"
    if strategy == "channel":
        return (1, None), "a scale for each output"
    if strategy == "group":
        found = _group_size(weights, where, "group_size")
        return (1, found), f"a scale for {found} inputs of an output"
    if strategy == "block":
        rows, columns = _block(weights.get("block_structure"), f"{where}: block_structure")
        return (rows, columns), f"blocks of {rows} x {columns}"
    raise ValueError(
        f"quantization_config ({where}): strategy is {strategy!r}; supported are tensor, channel, group, block."
    )


def _group_size(found: Fields, where: str, key: str) -> int | None:
    """Read a group size. None means all inputs."""
    size = found.get(key, 128)
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise ValueError(f"quantization_config ({where}): {key} is {size!r}: expected a positive integer, or -1.")
    return None if size == -1 else size


def _block(found: Any, where: str) -> tuple[int, int]:
    # "128x128" in old checkpoints
    sizes = [int(size) for size in re.findall(r"\d+", found)] if isinstance(found, str) else found
    if not isinstance(sizes, list) or len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError(f"quantization_config ({where} is {found!r}): expected two positive integers.")
    return sizes[0], sizes[1]


def _one_of(found: Fields, where: str, key: str, *supported: Any) -> Any:
    """Return the field, which must be one of `supported`, or the first of these if it is left out."""
    value = found.get(key, supported[0])
    if value is None and None not in supported:
        value = supported[0]
    if not any(value is choice if isinstance(choice, bool) else value == choice for choice in supported):
        raise ValueError(
            f"quantization_config ({where}): {key} is {value!r}; supported {'is' if len(supported) == 1 else 'are'} "
            f"{', '.join(map(str, supported))}."
        )
    return value


def _none_of(found: Fields, where: str, key: str) -> None:
    if value := found.get(key):
        raise ValueError(f"quantization_config ({where}): {key} is {str(value)[:80]}, which is not supported.")


def _object(found: Fields, where: str, key: str) -> Fields:
    """Return an object in `found`, empty if there is none."""
    value = found.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"quantization_config ({where}): {key} is {value!r}: expected an object.")
    return value


def _patterns(found: Fields, where: str, key: str) -> tuple[str, ...]:
    targets = found.get(key) or []
    if not isinstance(targets, list | tuple):
        raise ValueError(f"quantization_config ({where}): {key} is {targets!r}: expected a list of modules.")
    for target in targets:
        if not isinstance(target, str):
            raise ValueError(f"quantization_config ({where}): {target!r} is not a module name.")
        try:
            re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
        except re.error as error:
            raise ValueError(
                f"quantization_config ({where}): {target!r} is not a valid regular expression: {error}."
            ) from error
    return tuple(targets)


def _matches(target: str, module: str) -> bool:
    return re.match(target[3:], module) is not None if target.startswith("re:") else target == module
