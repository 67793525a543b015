"""Owns faults that only a process can do to itself. Python imports this module by its name wherever this directory is
on PYTHONPATH; `tests.chaos.hangs` puts it there for one server, and orders a fault by a file named by the process's id.
Never does anything unordered."""

import ctypes
import os
import threading
import time
from pathlib import Path

FOR_EVER_S = 3600
LOOK_S = 0.02

_sleep = time.sleep
_steps_hang = threading.Event()


def _wait_for_orders(order: Path) -> None:
    while not order.exists():
        _sleep(LOOK_S)
    if order.read_text() == "holds the interpreter lock":
        ctypes.PyDLL(None).sleep(FOR_EVER_S)  # calls of a PyDLL keep the interpreter lock
    else:
        _steps_hang.set()


def _sleep_in_steps(seconds: float) -> None:
    """A scripted engine sleeps where others compute; like a kernel, it does so without the interpreter lock."""
    is_step = threading.current_thread().name == "engine-steps"
    _sleep(FOR_EVER_S if is_step and _steps_hang.is_set() else seconds)


if directory := os.environ.get("CHUNKSERVE_TEST_FAULTS"):
    time.sleep = _sleep_in_steps
    threading.Thread(target=_wait_for_orders, args=(Path(directory) / str(os.getpid()),), daemon=True).start()
