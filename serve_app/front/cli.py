"""Owns the `serve` command of this project: Ray's own, with a check before `serve run` and a clean end after it.
Never changes what Ray's commands do otherwise; arguments and output are Ray's."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from serve_app.front.haproxy import HAProxyUnusable
from serve_app.front.preflight import ConfigRefused, preflight
from serve_app.front.proxy_env import serving_environment


def main() -> None:
    """Run Ray's `serve`. `serve run` of a config with our application is checked first, and has HAProxy in front."""
    arguments = sys.argv[1:]
    configs = _configs_of(arguments)
    try:
        for config in configs:
            preflight(config)
        _exit_on_signals()
        with serving_environment(arguments, configs, os.environ):
            _run()
    except (ConfigRefused, HAProxyUnusable) as refusal:
        sys.exit(str(refusal))


def _configs_of(arguments: list[str]) -> list[Path]:
    """What may be the config of a `serve run`; a `--runtime-env` is YAML as well."""
    if arguments[:1] != ["run"]:
        return []
    candidates = (Path(argument) for argument in arguments[1:] if argument.endswith((".yaml", ".yml")))
    return [path for path in candidates if path.is_file()]


def _exit_on_signals() -> None:
    """As Ray itself does for SIGTERM, later. Until then a signal must not leave files behind."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _exit_with_signal)


def _exit_with_signal(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(signum)


def _run() -> None:
    """When a signal ends `serve run`, let streams finish before Serve is taken down.

    Ray's SIGTERM handler raises SystemExit and leaves the cluster to die with the process; its Ctrl-C handling
    kills the proxies first. Both cut running streams in silence.
    """
    import ray  # here, because Ray Serve reads its environment when it is imported
    from ray.serve.scripts import cli

    from serve_app.front.shutdown import drain_and_shutdown

    try:
        cli()
    except SystemExit as end:
        if end.code not in (signal.SIGTERM, signal.SIGINT) or not ray.is_initialized():
            raise
        drain_and_shutdown()
