"""The comparison of steps limited by time with fixed ones: what it compares at equal gaps."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.engine.targets import equal_gaps


def cell(steps: str, gap: float, ttft: float, streams: int = 4) -> dict[str, Any]:
    spread = {"gap_p99": [gap, gap - 1, gap + 1], "ttft_p50": [ttft, ttft - 1, ttft + 1]}
    return {"streams": streams, "prompt_tokens": 1500, "steps": steps, **spread}


def last_line(*cells: dict[str, Any]) -> str:
    return equal_gaps({"cells": list(cells)}).splitlines()[-1]


def test_a_first_token_by_time_is_compared_with_that_of_a_fixed_budget_at_the_same_gap() -> None:
    fixed = cell("128", 200, 1000), cell("32", 50, 4000), cell("64", 100, 2000)
    assert last_line(*fixed, cell("time", 70.71, 2263)) == "| 4 | 1,500 | 71 | 2,263 | 2,828 | 0.80 |"
    assert last_line(*fixed, cell("time", 200, 900)) == "| 4 | 1,500 | 200 | 900 | 1,000 | 0.90 |"


@pytest.mark.parametrize("gap", [49, 201])
def test_a_gap_that_no_two_budgets_enclose_is_not_compared(gap: float) -> None:
    fixed = cell("32", 50, 4000), cell("128", 200, 1000)
    assert last_line(*fixed, cell("time", gap, 2000)) == f"| 4 | 1,500 | {gap} | 2,000 | – | – |"


def test_a_load_is_compared_with_budgets_of_its_own_alone() -> None:
    other = cell("32", 50, 4000, streams=16), cell("64", 100, 2000, streams=16)
    assert last_line(*other, cell("time", 70, 2000)).endswith("| – | – |")
