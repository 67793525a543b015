"""Owns what a program writes into a page of ours: the text between two marks that bear its name.
Never touches the rest of the page."""

from __future__ import annotations


def marks(name: str) -> tuple[str, str]:
    """Between which the text is."""
    return f"<!-- {name} -->", f"<!-- end of {name} -->"


def with_text(page: str, name: str, text: str) -> str:
    """The page with that text written anew.

    Raises:
        ValueError: the marks are not there, once each.
    """
    begin, end = marks(name)
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"
