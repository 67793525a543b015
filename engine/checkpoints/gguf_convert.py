"""Owns converting a GGUF file to a Hugging Face model directory: names, row order, weights in bf16 or as they are.
Never guesses: a tensor that is missing, unknown or not of the config's shape is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoints.gguf_config import ROPE_FACTORS, build_config
from engine.checkpoints.gguf_file import GGUFFile
from engine.checkpoints.gguf_tokenizer import special_token_ids, write_tokenizer
from engine.checkpoints.model_cache import ModelError, byte_bar, check_room, say

_VALUES_PER_CHUNK = 1 << 24  # 64 MiB of float32: converting needs this much memory, however large the model


STORED_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""The types of matrices that the engine can use as they are."""
_SAMPLING: dict[str, tuple[str, type[int] | type[float]]] = {
    "temperature": ("temp", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "repetition_penalty": ("penalty_repeat", float),
}
"""Hugging Face's names of how answers are sampled, and those below general.sampling with their types."""


def convert_gguf(path: Path, directory: Path, progress: bool, *, stored: bool = False) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files into `directory`.

    stored: matrices of STORED_TYPES stay rows of blocks, in the order of Hugging Face's rows; `quantization_config`
    names their types. All other tensors become bfloat16.

    Raises:
        ModelError: the file is damaged or describes a model that cannot be represented. The message names the tensor or
            metadata key.
        OSError: `directory` cannot be written.
    """
    say(f"Reading {path.name}", progress)
    gguf = GGUFFile(path)
    config = build_config(gguf)
    names = tensor_names(gguf, config)
    write_tokenizer(gguf, directory)
    kinds = _kinds(gguf, names) if stored else {}
    if kinds:
        types = {names[name].removesuffix(".weight").format(expert="*"): kind for name, kind in kinds.items()}
        config["quantization_config"] = {"quant_method": "gguf", "types": types}
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", _generation_config(gguf))
    _write_weights(directory / "model.safetensors", gguf, config, names, kinds, progress)


def _kinds(gguf: GGUFFile, names: dict[str, str]) -> dict[str, str]:
    """Return the types of the matrices, and of experts' matrices, that stay as they are."""
    found = {name: gguf.tensors[name].tensor_type.name for name in names if len(gguf.shape(name)) > 1}
    return {name: kind for name, kind in found.items() if kind in STORED_TYPES}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _generation_config(gguf: GGUFFile) -> dict[str, Any]:
    ids = {name: ids if len(ids) > 1 else ids[0] for name, ids in special_token_ids(gguf).items()}
    sampling = {name: gguf.get(f"general.sampling.{key}", kind) for name, (key, kind) in _SAMPLING.items()}
    return ids | {name: value for name, value in sampling.items() if value is not None}


def tensor_names(gguf: GGUFFile, config: dict[str, Any]) -> dict[str, str]:
    """GGUF tensor name -> Hugging Face's, for exactly the tensors that the config calls for, in the model's order. A
    tensor of all of a layer's experts has a name with `{expert}` for the number of each.

    Raises:
        ModelError: a tensor is missing, unknown, or not of the shape that the config calls for.
    """
    names = {}
    for name, hf_name, shape in _expected_tensors(config):
        if name not in gguf.tensors:
            raise ModelError(f"{gguf.path}: tensor {name} is missing; expected shape {list(shape)}.")
        if gguf.shape(name) != shape:
            raise ModelError(f"{gguf.path}: tensor {name} has shape {list(gguf.shape(name))}; expected {list(shape)}.")
        names[name] = hf_name
    unknown = [name for name in gguf.tensors if name not in names and name != ROPE_FACTORS]
    if unknown:
        raise ModelError(
            f"{gguf.path}: tensor {unknown[0]} and {len(unknown) - 1} more have no place in a "
            f"{config['architectures'][0]} of {config['num_hidden_layers']} layers."
        )
    return names


def _expected_tensors(config: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(GGUF name, Hugging Face's name, shape). A generator, so that a damaged layer count fails at the first missing
    tensor."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "token_embd.weight", "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        for name, (hf_name, shape) in _expected_in_layer(config).items():
            yield f"blk.{layer}.{name}", f"model.layers.{layer}.{hf_name}", shape
    yield "output_norm.weight", "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "output.weight", "lm_head.weight", (vocab, hidden)


def _expected_in_layer(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    expected: dict[str, tuple[str, tuple[int, ...]]] = {
        "attn_norm.weight": ("input_layernorm.weight", (hidden,)),
        "attn_q.weight": ("self_attn.q_proj.weight", (q, hidden)),
        "attn_k.weight": ("self_attn.k_proj.weight", (kv, hidden)),
        "attn_v.weight": ("self_attn.v_proj.weight", (kv, hidden)),
        "attn_output.weight": ("self_attn.o_proj.weight", (hidden, q)),
        "ffn_norm.weight": ("post_attention_layernorm.weight", (hidden,)),
    }
    if config["model_type"] in _EXPERTS:
        expected |= _expected_experts(config)
    else:
        expected |= {
            "ffn_gate.weight": ("mlp.gate_proj.weight", (inner, hidden)),
            "ffn_up.weight": ("mlp.up_proj.weight", (inner, hidden)),
            "ffn_down.weight": ("mlp.down_proj.weight", (hidden, inner)),
        }
    if config["model_type"] == "qwen2":
        for letter, size in (("q", q), ("k", kv), ("v", kv)):
            expected[f"attn_{letter}.bias"] = (f"self_attn.{letter}_proj.bias", (size,))
    if config["model_type"] in ("qwen3", "qwen3_moe"):
        expected["attn_q_norm.weight"] = ("self_attn.q_norm.weight", (head_dim,))
        expected["attn_k_norm.weight"] = ("self_attn.k_norm.weight", (head_dim,))
    return expected


_EXPERTS = {
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj"), "num_experts", "moe_intermediate_size"),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2"), "num_local_experts", "intermediate_size"),
}
"""Model type -> the mixture's name in a layer, those of an expert's gate, up and down, and the fields of the experts'
number and size."""


def _expected_experts(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    mixture, (gate, up, down), of_count, of_size = _EXPERTS[config["model_type"]]
    hidden, count, size = config["hidden_size"], config[of_count], config[of_size]
    expert = f"{mixture}.experts.{{expert}}"
    return {
        "ffn_gate_inp.weight": (f"{mixture}.gate.weight", (count, hidden)),
        "ffn_gate_exps.weight": (f"{expert}.{gate}.weight", (count, size, hidden)),
        "ffn_up_exps.weight": (f"{expert}.{up}.weight", (count, size, hidden)),
        "ffn_down_exps.weight": (f"{expert}.{down}.weight", (count, hidden, size)),
    }


def row_order(name: str, config: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """For each Hugging Face row, the index of its GGUF row, for Q and K of `llama` and Mixtral; None
    if both have the same order.

    llama.cpp rotates neighbours (0,1), (2,3)...; Hugging Face rotates halves (0,d/2), (1,d/2+1)...:
        GGUF  0 d/2 1 d/2+1 2 ...   (rows of one head, numbered as in Hugging Face)
    """
    heads = {"attn_q.weight": "num_attention_heads", "attn_k.weight": "num_key_value_heads"}
    part = name.split(".", 2)[-1]
    if config["model_type"] not in ("llama", "mixtral") or part not in heads:
        return None
    num_heads, head_dim = config[heads[part]], config["head_dim"]
    return np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).ravel()


def to_bfloat16(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Convert finite float32 values to the bits of bfloat16, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _chunks(gguf: GGUFFile, name: str, config: dict[str, Any], *, stored: bool) -> Iterator[bytes]:
    """A tensor's bytes in Hugging Face's row order, a few rows at a time: as stored, or in bfloat16."""
    num_rows = gguf.num_rows(name)
    order = row_order(name, config)
    step = max(1, _VALUES_PER_CHUNK * num_rows // gguf.num_values(name))
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        values = gguf.values(
            name, rows if order is None else order[rows]
        )  # all are looked at, for any that is not finite
        if stored:
            yield gguf.blocks(name, rows if order is None else order[rows]).tobytes()
        else:
            yield to_bfloat16(values).tobytes()


def _written(gguf: GGUFFile, name: str, hf_name: str, *, stored: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of what a tensor is written as, in order: of all experts, a matrix for each."""
    count, *rest = gguf.shape(name)
    if stored:
        *_, width = gguf.blocks(name).shape
        rest = [*rest[:-1], width]
    if "{expert}" not in hf_name:
        yield hf_name, (count, *rest)
        return
    for expert in range(count):
        yield hf_name.format(expert=expert), tuple(rest)


def _write_weights(
    path: Path, gguf: GGUFFile, config: dict[str, Any], names: dict[str, str], kinds: dict[str, str], progress: bool
) -> None:
    """Stream all tensors into one safetensors file. The format is written by hand: safetensors' own writer needs every
    tensor in memory, knows no bfloat16 in numpy, and has changed its arguments between releases."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, hf_name in names.items():
        kind, size = ("U8", 1) if name in kinds else ("BF16", 2)
        for own_name, shape in _written(gguf, name, hf_name, stored=name in kinds):
            start, end = end, end + math.prod(shape) * size
            header[own_name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data that follows must be aligned
    check_room(path.parent, 8 + len(encoded) + end)
    with path.open("wb") as file, byte_bar("Converting tensors", end, progress) as bar:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in names:
            for chunk in _chunks(gguf, name, config, stored=name in kinds):
                file.write(chunk)
                bar.update(len(chunk))
