"""Contracts of the signals that end `serve`.
Never starts Serve: Ray alone changes what a signal does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest

PROGRAM = """
import os, signal, sys
import ray
from serve_app.front.signals import exit_on_signals

exit_on_signals()
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=sys.argv[2])
if sys.argv[1] == "again":
    exit_on_signals()
try:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
except SystemExit as end:
    print(end.code == signal.SIGTERM, signal.alarm(0))
ray.shutdown()
"""


@pytest.mark.server
@pytest.mark.parametrize("again", ["again", "once"])
def test_a_signal_that_comes_once_ray_runs_aborts_nothing(again: str) -> None:
    """Regression: where it took three seconds from the signal to the drain's first line, `serve run` ended by SIGABRT,
    and all streams with it. `once`: Ray still does that; if it no longer did, nobody would have to ask again."""
    with tempfile.TemporaryDirectory(prefix="cs") as directory:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, again, directory],
            env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    is_ours, alarm_s = done.stdout.split() or ("True", "aborted")
    assert is_ours == "True", done.stderr[-2000:]
    assert (alarm_s == "0") is (again == "again"), done.stderr[-2000:]
