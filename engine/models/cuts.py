"""Owns where a rank's part of a model lies in the tensors of a checkpoint.
Never decides what the part is (`engine.models.shards` does), and never opens a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.models.description import LayerConfig, LinearAttention, ModelConfig
from engine.models.registry import FAMILIES
from engine.models.shards import expert_columns, head_rows, heads_of, mlp_columns, shared_columns

_MLP = ("gate_up", "gate", "up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A rank's part of a matrix [outputs, inputs], or of a vector [outputs]."""

    outputs: tuple[range, ...] | None = None
    """One run for each part of a stacked matrix. None: all."""
    inputs: range | None = None
    """None: all. With some, the matrix's outputs are summed over the ranks."""
    zero: bool = False
    """Whether this rank has zeros instead: a bias that is to be added once."""
    experts: range | None = None
    """The experts of a tensor that has an axis of them before the others. None: it has none."""

    def of(self, source: Any) -> Tensor:
        """Return the part of a Tensor or of a slice of safetensors: of a Tensor, a view where it is in one piece."""
        before = () if self.experts is None else (_slice(self.experts),)
        after = () if self.inputs is None else (_slice(self.inputs),)
        rows = (slice(None),) if self.outputs is None else tuple(map(_slice, self.outputs))
        found = [source[(*before, own, *after)] for own in rows]
        whole: Tensor = found[0] if len(found) == 1 else torch.cat(found, len(before))
        return torch.zeros_like(whole) if self.zero else whole


ALL = Cut()


@dataclass(frozen=True, slots=True)
class Cuts:
    """The parts of all tensors of a model."""

    by_name: Mapping[str, Cut]
    """By module, or by the name of a tensor that does not end with `.weight`. Others are whole on each rank."""
    rank: int = 0

    def of_module(self, module: str) -> Cut:
        """Return the part of a module's matrix."""
        return self.by_name.get(module, ALL)

    def of_tensor(self, name: str) -> Cut:
        """Return the part of a tensor. Of what is summed, the first rank has the bias."""
        module, _, part = name.rpartition(".")
        if name in self.by_name or part not in ("weight", "bias"):
            return self.of_module(name)
        cut = self.of_module(module)
        return Cut(zero=self.rank > 0) if part == "bias" and cut.inputs is not None else cut


def cuts_of(config: ModelConfig) -> Cuts:
    """Return where the part `config` of its whole model lies. Nothing is cut if it is whole."""
    if config.whole is None:
        return Cuts({})
    family, found = FAMILIES[config.architecture], dict[str, Cut]()
    if config.shard.size == 1:  # whole, but for the experts of others
        return Cuts(
            {
                name.format(layer=number): Cut(experts=_experts_here(config, number))
                for number, layer in enumerate(config.layers)
                if layer.experts is not None
                for name in family.stacked
            }
        )
    if not config.tie_word_embeddings:
        heads = [name for name, place in family.names.items() if place == "lm_head"]
        found |= dict.fromkeys(heads, Cut(outputs=(head_rows(config),)))
    for number, layer in enumerate(config.whole.layers):
        places, experts = _places(config, layer), _mlp(_expert_columns(config, layer), _expert_size(layer))
        for name, place in family.names.items():
            if "{expert}" in name:
                count = 0 if layer.experts is None else layer.experts.count
                names = [name.format(layer=number, expert=expert) for expert in range(count)]
                found |= {name: experts[place] for name in names if place in experts}
            elif "{layer}" in name and place in places:
                found[name.format(layer=number)] = places[place]
        for name, place in family.stacked.items() if layer.experts is not None else ():
            found[name.format(layer=number)] = replace(experts[place], experts=_experts_here(config, number))
    return Cuts(found, config.shard.rank)


def _places(config: ModelConfig, layer: LayerConfig) -> dict[str, Cut]:
    """Return the parts of a layer's places. layer: of the whole model."""
    whole, shard = config.whole, config.shard
    assert whole is not None
    places = _attention(whole, config) if layer.linear is None else _linear_attention(layer.linear, config)
    if layer.experts is None:
        return places | _mlp(mlp_columns(whole, shard), whole.intermediate_size)
    shared = _mlp(shared_columns(whole, layer.experts, shard), layer.experts.shared_size)
    return places | {f"shared_{place}": shared[place] for place in ("gate", "up", "down")}


