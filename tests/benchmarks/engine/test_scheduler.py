"""The scheduler's benchmark prints one JSON document with every cell that was asked for; it needs no torch."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from itertools import product

import pytest

from benchmarks.engine.scheduler import TRAFFIC, main, settle


def test_the_last_line_is_one_document_with_a_cell_for_each_load_and_phase(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loads_asked = ["--running", "2", "12", "--waiting", "3", "5", "--steps", "4", "--tokens", "64", "--seed", "5"]
    main(
        [*loads_asked, "--storms", "2", "--storm-running", "160", "--storm-waiting", "30", "--storm-tenants", "1", "3"]
    )
    lines = capsys.readouterr().out.splitlines()
    document = json.loads(lines[-1])
    cells = document["cells"]
    loads = product(TRAFFIC, ((2, 3), (12, 5)), ("plan", "commit", "apply"))
    seen = [(c["traffic"], (c["running"], c["waiting"]), c["phase"]) for c in cells if "traffic" in c]
    assert seen[:30] == list(loads)
    storms = product((1, 3), ("plan", "commit", "apply", "step"))
    assert [(c["tenants"], c["phase"]) for c in cells if c.get("traffic") == "storm"] == list(storms)
    assert seen[30:] == [
        ("storm", (160, 30), phase) for _, phase in product((1, 3), ("plan", "commit", "apply", "step"))
    ]
    assert [(c["phase"], c["rows"], c["tokens"]) for c in cells if "rows" in c] == [
        ("build_inputs", 1, 64),
        ("build_inputs", 16, 64),
    ]
    assert len(lines) == len(cells) + 1
    assert all(0 < cell["ms_min"] <= cell["ms_p50"] <= cell["ms_max"] for cell in cells)
    assert (document["benchmark"], document["seed"], document["steps"]) == ("scheduler", 5, 4)
    assert document["cpu"]


@pytest.mark.parametrize("traffic", ["steady", "churn", "crowded"])
def test_a_measurement_starts_with_the_load_it_is_named_after(traffic: str) -> None:
    core = settle(traffic, 20, 10, random.Random(3))
    load = core.load()
    assert load.num_waiting >= 10
    assert load.num_running == 20
    assert core.num_decoding == 20 or (traffic == "churn" and core.num_decoding >= 10)
    assert not core.times, "what led to this load is not measured"


def test_a_storm_that_memory_cannot_hold_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--traffic", "--storm-running", "159"])
    assert "--storm-running must be at least 160" in capsys.readouterr().err


def test_scheduling_is_measured_without_torch() -> None:
    code = """
import sys
from benchmarks.engine.scheduler import measure
import random
cells = measure("steady", 2, 2, 3, random.Random(1))
print(len(cells), "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "False"]
