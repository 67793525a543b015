"""Owns the MkDocs hook: it adds pages that live beside the code to the site, and turns links to source files into
names, since the site does not have these files.
Never changes a file."""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.livereload import LiveReloadServer
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
    "k8s/chart/README.md": "how-to/helm.md",
    "loadtest/README.md": "benchmarks/load-tests.md",
    "loadtest/sim/README.md": "benchmarks/simulator.md",
}
"""A page's path in the repository -> its path in the site."""

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


def on_serve(server: LiveReloadServer, config: MkDocsConfig, builder: Callable[..., None]) -> LiveReloadServer:
    """Build the site again when a page that lives beside the code changes."""
    for origin in BESIDE_THE_CODE:
        server.watch(str(ROOT / origin))
    return server


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the page's links for the site."""
    return with_links(markdown, page.file.src_uri)


def with_links(markdown: str, place: str) -> str:
    """Rewrite links outside code. `place` is the page's path in the site."""
    parts = _CODE.split(markdown)
    parts[::2] = [_rewritten(part, place) for part in parts[::2]]
    return "".join(parts)


def _rewritten(text: str, place: str) -> str:
    text = _IMAGE.sub(lambda link: _image(link, place), text)
    return _LINK.sub(lambda link: _link(link, place), text)


def in_repository(place: str, target: str) -> str:
    """Return the path on disk, from the repository's root, that a link of the page leads to."""
    origin = _PAGES.get(place, f"{DOCS}/{place}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))


def in_site(path: str) -> str | None:
    """Return the path in the site of a file of the repository; None if it is not in the site."""
    if path in BESIDE_THE_CODE:
        return BESIDE_THE_CODE[path]
    if path == "README.md":
        return "index.md"
    return path.removeprefix(f"{DOCS}/") if path.startswith(f"{DOCS}/") else None


def _link(link: re.Match[str], place: str) -> str:
    path = in_repository(place, link["target"])
    target = in_site(path)
    if target is not None:
        return f"[{link['text']}]({_from(place, target)}{link['anchor'] or ''})"
    if not (ROOT / path).exists():
        logger.warning("%s links to %s, which is not there", place, path)
    name = link["text"]
    return name if posixpath.basename(path.rstrip("/")) in name else f"{name} (`{path}`)"


def _image(link: re.Match[str], place: str) -> str:
    target = in_site(in_repository(place, link["target"]))
    return link[0] if target is None else f"![{link['text']}]({_from(place, target)})"


def _from(place: str, target: str) -> str:
    return posixpath.relpath(target, posixpath.dirname(place) or ".")
