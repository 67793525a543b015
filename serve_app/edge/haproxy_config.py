"""Owns the edits to the configuration that Ray Serve writes for HAProxy: limits, and answers in the API's shape.
Never writes a file and never starts HAProxy; `launcher` does."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from serve_app.edge.cors import CorsError, Policy, policies_in
from serve_app.edge.haproxy_cors import cors_rules
from serve_app.edge.limits import (
    BODY_STALL_S,
    HEAD_TIMEOUT_S,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_URL_BYTES,
    MIN_BODY_BYTES_PER_S,
)
from serve_app.edge.refusals import (
    BODY_TOO_SLOW,
    HEAD_TOO_LARGE,
    MALFORMED,
    NO_REPLICA,
    NO_ROUTE,
    REPLICA_LATE,
    REPLICA_LOST,
    URL_TOO_LONG,
    Refusal,
)

PER_SOURCE = "CHUNKSERVE_MAX_CONNECTIONS_PER_SOURCE"

PAGES: dict[int, Refusal] = {
    400: MALFORMED,
    408: BODY_TOO_SLOW,
    500: NO_REPLICA,
    502: REPLICA_LOST,
    503: NO_REPLICA,
    504: REPLICA_LATE,
}
"""HAProxy's own answers, by the status that it would send. Ray gives it a plain text for the last three."""

# HAProxy answers headers that it has no room for with a page that cannot be changed. So it gets room for more than are
# allowed, and a rule refuses them. Buffers are allocated on demand, and only what is written to is resident.
_BUFFER_BYTES = 128 * 1024
_ROOM_FOR_HEADERS = 8192

_SMALL_BODY_BYTES = 32 * 1024
"""A body up to this size goes to a replica once it is complete, so that the request can be sent to another replica."""
_SMALL_BODY_S = math.ceil(BODY_STALL_S + _SMALL_BODY_BYTES / MIN_BODY_BYTES_PER_S)
"""The time that the app's minimum rate allows the largest such body: HAProxy cuts off none that the app would take."""

_MARK = "# Edited by serve_app.edge.\n"
_BUFFER = re.compile(r"^( *)tune\.bufsize (\d+)$", re.MULTILINE)
_MAXCONN = re.compile(r"^ *maxconn (\d+)$", re.MULTILINE)
_DEFAULTS = re.compile(r"^defaults$", re.MULTILINE)
_FRONTEND = re.compile(r"^frontend http_frontend\n *bind .*$", re.MULTILINE)
_ERROR_FILE = re.compile(r"^ *errorfile .*\n", re.MULTILINE)
_NO_ROUTE = re.compile(r"^( *)http-request return status 404 content-type text/plain .*$", re.MULTILINE)
# Ray binds HAProxy's pages about itself to ports on all interfaces, and has no setting to change that.
_OWN_PAGES = {
    "RAY_SERVE_HAPROXY_METRICS_PORT": re.compile(r"^(frontend (prometheus)\n *bind) .*$", re.MULTILINE),
    "RAY_SERVE_HAPROXY_STATS_PORT": re.compile(r"^(listen (stats)\n *bind) .*$", re.MULTILINE),
}


class EdgeError(Exception):
    """A setting is wrong, or Ray's configuration is not the one that this module was written for."""


def edited(config: str, directory: Path, environ: Mapping[str, str]) -> str:
    """Return Ray's configuration with our limits. `directory` has the error pages and lists of origins. HAProxy's own
    pages are served from sockets in it, unless `environ` gives them a port.

    Raises:
        EdgeError: the message says which setting or which part of the configuration.
    """
    if config.startswith(_MARK):  # HAProxy crashed, and Ray starts it again with the same file
        return config
    limit = per_source_limit(environ, int(_found(_MAXCONN, config)[1]))
    cors = cors_rules(cors_policies(environ), directory)
    config = _ERROR_FILE.sub("", config)
    config = _replaced(_BUFFER, config, _room)
    config = _replaced(_DEFAULTS, config, lambda found: found[0] + _lines(_defaults(directory)))
    config = _replaced(_FRONTEND, config, lambda found: found[0] + _lines(cors + _frontend(limit)))
    config = _NO_ROUTE.sub(lambda found: found[1] + _returned(NO_ROUTE), config)
    for variable, bind in _OWN_PAGES.items():
        if variable not in environ:
            config = _replaced(bind, config, lambda found: f"{found[1]} unix@{directory}/{found[2]}.sock")
    return _MARK + config


