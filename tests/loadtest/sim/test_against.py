"""A live load's report compared with the same load simulated.
The live report is made here, from figures that are known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadtest.marks import with_text
from loadtest.sim import load
from loadtest.sim.against import KEPT, README, compare, main, table
from loadtest.sim.step_time import MEASURED
from loadtest.slo import BROKEN, MISSED, PASSED, SATURATED

ASKED = ("--scenario", "rates", "--rates", "1,2", "--seconds", "10", "--lengths", "0.1", "--seed", "5")
ENGINE = ("--engine", "max_num_batched_tokens=128,max_prefill_tokens=128,max_num_seqs=16")
OF_A_SERVER = {"url": "http://127.0.0.1:8000", "model": "", "limits": None, "do": "", "do_at": None, "settle": None}


@pytest.fixture(scope="module")
def simulated() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(load.run(load.parser().parse_args([*ASKED, *ENGINE]))))
    return found


@pytest.fixture
def live(simulated: dict[str, Any]) -> dict[str, Any]:
    """Make the report of a server that answered exactly as the simulation did."""
    made: dict[str, Any] = json.loads(json.dumps(simulated))
    del made["deployment"]
    for name in ("replicas", "router", "engine"):
        del made["settings"][name]
    made["settings"] |= OF_A_SERVER
    return made


def test_what_was_asked_live_is_asked_again_request_for_request(live: dict[str, Any]) -> None:
    compared = compare(live, ENGINE)
    assert [(row["point"], row["time"]) for row in compared["rows"]] == [
        (f"{rate} requests/s", time) for rate in (1, 2) for time in ("ttft", "tpot")
    ]
    for row in compared["rows"]:
        assert row["ms"].keys() == {"p50", "p90", "p99"}
        assert {cell["ratio"] for cell in row["ms"].values()} == {1.0}
        assert all(sides["measured"] == sides["simulated"] > 0 for sides in row["counts"].values())
    assert compared["largest_factor"] == 1.0


def test_a_percentile_is_held_against_its_own_and_the_farthest_counts_whichever_way_it_is_off(
    live: dict[str, Any],
) -> None:
    figures = live["points"][1]["figures"]
    figures["ttft_p90_ms"] *= 4
    figures["tpot_p99_ms"] /= 2
    compared = compare(live, ENGINE)
    ratios = {
        (row["point"], row["time"], share): round(cell["ratio"], 6)
        for row in compared["rows"]
        for share, cell in row["ms"].items()
    }
    off = {("2 requests/s", "ttft", "p90"): 0.25, ("2 requests/s", "tpot", "p99"): 2.0}
    assert {key: ratio for key, ratio in ratios.items() if ratio != 1.0} == off
    assert compared["largest_factor"] == pytest.approx(4)
    row = next(line for line in table(compared).splitlines() if line.startswith("| 2 requests/s: TTFT"))
    assert row.count("(+0 %)") == 2
    assert row.count("(-75 %)") == 1


def test_other_engines_give_other_percentiles(live: dict[str, Any]) -> None:
    slow = compare(live, ("--engine", "max_num_batched_tokens=17,max_prefill_tokens=16,max_num_seqs=16"))
    assert slow["largest_factor"] > 1.1


def test_steps_of_a_machine_half_as_fast_make_answers_half_as_fast(live: dict[str, Any], tmp_path: Path) -> None:
    document = json.loads(MEASURED.read_text())
    for cell in document["cells"]:
        cell["ms_p50"] *= 2
    steps = tmp_path / "slower.json"
    steps.write_text(json.dumps(document))
    compared = compare(live, [*ENGINE, "--steps", str(steps)])
    assert all(cell["ratio"] > 1.5 for row in compared["rows"] for cell in row["ms"].values())
    assert compared["step_time"]["measured_in"] == "slower.json", "without the folders of the machine"


@pytest.mark.parametrize(("within", "code"), [(2.1, PASSED), (1.9, MISSED)])
def test_the_command_keeps_what_it_found_and_fails_beyond_what_was_asked(
    live: dict[str, Any], within: float, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live["points"][0]["figures"]["tpot_p50_ms"] *= 2
    report, out = tmp_path / "report.json", tmp_path / "against.json"
    report.write_text(json.dumps(live))
    page = README.read_text()
    with pytest.raises(SystemExit) as ended:
        main([str(report), *ENGINE, "--within", str(within), "--out", str(out)])
    assert ended.value.code == code
    kept = json.loads(out.read_text())
    assert (kept["within"], round(kept["largest_factor"], 6)) == (within, 2.0)
    assert (kept["live"]["seed"], kept["simulated"]["engine"]) == (5, ENGINE[1])
    assert table(kept) in capsys.readouterr().out
    assert README.read_text() == page, "only the kept comparison is told there"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda live: live.update(schema=0), "schema 0 is not 1"),
        (lambda live: live.update(exit_code=SATURATED, saturated=["sent late"]), "failed with code 4: ['sent late']"),
        (lambda live: live.update(exit_code=BROKEN, broken=["a worker was lost"]), "failed with code 5"),
        (lambda live: live.update(deployment={}), "there is nothing live in it"),
        (lambda live: live["settings"].update(do="reboot"), "--do needs a real server"),
        (lambda live: live["points"].pop(), "the live load has the points ['1 requests/s'], the simulated one"),
        (lambda live: [point.update(figures=dict.fromkeys(("offered", "ok", "prompt_tokens", "output_tokens"), 0))
                       for point in live["points"]], "nothing was answered"),
    ],
)  # fmt: skip
def test_a_report_that_cannot_be_compared_is_refused_with_the_reason(
    live: dict[str, Any],
    spoil: Callable[[dict[str, Any]], object],
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(live)
    report = tmp_path / "report.json"
    report.write_text(json.dumps(live))
    with pytest.raises(SystemExit) as refused:
        main([str(report), *ENGINE, "--out", str(tmp_path / "against.json")])
    assert refused.value.code == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "against.json").exists()


@pytest.mark.parametrize("within", ["0.5", "nan"])
def test_a_factor_that_no_percentile_could_keep_is_refused(
    live: dict[str, Any], within: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps(live))
    with pytest.raises(SystemExit) as refused:
        main([str(report), *ENGINE, "--within", within, "--out", str(tmp_path / "against.json")])
    assert refused.value.code == 2
    assert f"--within is a factor, 1 or more, not {within}" in capsys.readouterr().err


def test_the_page_has_the_comparison_that_is_kept_and_none_before_there_is_one() -> None:
    page = README.read_text()
    text = table(json.loads(KEPT.read_text())) if KEPT.exists() else "Not measured yet."
    assert with_text(page, "against", text) == page


def test_a_file_that_is_no_report_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    report.write_text("[1]")
    with pytest.raises(SystemExit) as refused:
        main([str(report), *ENGINE, "--out", str(tmp_path / "against.json")])
    assert refused.value.code == 2
    assert "schema None is not 1, that of a load's report.json" in capsys.readouterr().err
