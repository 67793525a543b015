"""Implements this project's `serve` command: Ray's own, with checks before `serve run` and a clean shutdown after it.
Never changes anything else in Ray's commands; the only further argument is `--verbose`."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import uuid
from contextlib import ExitStack
from importlib.metadata import version

from serve_app.front.arguments import Arguments
from serve_app.front.config_file import ConfigRefused, read_config, refuse_tls
from serve_app.front.console import Console
from serve_app.front.haproxy import HAProxyUnusable
from serve_app.front.output import BY_SIGNAL, OutputLost, disk_problem
from serve_app.front.preflight import preflight
from serve_app.front.proxy_env import ENABLE, serving_environment, starts_a_cluster
from serve_app.front.servers import running_servers
from serve_app.front.signals import exit_on_signals
from serve_app.front.start import StartFailed, in_a_line
from serve_app.front.this_machine import EngineCheck, checking
from serve_app.front.threads import thread_warnings
from serve_app.settings.instance import VARIABLE

VERBOSE_HELP = "Show the logs of Ray and all replicas, which otherwise go to a file."


FAILED = 1


def main() -> None:
    """Run Ray's `serve` with this process's arguments, and exit with 1 if it fails."""
    serve(sys.argv[1:], Console(), refused=FAILED)


def serve(words: list[str], console: Console, *, refused: int) -> None:
    """Run Ray's `serve`. A `serve run` of a config with our application is checked first, and gets HAProxy in front.

    Args:
        words: the command line after the program's name.
        refused: the exit status for a config that cannot be served; other failures have FAILED.

    Raises:
        SystemExit: it failed, which was reported.
        Signalled: a signal came while there was nothing to take down.
    """
    arguments = Arguments.read(words, os.environ)
    try:
        if arguments.of_ray[:1] == ["--version"]:
            console.say(f"chunkserve {version('chunkserve')}, Ray {version('ray')}")
        elif arguments.config is not None:
            _run(arguments, console)
        else:
            if arguments.deployed is not None and not arguments.deployed.is_file():
                raise ConfigRefused(f"{arguments.deployed}: no such file: expected the YAML file of a Serve config.")
            exit_on_signals()
            _leave_to_ray(arguments, console)
    except (ConfigRefused, HAProxyUnusable, StartFailed) as refusal:
        console.complain(str(refusal))
        sys.exit(refused if isinstance(refusal, ConfigRefused) else FAILED)
    except OutputLost as lost:
        if lost.has_left:
            sys.exit(BY_SIGNAL + signal.SIGPIPE)
        console.complain(str(lost))
        sys.exit(FAILED)
    except Exception as error:  # noqa: BLE001 - there is no caller; the terminal may show nothing but this line
        if (problem := disk_problem(error)) is None:
            traceback.print_exc()
        console.complain(problem or f"serve failed: {in_a_line(error)}")
        sys.exit(FAILED)


def _run(arguments: Arguments, console: Console) -> None:
    assert arguments.config is not None
    config = read_config(arguments.config)
    applications, checks = preflight(config), list[EngineCheck]()
    exit_on_signals()
    with ExitStack() as held:
        own_cluster = starts_a_cluster(arguments.of_ray, os.environ)  # once Ray runs, this would answer no
        if own_cluster:
            for warning in thread_warnings(applications):
                console.say(f"warning  {warning}")
            checks = held.enter_context(checking(config, applications, arguments))
            os.environ[VARIABLE] = uuid.uuid4().hex
        held.enter_context(serving_environment(arguments.of_ray, [config.path], os.environ))
        if own_cluster and os.environ.get(ENABLE) == "1":
            refuse_tls(config)
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
    """Run Ray's command to its end, but drain at a signal. Ray's SIGTERM handler would let the cluster die with the
    process, and its Ctrl-C handling kills the proxies first: both cut running streams off without an error."""
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
        drain_and_shutdown(console.mention)


def _find_server() -> None:
    """Find the dashboard of this user's server. Ray's default is the first one on this machine, whoever owns it, and
    without the token that it requires."""
    # There is a note for each application, and applications of the same Ray share a dashboard.
    servers = {server.dashboard: server for server in running_servers()}.values()
    if len(servers) > 1:
        listed = ", ".join(f"{server.dashboard} ({server.url or 'no address'})" for server in servers)
        raise ConfigRefused(f"{len(servers)} servers run here; choose one with --address: {listed}")
    for server in servers:
        os.environ["RAY_DASHBOARD_ADDRESS"] = server.dashboard
        if server.auth_mode:
            os.environ.setdefault("RAY_AUTH_MODE", server.auth_mode)
