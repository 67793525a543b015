"""Owns the generated parts of our pages: the text between two marks with a given name.
Never touches the rest of the page."""

from __future__ import annotations


def marks(name: str) -> tuple[str, str]:
    """Return the marks before and after the text of this name."""
    return f"<!-- {name} -->", f"<!-- end of {name} -->"


def with_text(page: str, name: str, text: str) -> str:
    """Return the page with the text between the marks replaced.

    Raises:
        ValueError: each mark must occur exactly once, and does not.
    """
    begin, end = marks(name)
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"
