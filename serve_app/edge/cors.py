"""Owns which web pages may read the refusals of HAProxy, Ray or an HTTP server, made without the app (CORS): the
applications' own settings, as `serve run` hands them on.
Never covers an answer of the app, which names the page itself, see serve_app.api.http.cors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VARIABLE = "CHUNKSERVE_CORS"
"""JSON: each of our route prefixes with its policy. Without the variable, no refusal names a page."""

METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")
EXPOSED = (
    *("x-request-id", "request-id", "x-chunkserve-ignored", "openai-processing-ms"),
    *("retry-after", "retry-after-ms", "x-should-retry"),  # by these, SDKs decide when and whether to retry
)

_PREFIX = re.compile(r"/[^\s\"'\\#{}]*")
"""Ray and we write the prefix into HAProxy's configuration as a bare word."""
RAYS_OWN = "/-/"
PREFLIGHT_VARY = "Origin, Access-Control-Request-Method, Access-Control-Request-Headers"


class CorsError(ValueError):
    """The variable is wrong. The message says how."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Holds the policy of one application, in the terms of Starlette's CORSMiddleware."""

    prefix: str
    allow_origins: tuple[str, ...] = ()
    allow_origin_regex: str | None = None
    max_age: int = 600

    @property
    def allows_all(self) -> bool:
        return "*" in self.allow_origins

    def allowed(self, origin: str) -> str | None:
        """Return the value of `Access-Control-Allow-Origin`, or None to send none."""
        if self.allows_all:
            return "*"
        matches = self.allow_origin_regex is not None and re.fullmatch(self.allow_origin_regex, origin)
        return origin if matches or origin in self.allow_origins else None

    def governs(self, path: str) -> bool:
        return path == self.prefix or path.startswith(self.prefix.rstrip("/") + "/")


def policies_in(environ: Mapping[str, str]) -> tuple[Policy, ...]:
    """Read the policies, the longest prefix first, as routes are matched.

    Raises:
        CorsError: the variable is not JSON of this form.
    """
    given = environ.get(VARIABLE, "").strip()
    if not given:
        return ()
    try:
        found = [_policy(prefix, fields) for prefix, fields in json.loads(given).items()]
    except (ValueError, TypeError, AttributeError, re.error) as error:
        form = '{"/": {"allow_origins": ["https://chat.example.com"], "allow_origin_regex": null, "max_age": 600}}'
        raise CorsError(f"{VARIABLE} must be JSON such as {form}; it is {given[:80]!r}: {error}") from error
    return tuple(sorted(found, key=lambda policy: (-len(policy.prefix), policy.prefix)))


def written(policies: Sequence[Policy]) -> str:
    """Write policies in the form that `policies_in` reads."""
    fields = ("allow_origins", "allow_origin_regex", "max_age")
    return json.dumps({policy.prefix: {name: getattr(policy, name) for name in fields} for policy in policies})


def _policy(prefix: str, fields: Any) -> Policy:
    policy = Policy(prefix, **fields)
    if not _PREFIX.fullmatch(prefix):
        raise ValueError(f"the route prefix {prefix!r}")
    origins, regex, max_age = policy.allow_origins, policy.allow_origin_regex, policy.max_age
    if not isinstance(origins, list | tuple) or not all(isinstance(one, str) and _is_line(one) for one in origins):
        raise ValueError("allow_origins must be a list of origins")
    if regex is not None and not (_is_line(regex) and re.compile(regex)):
        raise ValueError("allow_origin_regex must be an expression on one line")
    if type(max_age) is not int or max_age < 0:
        raise ValueError(f"max_age must be 0 or more seconds, not {max_age!r}")
    return Policy(prefix, tuple(origins), regex, max_age)


def _is_line(text: str) -> bool:
    return "\n" not in text and "\r" not in text


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """Holds the parts of a refused request that say which page wants to read the refusal."""

    method: str
    path: str
    headers: Mapping[str, str]

    @property
    def is_preflight(self) -> bool:
        return self.method == "OPTIONS" and "access-control-request-method" in self.headers


@dataclass(frozen=True, slots=True)
class Told:
    """Holds what CORS adds to a refusal."""

    headers: dict[str, str]
    is_granted: bool = False
    """A refused preflight is answered with 200: the browser then sends the request, whose refusal the page can read."""


def told(policies: Sequence[Policy], asked: RefusedRequest) -> Told:
    policy = next((policy for policy in policies if policy.governs(asked.path)), None)
    if policy is None or asked.path.startswith(RAYS_OWN):
        return Told({})
    headers = {} if policy.allows_all else {"vary": "Origin"}
    origin = asked.headers.get("origin")
    allow = None if origin is None else policy.allowed(origin)
    if allow is None:
        return Told(headers)
    headers |= {"access-control-allow-origin": allow, "access-control-expose-headers": ", ".join(EXPOSED)}
    return Told(headers | _preflight(policy, asked), True) if asked.is_preflight else Told(headers)


def _preflight(policy: Policy, asked: RefusedRequest) -> dict[str, str]:
    headers = {
        "vary": PREFLIGHT_VARY,
        "access-control-allow-methods": ", ".join(METHODS),
        "access-control-max-age": str(policy.max_age),
    }
    if (names := asked.headers.get("access-control-request-headers")) is not None:
        headers["access-control-allow-headers"] = names
    if "access-control-request-private-network" in asked.headers:
        headers["access-control-allow-private-network"] = "true"
    return headers
