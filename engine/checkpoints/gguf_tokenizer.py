"""Owns turning a GGUF file's vocabulary into tokenizer.json and tokenizer_config.json.
Never guesses how text is split: a pre-tokenizer that it does not know is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.checkpoints.gguf_file import GGUFFile
from engine.checkpoints.model_cache import ModelError

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # llama.cpp's token types
# How Qwen2 and Llama 3 split text before merging. They differ only in digits: one at a time, or up to three.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_QWEN2 = ("qwen2", "deepseek-r1-qwen")
_PRE_TOKENIZERS = ("smollm", "gpt-2", *_QWEN2, *_LLAMA3)
# Special token -> the metadata keys that hold its ids; a model stops at any of its end-of-sequence tokens.
_SPECIAL_IDS = {
    "bos_token_id": ("bos_token_id",),
    "eos_token_id": ("eos_token_id", "eot_token_id", "eom_token_id"),
    "pad_token_id": ("padding_token_id",),
}
# Control tokens that end an answer by their texts, as in llama.cpp: many files name only one of a model's end tokens.
_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "</s>"),
        *("<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<｜end▁of▁sentence｜>"),
    )
)


def special_token_ids(gguf: GGUFFile) -> dict[str, list[int]]:
    """Name in config.json -> ids, the main one first. Tokens that the file does not name are absent."""
    found = {
        name: [i for key in keys if (i := gguf.get(f"tokenizer.ggml.{key}", int)) is not None]
        for name, keys in _SPECIAL_IDS.items()
    }
    found["eos_token_id"] += _ends(gguf)
    return {name: list(dict.fromkeys(ids)) for name, ids in found.items() if ids}


def _ends(gguf: GGUFFile) -> list[int]:
    tokens, types = gguf.get("tokenizer.ggml.tokens", list, []), gguf.get("tokenizer.ggml.token_type", list, [])
    kinds = zip(tokens or (), types or (), strict=False)  # files without types are refused where that matters
    return [i for i, (token, kind) in enumerate(kinds) if kind == _CONTROL and token in _ENDS]


def write_tokenizer(gguf: GGUFFile, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (special tokens, chat template).

    Raises:
        ModelError: the vocabulary's kind or pre-tokenizer is unknown, or its metadata is missing or inconsistent.
    """
    tokens = gguf.require("tokenizer.ggml.tokens", list)
    kind = gguf.require("tokenizer.ggml.model", str)
    if kind == "gpt2":
        tokenizer = _byte_level_tokenizer(gguf, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece_tokenizer(gguf)
    else:
        raise ModelError(f"{gguf.path}: metadata tokenizer.ggml.model is {kind!r}; expected gpt2 or llama.")
    specials = _special_tokens(gguf, tokens)
    # llama.cpp adds the first token if the file does not say otherwise.
    adds_bos = kind == "llama" or gguf.get("tokenizer.ggml.pre", str) in _LLAMA3
    if gguf.get("tokenizer.ggml.add_bos_token", bool, adds_bos) and "bos_token" in specials:
        bos = specials["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, tokens.index(bos))]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    config = _tokenizer_config(gguf, specials)
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _special_tokens(gguf: GGUFFile, tokens: list[str]) -> dict[str, str]:
    """bos_token, eos_token, pad_token -> text."""
    specials = {}
    for name, ids in special_token_ids(gguf).items():
        if not 0 <= ids[0] < len(tokens):
            raise ModelError(f"{gguf.path}: {name} is {ids[0]}, but the vocabulary has {len(tokens)} tokens.")
        specials[name.removesuffix("_id")] = tokens[ids[0]]
    return specials


def _tokenizer_config(gguf: GGUFFile, specials: dict[str, str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.require(f"{gguf.require('general.architecture', str)}.context_length", int),
        **specials,
    }
    template, with_tools = (gguf.get(f"tokenizer.chat_template{name}", str) for name in ("", ".tool_use"))
    if template is None:
        return config
    named = [{"name": "default", "template": template}, {"name": "tool_use", "template": with_tools}]
    return {**config, "chat_template": template if with_tools is None else named}


def _byte_level_tokenizer(gguf: GGUFFile, tokens: list[str]) -> Tokenizer:
    """Build byte-level BPE. transformers could convert it, but loses Qwen2's normalizer, Llama 3's ignore_merges and
    SmolLM2's split of digits, and imports torch."""
    pre = gguf.require("tokenizer.ggml.pre", str)
    if pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"{gguf.path}: metadata tokenizer.ggml.pre is {pre!r}; expected one of {', '.join(_PRE_TOKENIZERS)}."
        )
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.require("tokenizer.ggml.merges", list)]
    types = gguf.require("tokenizer.ggml.token_type", list)
    if len(types) != len(tokens):
        raise ModelError(f"{gguf.path}: {len(types)} token types for {len(tokens)} tokens in tokenizer.ggml.")
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3))
    except Exception as error:  # for a merge outside the vocabulary, tokenizers raises a bare Exception
        raise ModelError(f"{gguf.path}: tokenizer.ggml tokens and merges do not fit together: {error}") from error
    if pre in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    _add_whole_tokens(tokenizer, tokens, types)
    return tokenizer


def _pre_tokenizer(pre: str) -> Any:
    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    split = pre_tokenizers.Split(Regex(_SPLIT % ("" if pre in _QWEN2 else "{1,3}")), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _add_whole_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Add tokens that are never split: control tokens, which decoding can skip, and user-defined tokens."""
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL)])


def _sentencepiece_tokenizer(gguf: GGUFFile) -> Tokenizer:
    """Convert with transformers, which recovers the merges from the scores. Imports torch if it is installed."""
    from transformers import PreTrainedTokenizerFast

    try:
        converted = PreTrainedTokenizerFast.from_pretrained(str(gguf.path.parent), gguf_file=gguf.path.name)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise ModelError(f"{gguf.path}: transformers cannot convert its sentencepiece vocabulary: {error}") from error
    tokenizer: Tokenizer = converted.backend_tokenizer
    if not gguf.get("tokenizer.ggml.add_space_prefix", bool, True):  # transformers does not read it
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]  # and no Strip of a first space
        )
    return tokenizer
