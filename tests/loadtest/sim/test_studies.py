"""A study runs what its results lack, and its plot and table show what the results hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from loadtest.sim.plots import COLUMNS, DOCS, README, for_each, svg, table, with_table
from loadtest.sim.specs import RESERVING, SECONDS, SHORT, STUDIES, TIGHT, Spec, run_spec
from loadtest.sim.studies import empty, load, main, missing, save

SVG = "{http://www.w3.org/2000/svg}"
TINY: Spec = {"trace": SHORT, "policy": "ratio", "seed": 0, "requests": 12, "rate": 45.0}


def run_of(policy: str, seed: int, good_share: float, trace: str = "azure_conv") -> dict[str, Any]:
    figures = {"good_share": good_share, "replica_hours": 2.0 + seed, "ttft_p50_ms": 1500.0, "ttft_p99_ms": 9000.0}
    return {"spec": {"trace": trace, "policy": policy, "seed": seed}, "figures": figures}


@pytest.mark.parametrize("study", STUDIES)
def test_each_run_of_a_study_is_named_by_its_spec_alone(study: str) -> None:
    specs = list(STUDIES[study](5, SECONDS[study], 1.0))
    assert len({json.dumps(spec, sort_keys=True) for spec in specs}) == len(specs)
    assert {spec["seed"] for spec in specs} == set(range(5))
    assert all({"policy", "seed"} <= spec.keys() for spec in specs)


def test_every_study_has_columns_and_a_default_length() -> None:
    assert STUDIES.keys() == COLUMNS.keys() == SECONDS.keys()


def test_the_same_spec_gives_the_same_figures_but_for_the_time_that_it_took() -> None:
    one, other = run_spec("reservation", TINY), run_spec("reservation", TINY)
    assert one["ok"] == one["offered"] > 0
    for measured in ("wall_s", "cpu_s", "peak_memory_mib"):
        assert one.pop(measured) > 0
        other.pop(measured)
    assert one == other


def test_reservation_modes_differ_in_what_they_admit() -> None:
    found = {mode: run_spec("reservation", {**TINY, "policy": mode, "requests": 300}) for mode in ("full", "prompt")}
    assert found["full"]["preemptions"] == 0
    assert found["prompt"]["queue_mean_ms"] < found["full"]["queue_mean_ms"]


def test_requests_without_a_length_limit_do_not_wait_for_memory_that_answers_do_not_take() -> None:
    """By `ratio`, each candidate had to find 4,096 tokens free, and each running answer kept 860, so half of the
    requests came late. By what answers really take, about as many are in time as by looking at prompts alone, and few
    lose their memory."""
    crowded = {"trace": "unset, 40k", "seed": 0, "requests": 200, "rate": 5.0}
    found = {
        policy: run_spec("reservation", {**crowded, "policy": policy}) for policy in ("vllm-v1", "ratio", "learned")
    }
    assert found["ratio"]["good_share"] < 0.7 * found["learned"]["good_share"]
    assert found["learned"]["good_share"] > found["vllm-v1"]["good_share"] - 0.05
    assert found["learned"]["preemptions"] < found["vllm-v1"]["preemptions"] / 2


def test_what_a_file_holds_is_not_run_again_and_what_the_study_dropped_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results = empty("autoscaling")
    results["runs"] = [run_of("ours", 0, 0.9), run_of("ours", 7, 0.8), run_of("gone", 0, 0.1)]
    save(results, path)
    kept = load(path, "autoscaling", anew=False)
    specs = [run_of("ours", seed, 0)["spec"] for seed in (0, 1)]
    assert missing(kept, specs) == [specs[1]]
    assert [(run["spec"]["policy"], run["spec"]["seed"]) for run in kept["runs"]] == [("ours", 0), ("ours", 7)]
    assert load(path, "autoscaling", anew=True)["runs"] == []


def test_a_run_that_another_study_holds_is_taken_over_and_not_simulated_twice(tmp_path: Path) -> None:
    def runs_of(size: float, anew: bool = False) -> list[dict[str, Any]]:
        specs = ["--seeds", "1", "--size", str(size), "--processes", "1"]
        main(["disruption", *specs, "--out", str(path), *(["--anew"] if anew else [])])
        runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"]
        return runs

    path = tmp_path / "sim_disruption.json"
    held = empty("scale")
    undisturbed = {"policy": "none", "seed": 0, "replicas": 1, "requests": 1005}
    held["runs"] = [{"spec": undisturbed, "commit": "elsewhere", "figures": {"good_share": 0.5}}]
    save(held, tmp_path / "sim_scale.json")
    runs = runs_of(0.001)
    assert [run["spec"]["policy"] for run in runs] == ["none", "upgrade", "zone-loss"]
    assert [run["commit"] == "elsewhere" for run in runs] == [True, False, False]
    assert "elsewhere" not in [run["commit"] for run in runs_of(0.001, anew=True)]


@pytest.mark.parametrize(
    ("option", "value", "limit"),
    [
        ("--seeds", "0", "1 or more, not 0"),
        ("--processes", "-1", "1 or more, not -1"),
        ("--size", "0", "a positive number, not 0"),
        ("--seconds", "nan", "a positive number, not nan"),
    ],
)
def test_options_of_no_study_are_refused_and_the_results_stay(
    option: str, value: str, limit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: with no seeds a study had no runs of its own, so every kept run looked foreign and was dropped."""
    path = tmp_path / "results.json"
    save({**empty("reservation"), "runs": [run_of("full", 0, 0.9)]}, path)
    held = path.read_text()
    with pytest.raises(SystemExit) as refused:
        main(["reservation", option, value, "--out", str(path)])
    assert refused.value.code == 2
    assert f"{option} is {limit}" in capsys.readouterr().err
    assert path.read_text() == held


