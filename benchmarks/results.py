"""Owns how a result is put on disk while more of it is still being measured.
Never leaves a part of a document: whoever reads the file finds the one before or the new one."""

from __future__ import annotations

import json
from pathlib import Path


def write_whole(path: Path, document: object) -> None:
    """As one line of JSON. What JSON does not know is written as text."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(document, default=str) + "\n", encoding="utf-8")
    beside.replace(path)
