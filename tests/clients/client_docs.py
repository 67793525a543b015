"""Owns what docs/how-to/agents.md tells users to set, read from the page itself, so that tests run what it shows.
Never adds to it: what a test needs besides, such as switching telemetry off, is in the test."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "agents.md"
SHOWN_URL, SHOWN_MODEL = "http://127.0.0.1:8000", "qwen3-8b"
"""What the page shows in place of a server and its model."""

_FENCE = re.compile(r"^```(?P<language>\w+)(?: title=\"~/(?P<path>[^\"]+)\")?\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(slots=True)
class Settings:
    """The settings of a program, as its section of the page shows them."""

    exports: str = ""
    """Lines for a shell."""
    files: dict[str, str] = field(default_factory=dict)
    """Path in the home directory -> content."""
    script: str = ""
    """A script in Python that prepares the home directory."""
    prose: str = ""

    def at(self, url: str, model: str) -> Settings:
        """Return the same settings for another server and model."""

        def put(text: str) -> str:
            return text.replace(SHOWN_URL, url).replace(SHOWN_MODEL, model)

        files = {path: put(text) for path, text in self.files.items()}
        return Settings(put(self.exports), files, put(self.script), self.prose)


def sections() -> dict[str, str]:
    """Map each title to its text, in the page's order."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def settings_of(section: str) -> Settings:
    text = sections()[section]
    settings = Settings(prose=text)
    for fence in _FENCE.finditer(text):
        if fence["path"]:
            settings.files[fence["path"]] = fence["text"]
        elif fence["language"] == "bash":
            settings.exports += fence["text"]
        elif fence["language"] == "python":
            settings.script += fence["text"]
    return settings
