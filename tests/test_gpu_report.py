"""Owns that a run on a GPU shows how near each comparison came to its tolerance, and keeps that as it goes.
Never needs a GPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.distances import Distance, assert_close, is_within, take_noted
from tests.support.gpu_report import DISTANCES, GpuReport


@pytest.fixture(autouse=True)
def _none_noted_before() -> None:
    take_noted()


def test_a_comparison_is_noted_by_its_share_of_what_is_allowed_whether_or_not_it_holds() -> None:
    assert_close(torch.tensor([1.0, 10.0]), torch.tensor([1.1, 10.0]), atol=0.1, rtol=0.1)
    with pytest.raises(AssertionError):
        assert_close(torch.tensor([1.0]), torch.tensor([2.0]), atol=0.5, rtol=0.0)
    assert not is_within(0.3, 0.2)
    assert not is_within(math.nan, 0.2)
    shares = [each.share for each in take_noted()]
    assert shares[:3] == pytest.approx([0.1 / 0.21, 2.0, 1.5])
    assert math.isnan(shares[3])
    assert take_noted() == []


def test_slots_of_nan_that_stay_nan_are_no_distance_and_others_are() -> None:
    both = torch.tensor([math.nan, 1.0])
    assert_close(both, both, atol=1e-3, rtol=1e-3, equal_nan=True)
    assert_close(both, both, atol=0, rtol=0, equal_nan=True)
    with pytest.raises(AssertionError):
        assert_close(both, torch.ones(2), atol=1e-3, rtol=0)
    *within, beyond = (each.share for each in take_noted())
    assert within == [0.0, 0.0]
    assert math.isnan(beyond)


def test_what_a_test_compares_is_in_the_report_of_its_call_even_if_it_fails() -> None:
    """It came with the end of a fixture, which no report of the call waits for: no distance was ever shown."""
    item: Any = SimpleNamespace(user_properties=[])
    is_within(0.9, 1.0)  # by whoever was before
    call = GpuReport({}, None).pytest_runtest_call(item)
    next(call)
    assert not is_within(0.3, 0.2)
    with pytest.raises(AssertionError, match="too far"):
        call.throw(AssertionError("too far"))
    assert item.user_properties == [(DISTANCES, [(0.3, 0.2)])]


def report_of(name: str, outcome: str, distances: list[Distance]) -> Any:
    properties: list[tuple[str, object]] = [(DISTANCES, [tuple(each) for each in distances])]
    error = "broken" if outcome == "failed" else None
    return pytest.TestReport(name, ("f", 1, "f"), {}, outcome, error, "call", user_properties=properties, duration=0.5)  # type: ignore[arg-type]


def test_each_test_is_kept_as_it_ends_and_the_nearest_of_each_function_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = GpuReport({"device": "a card", "kernels": "compiled"}, path)
    assert report.pytest_report_header() == "GPU: device a card, kernels compiled"
    report.pytest_runtest_logreport(report_of("t.py::a[1]", "passed", [Distance(0.1, 1.0), Distance(0.5, 1.0)]))
    (first,) = json.loads(path.read_text())["tests"]
    assert (first["test"], first["outcome"], first["share"]) == ("t.py::a[1]", "passed", 0.5)
    report.pytest_runtest_logreport(report_of("t.py::a[2]", "failed", [Distance(math.nan, 1.0)]))
    report.pytest_runtest_logreport(report_of("t.py::b", "passed", []))
    assert [test.get("error") for test in json.loads(path.read_text())["tests"]] == [None, "broken", None]
    assert report._lines() == ["t.py::a: 1 passed, 1 failed; nearest nan of 1e+00 allowed", "t.py::b: 1 passed"]
