"""Owns the reading of a checkpoint's JSON files, and the error of all that cannot be served.
Never knows what a file is for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.checkpoints.model_cache import ModelError


class CheckpointError(ModelError):
    """A checkpoint cannot be served as it is. The message names the file, what was found and what was expected."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        CheckpointError: the file is missing, is not JSON, or is not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: expected a Hugging Face model directory.") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}: expected an object.")
    return value
