"""Owns the measurement of an eager step: how long the host takes to launch it, and the device to run it.
Never decides anything by it; `engine.execution.gpu.cuda_graph_buckets` does."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.execution.device import Device
from engine.execution.gpu.cuda_graph_buckets import LaunchCost


def measure_launch(device: Device, step: Callable[[], object], num_tokens: int) -> LaunchCost:
    """Run `step` once and measure it; it was run before, so that nothing is compiled or chosen. Waits for its end.

    A device that works at once takes no longer than its host: what it launches is never worth more than its work.
    """
    before = time.perf_counter()
    begun = device.timing_event()
    step()
    ended = device.timing_event()
    launch_ms = (time.perf_counter() - before) * 1000
    return LaunchCost(launch_ms, begun.ms_until(ended), num_tokens)
