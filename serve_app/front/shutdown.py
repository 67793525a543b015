"""Ends a `serve run` cleanly: running requests finish or are ended with an error, and then Serve is taken down.
Never decides how long that takes: each application's ingress does, by its `drain_timeout_s`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatusOverview, ReplicaState

Say = Callable[[str], None]


def drain_and_shutdown(say: Say) -> None:
    """Let every application finish or end its streams, then take Serve down. A second signal cuts this short."""
    signal.alarm(0)  # the one of Ray's handler, if the signal came before `exit_on_signals` replaced that
    say("Shutting down: letting running requests finish. Signal again to stop at once.")
    for name, app in serve.status().applications.items():
        if (ended := drain(name, app, say)) is not None:
            _report(name, ended, say)
            _delete(name, say)
    serve.shutdown()


def drain_and_delete(names: Sequence[str], say: Say) -> None:
    """Drain and delete only these applications; the others on their cluster continue."""
    signal.alarm(0)  # as above
    say(f"Deleting {', '.join(names)}: letting running requests finish.")
    applications = serve.status().applications
    for name in names:
        if name in applications:
            _report(name, drain(name, applications[name], say) or 0, say)
            _delete(name, say)


def drain(app_name: str, app: ApplicationStatusOverview, say: Say) -> int | None:
    """Ask every ingress replica of an application to drain, and return how many requests had to be ended; None if no
    replica runs, because then a wait could last forever.

    An application that is still deploying or unhealthy may have streams, too, so only running replicas count.
    """
    try:
        ingress = serve.get_app_handle(app_name)
        deployment = app.deployments.get(ingress.deployment_name)
        if deployment is None or not deployment.replica_states.get(ReplicaState.RUNNING):
            return None  # a broadcast would wait for the first replica
        if not ingress.is_initialized:
            ingress._init(_run_router_in_separate_loop=True)  # here is no event loop for RUN_ROUTER_IN_SEPARATE_LOOP=0
        late: list[int] = ingress.broadcast("drain").results()
    except (RayError, RayServeException) as error:
        # Another project's application in the same config, one that is being deleted, or a replica that just died.
        say(f"{app_name} was not drained: {type(error).__name__}")
        return 0
    return sum(late)


def _report(app_name: str, ended: int, say: Say) -> None:
    if ended:
        say(f"{app_name}: {ended} requests did not finish in time and were ended with an error.")


def _delete(app_name: str, say: Say) -> None:
    """Remove the application while the proxies still run: `serve.shutdown` kills them before the last bytes are
    sent."""
    try:
        serve.delete(app_name)
    except TimeoutError as error:
        say(f"{app_name}: {error}")
