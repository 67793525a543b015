"""Asks a running server over HTTP: JSON documents, and streams of server-sent events.
Never tries again, and never shows a key."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

KEY = "CHUNKSERVE_API_KEY"
"""The variable with the API key. An option would show it to everybody who lists this machine's processes."""
_HERE = ("127.0.0.1", "localhost", "::1")
_ANSWER_TIMEOUT_S = 30
_STREAM_TIMEOUT_S = 600
"""Silence after which a stream counts as broken; a server that keeps it alive sends comments meanwhile."""

Json = Mapping[str, Any]


class NoAnswer(Exception):
    """No server answers at the URL. The message is one line."""


class Refused(Exception):
    """The server answered with an error. The message is the server's own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Api:
    """A server at `url`, which does not end with a slash."""

    url: str

    def get(self, path: str) -> Any:
        """Return the JSON document at `path`; None if the answer has no body.

        Raises:
            NoAnswer, Refused
        """
        with closing(self._open(path, None, _ANSWER_TIMEOUT_S)) as response:
            return _parsed(self.url, response.read())

    def stream(self, path: str, body: Json) -> Generator[Json, None, None]:
        """Send a request that asks for a stream, and yield its events as they come. To close the iterator ends the
        request.

        Raises:
            NoAnswer: also where the stream breaks off.
            Refused: also for an error that comes as an event.
        """
        with closing(self._open(path, body, _STREAM_TIMEOUT_S)) as response:
            try:
                for line in response:
                    name, _, data = line.decode(errors="replace").strip().partition(":")
                    if name != "data" or not data.strip():
                        continue
                    if data.strip() == "[DONE]":
                        return
                    event = _parsed(self.url, data.encode())
                    if "error" in event:
                        raise Refused(200, _message(event, "error"))
                    yield event
            except (OSError, HTTPException) as error:
                raise NoAnswer(f"the answer from {self.url} broke off: {_words(error)}") from error
        raise NoAnswer(f"the answer from {self.url} broke off before its end")

    def _open(self, path: str, body: Json | None, timeout_s: float) -> HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, headers)
        # A proxy for the outside cannot reach this machine's own addresses.
        proxies: dict[str, str] | None = {} if urlsplit(self.url).hostname in _HERE else None
        opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
        try:
            response: HTTPResponse = opener.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            with closing(error):
                raise Refused(error.code, _refusal(error.read(), error.reason)) from None
        except (OSError, HTTPException, ValueError) as error:  # ValueError: a URL without a host
            raise NoAnswer(f"no server answers at {self.url}: {_words(error)}") from None
        return response


def _parsed(url: str, text: bytes) -> Any:
    try:
        return json.loads(text) if text else None
    except ValueError:
        raise NoAnswer(f"what answers at {url} is no chunkserve: expected JSON, not {text[:40]!r}") from None


def _refusal(body: bytes, reason: str) -> str:
    try:
        return _message(json.loads(body), reason)
    except ValueError:
        return reason


def _message(answer: Any, otherwise: str) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(message or otherwise).split())


def _words(error: Exception) -> str:
    return " ".join(str(getattr(error, "reason", None) or error or type(error).__name__).split())
