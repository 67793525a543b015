"""Sets Ray Serve's environment for `serve run`: HAProxy in front, with files and ports of its own.
Never overrides what the user has set, and never changes anything for a cluster that this command does not start."""

from __future__ import annotations

import math
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
"""When HAProxy reloads because a replica came or went, its old process keeps the running streams. It is killed after
this long, which cuts its streams off without an error."""
_DRAIN_MARGIN_S = 60
_DEREGISTER_S = 2
"""How long an ingress replica that is ending still accepts connections. HAProxy stops using it after 0.2 s (measured on
two idle cores), and takes a refused connection to another replica."""

_ONE_LOOP = {
    # Runs the request's path in one event loop instead of three: there are fewer hops between threads per token, and a
    # slow client's back-pressure reaches the ingress. Handles then cannot be called from synchronous code; ours are
    # not.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}

_END_WHAT_HANGS = {
    # A replica that fails its health checks is ended at once, and its streams continue elsewhere. Otherwise Serve would
    # ask it to end by itself, which it cannot do, and wait as at a shutdown: 135 s by default (seen with a stopped
    # engine).
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}

_KEEPS_TRYING = {
    # Serve gives up a deployment that never had a replica after so many failed starts for each that it wants: a model
    # that sleeps would be lost by three failed wakes. So high, max_constructor_retry_count alone counts, which each
    # deployment of ours sets.
    "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1000000",
}

_UNHURRIED = {
    # How often Serve's controller looks at every replica, in seconds. The default of 0.1 takes 0.10 of a core all the
    # time, including Ray's own records of it; 0.3 takes 0.04 (measured). An engine with two cores is slowed by the
    # difference. Failures and the need for replicas take seconds to show anyway, in health checks and load reports.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
}

_AS_OTHERS = {
    # Ray runs its workers at niceness 15, including our engines, ingress and HAProxy, so that everything that the node
    # runs at 0 goes first. Beside another busy server, streams took 57 ms per token at 15 and 44 ms at 0 (one run
    # each).
    "RAY_worker_niceness": "0",
}

_ONE_AT_A_TIME = {
    # When a node runs out of memory, Ray's monitor ends one worker, and looks again. It begins with Serve's controller,
    # which restarts, and which no stream needs. By Ray's default it ends as many workers at once as free the missing
    # memory and a reserve: on a small server all seven, including HAProxy, although 1.3 MB were missing (seen).
    "RAY_worker_killing_policy_by_group": "true",
}


_ANSWERED_ELSEWHERE = {
    # If an ingress replica ends before the first byte of an answer, the request goes to another one; our requests may
    # run twice. Otherwise HAProxy would close the client's connection without an answer, if its own connection to the
    # replica had already served another request.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
}

GUARD = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
"""Names the function of serve_app.edge.http_server that Ray Serve calls first in each process that serves HTTP."""
_GUARDS_ALL = {GUARD: "serve_app.edge.http_server:guard_ours"}
_GUARDS_SOME = {GUARD: "serve_app.edge.http_server:guard_shared"}

ALL_OURS = (
    _ONE_LOOP
    | _END_WHAT_HANGS
    | _KEEPS_TRYING
    | _UNHURRIED
    | _AS_OTHERS
    | _ONE_AT_A_TIME
    | _ANSWERED_ELSEWHERE
    | _GUARDS_ALL
)


@dataclass(frozen=True, slots=True)
class _Served:
    """The parts of a config that matter here: the longest drain of our applications, how long their clients may stall,
    whether there are other applications, and which web pages may use ours."""

    drain_timeout_s: float
    client_stall_timeout_s: float
    only_ours: bool
    policies: tuple[Policy, ...]


@contextmanager
def serving_environment(arguments: list[str], configs: list[Path], environ: MutableMapping[str, str]) -> Iterator[None]:
    """Set Ray Serve's variables in `environ`; the daemons that `serve run` starts inherit them. Must be entered before
    anything imports `ray.serve`, and left when Serve has ended.

    Raises:
        HAProxyUnusable: the user explicitly asked for HAProxy, and it cannot run here.
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
    policies = tuple(_policy(prefix, settings) for prefix, settings in routed if prefix is not None)
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
    """Whether `serve run` starts a Ray cluster of its own; decides like `ray.init`."""
    address = environ.get("RAY_ADDRESS") or None
    for at, argument in enumerate(arguments):
        if argument in ("--address", "-a"):
            address = next(iter(arguments[at + 1 :]), None)
        elif argument.startswith("--address="):
            address = argument.partition("=")[2]
    if address is not None:
        return address == "local"
    from ray._private.utils import read_ray_address  # the address that `ray start` leaves for `ray.init()` to join

    return not read_ray_address()


def _of_all_replicas(served: _Served) -> dict[str, str]:
    """Choose the variables for all replicas. Other applications may call handles from synchronous code, and may need
    time to end, so they only get the guard."""
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
        print(f"Ray Serve's Python proxy is in front, because HAProxy cannot run here: {reason}", flush=True)
        return
    hard_stop_s = max(_LONGEST_STREAM_S, int(served.drain_timeout_s) + _DRAIN_MARGIN_S)
    environ.setdefault(ENABLE, "1")
    # Ray's default is an hour, during which a client could hold a connection without sending its body or reading.
    environ.setdefault("RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S", str(math.ceil(served.client_stall_timeout_s)))
    environ.setdefault("RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", str(hard_stop_s))
    environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", str(_DEREGISTER_S))
    environ[BINARY_PATH] = str(haproxy.launcher)  # the launcher starts the binary that was set here
    for name, value in haproxy.environment.items():
        environ.setdefault(name, value)
