"""Owns the rule that the docs' pictures are of the page as it is.
Never compares pixels: a record beside the pictures says of which page they are."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path

import pytest

from tests.screenshot import DOCS, PICTURES, RECORD, SIZE, main, page_digest
from tests.support.browser import PROGRAM

AGAIN = "`.venv/bin/python -m tests.screenshot` makes the pictures again"


def size_of(picture: bytes) -> tuple[int, int]:
    """Return the width and height that a PNG's header gives."""
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    return width, height


def test_the_docs_pictures_are_of_the_page_as_it_is() -> None:
    assert json.loads((DOCS / RECORD).read_text())["page"] == page_digest(), f"the page has changed: {AGAIN}"


def test_every_picture_of_the_page_is_made_by_the_browser_and_shown() -> None:
    record = json.loads((DOCS / RECORD).read_text())["pictures"]
    made = {name: hashlib.sha256((DOCS / name).read_bytes()).hexdigest() for name in PICTURES}
    assert record == made, f"somebody has changed a picture: {AGAIN}"
    pictures = {path.name for path in DOCS.rglob("*.png")}
    assert pictures == set(PICTURES), "a picture that no command makes grows old"
    shown = "".join(path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md"))
    assert {name for name in PICTURES if re.search(rf"!\[[^\]]+\]\([./]*{re.escape(name)}\)", shown)} == set(PICTURES)


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="no chromium here: `apt-get install chromium` brings it")
def test_the_command_makes_every_picture_and_its_record(tmp_path: Path) -> None:
    main(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*PICTURES, RECORD}
    assert {size_of((tmp_path / name).read_bytes()) for name in PICTURES} == {SIZE}
    assert json.loads((tmp_path / RECORD).read_text())["page"] == page_digest()
