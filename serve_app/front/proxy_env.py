"""Owns the environment that our `serve run` gives to Ray Serve: HAProxy in front, with files and ports of its own.
Never overrides what the user set, and never speaks for a cluster that this command does not start."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from serve_app.auth.keys import Keys, KeysFileError
from serve_app.edge.cors import VARIABLE, Policy, written
from serve_app.front.haproxy import BINARY_PATH, HAProxyMisconfigured, HAProxyUnusable, private_haproxy
from serve_app.front.preflight import our_applications
from serve_app.settings.application import AppSettings
from serve_app.settings.cors import allowed_origins

ENABLE = "RAY_SERVE_ENABLE_HA_PROXY"

_LONGEST_STREAM_S = 3600
"""A reload of HAProxy (a replica came or went) leaves running streams to the old process, which is killed after this
long, and them with it in silence."""
_DRAIN_MARGIN_S = 60
_DEREGISTER_S = 2
"""How long an ingress replica that is to end still accepts connections. HAProxy leaves it out after 0.2 s (measured
on two idle cores), and takes a connection that is refused to another replica."""

_CORES_PER_THREAD = 4
"""HAProxy's threads cost by waking each other; one passes on 50,000 tokens a second (15 to 20 us each, measured)."""

_ONE_LOOP = {
    # The request's path in one event loop instead of three: fewer hops between threads a token, and a slow client's
    # back-pressure reaches the ingress. Handles cannot be called from synchronous code then; ours are not.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}

_END_WHAT_HANGS = {
    # A replica that fails its health checks ends at once, and its streams go on elsewhere. Otherwise Serve asks it to
    # end by itself, which it cannot hear, and waits as at a shutdown: 135 s by default (seen with a stopped engine).
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}

_UNHURRIED = {
    # How often Serve's controller looks at every replica, in seconds; 0.1 by default, which takes 0.10 of a core with
    # what Ray notes of it, for as long as the server is there; this 0.04 (measured). An engine of two cores feels it. A
    # replica that fails or is wanted is noticed after seconds in any case: by health checks and load reports.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
}

_AS_OTHERS = {
    # Ray runs its workers at niceness 15, our engines, ingress and HAProxy among them: whatever else the node runs at 0
    # then goes first: beside another busy server, streams had 57 ms a token at 15 and 44 at 0 (one run each).
    "RAY_worker_niceness": "0",
}

_ONE_AT_A_TIME = {
    # Where a node runs out of memory, Ray's monitor ends one worker, and looks again. It begins with the controller of
    # Serve, which starts anew, and which no stream needs. By Ray's default it ends as many at once as free what is
    # missing and a reserve: of a small server all seven, HAProxy included, though 1.3 MB were missing (seen).
    "RAY_worker_killing_policy_by_group": "true",
}


_ANSWERED_ELSEWHERE = {
    # A request that got no byte of its answer from an ingress replica that ends goes to another; ours may run twice.
    # HAProxy would close the client's connection without a word, if the one to the replica had served another request.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
}

GUARD = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
"""Which of serve_app.edge.http_server's Ray Serve calls in each process that serves HTTP, before it does."""
_GUARDS_ALL = {GUARD: "serve_app.edge.http_server:guard_ours"}
_GUARDS_SOME = {GUARD: "serve_app.edge.http_server:guard_shared"}

ALL_OURS = _ONE_LOOP | _END_WHAT_HANGS | _UNHURRIED | _AS_OTHERS | _ONE_AT_A_TIME | _ANSWERED_ELSEWHERE | _GUARDS_ALL


@dataclass(frozen=True, slots=True)
class _Served:
    """What matters here of a config: the longest drain of our applications, how long their clients may stand still,
    whether there are other applications, and which web pages may use ours."""

    drain_timeout_s: float
    client_stall_timeout_s: float
    only_ours: bool
    policies: tuple[Policy, ...]


@contextmanager
def serving_environment(arguments: list[str], configs: list[Path], environ: MutableMapping[str, str]) -> Iterator[None]:
    """Set what Ray Serve is to find in `environ`; the daemons that `serve run` starts inherit it. To be entered
    before anything imports `ray.serve`, left when Serve has ended.

    Raises:
        HAProxyUnusable: the user asked for HAProxy by name, and it cannot run here.
    """
    served = next(filter(None, map(_served, configs)), None)
    with ExitStack() as held:
        if served is not None and starts_a_cluster(arguments, environ):
            for name, value in _of_all_replicas(served).items():
                environ.setdefault(name, value)
            environ.setdefault(VARIABLE, written(served.policies))
            _put_haproxy_in_front(served, environ, held)
        yield


def _served(config: Path) -> _Served | None:
    content = yaml.safe_load(config.read_text())
    routed = [(prefix, AppSettings.model_validate(args)) for _, prefix, args in our_applications(content)]
    ours = [settings for _, settings in routed]
    if not ours:
        return None
    longest_s = max(settings.drain_timeout_s for settings in ours)
    stall_s = max(settings.client_stall_timeout_s for settings in ours)
    policies = tuple(_policy(prefix, settings) for prefix, settings in routed)
    return _Served(longest_s, stall_s, only_ours=len(ours) == len(content["applications"]), policies=policies)


def _policy(prefix: str, settings: AppSettings) -> Policy:
    """As the application has it. A file of keys that cannot be read here counts as none: fewer pages may use that."""
    try:
        needs_keys = Keys.load(settings.auth).are_needed
    except KeysFileError:
        needs_keys = bool(settings.auth.keys)
    origins, regex = allowed_origins(settings.cors, needs_keys=needs_keys)
    return Policy(prefix, origins, regex, settings.cors.max_age)


def starts_a_cluster(arguments: list[str], environ: MutableMapping[str, str]) -> bool:
    """Whether `serve run` starts a Ray of its own, as `ray.init` decides it."""
    address = environ.get("RAY_ADDRESS") or None
    for at, argument in enumerate(arguments):
        if argument in ("--address", "-a"):
            address = next(iter(arguments[at + 1 :]), None)
        elif argument.startswith("--address="):
            address = argument.partition("=")[2]
    if address is not None:
        return address == "local"
    from ray._private.utils import read_ray_address  # what `ray start` notes for `ray.init()` to join

    return not read_ray_address()


def _of_all_replicas(served: _Served) -> dict[str, str]:
    """Somebody else's application may call handles from synchronous code, and end as it likes."""
    return ALL_OURS if served.only_ours else _GUARDS_SOME


def _put_haproxy_in_front(served: _Served, environ: MutableMapping[str, str], held: ExitStack) -> None:
    asked = environ.get(ENABLE)
    if asked not in (None, "1"):
        return
    try:
        haproxy = held.enter_context(private_haproxy(environ))
    except HAProxyUnusable as reason:
        if asked == "1" or isinstance(reason, HAProxyMisconfigured):
            raise
        print(f"Ray Serve's Python proxy is in front, for HAProxy cannot run here: {reason}", flush=True)
        return
    hard_stop_s = max(_LONGEST_STREAM_S, int(served.drain_timeout_s) + _DRAIN_MARGIN_S)
    environ.setdefault(ENABLE, "1")
    environ.setdefault("RAY_SERVE_HAPROXY_NBTHREAD", str(max(1, (os.cpu_count() or 1) // _CORES_PER_THREAD)))
    # By Ray's default an hour: so long, a client held a connection by a body that it did not send, or an answer unread.
    environ.setdefault("RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S", str(math.ceil(served.client_stall_timeout_s)))
    environ.setdefault("RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", str(hard_stop_s))
    environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", str(_DEREGISTER_S))
    environ[BINARY_PATH] = str(haproxy.launcher)  # which becomes the one that was set here
    for name, value in haproxy.environment.items():
        environ.setdefault(name, value)
