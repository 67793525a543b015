"""Owns what MkDocs does with this repository beyond docs/: pages that live beside the code are shown in the site too,
and links to source files become names, since the site does not hold them.
Never changes a file."""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs"

BESIDE_THE_CODE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "engine/DESIGNS.md": "explanation/designs.md",
    "engine/models/README.md": "explanation/models.md",
    "engine/NOTES.md": "explanation/decisions/engine.md",
    "kernels/NOTES.md": "explanation/decisions/kernels.md",
    "serve_app/NOTES.md": "explanation/decisions/serving.md",
    "serve_app/parsing/NOTES.md": "explanation/decisions/parsing.md",
    "serve_app/grammars/NOTES.md": "explanation/decisions/grammars.md",
    "loadtest/NOTES.md": "explanation/decisions/load-tests.md",
    "k8s/NOTES.md": "explanation/decisions/kubernetes.md",
    "tests/NOTES.md": "explanation/decisions/tests.md",
    "docsite/NOTES.md": "explanation/decisions/documentation.md",
    "tests/mutations.md": "explanation/mutations.md",
    "tests/support/README.md": "explanation/test-tools.md",
    "k8s/README.md": "how-to/kubernetes.md",
    "loadtest/README.md": "benchmarks/load-tests.md",
    "loadtest/sim/README.md": "benchmarks/simulator.md",
}
"""Where a page lies in the repository -> where it is in the site."""

_PAGES = {place: origin for origin, place in BESIDE_THE_CODE.items()}
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>(?!https?:|mailto:|#)[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
_IMAGE = re.compile(r"!\[(?P<text>[^\]]*)\]\((?P<target>(?!https?:)[^)\s]+)\)")
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`(?!\]))", re.MULTILINE | re.DOTALL)

logger = logging.getLogger("mkdocs.hooks.docsite")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that live beside the code."""
    for origin, place in BESIDE_THE_CODE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / origin)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with links that lead to places in the site, or none."""
    return with_links(markdown, page.file.src_uri)


def with_links(markdown: str, place: str) -> str:
    """`place`: the page's in the site. Code is left as it is."""
    parts = _CODE.split(markdown)
    parts[::2] = [_rewritten(part, place) for part in parts[::2]]
    return "".join(parts)


def _rewritten(text: str, place: str) -> str:
    text = _IMAGE.sub(lambda found: _image(found, place), text)
    return _LINK.sub(lambda found: _link(found, place), text)


def in_repository(place: str, target: str) -> str:
    """The path, from the repository's root, that a link of the page leads to on disk."""
    origin = _PAGES.get(place, f"{DOCS}/{place}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))


def in_site(path: str) -> str | None:
    """Where the site has a file of the repository; None: nowhere."""
    if path in BESIDE_THE_CODE:
        return BESIDE_THE_CODE[path]
    if path == "README.md":
        return "index.md"
    return path.removeprefix(f"{DOCS}/") if path.startswith(f"{DOCS}/") else None


def _link(found: re.Match[str], place: str) -> str:
    path = in_repository(place, found["target"])
    target = in_site(path)
    if target is not None:
        return f"[{found['text']}]({_from(place, target)}{found['anchor'] or ''})"
    if not (ROOT / path).exists():
        logger.warning("%s links to %s, which is not there", place, path)
    name = found["text"]
    return name if posixpath.basename(path.rstrip("/")) in name else f"{name} (`{path}`)"


def _image(found: re.Match[str], place: str) -> str:
    target = in_site(in_repository(place, found["target"]))
    return found[0] if target is None else f"![{found['text']}]({_from(place, target)})"


def _from(place: str, target: str) -> str:
    return posixpath.relpath(target, posixpath.dirname(place) or ".")
