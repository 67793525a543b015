"""Makes the docs' pictures of the page, and docs/pictures.json, which says of what: a test compares that with the page.
Never a test itself, and needs no weights: the engine is scripted. Run it as `python -m tests.screenshot`."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from tests.support.browser import Page, browsing
from tests.support.serve_process import serve_run

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RECORD = "pictures.json"
PROMPT = "How do I count the ships that pass at night?"
REPLY = """Keep a **log**, one line a ship, and count by name:

```python
from collections import Counter

def ships(log: str) -> Counter[str]:
    \"\"\"Count the ships of a log.\"\"\"
    return Counter(line.split()[-1] for line in log.splitlines())
```

Of the last three nights:

| ship | passages | last seen |
|:-----|---------:|:----------|
| Petrel | 4 | 21:40 |
| Aurora | 2 | 19:05 |

1. The *Petrel* comes every night.
2. The *Aurora* comes with the fog.
"""
# About what the default model's steps take on two cores (loadtest/results/mixed_load.json).
ARGS = {
    "served_model_name": "scripted-engine",
    "engine": {
        "executor": "fake",
        "max_num_batched_tokens": 256,
        "fake": {"reply": REPLY, "step_delay_ms": 20, "token_delay_ms": 0.8},
    },
}
SIZE = (1280, 830)


def send(page: Page) -> None:
    page.until("document.querySelector('canvas')")
    page.value("document.querySelector('#max-tokens').value = 2000")
    page.click("#prompt")
    page.write(PROMPT)
    page.press("Enter")


def busy(page: Page) -> None:
    """An answer is written while chunks of a long prompt share steps with streams."""
    send(page)
    page.until("document.querySelector('.message.assistant .text')?.textContent.length > 60")
    page.click("#load")
    page.until("document.querySelector('.reading').textContent.match(/of which (\\d+)/)?.[1] >= 7")


def answered(page: Page) -> None:
    """An answer is whole, and its time is divided by cause."""
    send(page)
    page.until("document.querySelector('.message.assistant[aria-busy=false]')")
    page.click(".why summary")
    page.until("document.querySelector('.why .parts li')")
    page.value("document.querySelector('#log').scrollTop = 1e6")
    page.until("document.querySelector('[data-is=running]').textContent.startsWith('0 of')")


PICTURES: dict[str, tuple[str, Callable[[Page], None]]] = {
    "playground.png": ("light", busy),
    "playground-dark.png": ("dark", answered),
}
"""The colour scheme of each picture, and what is done until it is taken."""


_PAINTED = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 200))))"


def page_digest() -> str:
    """Digest all that the pictures show: the page's files, and this one."""
    files = [path for path in (ROOT / "serve_app" / "page").rglob("*") if path.suffix in (".html", ".css", ".js")]
    digest = hashlib.sha256()
    for path in (*sorted(files), Path(__file__)):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def main(folder: Path) -> None:
    """Write the pictures and their record into `folder`. The pictures are as large as the window."""
    with serve_run(ARGS) as server, browsing() as page:
        page.resize(*SIZE)
        for name, (scheme, until_ready) in PICTURES.items():
            page.prefer(scheme)
            page.open(server.url)
            until_ready(page)
            page.value(_PAINTED)
            (folder / name).write_bytes(page.picture())
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in PICTURES}
    record = {"page": page_digest(), "pictures": digests}
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m tests.screenshot", description="Make the docs' pictures with chromium and a scripted engine."
    )
    parser.add_argument("folder", nargs="?", type=Path, default=DOCS)
    main(parser.parse_args().folder)
