"""Turns the signals that ask `serve` to end into SystemExit, so that whoever runs can clean up.
Never drains anything: `serve_app.front.shutdown` does."""

from __future__ import annotations

import signal
from types import FrameType


class Signalled(SystemExit):
    """A signal asks to end. The exit status is its number, unless this is caught: another end may have that, too."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def exit_on_signals() -> None:
    """Raise Signalled with the signal's number, in the main thread.

    To be called again once Ray has started. Its native handler of SIGTERM sets an alarm that aborts the process after
    three seconds, whatever it is doing by then.
    """
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _exit_with_signal)


def _exit_with_signal(signum: int, frame: FrameType | None) -> None:
    raise Signalled(signum)
