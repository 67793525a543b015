"""Writes tiny GGUF files the way llama.cpp's converter does, from Hugging Face weights that the test keeps.
Never uses the code under test: the permutation here is the published one, which `checkpoints` inverts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

CONTROL, NORMAL, USER_DEFINED = 3, 1, 4
ALPHABET = sorted(ByteLevel.alphabet())
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", *ALPHABET, "Ġt", "th", "the", "Ġthe", "12", "123"]
TYPES = [CONTROL, CONTROL, CONTROL, USER_DEFINED] + [NORMAL] * (len(TOKENS) - 4)
MERGES = ["Ġ t", "t h", "th e", "Ġ the", "1 2", "12 3"]
SHAPE = dict(
    hidden=32, inner=64, heads=4, kv_heads=2, head_dim=8, layers=2, vocab=len(TOKENS), experts=5, per_token=2, expert=48
)
"""expert: the size of an expert of Qwen3-MoE; those of Mixtral have `inner`."""
MIXTURES = {
    "qwen3moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
}
"""Hugging Face's names of a mixture, and of an expert's gate, up and down. Mixtral is written as `llama`."""
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def hf_weights(arch: str, seed: int = 0, tied: bool = True) -> dict[str, np.ndarray]:
    """Return random Hugging Face weights, with float32 values that bfloat16 holds exactly."""
    rng = np.random.default_rng(seed)
    hidden, inner, head_dim, vocab = (SHAPE[name] for name in ("hidden", "inner", "head_dim", "vocab"))
    q, kv = SHAPE["heads"] * head_dim, SHAPE["kv_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(SHAPE["layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (q, hidden),
            prefix + "self_attn.k_proj.weight": (kv, hidden),
            prefix + "self_attn.v_proj.weight": (kv, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, q),
            prefix + "post_attention_layernorm.weight": (hidden,),
        }
        if arch in MIXTURES:
            mixture, parts = MIXTURES[arch]
            shapes[f"{prefix}{mixture}.gate.weight"] = (SHAPE["experts"], hidden)
            size = inner if arch == "mixtral" else SHAPE["expert"]
            for expert in range(SHAPE["experts"]):
                for part, shape in zip(parts, ((size, hidden), (size, hidden), (hidden, size)), strict=True):
                    shapes[f"{prefix}{mixture}.experts.{expert}.{part}.weight"] = shape
        else:
            shapes |= {
                prefix + "mlp.gate_proj.weight": (inner, hidden),
                prefix + "mlp.up_proj.weight": (inner, hidden),
                prefix + "mlp.down_proj.weight": (hidden, inner),
            }
        if arch == "qwen2":
            shapes |= {
                prefix + f"self_attn.{name}_proj.bias": (size,) for name, size in zip("qkv", (q, kv, kv), strict=True)
            }
        if arch in ("qwen3", "qwen3moe"):
            shapes |= {prefix + f"self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
    return {name: bf16_exact(rng.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()}


def bf16_exact(values: np.ndarray) -> np.ndarray:
    """Return float32 with the low 16 bits cleared."""
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)


_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}


def gguf_tensors(arch: str, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the same weights under GGUF names, with llama's Q and K rows as llama.cpp stores them, and a layer's
    experts in one tensor."""
    tensors = _expert_tensors(arch, weights)
    for name, values in weights.items():
        stem, suffix = name.rsplit(".", 1)
        if ".experts." in name:
            continue
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            gguf_name = f"blk.{layer}.{_NAMES[part]}.{suffix}"
        else:
            gguf_name = f"{_NAMES[stem]}.{suffix}"
        if arch in ("llama", "mixtral") and (".q_proj." in name or ".k_proj." in name):
            heads = SHAPE["heads"] if ".q_proj." in name else SHAPE["kv_heads"]
            split = values.reshape(heads, 2, SHAPE["head_dim"] // 2, *values.shape[1:])
            values = split.swapaxes(1, 2).reshape(values.shape)
        tensors[gguf_name] = values
    return tensors


def _expert_tensors(arch: str, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if arch not in MIXTURES:
        return {}
    mixture, parts = MIXTURES[arch]
    experts = range(SHAPE["experts"])
    return {
        f"blk.{layer}.ffn_{name}_exps.weight": np.stack(
            [weights[f"model.layers.{layer}.{mixture}.experts.{expert}.{part}.weight"] for expert in experts]
        )
        for layer in range(SHAPE["layers"])
        for part, name in zip(parts, ("gate", "up", "down"), strict=True)
    }


def metadata(arch: str) -> dict[str, Any]:
    """Return what a converter writes for the tiny model. A test changes or removes keys; None leaves one out."""
    mixture, arch = arch in MIXTURES, _written_as(arch)
    experts = {
        f"{arch}.expert_count": SHAPE["experts"],
        f"{arch}.expert_used_count": SHAPE["per_token"],
        f"{arch}.expert_feed_forward_length": SHAPE["expert"],
    }
    return (experts if mixture else {}) | {
        f"{arch}.context_length": 512,
        f"{arch}.embedding_length": SHAPE["hidden"],
        f"{arch}.block_count": SHAPE["layers"],
        f"{arch}.feed_forward_length": SHAPE["inner"],
        f"{arch}.attention.head_count": SHAPE["heads"],
        f"{arch}.attention.head_count_kv": SHAPE["kv_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.attention.key_length": SHAPE["head_dim"],
        f"{arch}.attention.value_length": SHAPE["head_dim"],
        f"{arch}.rope.freq_base": 50000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2" if arch.startswith("qwen") else "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def _written_as(arch: str) -> str:
    return "llama" if arch == "mixtral" else arch


def write_gguf(
    path: Path,
    arch: str = "llama",
    tensors: dict[str, np.ndarray] | None = None,
    quantized: dict[str, gguf.GGMLQuantizationType] | None = None,
    blocks: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    **changes: Any,
) -> Path:
    """Write a GGUF file. `changes` are metadata keys with `__` for `.`; None removes a key. blocks: rows of bytes to be
    written for a tensor, with their type."""
    writer = gguf.GGUFWriter(path, _written_as(arch))
    fields = metadata(arch) | {key.replace("__", "."): value for key, value in changes.items()}
    for key, value in fields.items():
        _add(writer, key, value)
    for name, values in (gguf_tensors(arch, hf_weights(arch)) if tensors is None else tensors).items():
        kind = (quantized or {}).get(name)
        if blocks and name in blocks:
            rows, kind = blocks[name]
            writer.add_tensor(name, rows, raw_dtype=kind)
        elif kind is None:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)
