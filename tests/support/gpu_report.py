"""Owns what a run of tests/gpu says of itself: on what it ran, and how near each test came to its tolerances.
Never changes an outcome. With CHUNKSERVE_GPU_REPORT, a path, the same is kept there as JSON after each test."""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Generator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.results import write_whole
from engine.config import ConfigError, EngineConfig
from engine.execution import device
from tests.support.distances import Distance, take_noted

PATH = "CHUNKSERVE_GPU_REPORT"
DISTANCES = "distances"
"""A property of a test's report: its comparisons."""


def mode() -> dict[str, str]:
    """The device that tests get, and how Triton's kernels run on it."""
    try:
        found, _ = device.choose_device(EngineConfig(device="cuda"))
        name = found.name
    except ConfigError:
        name = "none"
    try:
        from kernels.triton.shared.launch import INTERPRETED, TUNING

        kernels, tuning = "interpreted" if INTERPRETED else "compiled", os.environ.get(TUNING, "keep")
    except ImportError as error:
        kernels, tuning = f"absent ({error})", "none"
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "kernels": kernels,
        "tuning": tuning,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def farthest_last(share: float) -> float:
    """NaN is beyond all."""
    return math.inf if math.isnan(share) else share


class GpuReport:
    """A plugin of pytest."""

    def __init__(self, how: dict[str, str], path: Path | None) -> None:
        self._mode, self._path = how, path
        self._tests: list[dict[str, Any]] = []

    def pytest_report_header(self) -> str:
        return f"GPU: {self._text()}"

    def _text(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self._mode.items())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Not in a fixture, whose end comes after the report of the call."""
        take_noted()
        try:
            return (yield)
        finally:
            item.user_properties.append((DISTANCES, [tuple(each) for each in take_noted()]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        found = [Distance(*each) for name, noted in report.user_properties if name == DISTANCES for each in noted]  # type: ignore[misc]
        test: dict[str, Any] = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
        if found:
            nearest = max(found, key=lambda each: farthest_last(each.share))
            test |= {"distance": nearest.distance, "tolerance": nearest.tolerance, "share": nearest.share}
        if report.failed:
            test["error"] = str(report.longrepr)[-2000:]
        self._tests.append(test)
        if self._path is not None:
            write_whole(self._path, {"mode": self._mode, "tests": self._tests})

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section(f"GPU: {self._text()}")
        for line in self._lines():
            terminalreporter.line(line)

    def _lines(self) -> list[str]:
        """One for each function: its outcomes, and of its comparisons that which was nearest to its tolerance."""
        by_function: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for test in self._tests:
            by_function[test["test"].partition("[")[0]].append(test)
        lines = []
        for function, tests in by_function.items():
            outcomes = ", ".join(
                f"{count} {outcome}" for outcome, count in Counter(t["outcome"] for t in tests).items()
            )
            compared = [test for test in tests if "share" in test]
            nearest = max(compared, key=lambda test: farthest_last(test["share"]), default=None)
            how = (
                "" if nearest is None else f"; nearest {nearest['distance']:.2e} of {nearest['tolerance']:.0e} allowed"
            )
            lines.append(f"{function}: {outcomes}{how}")
        return lines
