"""Owns the decoder's weight tensors and the table from a checkpoint's names to them. Long, because it covers every
stack.
Never reads a file: `engine.models.weights` fills what this allocates, and then calls `settle`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.models.description import LayerConfig, LinearAttention, ModelConfig
from engine.models.narrow import NARROW_PARTS, SHARED_PARTS, InBlocks, Kept, Narrow, split_outputs
from engine.models.registry import FAMILIES
from engine.models.rope import pairs_side_by_side
from engine.models.shards import head_rows
from engine.models.stored_matrix import StoredMatrix
from kernels.cpu.large_pages import Empty, empty_on
from kernels.cpu.native.grouped import PANEL, fitting
from kernels.forward import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionWeights:
    """Weights of linear attention other than its projections."""

    conv: Tensor  # [channels, 1, kernel]
    rates: tuple[Tensor, Tensor]  # see kernels.reference.log_decay; each [value heads] float32
    norm: Tensor  # [value_dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpertWeights:
    """An MLP that every token passes in addition to its experts."""

    gate_up: Linear  # [2 * shared_size, hidden]
    down: Linear  # [hidden, shared_size]
    gate: Linear  # [1, hidden], gates the MLP's output


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One block. `qkv` and `gate_up` are stacked, so that each is one matrix product.

    With gated attention, `qkv` begins with the gates. With linear attention, it has queries, keys, values, gates of the
    output, write strengths and decays.
    """

    input_norm: Tensor  # [hidden]
    qkv: Linear  # [(heads + 2 * kv_heads) * head_dim, hidden]; gated: 2 * heads; linear attention: [projected, hidden]
    norms: tuple[Tensor, Tensor] | None  # for queries and keys, each [head_dim]
    linear: LinearAttentionWeights | None
    output: Linear  # [hidden, heads * head_dim]; of linear attention: [hidden, value_size]
    attention_post_norm: Tensor | None  # [hidden]
    mlp_norm: Tensor  # [hidden]
    router: Tensor | None  # [experts, hidden] float32
    gate_up: Linear  # [2 * intermediate, hidden]; of experts, [experts, ...]
    down: Linear  # [hidden, intermediate]; of experts, [experts, ...]
    shared: SharedExpertWeights | None
    mlp_post_norm: Tensor | None  # [hidden]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """All weights of one decoder, or of a rank's part of it. If the checkpoint ties them, the weight of `lm_head` is
    `embedding` itself, or the rank's rows of it."""

    embedding: Any  # [vocab, hidden] Tensor, or a backend's packed form of it
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    lm_head: Linear  # [own vocab, hidden]

    @property
    def head_in_embedding(self) -> bool:
        """Whether the LM head has no memory of its own."""
        head = self.lm_head.weight
        if isinstance(head, Tensor) and isinstance(self.embedding, Tensor):
            return head.untyped_storage().data_ptr() == self.embedding.untyped_storage().data_ptr()
        return head is self.embedding


def allocate(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | None = None, kept: Kept | None = None
) -> DecoderWeights:
    """Allocate tensors of the right shapes with undefined contents. device: None means the CPU. kept: which matrices
    have fewer bits."""
    kept = kept or Kept()
    empty = empty_on(device)
    embedding = _allocate_embedding(config, dtype, device, kept, empty_on(device))  # which stays when others are packed
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(
            _allocate_layer(config, layer, dtype, device, _narrow_places(config, number, layer, kept), empty)
            for number, layer in enumerate(config.layers)
        ),
        norm=torch.empty(config.hidden_size, dtype=_norm_dtype(config, dtype), device=device),
        lm_head=_tied_head(config, embedding)
        if config.tie_word_embeddings
        else _allocate_head(config, dtype, device, kept, empty),
    )


def embedding_name(config: ModelConfig) -> str:
    """Return the embedding's name in the checkpoint, without `.weight`; "" if its family has forgotten it."""
    names = (name for name, place in FAMILIES[config.architecture].names.items() if place == "embedding")
    return next(names, "")


