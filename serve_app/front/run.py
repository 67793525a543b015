"""Runs `serve run` for our applications from Ray's start to its end: submits, waits, reports, and drains at a signal.
Never lets Ray's own command wait: it would wait forever even if an application failed."""

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
from serve_app.front.signals import exit_on_signals
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
    """`applications`: this project's applications in the config. `own_cluster`: this command started the Ray cluster,
    so that nobody else serves there, and its proxies are on this machine."""

    arguments: Arguments
    config: ServeConfig
    applications: list[Application]
    own_cluster: bool

    @property
    def names(self) -> list[str]:
        """The names of all applications in the config."""
        return [str(app.get("name", "default")) for app in self.config.applications]


def run(launch: Launch, checks: list[EngineCheck], console: Console) -> None:
    """Serve until a signal. Ray Serve's environment must be set before.

    Raises:
        ConfigRefused: a check of an engine failed, or Ray Serve refuses the config.
        StartFailed: Ray or an application did not start; what did start is taken down again.
        Exception: something else failed; what did start is taken down again.
        SystemExit: a signal came while there was nothing to take down.
    """
    began = time.monotonic()
    import ray  # imported while the checks run, because it takes as long as they do

    for check in checks:
        check.finish()
    with ExitStack() as held:
        try:
            _submit(launch.arguments)
            exit_on_signals()  # Ray has replaced what a signal did
            _report(launch, console, held, began)
            while True:
                signal.pause()
        except ConfigRefused:
            raise
        except Exception:
            if ray.is_initialized():
                _take_down_after_failure(launch, console)
            raise
        except SystemExit as end:
            if end.code not in (signal.SIGTERM, signal.SIGINT) or not ray.is_initialized():
                raise
            _take_down(launch, console)


def _take_down(launch: Launch, console: Console) -> None:
    """Take everything down. On a cluster that others use, only take the config's applications down."""
    from serve_app.front.shutdown import drain_and_delete, drain_and_shutdown

    if launch.own_cluster:
        drain_and_shutdown(console.mention)
    else:
        drain_and_delete(launch.names, console.mention)


def _take_down_after_failure(launch: Launch, console: Console) -> None:
    """Take everything down without hiding the failure."""
    try:
        _take_down(launch, console)
    except Exception as error:  # noqa: BLE001 - the earlier failure must be raised instead
        traceback.print_exc()
        console.mention(f"not everything was taken down: {in_a_line(error)}")


def _submit(arguments: Arguments) -> None:
    """Do what Ray's `serve run` does before it waits. It prints exceptions, and then ends as if nothing had failed."""
    import click
    from pydantic import ValidationError
    from ray.serve.scripts import cli

    try:
        # The last of --blocking and --non-blocking would win.
        first, *rest = (argument for argument in arguments.of_ray if argument != "--blocking")
        with _in_groups_of_their_own():
            cli.main(args=[first, "--non-blocking", *rest], prog_name="serve", standalone_mode=False)
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
        reasons = (f"{'.'.join(map(str, mistake['loc']))}: {mistake['msg']}" for mistake in mistakes)
        raise ConfigRefused("\n".join(f"{arguments.config}: {reason}" for reason in reasons)) from error
    except click.ClickException as error:
        raise ConfigRefused(error.format_message()) from error
    except SystemExit as end:
        if end.code in (None, 0):
            raise StartFailed("Ray Serve did not start; its last messages are in the log") from end
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise StartFailed(f"Ray did not start: {' '.join(str(error).split())}") from error


@contextmanager
def _in_groups_of_their_own() -> Iterator[None]:
    """Start Ray's processes outside this command's process group. A SIGTERM to the group, as sent by `timeout` or a
    shell's `kill %1`, would end them at once, and cut off the streams that should finish. They still end with this
    process: the kernel kills them."""
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


def _report(launch: Launch, console: Console, held: ExitStack, began: float) -> None:
    from ray import serve

    wait_until_running(launch.names, serve.status, console.say)
    for application in launch.applications:
        url = _address(launch, application)
        unreachable = _why_unreachable(launch, application, url)
        for line in _lines_or_warning(application):
            console.say(line)
        if unreachable is None:
            console.say(ready_lines(application, url, time.monotonic() - began))
        else:
            console.say(f"application {application.name} is running; {unreachable}")
        held.enter_context(noted(_running(url)))


def _address(launch: Launch, application: Application) -> str:
    """Return the application's URL; "" if only its handle reaches it."""
    if application.route_prefix is None or not has_proxies(launch.config):
        return ""
    return url_of(launch.config, application.route_prefix)


def _why_unreachable(launch: Launch, application: Application, url: str) -> str | None:
    """Say why the application cannot be reached; None if it answers. A cluster that already ran keeps its own proxies,
    on the nodes and the port of its first config.

    Raises:
        StartFailed: nothing answers, although the proxies are this command's own.
    """
    if not has_proxies(launch.config):
        return "proxy_location is Disabled, so only its handle reaches it"
    if application.route_prefix is None:
        return "route_prefix is null, so only its handle reaches it"
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


def _lines_or_warning(application: Application) -> list[str]:
    """Return the engine's lines, or a warning if it does not answer; the application runs in either case."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    lines = []
    for model, engine in zip(application.each_model(), application.settings.engine_names, strict=True):
        try:
            lines += _lines_of_engine(model, engine)
        except (RayError, RayServeException, TimeoutError) as error:
            lines.append(f"warning  no engine of {application.name} reports its configuration: {in_a_line(error)}")
    return lines


def _lines_of_engine(application: Application, deployment: str) -> list[str]:
    """Ask an engine for its configuration, unless none may be running: the question would start one."""
    if application.settings.may_sleep:
        return [f"model    {application.settings.model_id}: an engine starts at the first request"]
    from ray import serve

    engine = serve.get_deployment_handle(deployment, application.name)
    engine._init(_run_router_in_separate_loop=True)  # here is no event loop for RUN_ROUTER_IN_SEPARATE_LOOP=0
    return engine_lines(application, engine.facts.remote().result(timeout_s=_ENGINE_ANSWER_S).config)
