"""Owns the `serve` command of this project: Ray's own, with a check before `serve run` and a clean end after it.
Never changes what Ray's commands do otherwise; arguments and output are Ray's."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatusOverview, ReplicaState
from ray.serve.scripts import cli

from serve_app.preflight import ConfigRefused, preflight


def main() -> None:
    """Run Ray's `serve`. When a signal ends `serve run`, let streams finish before Serve is taken down.

    Ray's SIGTERM handler raises SystemExit and leaves the cluster to die with the process; its Ctrl-C handling
    kills the proxies first. Both cut running streams in silence.
    """
    _check(sys.argv[1:])
    signal.signal(signal.SIGINT, _exit_with_signal)  # Ray itself does so for SIGTERM
    try:
        cli()
    except SystemExit as end:
        if end.code not in (signal.SIGTERM, signal.SIGINT) or not ray.is_initialized():
            raise
        drain_and_shutdown()


def _check(arguments: list[str]) -> None:
    """Refuse a config that `serve run` could not serve, in its own words and before Ray starts."""
    if arguments[:1] != ["run"]:
        return
    for config in (Path(argument) for argument in arguments[1:] if argument.endswith((".yaml", ".yml"))):
        if config.is_file():
            try:
                preflight(config)
            except ConfigRefused as refusal:
                sys.exit(str(refusal))


def _exit_with_signal(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(signum)


def drain_and_shutdown() -> None:
    """Let every application finish or end its streams, then take Serve down. A second signal cuts this short."""
    signal.alarm(0)  # Ray's native SIGTERM handler has set one that aborts the process after three seconds
    print("Shutting down: letting running requests finish. Signal again to stop at once.", flush=True)
    for name, app in serve.status().applications.items():
        if (ended := drain(name, app)) is not None:
            _report(name, ended)
            _delete(name)
    serve.shutdown()


def drain(app_name: str, app: ApplicationStatusOverview) -> int | None:
    """Ask every ingress replica of an application to drain; return how many requests had to be ended, or None if none
    of them runs: then there is nobody to wait for, and a deployment that keeps failing would be waited for in vain.

    An application that is still deploying, or unhealthy, has streams too: what counts is a replica that runs.
    """
    try:
        ingress = serve.get_app_handle(app_name)
        deployment = app.deployments.get(ingress.deployment_name)
        if deployment is None or not deployment.replica_states.get(ReplicaState.RUNNING):
            return None  # a broadcast would wait for the first replica
        late: list[int] = ingress.broadcast("drain").results()
    except (RayError, RayServeException) as error:
        # Somebody else's application in the same config, one that is being deleted, or a replica that just died.
        print(f"{app_name} was not drained: {type(error).__name__}", flush=True)
        return 0
    return sum(late)


def _report(app_name: str, ended: int) -> None:
    if ended:
        print(f"{app_name}: {ended} requests did not finish in time and were ended with an error.", flush=True)


def _delete(app_name: str) -> None:
    """Remove the application while the proxies still run: `serve.shutdown` kills them before the last bytes left."""
    try:
        serve.delete(app_name)
    except TimeoutError as error:
        print(f"{app_name}: {error}", flush=True)
