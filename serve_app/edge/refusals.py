"""Owns what HAProxy or an HTTP server tells a client without the app: OpenAI's error shape, as bytes.
Never imports serve_app.errors, which defines that shape; a test compares the two."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import MappingProxyType

from serve_app.edge.limits import HEAD_TIMEOUT_S, MAX_HEAD_BYTES, MAX_HEADERS, MAX_URL_BYTES

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Refusal:
    status: HTTPStatus
    code: str
    message: str
    """Without quotation marks: HAProxy's configuration quotes it."""
    type: str = _INVALID

    @property
    def is_temporary(self) -> bool:
        return self.status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)

    def body(self) -> str:
        error = {"message": self.message, "type": self.type, "param": None, "code": self.code}
        return json.dumps({"error": error})

    def headers(self) -> dict[str, str]:
        retry = {"retry-after": "1"} if self.is_temporary else {}
        return {"content-type": "application/json", "content-length": str(len(self.body()))} | retry

    def response(self, more: Mapping[str, str] = _NOTHING, status: HTTPStatus | None = None) -> bytes:
        """Return the whole response, which ends the connection. `more`: further headers; `status`: replaces its own."""
        told = "".join(f"{name}: {value}\r\n" for name, value in (self.headers() | dict(more)).items())
        said = status or self.status
        head = f"HTTP/1.1 {said.value} {said.phrase}\r\n{told}connection: close\r\n\r\n"
        return (head + self.body()).encode("latin-1")


HEAD_TOO_LARGE = Refusal(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    "headers_too_large",
    f"The headers are larger than {MAX_HEAD_BYTES} bytes, or there are more than {MAX_HEADERS} of them.",
)
URL_TOO_LONG = Refusal(
    HTTPStatus.REQUEST_URI_TOO_LONG, "url_too_long", f"The URL is longer than {MAX_URL_BYTES} bytes."
)
HEAD_TOO_SLOW = Refusal(
    HTTPStatus.REQUEST_TIMEOUT, "request_timeout", f"The headers did not arrive within {HEAD_TIMEOUT_S} s."
)
BODY_TOO_SLOW = Refusal(HTTPStatus.REQUEST_TIMEOUT, "request_timeout", "The body did not arrive in time.")
MALFORMED = Refusal(HTTPStatus.BAD_REQUEST, "invalid_http", "This is not a valid HTTP/1.1 request.")
NO_ROUTE = Refusal(HTTPStatus.NOT_FOUND, "not_found", "No application is served at this path.")
REPLICA_LOST = Refusal(
    HTTPStatus.SERVICE_UNAVAILABLE, "replica_lost", "The replica that computed this answer went away.", _SERVER
)
NO_REPLICA = Refusal(
    HTTPStatus.SERVICE_UNAVAILABLE, "service_unavailable", "No replica takes requests at the moment.", _SERVER
)
REPLICA_LATE = Refusal(HTTPStatus.GATEWAY_TIMEOUT, "gateway_timeout", "The replica did not answer in time.", _SERVER)