def per_source_limit(environ: Mapping[str, str], maxconn: int) -> int:
    """Return how many connections one source may hold, 0 for no limit. The default is half of `maxconn`.

    Raises:
        EdgeError: the setting is not a whole number, or is negative.
    """
    given = environ.get(PER_SOURCE, "").strip()
    if not given:
        return maxconn // 2
    if not (given.isascii() and given.isdecimal()):
        raise EdgeError(f"{PER_SOURCE} must be a whole number of connections, 0 for no limit; it is {given[:40]!r}")
    return int(given)


def cors_policies(environ: Mapping[str, str]) -> tuple[Policy, ...]:
    """Read the policies. Raises EdgeError if the variable is wrong."""
    try:
        return policies_in(environ)
    except CorsError as error:
        raise EdgeError(str(error)) from error


def _room(found: re.Match[str]) -> str:
    indent, size = found[1], max(int(found[2]), _BUFFER_BYTES)
    return f"{indent}tune.bufsize {size}\n{indent}tune.http.maxhdr {_ROOM_FOR_HEADERS}"


def _defaults(directory: Path) -> list[str]:
    pages = [f"errorfile {status} {page_path(directory, status)}" for status in PAGES]
    # A connection on which nothing was sent, such as one that a browser opens ahead of time, is closed silently.
    return [f"timeout http-request {HEAD_TIMEOUT_S}s", "option http-ignore-probes", *pages]


def _frontend(limit: int) -> list[str]:
    too_large = f"{{ req.hdrs,length gt {MAX_HEAD_BYTES} }} or {{ req.fhdr_cnt gt {MAX_HEADERS} }}"
    rules = [
        f"{_returned(URL_TOO_LONG)} if {{ url,length gt {MAX_URL_BYTES} }}",
        f"{_returned(HEAD_TOO_LARGE)} if {too_large}",
        f"http-request wait-for-body time {_SMALL_BODY_S}s if {{ req.hdr_val(content-length) 1:{_SMALL_BODY_BYTES} }}",
    ]
    if not limit:
        return rules
    # Rejected on accept: no buffer, no session. An IPv6 /64 is one source, because each subscriber gets at least one.
    return [
        "stick-table type ipv6 size 100k expire 10m store conn_cur",
        "tcp-request connection track-sc0 src,ipmask(32,64)",
        f"tcp-request connection reject if {{ sc0_conn_cur gt {limit} }}",
        *rules,
    ]


def _returned(refusal: Refusal) -> str:
    status = refusal.status.value
    return f"http-request return status {status} content-type application/json string '{refusal.body()}'"


def page_path(directory: Path, status: int) -> Path:
    """Return a path other than Ray's `500.http`, which Ray writes only once."""
    return directory / f"says-{status}.http"


def _lines(lines: list[str]) -> str:
    return "".join(f"\n    {line}" for line in lines)


def _found(pattern: re.Pattern[str], config: str) -> re.Match[str]:
    found = pattern.search(config)
    if found is None:
        raise EdgeError(f"HAProxy's configuration, as Ray writes it, has nothing like {pattern.pattern!r}")
    return found


def _replaced(pattern: re.Pattern[str], config: str, new: Callable[[re.Match[str]], str]) -> str:
    _found(pattern, config)
    return pattern.sub(new, config, count=1)