def _allocate_embedding(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | None, kept: Kept, empty: Empty
) -> Tensor | StoredMatrix:
    layout = kept.modules.get(embedding_name(config))
    in_blocks = layout if isinstance(layout, InBlocks) else None
    found: Tensor | StoredMatrix = _allocate(
        in_blocks, config.vocab_size, config.hidden_size, dtype=dtype, device=device, empty=empty
    ).weight
    return found


def _allocate_head(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | None, kept: Kept, empty: Empty
) -> Linear:
    layout, shape = kept.layout(["lm_head"]), (len(head_rows(config)), config.hidden_size)
    return _allocate(layout, *shape, dtype=dtype, device=device, empty=empty)


def _tied_head(config: ModelConfig, embedding: Tensor | StoredMatrix) -> Linear:
    """Return the rank's rows of the embedding. In blocks, they are to be filled by `settle`."""
    rows = head_rows(config)
    if config.shard.size == 1:
        return Linear(embedding)
    if isinstance(embedding, Tensor):
        return Linear(embedding[rows.start : rows.stop])
    return Linear(StoredMatrix(len(rows), embedding.inputs, embedding.form, embedding.dtype, embedding.device))


def _allocate(
    layout: Narrow | InBlocks | None,
    *shape: int,
    dtype: torch.dtype,
    device: torch.device | None,
    empty: Empty,
    bias: Tensor | None = None,
) -> Linear:
    if isinstance(layout, InBlocks):
        if (form := fitting(layout.form, shape[-1])) is not None:
            return InBlocks(form).empty(*shape, bias=bias, dtype=dtype, device=device)
    elif layout is not None and shape[-1] % 2 == 0:  # a byte may hold two inputs
        return layout.empty(*shape, bias=bias, device=device, numbers=empty)
    if shape[-2] % PANEL:  # its panels will lie elsewhere: its memory must not wait for that of others
        empty = partial(torch.empty, device=device)
    return Linear(empty(*shape, dtype=dtype), bias)


_MATRIX_OF = {
    **dict.fromkeys(("qkv", "q", "k", "v"), "qkv"),
    **dict.fromkeys(("linear_qkvz", "linear_qkv", "linear_z", "linear_ba", "linear_b", "linear_a"), "qkv"),
    **dict.fromkeys(("output", "linear_output"), "output"),
    **dict.fromkeys(("gate_up", "gate", "up"), "gate_up"),
    "down": "down",
    **dict.fromkeys(("shared_gate", "shared_up"), "shared_gate_up"),
    "shared_down": "shared_down",
}
"""Place -> the matrix that it is, or is a part of."""
_ATTENTION_PLACES = ("qkv", "q", "k", "v", "output")


def _narrow_places(
    config: ModelConfig, number: int, layer_config: LayerConfig, kept: Kept
) -> Mapping[str, Narrow | InBlocks]:
    """Return the layouts of those of a layer's matrices that have fewer bits."""
    modules: dict[str, dict[int, list[str]]] = {}  # matrix -> expert, 0 where there is none -> its modules
    experts, unused = layer_config.experts, "linear_" if layer_config.linear is None else _ATTENTION_PLACES
    for name, place in FAMILIES[config.architecture].names.items():
        of_expert = experts is not None and place in _MLP_PLACES
        if place not in _MATRIX_OF or place.startswith(unused) or ("{expert}" in name) is not of_expert:
            continue
        if place.startswith("shared_") and (experts is None or not experts.shared_size):
            continue
        for expert in experts.here if of_expert and experts is not None else range(1):
            module = name.replace("{layer}", str(number)).replace("{expert}", str(expert))
            modules.setdefault(_MATRIX_OF[place], {}).setdefault(expert, []).append(module)
    of_experts = () if experts is None else _MLP_PLACES
    layouts = {
        place: kept.experts_layout(list(needed.values())) if place in of_experts else kept.layout(needed[0])
        for place, needed in modules.items()
    }
    if _turns_rows(config, layer_config) and isinstance(layouts.get("qkv"), InBlocks):
        del layouts["qkv"]
    return {place: layout for place, layout in layouts.items() if layout is not None}


def _turns_rows(config: ModelConfig, layer_config: LayerConfig) -> bool:
    """Whether `settle` reorders a layer's outputs, which it cannot do in blocks."""
    if layer_config.linear is not None:
        return layer_config.linear.stacked_by_head
    return config.attention_gate or config.rope.rotated_size(config.head_dim) < config.head_dim