def _expert_columns(config: ModelConfig, layer: LayerConfig) -> range:
    assert config.whole is not None
    return range(0) if layer.experts is None else expert_columns(config.whole, layer.experts, config.shard)


def _experts_here(config: ModelConfig, number: int) -> range:
    """Return the experts that this rank has in a layer with experts."""
    experts = config.layers[number].experts
    assert experts is not None
    return experts.here


def _expert_size(layer: LayerConfig) -> int:
    return 0 if layer.experts is None else layer.experts.intermediate_size


def _attention(whole: ModelConfig, config: ModelConfig) -> dict[str, Cut]:
    keys, queries = heads_of(whole.num_kv_heads, whole.num_heads, config.shard)
    size = whole.head_dim
    width = 2 * size if whole.attention_gate else size  # gates lie beside their queries
    parts = _times(queries, width), _times(keys, size), _times(keys, size)
    kv = whole.num_kv_heads * size
    stacked = _stacked(parts, (whole.num_heads * width, kv, kv))
    by_part = {place: Cut(outputs=(own,)) for place, own in zip("qkv", parts, strict=True)}
    return {**by_part, "qkv": stacked, "output": Cut(inputs=_times(queries, size))}


def _linear_attention(linear: LinearAttention, config: ModelConfig) -> dict[str, Cut]:
    heads = linear.heads
    keys, values = heads_of(heads.num_key_heads, heads.num_value_heads, config.shard)
    by_key, by_value = _times(keys, heads.key_dim), _times(values, heads.value_dim)
    qkv = _stacked((by_key, by_key, by_value), (heads.key_size, heads.key_size, heads.value_size))
    of_head = Cut(outputs=(values,))
    return {
        "linear_qkvz": Cut(outputs=tuple(_by_key_head(linear, keys, values))),
        "linear_ba": Cut(outputs=tuple(_rates_by_key_head(linear, keys, values))),
        "linear_qkv": qkv,
        "linear_conv": qkv,
        "linear_z": Cut(outputs=(by_value,)),
        **dict.fromkeys(("linear_b", "linear_a", "linear_rate", "linear_rate_bias"), of_head),
        "linear_output": Cut(inputs=by_value),
    }


def _by_key_head(linear: LinearAttention, keys: range, values: range) -> Iterator[range]:
    """Yield runs of rows, where each key head has its query, its key, and its value heads' values and gates."""
    heads = linear.heads
    group, key, value = heads.num_value_heads // heads.num_key_heads, heads.key_dim, heads.value_dim
    if len(values) == len(keys) * group:
        yield _times(keys, 2 * (key + group * value))
        return
    first, own = keys.start * 2 * (key + group * value), _shifted(values, -keys.start * group)
    yield range(first, first + 2 * key)
    yield _shifted(_times(own, value), first + 2 * key)
    yield _shifted(_times(own, value), first + 2 * key + group * value)


def _rates_by_key_head(linear: LinearAttention, keys: range, values: range) -> Iterator[range]:
    """Yield runs of rows, where each key head has its value heads' write strengths and decays."""
    group = linear.heads.num_value_heads // linear.heads.num_key_heads
    if len(values) == len(keys) * group:
        yield _times(keys, 2 * group)
        return
    first, own = keys.start * 2 * group, _shifted(values, -keys.start * group)
    yield _shifted(own, first)
    yield _shifted(own, first + group)


def _mlp(columns: range, total: int) -> dict[str, Cut]:
    rows = Cut(outputs=(columns,))
    return {
        "gate_up": _stacked((columns, columns), (total, total)),
        "gate": rows,
        "up": rows,
        "down": Cut(inputs=columns),
    }


def _stacked(parts: tuple[range, ...], sizes: tuple[int, ...]) -> Cut:
    """Return the cut of a matrix that is stacked of parts with so many outputs."""
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    return Cut(outputs=tuple(_shifted(part, first) for part, first in zip(parts, firsts, strict=True)))


def _times(run: range, size: int) -> range:
    return range(run.start * size, run.stop * size)


def _shifted(run: range, by: int) -> range:
    return range(run.start + by, run.stop + by)


def _slice(run: range) -> slice:
    return slice(run.start, run.stop)
