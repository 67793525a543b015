"""Owns what is asked of a draft model before it is loaded: that it can run here, and that its tokens are the model's.
Never loads its weights, and never lets one in whose drafts would be of another language."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.build.resolve import weights_read
from engine.checkpoints.model_cache import ModelError
from engine.checkpoints.prepare import prepare_model
from engine.config import ConfigError, EngineConfig, refuse_conflicts
from engine.features import DRAFT_HAS_STATE, DRAFT_MODEL, DRAFT_TAKES_IMAGES
from engine.models.config import ModelConfig, read_model_config

TOKENIZER_FILE = "tokenizer.json"
LEAST_COST = 0.02
"""No pass takes less than so much of a step: part of it is Python's. A guess."""


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A model that may draft for another."""

    directory: Path
    model: ModelConfig
    cost: float
    """See SpeculativeConfig.model_cost."""


def read_draft(model_dir: Path, model: ModelConfig, config: EngineConfig) -> DraftCheckpoint | None:
    """What `speculative` asks for beside `model`, of which `model_dir` is; None where it asks for no draft model.

    Raises:
        ModelError: the draft model cannot be found or read.
        ConfigError: it cannot draft for this one.
    """
    name = config.speculative.model
    if config.speculative.method != "draft_model" or name is None:
        return None
    try:
        directory = prepare_model(name, weights=config.load_format != "dummy")
        draft = read_model_config(directory)
    except ModelError as error:  # which names a model, and there are two
        raise ModelError(f"speculative.model is {name}: {error}") from error
    _check_kind(name, draft)
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"speculative.model is {name}, whose vocabulary has {draft.vocab_size} tokens, but the model's has "
            f"{model.vocab_size}: drafts need a checkpoint of the same tokenizer."
        )
    if differs := _difference(directory / TOKENIZER_FILE, model_dir / TOKENIZER_FILE):
        raise ConfigError(
            f"speculative.model is {name}, whose tokenizer is another: {differs}. Drafts need a checkpoint of the same."
        )
    return DraftCheckpoint(directory, draft, max(LEAST_COST, weights_read(draft) / weights_read(model)))


def _check_kind(name: str, draft: ModelConfig) -> None:
    on = {DRAFT_MODEL: f"speculative.model is {name}"}
    if draft.vision is not None:
        on[DRAFT_TAKES_IMAGES] = f"{draft.architecture} takes images"
    if draft.linear_layers:
        on[DRAFT_HAS_STATE] = f"{draft.architecture} has a recurrent state"
    refuse_conflicts(on)


def check_length(draft: DraftCheckpoint, max_model_len: int) -> None:
    """Raise ConfigError where the draft model's positions end before the model's do."""
    longest = draft.model.rope.longest_position(draft.model.max_position_embeddings)
    if longest < max_model_len:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the draft model in {draft.directory} reads at most {longest} "
            "positions: set max_model_len to that, or less."
        )


def _difference(draft: Path, model: Path) -> str | None:
    """The first token that is not the same, in words; None where all are, or where weights are random and a directory
    has no tokenizer."""
    if not (draft.is_file() and model.is_file()):
        return None
    theirs, ours = _tokens(draft), _tokens(model)
    for token_id in sorted(theirs.keys() | ours.keys()):
        if theirs.get(token_id) != ours.get(token_id):
            found, expected = (repr(tokens[token_id]) if token_id in tokens else "none" for tokens in (theirs, ours))
            return f"token {token_id} is {found} there, and {expected} here"
    return None


def _tokens(path: Path) -> dict[int, str]:
    """By id, special ones included."""
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    return {token_id: token for token, token_id in vocabulary.items()}
