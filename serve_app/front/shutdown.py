"""Ends a `serve run` cleanly: running requests finish or are ended with an error, and then Serve is taken down.
Never decides how long that takes: each application's ingress does, by its `drain_timeout_s`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import TypeVar

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatusOverview, ReplicaState

Say = Callable[[str], None]
T = TypeVar("T")


def drain_and_shutdown(say: Say) -> None:
    """Let every application finish or end its streams, then take Serve down. A second signal cuts this short."""
    signal.alarm(0)  # the one of Ray's handler, if the signal came before `exit_on_signals` replaced that
    say("Shutting down: letting running requests finish. Signal again to stop at once.")
    applications = serve.status().applications
    for name, ended in _drained(applications, say):
        if ended is not None:
            _report(name, ended, say)
            _delete(name, say)
    serve.shutdown()


def drain_and_delete(names: Sequence[str], say: Say) -> None:
    """Drain and delete only these applications; the others on their cluster continue."""
    signal.alarm(0)  # as above
    say(f"Deleting {', '.join(names)}: letting running requests finish. Signal again to stop at once.")
    applications = serve.status().applications
    for name, ended in _drained({name: applications[name] for name in names if name in applications}, say):
        _report(name, ended or 0, say)
        _delete(name, say)


def _drained(applications: Mapping[str, ApplicationStatusOverview], say: Say) -> Iterator[tuple[str, int | None]]:
    """Drain all at the same time, and yield what `drain` returns for each."""
    drains = [(name, _begun(partial(drain, name, app, say))) for name, app in applications.items()]
    for name, ended in drains:
        yield name, ended.result()


def _begun(call: Callable[[], T]) -> Future[T]:
    """Call it in a thread that does not keep the process from ending at a second signal, as an executor's would."""
    future = Future[T]()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            future.set_exception(error)

    Thread(target=work, daemon=True).start()
    return future


def drain(app_name: str, app: ApplicationStatusOverview, say: Say) -> int | None:
    """Ask every ingress replica of an application to drain, and return how many requests had to be ended; None if no
    replica runs, so that nobody can be asked.

    An application that is still deploying or unhealthy may have streams, too, so only running replicas count.
    """
    try:
        ingress = serve.get_app_handle(app_name)
        deployment = app.deployments.get(ingress.deployment_name)
        if deployment is None or not deployment.replica_states.get(ReplicaState.RUNNING):
            return None
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