def _norm_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """Return float32 if norms have an offset: the sum of a weight near 0 and the offset needs more bits than the
    weight."""
    return torch.float32 if config.norm_offset else dtype


def _allocate_layer(
    config: ModelConfig,
    layer_config: LayerConfig,
    dtype: torch.dtype,
    device: torch.device | None,
    narrow: Mapping[str, Narrow | InBlocks],
    empty: Empty,
) -> LayerWeights:
    hidden, head_dim = config.hidden_size, config.head_dim
    experts, attends = layer_config.experts, layer_config.linear is None
    stack = () if experts is None else (len(experts.here),)
    intermediate = config.intermediate_size if experts is None else experts.intermediate_size

    def linear(*shape: int, bias: bool, place: str = "") -> Linear:
        own = torch.empty(shape[-2], dtype=dtype, device=device) if bias else None
        return _allocate(narrow.get(place), *shape, dtype=dtype, device=device, empty=empty, bias=own)

    def norm(size: int = hidden) -> Tensor:
        return torch.empty(size, dtype=_norm_dtype(config, dtype), device=device)

    return LayerWeights(
        input_norm=norm(),
        qkv=linear(_projected_size(config, layer_config), hidden, bias=attends and config.qkv_bias, place="qkv"),
        norms=(norm(head_dim), norm(head_dim)) if attends and config.qk_norm else None,
        linear=None if layer_config.linear is None else _allocate_linear_attention(layer_config.linear, dtype, device),
        output=linear(hidden, attended_size(config, layer_config), bias=attends and config.output_bias, place="output"),
        attention_post_norm=norm() if config.post_norms else None,
        mlp_norm=norm(),
        router=torch.empty(experts.count, hidden, dtype=torch.float32, device=device) if experts else None,
        gate_up=linear(*stack, 2 * intermediate, hidden, bias=config.mlp_bias, place="gate_up"),
        down=linear(*stack, hidden, intermediate, bias=config.mlp_bias, place="down"),
        shared=_allocate_shared(hidden, experts.shared_size, linear) if experts and experts.shared_size else None,
        mlp_post_norm=norm() if config.post_norms else None,
    )


def _projected_size(config: ModelConfig, layer_config: LayerConfig) -> int:
    """Return the number of rows of `qkv`."""
    if layer_config.linear is not None:
        return layer_config.linear.projected_size
    return sum(qkv_sizes(config))


