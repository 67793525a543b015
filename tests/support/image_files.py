"""Owns images as requests have them: made up, as files, as data URLs, and from a server on a free port.
Never answers from outside this machine."""

from __future__ import annotations

import base64
import io
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image


def make_image(seed: int, width: int, height: int) -> Image.Image:
    """Make an image of noise over a slope: no two seeds give the same."""
    generator = np.random.default_rng(seed)
    noise = generator.integers(0, 120, (height, width, 3))
    slope = np.linspace(0, 135, width)[None, :, None]
    return Image.fromarray((noise + slope).astype(np.uint8))


def image_file(image: Image.Image, kind: str = "png", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind.upper(), **options)
    return file.getvalue()


def data_url(image: Image.Image, kind: str = "png", **options: Any) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(image_file(image, kind, **options)).decode()}"


@dataclass
class Given:
    """What a path is answered with, after `wait`. `stalls`: nothing follows the headers until the test ends."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "image/png"})
    chunked: bool = False
    stalls: bool = False
    wait: Callable[[], object] = bool


@dataclass
class ImageServer:
    paths: dict[str, Given]
    port: int = 0
    asked: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, path: str) -> str:
        return f"http://{self.host}{path}"


@contextmanager
def image_server(paths: dict[str, Given], secure: ssl.SSLContext | None = None) -> Iterator[ImageServer]:
    found = ImageServer(paths)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            found.asked.append(self.path)
            given = found.paths.get(self.path, Given(status=404))
            given.wait()
            self.send_response(given.status)
            for name, value in given.headers.items():
                self.send_header(name, value)
            self.send_header(*(("Transfer-Encoding", "chunked") if given.chunked else ("Connection", "close")))
            self.end_headers()
            if given.stalls:
                found.over.wait(30)
            self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(given.body), given.body) if given.chunked else given.body)
            self.close_connection = True

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if secure is not None:
        server.socket = secure.wrap_socket(server.socket, server_side=True)
    found.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