@pytest.mark.parametrize("study", STUDIES)
def test_the_smallest_study_has_a_replica_and_a_request(study: str) -> None:
    for spec in STUDIES[study](1, 60.0, 1e-6):
        assert min(spec.get("replicas", 1), spec.get("requests", 1)) == 1


@pytest.mark.parametrize(("part", "name"), [("step_time", "token_s"), ("goal", "ttft_ms")])
def test_results_of_other_step_times_or_another_goal_are_not_taken_over(tmp_path: Path, part: str, name: str) -> None:
    path = tmp_path / "results.json"
    results = {**empty("autoscaling"), "runs": [run_of("ours", 0, 0.9)]}
    results[part] = {**results[part], name: 1.0}
    save(results, path)
    assert load(path, "autoscaling", anew=False)["runs"] == []


def test_the_command_writes_every_run_with_the_commit_that_made_it_and_a_report_of_each(tmp_path: Path) -> None:
    path, reports = tmp_path / "results.json", tmp_path / "reports"
    arguments = ["reservation", "--seeds", "1", "--size", "0.005", "--processes", "1", "--out", str(path)]
    main([*arguments, "--reports", str(reports)])
    results = json.loads(path.read_text())
    assert results["simulated"]
    ways = {(run["spec"]["trace"], run["spec"]["policy"]) for run in results["runs"]}
    assert ways == {(trace, way) for trace in (SHORT, *TIGHT) for way in RESERVING if trace == SHORT or way != "full"}
    assert all(run["commit"] and run["figures"]["ok"] for run in results["runs"])
    for run in results["runs"]:
        (folder,) = reports.glob(f"reservation-{run['spec']['trace']}-{run['spec']['policy']}-*")
        told = json.loads((folder / "report.json").read_text())
        assert told["goal"] == results["goal"]
        assert told["points"][0]["figures"].items() <= run["figures"].items()
        assert "<svg" in (folder / "report.html").read_text()


def test_a_table_has_a_row_for_each_policy_with_the_mean_and_the_spread_of_its_seeds() -> None:
    runs = [run_of("ours", 0, 0.8), run_of("ours", 1, 0.9), run_of("fixed", 0, 1.0)]
    results = {"study": "autoscaling", "runs": runs}
    rows = table(results).splitlines()
    assert rows[2].startswith("| azure_conv | fixed | 1 | 100.0 | 2.00 | 1.5 | 9.0 |")
    assert rows[3].startswith("| azure_conv | ours | 2 | 85.0 (80.0–90.0) | 2.50 (2.00–3.00) | 1.5 | 9.0 |")


def test_autoscaling_is_drawn_as_a_point_for_each_seed_and_one_for_their_mean() -> None:
    runs = [run_of("ours", 0, 0.8), run_of("ours", 1, 0.9), run_of("fixed", 0, 1.0)]
    runs.append(run_of("ours", 0, 0.5, "azure_code"))
    picture = ElementTree.fromstring(svg({"study": "autoscaling", "runs": runs}))
    panels = picture.findall(f"{SVG}g")
    assert [len(panel.findall(f"{SVG}circle")) for panel in panels] == [2, 3 + 2]
    title = picture.find(f"{SVG}title")
    assert title is not None
    assert title.text == "Simulated: autoscaling"


def test_other_studies_are_drawn_as_a_bar_for_each_policy_and_figure() -> None:
    runs = [run_of("prefix-affine", 0, 0.8), run_of("round-robin", 0, 0.4)]
    picture = ElementTree.fromstring(svg({"study": "routing", "runs": runs}))
    panels = picture.findall(f"{SVG}g")
    assert len(panels) == len(COLUMNS["routing"])
    widths = [float(bar.get("width", "0")) for bar in panels[0].findall(f"{SVG}rect")]
    assert widths[0] == pytest.approx(2 * widths[1])


def test_the_kept_figures_have_the_names_of_those_that_a_run_gives() -> None:
    names = run_spec("reservation", TINY).keys()

    def check(results: dict[str, Any]) -> None:
        assert results["goal"] == empty(results["study"])["goal"]
        assert not [name for run in results["runs"] for name in run["figures"].keys() - names]

    for_each(check)


def test_plots_and_tables_in_the_repository_are_those_of_its_results() -> None:
    found: list[str] = []

    def check(results: dict[str, Any]) -> None:
        found.append(results["study"])
        assert (DOCS / f"sim_{results['study']}.svg").read_text() == svg(results)
        assert with_table(README.read_text(), results) == README.read_text()

    for_each(check)
    assert found
