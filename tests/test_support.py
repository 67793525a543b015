"""The map of what tests share has every module, and no other."""

from __future__ import annotations

import re
from pathlib import Path

SUPPORT = Path(__file__).parent / "support"


def test_the_readme_of_tests_support_names_every_module_in_a_table() -> None:
    text = (SUPPORT / "README.md").read_text(encoding="utf-8")
    tables = text.partition("\n## ")[2]
    named = re.findall(r"`(\w+\.py)`", "\n".join(line for line in tables.splitlines() if line.startswith("|")))
    there = [path.name for path in SUPPORT.glob("*.py") if path.name != "__init__.py"]
    assert sorted(named) == sorted(there)
