"""Owns what golden tests share in one run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.models import save_shallow_model


@pytest.fixture(scope="session")
def shallow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the default model with its first layers alone."""
    directory = tmp_path_factory.mktemp("golden") / "shallow"
    save_shallow_model(directory)
    return directory
