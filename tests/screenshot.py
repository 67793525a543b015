"""Makes docs/playground.png: the page over the default model, while streams run and a long prompt is read beside them.
Run it as `python -m tests.screenshot`; it is no test, and needs chromium."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.browser import browsing
from tests.support.serve_process import serve_run

PICTURE = Path(__file__).parents[1] / "docs" / "playground.png"
PROMPT = "Tell me a story about a lighthouse."


def main(scheme: str = "light", width: int = 1280, height: int = 790, picture: Path = PICTURE) -> None:
    """`scheme`: light or dark; the picture is as large as the window."""
    with serve_run({}) as server, browsing() as page:
        page.resize(width, height)
        page.prefer(scheme)
        page.open(server.url)
        page.until("document.querySelector('canvas')")
        page.click("#prompt")
        page.write(PROMPT)
        page.press("Enter")
        page.until("document.querySelectorAll('.message.assistant .text')[0]?.textContent.length > 100")
        page.click("#load")
        page.until("document.querySelector('#load-status').textContent.includes('being read')")
        page.until("document.querySelector('.reading').textContent.match(/of which (\\d+)/)?.[1] >= 3")
        picture.parent.mkdir(exist_ok=True)
        picture.write_bytes(page.picture())


if __name__ == "__main__":
    main(*sys.argv[1:2])