def qkv_sizes(config: ModelConfig) -> list[int]:
    """Return the numbers of rows of queries (including the gates stored with them), of keys, and of values."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [2 * q if config.attention_gate else q, kv, kv]


def attended_size(config: ModelConfig, layer_config: LayerConfig) -> int:
    """Return the number of columns of `output`."""
    return config.num_heads * config.head_dim if layer_config.linear is None else layer_config.linear.heads.value_size


def _allocate_linear_attention(
    linear: LinearAttention, dtype: torch.dtype, device: torch.device | None
) -> LinearAttentionWeights:
    def by_head() -> Tensor:  # in float32, because decays are exponentials of them
        return torch.empty(linear.heads.num_value_heads, dtype=torch.float32, device=device)

    return LinearAttentionWeights(
        conv=torch.empty(linear.channels, 1, linear.kernel, dtype=dtype, device=device),
        rates=(by_head(), by_head()),
        norm=torch.empty(linear.heads.value_dim, dtype=dtype, device=device),
    )


def _allocate_shared(hidden: int, size: int, linear: Callable[..., Linear]) -> SharedExpertWeights:
    return SharedExpertWeights(
        gate_up=linear(2 * size, hidden, bias=False, place="shared_gate_up"),
        down=linear(hidden, size, bias=False, place="shared_down"),
        gate=linear(1, hidden, bias=False),
    )


def settle(config: ModelConfig, weights: DecoderWeights) -> None:
    """Convert weights from the checkpoint's layout to the one that the block uses, in place. A rank's part has the
    layout of a smaller model."""
    if isinstance(weights.embedding, StoredMatrix) and _has_own_rows(config, weights):
        rows = head_rows(config)
        weights.lm_head.weight.fill(weights.embedding.filled[0].part(rows.start, rows.stop))
    if config.norm_offset:
        for norm in _norms(weights):
            norm.add_(config.norm_offset)
    for layer_config, layer in zip(config.layers, weights.layers, strict=True):
        if layer_config.linear is not None:
            assert layer.linear is not None
            layer.linear.rates[0].exp_().neg_()
            for stacked in _by_output(layer.qkv) if layer_config.linear.stacked_by_head else ():
                _unstack_heads(layer_config.linear, stacked)
        else:
            for stacked in _by_output(layer.qkv):
                settle_qkv(config, stacked)
            for norm in layer.norms or ():
                if (order := _pair_order(config, norm.device)) is not None:
                    norm.copy_(norm[order])


def _by_output(linear: Linear) -> Iterator[Tensor]:
    """Yield the tensors of a matrix, each [outputs, ...], as numbers that torch can move. What is in blocks keeps
    its order."""
    for tensor in (linear.weight, linear.bias, linear.scales, linear.zeros):
        if tensor is not None and not isinstance(tensor, StoredMatrix):
            yield tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def settle_qkv(config: ModelConfig, stacked: Tensor) -> None:
    """Reorder the outputs of a query, key and value projection, [outputs, ...], for the block, in place."""
    size, head_dim = config.num_heads * config.head_dim, config.head_dim
    if config.attention_gate:  # from query, gate, query, gate ... to all gates, all queries
        queries = stacked[: 2 * size]
        by_head = queries.view(config.num_heads, 2, head_dim, *queries.shape[1:])
        queries.copy_(by_head.flip(1).transpose(0, 1).reshape(queries.shape))
    if (order := _pair_order(config, stacked.device)) is not None:
        first = size if config.attention_gate else 0
        turned = stacked[first : first + size + config.num_kv_heads * head_dim]
        by_head = turned.view(-1, head_dim, *turned.shape[1:])
        by_head.copy_(by_head[:, order])


def _pair_order(config: ModelConfig, device: torch.device) -> Tensor | None:
    """Return the order of a head's elements if heads are rotated partially, or None to leave them as stored."""
    partial = config.rope.rotated_size(config.head_dim) < config.head_dim
    return pairs_side_by_side(config.rope, config.head_dim).to(device) if partial else None


def _unstack_heads(linear: LinearAttention, stacked: Tensor) -> None:
    """Reorder from (query, key, values, gates) of each key head and (strengths, decays) of each to all queries, all
    keys, ..."""
    heads = linear.heads
    group = heads.num_value_heads // heads.num_key_heads
    wide = [heads.key_dim, heads.key_dim, group * heads.value_dim, group * heads.value_dim]
    qkvz, ba = stacked[: -2 * heads.num_value_heads], stacked[-2 * heads.num_value_heads :]
    for part, sizes in ((qkvz, wide), (ba, [group, group])):
        by_head = part.view(heads.num_key_heads, -1, *part.shape[1:])
        part.copy_(torch.cat([kind.flatten(0, 1) for kind in by_head.split(sizes, dim=1)]))  # type: ignore[no-untyped-call]


def _norms(weights: DecoderWeights) -> Iterator[Tensor]:
    yield weights.norm
    for layer in weights.layers:
        found = (layer.input_norm, *(layer.norms or ()), layer.attention_post_norm, layer.mlp_norm, layer.mlp_post_norm)
        yield from (norm for norm in found if norm is not None)


# --- names ------------------------------------------------------------------------------------------------------------

MODEL_PLACES = ("embedding", "norm", "lm_head")
LAYER_PLACES = (
    "input_norm", "qkv", "q", "k", "v", "q_norm", "k_norm", "output", "attention_post_norm",
    "linear_qkvz", "linear_qkv", "linear_z", "linear_ba", "linear_b", "linear_a",
    "linear_conv", "linear_rate", "linear_rate_bias", "linear_norm", "linear_output",
    "mlp_norm", "router", "gate_up", "gate", "up", "down", "mlp_post_norm",
    "shared_gate", "shared_up", "shared_down", "shared_share",
)  # fmt: skip
"""The places that a family's tensors may have. For a stacked matrix, a family names either the whole or its parts. In
gated attention, `q` includes the gates. Layers with linear attention have `linear_*` instead of attention's places."""
_MLP_PLACES = ("gate_up", "gate", "up", "down")


