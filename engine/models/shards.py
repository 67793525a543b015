"""Owns which part of a model each rank has that computes it together with others: heads, columns, tokens, experts.
Never reads or cuts a tensor: `engine.models.cuts` says where the parts lie in a checkpoint, and its readers cut."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from engine.config import ConfigError
from engine.models.description import WHOLE, Experts, LinearAttention, ModelConfig, Shard
from engine.models.registry import FAMILIES
from kernels.forward import held_experts

_RUNS = (128, 32)
"""Columns that kernels take at a time: ranks have whole runs where the model has enough of them."""
_LEAST = 2
"""Columns that a rank has at the least, and a multiple of which it has: 4 bits of two share a byte."""


def sharded(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Return this rank's part of a model, whose outputs are to be summed over the ranks.

    A rank has whole heads, as many columns of each MLP and of each expert as any other rank, or nearly so, and its own
    tokens' rows of the LM head. Embedding, norms and routers are whole on each rank, so that they need no messages. The
    parts may differ in size. With fewer KV heads than ranks, several ranks have the same KV head; likewise with key
    heads of linear attention.

    Raises:
        ConfigError: there are more ranks than the model has heads, or than pairs of columns in an MLP.
    """
    if shard.size == 1:
        return config
    _check_heads(config.num_heads, "attention heads", shard, config)
    keys, queries = heads_of(config.num_kv_heads, config.num_heads, shard)
    layers = tuple(
        replace(
            layer,
            experts=None if layer.experts is None else _experts(config, layer.experts, shard),
            linear=None if layer.linear is None else _linear_attention(config, layer.linear, shard),
        )
        for layer in config.layers
    )
    dense = any(layer.experts is None for layer in config.layers)
    return replace(
        config,
        num_heads=len(queries),
        num_kv_heads=len(keys),
        intermediate_size=len(mlp_columns(config, shard)) if dense else config.intermediate_size,
        layers=layers,
        shard=shard,
        whole=config,
    )


def with_experts_of(config: ModelConfig, rank: int, size: int) -> ModelConfig:
    """Return the model of one of `size` ranks that have the experts between them, each with tokens of its own: whole,
    but for the experts of others.

    Raises:
        ConfigError: a layer has fewer experts than there are ranks, or none has any.
    """
    fewest = min((layer.experts.count for layer in config.layers if layer.experts is not None), default=0)
    if size > fewest:
        raise ConfigError(
            f"expert_parallel_size is {size}, but {config.architecture} has {fewest} experts in a layer, and a rank "
            f"has at least one: set it to {max(fewest, 1)} or less."
        )

    def held(experts: Experts) -> Experts:
        return replace(experts, held=held_experts(experts.count, rank, size))

    layers = (
        layer if layer.experts is None else replace(layer, experts=held(layer.experts)) for layer in config.layers
    )
    return replace(config, layers=tuple(layers), whole=config)


def parts_of(config: ModelConfig, size: int) -> list[ModelConfig]:
    """Return the part of each of `size` ranks. Raises: as sharded."""
    return [sharded(config, Shard(rank, size)) for rank in range(size)]


def vocab_sizes(config: ModelConfig, size: int) -> list[int]:
    """Return of how many tokens each of `size` ranks computes the logits. The first rank's tokens come first."""
    return [len(spread(config.vocab_size, rank, size)) for rank in range(size)]


def head_rows(config: ModelConfig) -> range:
    """Return the tokens whose logits this rank computes: rows of the whole LM head."""
    return spread(config.vocab_size, config.shard.rank, config.shard.size)


def heads_of(num_kv_heads: int, num_heads: int, shard: Shard) -> tuple[range, range]:
    """Return a rank's KV heads and query heads, of the whole model's. num_heads: at least as many as ranks."""
    group = num_heads // num_kv_heads
    if num_kv_heads >= shard.size:
        keys = spread(num_kv_heads, shard.rank, shard.size)
        return keys, range(keys.start * group, keys.stop * group)
    key = next(key for key in range(num_kv_heads) if shard.rank in spread(shard.size, key, num_kv_heads))
    sharing = spread(shard.size, key, num_kv_heads)
    own = spread(group, shard.rank - sharing.start, len(sharing))
    return range(key, key + 1), range(key * group + own.start, key * group + own.stop)


