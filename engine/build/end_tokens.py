"""Owns which tokens end an answer: those of the model's configs, and the tokenizer's own.
Never loads a tokenizer: it reads two names and the ids that the tokenizer's files give them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.models.config import CheckpointError, read_json

_CONFIGS = ("generation_config.json", "config.json")
"""The first has the chat model's own, the other often only the base model's."""


def end_tokens(model_dir: Path, vocab_size: int) -> tuple[tuple[int, ...], str]:
    """Return the tokens that end an answer, and where they come from.

    The tokenizer's eos_token ends answers, too, as in vLLM: fine-tunes often set it to what ends a turn, and leave the
    configs of the base model as they were. vocab_size: of the model; a token beyond it is never sampled.

    Raises:
        CheckpointError: an eos_token_id is not a token id, or one of the files is no JSON object.
    """
    named, name = _of_configs(model_dir)
    told = [f"{', '.join(map(str, named))} of {name}"] if named else []
    own = _of_tokenizer(model_dir)
    if own is not None and own < vocab_size and own not in named:
        named = (*named, own)
        told.append(f"{own} of the tokenizer's eos_token")
    return named, " and ".join(told) or "none: neither the checkpoint's configs nor its tokenizer name one"


def _of_configs(model_dir: Path) -> tuple[tuple[int, ...], str]:
    """Return the end tokens of the first config that names any, and the config's name."""
    for name in _CONFIGS:
        path = model_dir / name
        document = _read(path)
        value = document.get("eos_token_id")
        if value is None and isinstance(text_config := document.get("text_config"), dict):  # a model with images
            value = text_config.get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(token, int) and token >= 0 for token in ids):
                raise CheckpointError(f"{path}: eos_token_id is {value!r}: expected a token id or a list of them.")
            return tuple(ids), name
    return (), ""


def _of_tokenizer(model_dir: Path) -> int | None:
    """Return the id of the tokenizer's eos_token; None if it has none, or there is no tokenizer."""
    config = _read(model_dir / "tokenizer_config.json")
    if (
        "added_tokens_decoder" not in config
    ):  # before transformers 4.34 this file had the last word, and still has there
        config = {**config, **_read(model_dir / "special_tokens_map.json")}
    entry = config.get("eos_token")
    text = entry.get("content") if isinstance(entry, dict) else entry
    if not isinstance(text, str):
        return None
    whole = _read(model_dir / "tokenizer.json")
    added = whole.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and token.get("content") == text:
            return _id(token.get("id"))
    model = whole.get("model")
    return _id(_position(model.get("vocab") if isinstance(model, dict) else None, text))


def _position(vocab: Any, text: str) -> Any:
    if isinstance(vocab, dict):
        return vocab.get(text)
    pieces = vocab if isinstance(vocab, list) else ()  # Unigram's: pairs of a piece and its score
    return next((number for number, pair in enumerate(pieces) if isinstance(pair, list) and pair[:1] == [text]), None)


def _id(found: Any) -> int | None:
    return found if isinstance(found, int) and found >= 0 else None


def _read(path: Path) -> Mapping[str, Any]:
    return read_json(path) if path.exists() else {}
