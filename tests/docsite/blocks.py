"""Owns what the documentation tells users to type: every fenced block of every page that is written by hand.
Never runs one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from docsite.pages import DOCS, ROOT, WHOLE

ELSEWHERE = {
    "how-to/agents.md": "tests/clients, which run the programs with exactly these settings",
    "how-to/from-vllm-or-sglang.md": "tests/docsite/test_options_of_others.py",
    "how-to/from-ray-serve-llm.md": "tests/serve_app/ray_llm/test_page.py, with types in place of vLLM's",
}
"""Pages whose blocks have a test of their own."""
_FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. `page` is relative to docs/, or to the repository's root if the page is there."""

    page: str
    kind: str
    text: str

    @property
    def commands(self) -> list[str]:
        """Return the commands of a shell block one by one, without their comments."""
        whole = self.text.replace("\\\n", " ")
        quoted = re.sub(r"'[^']*'", lambda found: found[0].replace("\n", "\0"), whole)
        lines = (line.replace("\0", "\n").partition("  #")[0].strip() for line in quoted.splitlines())
        return [line for line in lines if line]


def _read() -> list[Block]:
    pages = {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}
    pages |= {name: ROOT / name for name in ("README.md", "CONTRIBUTING.md")}
    own = {name: path for name, path in pages.items() if name not in ELSEWHERE and name not in WHOLE}
    return [
        Block(name, kind, text)
        for name, path in own.items()
        for kind, text in _FENCE.findall(path.read_text(encoding="utf-8"))
    ]


BLOCKS = _read()


def block(kind: str, containing: str) -> Block:
    """Find the block that contains this text; the same block may be on two pages."""
    (text,) = {one.text for one in BLOCKS if one.kind == kind and containing in one.text}
    return next(one for one in BLOCKS if one.text == text)
