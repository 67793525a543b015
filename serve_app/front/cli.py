"""Owns the `serve` command of this project: Ray's own, with checks before `serve run` and a clean end after it.
Never changes what Ray's commands do otherwise; arguments are Ray's, and `--verbose`."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import uuid
from contextlib import ExitStack
from importlib.metadata import version
from types import FrameType

from serve_app.front.arguments import Arguments
from serve_app.front.config_file import ConfigRefused, read_config
from serve_app.front.console import Console
from serve_app.front.haproxy import HAProxyUnusable
from serve_app.front.preflight import preflight
from serve_app.front.proxy_env import serving_environment, starts_a_cluster
from serve_app.front.servers import running_servers
from serve_app.front.start import StartFailed, in_a_line
from serve_app.front.this_machine import EngineCheck, checking
from serve_app.settings.instance import VARIABLE

VERBOSE_HELP = "Show what Ray and all replicas log, which otherwise goes to a file."


def main() -> None:
    """Run Ray's `serve`. `serve run` of a config with our application is checked first, and has HAProxy in front."""
    arguments, console = Arguments.read(sys.argv[1:], os.environ), Console()
    try:
        if arguments.of_ray[:1] == ["--version"]:
            console.say(f"chunkserve {version('chunkserve')}, Ray {version('ray')}")
        elif arguments.config is not None:
            _run(arguments, console)
        else:
            _exit_on_signals()
            _leave_to_ray(arguments, console)
    except (ConfigRefused, HAProxyUnusable, StartFailed) as refusal:
        console.complain(str(refusal))
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 - nobody is above; the terminal may see nothing but this line
        traceback.print_exc()
        console.complain(f"serve failed: {in_a_line(error)}")
        sys.exit(1)


def _run(arguments: Arguments, console: Console) -> None:
    assert arguments.config is not None
    config = read_config(arguments.config)
    applications, checks = preflight(config), list[EngineCheck]()
    _exit_on_signals()
    with ExitStack() as held:
        own_cluster = starts_a_cluster(arguments.of_ray, os.environ)  # Ray's own start would make it look otherwise
        if own_cluster:
            checks = held.enter_context(checking(config, applications, arguments))
            os.environ[VARIABLE] = uuid.uuid4().hex
        held.enter_context(serving_environment(arguments.of_ray, [config.path], os.environ))
        if not (applications and arguments.leaves_the_run_to_us):
            _leave_to_ray(arguments, console)
            return
        from serve_app.front.run import Launch, run

        if not arguments.verbose:
            held.enter_context(console.quiet())
            if console.log is not None:
                console.say(f"starting {config.path}; what Ray and the replicas print: {console.log}")
        run(Launch(arguments, config, applications, own_cluster), checks, console)


def _leave_to_ray(arguments: Arguments, console: Console) -> None:
    """Ray's command, to its end. Its SIGTERM handler would leave the cluster to die with the process, and its Ctrl-C
    handling kills the proxies first: both cut running streams in silence."""
    if arguments.wants_a_server and "RAY_DASHBOARD_ADDRESS" not in os.environ:
        _find_server()
    import click
    import ray
    from ray.serve.scripts import cli  # here, because Ray Serve reads its environment when it is imported

    from serve_app.front.shutdown import drain_and_shutdown

    cli.commands["run"].params.append(click.Option(["--verbose"], is_flag=True, expose_value=False, help=VERBOSE_HELP))
    try:
        cli(args=arguments.of_ray, prog_name="serve")
    except ConnectionError as error:
        raise StartFailed(f"no server answers: {' '.join(str(error).split())}") from None
    except SystemExit as end:
        if end.code not in (signal.SIGTERM, signal.SIGINT) or not ray.is_initialized():
            raise
        drain_and_shutdown(console.say)


def _find_server() -> None:
    """Ray's default is the first dashboard of this machine, whose ever it is, and without the token that it wants."""
    # Each application of ours is noted, and those of one Ray have one dashboard.
    found = {server.dashboard: server for server in running_servers()}.values()
    if len(found) > 1:
        listed = ", ".join(f"{server.dashboard} ({server.url})" for server in found)
        raise ConfigRefused(f"{len(found)} servers run here: choose one by --address: {listed}")
    for server in found:
        os.environ["RAY_DASHBOARD_ADDRESS"] = server.dashboard
        if server.auth_mode:
            os.environ.setdefault("RAY_AUTH_MODE", server.auth_mode)


def _exit_on_signals() -> None:
    """As Ray itself does for SIGTERM, later. Until then a signal must not leave files behind."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _exit_with_signal)


def _exit_with_signal(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(signum)