@dataclass(frozen=True, slots=True)
class _Bare:
    """A tensor whose name in the checkpoint does not end with `.weight`."""

    tensor: Tensor


_Place = Linear | Tensor | _Bare | None


def checkpoint_table(config: ModelConfig, weights: DecoderWeights) -> dict[str, Tensor]:
    """Map each name of a checkpoint's tensor to the view that it fills. Exactly one name fills each element of
    `weights`."""
    names = FAMILIES[config.architecture].names
    head = None if config.tie_word_embeddings else weights.lm_head
    model: dict[str, _Place] = dict(zip(MODEL_PLACES, (weights.embedding, weights.norm, head), strict=True))
    table = _table({name: place for name, place in names.items() if "{layer}" not in name}, model)
    of_layers = {name: place for name, place in names.items() if "{layer}" in name}
    for number, (layer_config, layer) in enumerate(zip(config.layers, weights.layers, strict=True)):
        for name, view in _layer_table(config, layer_config, layer, of_layers).items():
            table[name.replace("{layer}", str(number))] = view
    own = (tensor for name, tensor in table.items() if not name.endswith(SHARED_PARTS))
    named, needed = (sum(tensor.numel() for tensor in tensors) for tensors in (own, _tensors(config, weights)))
    assert named == needed, f"{config.architecture} names {named} of the model's {needed} numbers"
    return table


def stacked_table(config: ModelConfig, weights: DecoderWeights) -> dict[str, tuple[Linear, tuple[str, ...]]]:
    """Map each name of a tensor with all of a layer's experts to (the matrices that it fills, the names in
    `checkpoint_table` that it replaces)."""
    family = FAMILIES[config.architecture]
    table: dict[str, tuple[Linear, tuple[str, ...]]] = {}
    for number, (layer_config, layer) in enumerate(zip(config.layers, weights.layers, strict=True)):
        for name, place in family.stacked.items() if layer_config.experts is not None else ():
            parts = ("gate", "up") if place == "gate_up" else ("down",)
            patterns = [pattern for pattern, part in family.names.items() if "{expert}" in pattern and part in parts]
            stood_for = (
                f"{pattern.format(layer=number, expert=expert)}.weight"
                for pattern in patterns
                for expert in _numbers(layer_config)
            )
            linear = layer.gate_up if place == "gate_up" else layer.down
            table[name.format(layer=number)] = linear, tuple(stood_for)
    return table


def _numbers(layer_config: LayerConfig) -> range:
    return range(0) if layer_config.experts is None else layer_config.experts.here


def _matrices(config: ModelConfig, weights: DecoderWeights) -> Iterator[Linear]:
    if not config.tie_word_embeddings:
        yield weights.lm_head
    for layer in weights.layers:
        yield from (layer.qkv, layer.output, layer.gate_up, layer.down)
        if layer.shared is not None:
            yield from (layer.shared.gate_up, layer.shared.down, layer.shared.gate)


def _tensors(config: ModelConfig, weights: DecoderWeights) -> Iterator[Tensor]:
    """Yield all tensors but SHARED_PARTS, which several names of a checkpoint stand for."""
    yield weights.embedding
    yield from _norms(weights)
    for layer in weights.layers:
        if layer.router is not None:
            yield layer.router
        if layer.linear is not None:
            yield from (layer.linear.conv, *layer.linear.rates, layer.linear.norm)
    for linear in _matrices(config, weights):
        yield from (
            tensor for tensor in (linear.weight, linear.bias, linear.scales, linear.zeros) if tensor is not None
        )


def num_bytes(config: ModelConfig, weights: DecoderWeights) -> int:
    """Return the bytes of all tensors. A tied one counts once, unless a rank has its rows in blocks of their own."""
    shared = (part for linear in _matrices(config, weights) for part in (linear.order, linear.input_scale))
    head = weights.lm_head.weight
    apart = [head] if isinstance(head, StoredMatrix) and _has_own_rows(config, weights) else []
    return sum(tensor.nbytes for tensor in (*_tensors(config, weights), *shared, *apart) if tensor is not None)


