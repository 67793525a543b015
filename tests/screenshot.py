"""Makes docs/playground.png: the page while an answer is written, streams run, and a long prompt is read beside them.
Run it as `python -m tests.screenshot`. It is no test. It needs chromium but no weights: the engine is scripted."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.support.browser import Page, browsing
from tests.support.serve_process import serve_run

PICTURE = Path(__file__).parents[1] / "docs" / "playground.png"
PROMPT = "Tell me a story about a lighthouse."
STORY = (
    "On the last rock before the open sea stood a lighthouse, and in it lived a keeper who had never missed a night. "
    "When the fog came she counted the ships by their horns, and to each she gave a number in her book. One evening "
    "there was a horn that she did not know. It was low and slow, and it came no nearer. She lit the second lamp. "
)
# About what the default model's steps take on two cores (loadtest/results/mixed_load.json).
ARGS = {
    "served_model_name": "scripted-engine",
    "engine": {
        "executor": "fake",
        "max_num_batched_tokens": 256,
        "fake": {"reply": STORY, "step_delay_ms": 20, "token_delay_ms": 0.8},
    },
}
SIZE = (1280, 790)


def busy(page: Page) -> None:
    """Wait until chunks of the long prompt share steps with the streams."""
    page.until("document.querySelector('canvas')")
    page.click("#prompt")
    page.write(PROMPT)
    page.press("Enter")
    page.until("document.querySelector('.message.assistant .text')?.textContent.length > 80")
    page.click("#load")
    page.until("document.querySelector('.reading').textContent.match(/of which (\\d+)/)?.[1] >= 7")


def main(scheme: str, picture: Path, width: int, height: int) -> None:
    """Take the picture; `scheme` is light or dark. The picture is as large as the window."""
    with serve_run(ARGS) as server, browsing() as page:
        page.resize(width, height)
        page.prefer(scheme)
        page.open(server.url)
        busy(page)
        picture.write_bytes(page.picture())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m tests.screenshot", description="Make docs/playground.png with chromium and a scripted engine."
    )
    parser.add_argument("scheme", nargs="?", choices=("light", "dark"), default="light")
    parser.add_argument("picture", nargs="?", type=Path, default=PICTURE)
    parser.add_argument("width", nargs="?", type=int, default=SIZE[0])
    parser.add_argument("height", nargs="?", type=int, default=SIZE[1])
    main(**vars(parser.parse_args()))
