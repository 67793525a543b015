"""Owns the checks on a draft model before it is loaded: that it can run here, and that it has the model's tokens.
Never loads its weights, and never accepts a draft model with another vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.build.host_fit import kept_on_cpu
from engine.build.resolve import weights_read
from engine.checkpoints.gguf_form import gguf_form
from engine.checkpoints.model_cache import ModelError
from engine.checkpoints.prepare import prepare_model
from engine.config import ConfigError, EngineConfig, refuse_conflicts
from engine.features import DRAFT_HAS_STATE, DRAFT_MODEL, DRAFT_TAKES_IMAGES
from engine.models.config import ModelConfig, read_model_config
from engine.models.weights import bytes_a_weight

TOKENIZER_FILE = "tokenizer.json"
LEAST_COST = 0.02
"""Minimum cost of a pass of the draft model, as a share of a step, because part of a pass is Python. A guess."""


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A model that may draft for another."""

    directory: Path
    model: ModelConfig


def read_draft(model_dir: Path, model: ModelConfig, config: EngineConfig) -> DraftCheckpoint | None:
    """Return the draft model that `config.speculative` asks for, to draft for `model` in `model_dir`, or None.

    Raises:
        ModelError: the draft model cannot be found or read.
        ConfigError: it cannot draft for this model.
    """
    name = config.speculative.model
    if config.speculative.method != "draft_model" or name is None:
        return None
    try:
        directory = prepare_model(name, weights=config.load_format != "dummy", **gguf_form(config))
        draft = read_model_config(directory)
    except ModelError as error:  # the text names a model: say which of the two
        raise ModelError(f"speculative.model is {name}: {error}") from error
    _check_kind(name, draft)
    if draft.headless:
        raise ConfigError(f"speculative.model is {name}, which has no LM head: expected a model that writes text.")
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"speculative.model is {name}, whose vocabulary has {draft.vocab_size} tokens, but the model's has "
            f"{model.vocab_size}: the draft model needs the same tokenizer."
        )
    if differs := _difference(directory / TOKENIZER_FILE, model_dir / TOKENIZER_FILE):
        raise ConfigError(
            f"speculative.model is {name}, whose tokenizer differs: {differs}. The draft model needs the same "
            "tokenizer."
        )
    return DraftCheckpoint(directory, draft)


def bytes_read(model_dir: Path, model: ModelConfig, config: EngineConfig, dtype: torch.dtype, *, native: bool) -> float:
    """Return the bytes of weights that a step of one token reads on a CPU. native: whether on the native kernels.

    Raises:
        CheckpointError: the checkpoint's files cannot be read.
    """
    if native and config.quantize == "int8":
        return weights_read(model)  # one byte each
    where = None if config.load_format == "dummy" else model_dir
    return weights_read(model) * bytes_a_weight(where, model, dtype, keep=kept_on_cpu(config, native=native))


def pass_cost(draft_bytes: float, model_bytes: float) -> float:
    """Return SpeculativeConfig.model_cost, from what a step of each model reads: few rows wait for weights."""
    return max(LEAST_COST, draft_bytes / model_bytes)


def _check_kind(name: str, draft: ModelConfig) -> None:
    on = {DRAFT_MODEL: f"speculative.model is {name}"}
    if draft.vision is not None:
        on[DRAFT_TAKES_IMAGES] = f"{draft.architecture} takes images"
    if draft.linear_layers:
        on[DRAFT_HAS_STATE] = f"{draft.architecture} has a recurrent state"
    refuse_conflicts(on)


def check_length(draft: DraftCheckpoint, max_model_len: int) -> None:
    """Raise ConfigError if the draft model cannot read `max_model_len` positions."""
    longest = draft.model.longest_position
    if longest < max_model_len:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the draft model in {draft.directory} supports at most "
            f"{longest} positions: set max_model_len to {longest} or less."
        )


def _difference(draft: Path, model: Path) -> str | None:
    """Describe the first token that differs. None if all are the same, or if a directory has no tokenizer, as it may
    not with random weights."""
    if not (draft.is_file() and model.is_file()):
        return None
    theirs, ours = _tokens(draft), _tokens(model)
    for token_id in sorted(theirs.keys() | ours.keys()):
        if theirs.get(token_id) != ours.get(token_id):
            found, expected = (repr(tokens[token_id]) if token_id in tokens else "none" for tokens in (theirs, ours))
            return f"token {token_id} is {found} in the draft model, and {expected} in the model"
    return None


def _tokens(path: Path) -> dict[int, str]:
    """Return all tokens by id, special ones included."""
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    return {token_id: token for token, token_id in vocabulary.items()}