def _has_own_rows(config: ModelConfig, weights: DecoderWeights) -> bool:
    return config.tie_word_embeddings and weights.lm_head.weight is not weights.embedding


def _layer_table(
    config: ModelConfig, layer_config: LayerConfig, layer: LayerWeights, names: Mapping[str, str]
) -> dict[str, Tensor]:
    places = _places(config, layer_config, layer)
    if layer_config.experts is None:
        return _table({name: place for name, place in names.items() if "{expert}" not in name}, places)
    shared = {name: place for name, place in names.items() if "{expert}" not in name and place not in _MLP_PLACES}
    table = _table(shared, places)
    for place, number in enumerate(layer_config.experts.here):
        own = _mlp_places(layer.gate_up.of_expert(place), layer.down.of_expert(place))
        expert = {name.replace("{expert}", str(number)): place for name, place in names.items() if "{expert}" in name}
        table |= _table(expert, own)
    return table


def _places(config: ModelConfig, layer_config: LayerConfig, layer: LayerWeights) -> dict[str, _Place]:
    q_norm, k_norm = layer.norms or (None, None)
    places: dict[str, _Place] = dict.fromkeys(LAYER_PLACES) | {
        "input_norm": layer.input_norm,
        "q_norm": q_norm,
        "k_norm": k_norm,
        "attention_post_norm": layer.attention_post_norm,
        "mlp_norm": layer.mlp_norm,
        "router": layer.router,
        "mlp_post_norm": layer.mlp_post_norm,
    }
    if layer_config.linear is None:
        parts = dict(zip("qkv", split_outputs(layer.qkv, qkv_sizes(config)), strict=True))
        places |= {"qkv": layer.qkv, **parts, "output": layer.output}
    else:
        places |= _linear_places(layer_config.linear, layer)
    if layer.shared is not None:
        gate, up = _halves(layer.shared.gate_up)
        down, share = layer.shared.down, layer.shared.gate
        places |= {"shared_gate": gate, "shared_up": up, "shared_down": down, "shared_share": share}
    return places if layer.router is not None else places | _mlp_places(layer.gate_up, layer.down)


def _linear_places(linear: LinearAttention, layer: LayerWeights) -> dict[str, _Place]:
    assert layer.linear is not None
    heads = linear.heads
    qkv, z, b, a = split_outputs(layer.qkv, [heads.channels, heads.value_size, *[heads.num_value_heads] * 2])
    qkvz, ba = split_outputs(layer.qkv, [heads.channels + heads.value_size, 2 * heads.num_value_heads])
    rate, bias = layer.linear.rates
    return {
        "linear_qkvz": qkvz,
        "linear_qkv": qkv,
        "linear_z": z,
        "linear_ba": ba,
        "linear_b": b,
        "linear_a": a,
        "linear_conv": layer.linear.conv,
        "linear_rate": _Bare(rate),
        "linear_rate_bias": _Bare(bias),
        "linear_norm": layer.linear.norm,
        "linear_output": layer.output,
    }


def _mlp_places(gate_up: Linear, down: Linear) -> dict[str, _Place]:
    gate, up = _halves(gate_up)
    return {"gate_up": gate_up, "gate": gate, "up": up, "down": down}


def _table(names: Mapping[str, str], places: Mapping[str, _Place]) -> dict[str, Tensor]:
    table: dict[str, Tensor] = {}
    for name, place in names.items():
        found = places[place]
        if isinstance(found, Linear):
            table[f"{name}.weight"] = found.weight
            if found.bias is not None:
                table[f"{name}.bias"] = found.bias
            narrow = (found.scales, found.zeros, found.order, found.input_scale)
            for part, tensor in zip(NARROW_PARTS, narrow, strict=True):
                if tensor is not None:
                    table[f"{name}.{part}"] = tensor
        elif isinstance(found, _Bare):
            table[name] = found.tensor
        elif found is not None:
            table[f"{name}.weight"] = found
    return table


def _halves(gate_up: Linear) -> list[Linear]:
    return split_outputs(gate_up, [len(gate_up.weight) // 2] * 2)