def mlp_columns(config: ModelConfig, shard: Shard) -> range:
    """Return a rank's columns of the dense MLPs. config: of the whole model, here and below."""
    return _columns(config, config.intermediate_size, "down", shard, "MLP")


def expert_columns(config: ModelConfig, experts: Experts, shard: Shard) -> range:
    """Return a rank's columns of each expert."""
    return _columns(config, experts.intermediate_size, "down", shard, "experts", of_experts=True)


def shared_columns(config: ModelConfig, experts: Experts, shard: Shard) -> range:
    """Return a rank's columns of the shared expert; none if there is no such expert."""
    if not experts.shared_size:
        return range(0)
    return _columns(config, experts.shared_size, "shared_down", shard, "shared expert")


def spread(count: int, number: int, parts: int, unit: int = 1) -> range:
    """Divide `count` into `parts` runs of whole units and return one of them. The first ones may have a unit more, and
    the last one has what is left beyond whole units."""
    units, more = divmod(count // unit, parts)
    first = number * units + min(number, more)
    last = first + units + (number < more)
    return range(first * unit, count if number == parts - 1 else last * unit)


def _columns(
    config: ModelConfig, total: int, place: str, shard: Shard, what: str, *, of_experts: bool = False
) -> range:
    """Divide an MLP's columns by whole runs of its packing, as even as possible: groups that share a scale are cut only
    if there are fewer of them than ranks. The kernels' own runs come next."""
    if total < _LEAST * shard.size:
        raise ConfigError(
            f"tensor_parallel_size is {shard.size}, but the intermediate size of {config.architecture}'s {what} is "
            f"{total}, and a rank has at least {_LEAST} of it: set it to {max(total // _LEAST, 1)} or less."
        )
    packed = math.lcm(_LEAST, *_groups(config, place, of_experts=of_experts))
    wide = [math.lcm(packed, run) for run in _RUNS]
    even = (unit for unit in (*wide, packed) if total % (unit * shard.size) == 0)
    enough = (unit for unit in (wide[-1], packed, _RUNS[-1], _LEAST) if total // unit >= shard.size)
    return spread(total, shard.rank, shard.size, next(even, 0) or next(enough))


def _groups(config: ModelConfig, place: str, *, of_experts: bool) -> Iterator[int]:
    """Yield how many inputs share a scale or a block in the matrices that have the MLP's columns as inputs."""
    if config.quantization is None:
        return
    for name, found in FAMILIES[config.architecture].names.items():
        if found != place or ("{expert}" in name) is not of_experts:
            continue
        for number in range(config.num_layers):
            packing = config.quantization.packing(name.format(layer=number, expert=0))
            if packing is not None and packing.group is not None:
                yield packing.group


def _experts(config: ModelConfig, experts: Experts, shard: Shard) -> Experts:
    columns, shared = expert_columns(config, experts, shard), shared_columns(config, experts, shard)
    return replace(experts, intermediate_size=len(columns), shared_size=len(shared))


def _linear_attention(config: ModelConfig, linear: LinearAttention, shard: Shard) -> LinearAttention:
    heads = linear.heads
    _check_heads(heads.num_value_heads, "value heads of linear attention", shard, config)
    keys, values = heads_of(heads.num_key_heads, heads.num_value_heads, shard)
    return replace(linear, heads=replace(heads, num_key_heads=len(keys), num_value_heads=len(values)))


def _check_heads(count: int, what: str, shard: Shard, config: ModelConfig) -> None:
    assert config.shard == WHOLE, "a part is not cut again"
    if shard.size > count:
        raise ConfigError(
            f"tensor_parallel_size is {shard.size}, but {config.architecture} has {count} {what}, and a rank has at "
            f"least one: set it to {count} or less."
        )
