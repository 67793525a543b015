"""Owns a stage for the page without a server behind it: its document with its headers, and two canned answers.
Never answers a chat: a test brings the stream that it is about, cut as it likes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from serve_app.page.route import document
from tests.support.browser import Page

ENGINE = {
    **{"engine": "one", "num_running": 1, "num_waiting": 0, "num_blocks": 100, "num_held_blocks": 7, "max_num_seqs": 8},
    **{"max_num_batched_tokens": 64, "window_s": 10, "prompt_tokens_per_s": 0, "generated_tokens_per_s": 5.25},
    **{"gap_p50_ms": 20.25, "gap_p99_ms": None, "tpot_ms": None, "num_loading": 0},
    "tiers": [
        {"tier": "host", "used_bytes": 3 * 2**29, "capacity_bytes": 4 * 2**30, "hit_tokens": 12_340},
        {"tier": "disk", "used_bytes": 0, "capacity_bytes": 100 * 2**20, "hit_tokens": 0},
    ],
    "steps": [{"id": 7, "decodes": 2, "chunks": [30, 4], "waiting": 1, "ms": 12.5, "age_ms": 0}],
}


def model(name: str, *, root: str | None = None, parent: str | None = None, length: int = 4096) -> dict[str, Any]:
    """Write an entry of /v1/models."""
    return {"id": name, "object": "model", "root": root or name, "parent": parent, "max_model_len": length}


MODELS = [
    model("small"),
    model("large", length=8192),
    model("large:poet", root="large", parent="large"),
    model("best", root="large"),
]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        html, headers = document()
        ingresses = [{"ingress": "i", "num_live": 1, "num_waiting": 0}]
        activity = {"model": "small", "engines": [ENGINE], "num_missing": 0, "ingresses": ingresses}
        canned = {"/v1/models": {"data": MODELS}, "/activity": activity}
        path = self.path.partition("?")[0]
        if path == "/":
            self._answer(200, html, {"Content-Type": "text/html; charset=utf-8", **headers})
        elif path in canned:
            self._answer(200, json.dumps(canned[path]), {"Content-Type": "application/json"})
        else:
            self._answer(404, "{}", {"Content-Type": "application/json"})

    def _answer(self, status: int, body: str, headers: dict[str, str]) -> None:
        data = body.encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing: the tests' output has enough."""


@contextmanager
def stage() -> Iterator[str]:
    """Serve the page; the value is its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# Frames are made by the test: `every` pieces of the stream, then one frame, so that nothing depends on a clock.
_STREAM = """
(() => {
  const due = new Map();
  let number = 0;
  window.numFrames = 0; window.bodies = [];
  window.requestAnimationFrame = (drawn) => { due.set(++number, drawn); return number; };
  window.cancelAnimationFrame = (id) => due.delete(id);
  window.frame = () => {
    const drawn = [...due.values()];
    numFrames += 1;
    due.clear();
    for (const one of drawn) one(0);
  };
  const turn = () => new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = resolve;
    port2.postMessage(0);
  });
  const deltaOf = (piece) => (typeof piece === "string" ? { content: piece } : piece);
  const say = (piece) => ({ id: "chatcmpl-1", choices: [{ index: 0, delta: deltaOf(piece) }] });
  const encoder = new TextEncoder(), real = window.fetch;
  const body = (pieces, every, signal) => {
    let at = 0;
    return new ReadableStream({
      start(to) { signal.addEventListener("abort", () => to.error(signal.reason)); },
      async pull(to) {
        if (at % every === 0) { await turn(); await turn(); frame(); }
        while (at >= pieces.length && open_) await new Promise((resolve) => { window.goOn = resolve; });
        if (signal.aborted) return;
        if (at < pieces.length) to.enqueue(encoder.encode(`data: ${JSON.stringify(say(pieces[at++]))}\\n\\n`));
        else { to.enqueue(encoder.encode("data: [DONE]\\n\\n")); to.close(); }
      },
    }, { highWaterMark: 0 });
  };
  window.pieces = []; window.every = 1; window.open_ = false;
  window.fetch = (url, options) => {
    if (!String(url).includes("/chat/")) return real(url, options);
    bodies.push(JSON.parse(options.body));
    return Promise.resolve(new Response(body(pieces, every, options.signal)));
  };
})()
"""


def script(page: Page) -> None:
    """Let this page's chats be answered by what `answer` brings. `bodies` then has the requests."""
    page.value(_STREAM)


def answer(page: Page, pieces: Sequence[str | dict[str, str]], *, every: int = 1, stays_open: bool = False) -> None:
    """Send a message that is answered by these pieces, texts or deltas, with a frame after `every` of them."""
    page.value(f"pieces = {json.dumps(list(pieces))}; every = {every}; open_ = {json.dumps(stays_open)}; 0")
    before = page.value("document.querySelectorAll('.message.assistant').length")
    page.click("#prompt")
    page.write("hello")
    page.press("Enter")
    page.until(f"document.querySelectorAll('.message.assistant').length > {before}")
    page.value("frame(); 0")
    if not stays_open:
        page.until("document.querySelector('#stop').hidden")
