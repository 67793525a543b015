"""Writes the generated pages of docs/ (`make docs`).
Never writes a page that is up to date."""

from __future__ import annotations

import argparse

from docsite.pages import ROOT, rendered


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m docsite", description="Write every generated page of the documentation that is not up to date."
    ).parse_args()
    for path, text in rendered().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
