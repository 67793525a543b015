"""Asks a running server over HTTP: JSON documents, and streams of server-sent events.
Never tries again, never follows a redirect with a key, and never shows one."""

from __future__ import annotations

import json
import os
import unicodedata
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any, TypeVar
from urllib.parse import urlsplit

KEY = "CHUNKSERVE_API_KEY"
"""The variable with the API key. An option would show it to everybody who lists this machine's processes."""
_REORDER = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Unicode's embeddings, overrides and isolates."""
_HERE = ("127.0.0.1", "localhost", "::1")
_ANSWER_TIMEOUT_S = 30
_STREAM_TIMEOUT_S = 600
"""Silence after which a stream counts as broken; a server that keeps it alive sends comments meanwhile."""

Json = Mapping[str, Any]
_Taken = TypeVar("_Taken")


class NoAnswer(Exception):
    """No server of this project answers at the URL. The message is one line."""


class Refused(Exception):
    """The server answered with an error. The message is the server's own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Api:
    """A server at `url`, which does not end with a slash."""

    url: str

    def get(self, path: str, take: Callable[[Any], _Taken]) -> _Taken:
        """Return what `take` makes of the JSON document at `path`, which is None if the answer has no body.

        Raises:
            NoAnswer: also where `take` does not find what it looks for, because another server answers.
            Refused
        """
        with closing(self._open(path, None, _ANSWER_TIMEOUT_S)) as response:
            try:
                text = response.read()
            except (OSError, HTTPException) as error:
                raise NoAnswer(f"the answer from {self.url} broke off: {_words(error)}") from None
        return self._taken(text, take)

    def stream(self, path: str, body: Json, take: Callable[[Any], _Taken]) -> Generator[_Taken, None, None]:
        """Send a request that asks for a stream, and yield what `take` makes of its events as they come. To close the
        iterator ends the request.

        Raises:
            NoAnswer: also where the stream breaks off, or `take` does not find what it looks for.
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
                    yield self._taken(data.encode(), lambda event: take(_without_error(event)))
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
        opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies), _NoRedirects)
        try:
            response: HTTPResponse = opener.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            with closing(error):
                raise Refused(error.code, _refusal(f"{self.url}{path}", error)) from None
        except (OSError, HTTPException, ValueError) as error:  # ValueError: what no URL may have
            raise NoAnswer(f"no server answers at {self.url}: {_words(error)}") from None
        return response

    def _taken(self, text: bytes, take: Callable[[Any], _Taken]) -> _Taken:
        try:
            document = json.loads(text) if text else None
        except (ValueError, RecursionError):
            raise NoAnswer(f"what answers at {self.url} is no chunkserve: expected JSON, not {text[:40]!r}") from None
        try:
            return take(document)
        except (LookupError, TypeError, ValueError, AttributeError):
            raise NoAnswer(f"what answers at {self.url} is no chunkserve: it sent {text[:40]!r}") from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Leave a redirect as an error: to follow it would send the key to another server."""


def _without_error(event: Any) -> Any:
    if "error" in event:
        raise Refused(200, one_line(_message(event) or "error"))
    return event


def _refusal(url: str, error: urllib.error.HTTPError) -> str:
    """Return the server's message; that of another kind of server has none, so that the address must help."""
    try:
        message = _message(json.loads(error.read()))
    except (OSError, HTTPException, ValueError, RecursionError):
        message = None
    moved = f" ({moved_to})" if (moved_to := error.headers.get("Location")) else ""
    return one_line(message or f"{url} answers {error.code} {error.reason}{moved}")


def _message(answer: Any) -> str | None:
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message) if message else None


def _words(error: Exception) -> str:
    return one_line(str(getattr(error, "reason", None) or error or type(error).__name__))


def one_line(text: str) -> str:
    """Return a text in one line, without the characters that control a terminal."""
    return harmless(" ".join(text.split()))


def harmless(text: str) -> str:
    """Replace the characters that control a terminal, but for tabs and new lines: a server or its model chose them.
    Spaces of all widths stay, and so do the joiners in emojis and scripts; what reverses the order of letters does not.
    """
    return "".join(mark if mark.isprintable() or mark in "\t\n" or _shapes(mark) else "\ufffd" for mark in text)


def _shapes(mark: str) -> bool:
    return unicodedata.category(mark) in ("Zs", "Cf") and mark not in _REORDER
