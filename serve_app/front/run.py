"""Owns a `serve run` of our applications, from Ray's start to its end: submit, wait, tell, and drain at a signal.
Never leaves Ray's own command to wait: it would wait for ever beside an application that failed."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from serve_app.front.arguments import Arguments
from serve_app.front.config_file import ConfigRefused, ServeConfig, has_proxies
from serve_app.front.console import Console
from serve_app.front.preflight import Application
from serve_app.front.servers import RunningServer, noted
from serve_app.front.start import (
    StartFailed,
    engine_lines,
    in_a_line,
    ready_lines,
    url_of,
    wait_until_answering,
    wait_until_running,
)
from serve_app.front.this_machine import EngineCheck

_ENGINE_ANSWER_S = 30


@dataclass(frozen=True, slots=True)
class Launch:
    """applications: ours among the config's. own_cluster: whether the Ray below is this command's, so that nobody else
    serves there, and its proxies are here."""

    arguments: Arguments
    config: ServeConfig
    applications: list[Application]
    own_cluster: bool

    @property
    def names(self) -> list[str]:
        """Of all applications of the config."""
        return [str(app.get("name", "default")) for app in self.config.applications]


def run(launch: Launch, checks: list[EngineCheck], console: Console) -> None:
    """Serve until a signal. To be called with the environment set that Ray Serve is to find.

    Raises:
        ConfigRefused: a check of an engine failed, or Ray Serve refuses the config.
        StartFailed: Ray or an application did not start; what had is taken down again.
        Exception: whatever else went wrong; the same is taken down.
        SystemExit: a signal came before there was anything to take down.
    """
    began = time.monotonic()
    import ray  # here, while the checks run: it takes as long as they do

    from serve_app.front.shutdown import drain_and_shutdown

    for check in checks:
        check.finish()
    with ExitStack() as held:
        try:
            _submit(launch.arguments)
            _tell(launch, console, held, began)
            while True:
                signal.pause()
        except ConfigRefused:
            raise
        except Exception:
            if ray.is_initialized():
                _take_down(launch, console)
            raise
        except SystemExit as end:
            if end.code not in (signal.SIGTERM, signal.SIGINT) or not ray.is_initialized():
                raise
            drain_and_shutdown(console.say)


def _take_down(launch: Launch, console: Console) -> None:
    """After a failure, which is to be told whether or not this works. On a cluster that others use, the applications of
    the config alone."""
    from serve_app.front.shutdown import drain_and_delete, drain_and_shutdown

    try:
        if launch.own_cluster:
            drain_and_shutdown(console.say)
        else:
            drain_and_delete(launch.names, console.say)
    except Exception as error:  # noqa: BLE001 - the failure before it is the one to raise
        traceback.print_exc()
        console.say(f"not everything was taken down: {in_a_line(error)}")


def _submit(arguments: Arguments) -> None:
    """What Ray's `serve run` does before it waits. It prints its exceptions, and ends as if all were well."""
    import click
    from pydantic import ValidationError
    from ray.serve.scripts import cli

    try:
        first, *rest = (of for of in arguments.of_ray if of != "--blocking")  # the last of the two would win
        with _in_groups_of_their_own():
            cli.main(args=[first, "--non-blocking", *rest], prog_name="serve", standalone_mode=False)
    except ValidationError as error:
        reasons = (f"{'.'.join(map(str, of['loc']))}: {of['msg']}" for of in error.errors(include_url=False))
        raise ConfigRefused("\n".join(f"{arguments.config}: {reason}" for reason in reasons)) from error
    except click.ClickException as error:
        raise ConfigRefused(error.format_message()) from error
    except SystemExit as end:
        if end.code in (None, 0):
            raise StartFailed("Ray Serve did not start; its last words are in the log") from end
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise StartFailed(f"Ray did not start: {' '.join(str(error).split())}") from error


@contextmanager
def _in_groups_of_their_own() -> Iterator[None]:
    """Start Ray's processes outside this command's process group. A SIGTERM to the group, as `timeout` or a shell's
    `kill %1` sends it, would end them at once, and with them the streams that are to finish. They end with this
    process all the same: the kernel kills them."""
    from ray._private import services

    started = services.ConsolePopen

    class InGroupOfItsOwn(started):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, process_group=0, **options)

    services.ConsolePopen = InGroupOfItsOwn
    try:
        yield
    finally:
        services.ConsolePopen = started


def _tell(launch: Launch, console: Console, held: ExitStack, began: float) -> None:
    from ray import serve

    wait_until_running(launch.names, serve.status, console.say)
    for application in launch.applications:
        url = url_of(launch.config, application.route_prefix)
        unreachable = _why_unreachable(launch, url)
        for line in _told_by_engine(application):
            console.say(line)
        if unreachable is None:
            console.say(ready_lines(application, url, time.monotonic() - began))
        else:
            console.say(f"application {application.name} is running; {unreachable}")
        held.enter_context(noted(_running(url)))


def _why_unreachable(launch: Launch, url: str) -> str | None:
    """None: it answers. A cluster that ran before keeps its own proxies, on the nodes and the port of its first config.

    Raises:
        StartFailed: nothing answers, and the proxies are this command's own.
    """
    if not has_proxies(launch.config):
        return "proxy_location is Disabled: it is reached by its handle alone"
    try:
        wait_until_answering(url)
    except StartFailed as reason:
        if launch.own_cluster:
            raise
        return f"not reachable from here: {reason}"
    return None


def _running(url: str) -> RunningServer:
    from ray._private.worker import _global_node

    dashboard = "" if _global_node is None else f"http://{_global_node.webui_url}"
    return RunningServer(url, dashboard, os.environ.get("RAY_AUTH_MODE", ""))


def _told_by_engine(application: Application) -> list[str]:
    """A warning where it does not answer: the application runs without these lines."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        return _of_engine(application)
    except (RayError, RayServeException, TimeoutError) as error:
        return [f"warning  no engine of {application.name} says what it chose: {in_a_line(error)}"]


def _of_engine(application: Application) -> list[str]:
    """None where no engine runs, and to ask would start one."""
    bounds = application.settings.autoscaling
    if bounds is not None and bounds.min_replicas == 0:
        return [f"model    {application.settings.model_id}: an engine starts at the first request"]
    from ray import serve

    engine = serve.get_deployment_handle("Engine", application.name)
    engine._init(_run_router_in_separate_loop=True)  # here is no event loop for RUN_ROUTER_IN_SEPARATE_LOOP=0
    return engine_lines(application, engine.resolved_config.remote().result(timeout_s=_ENGINE_ANSWER_S))
