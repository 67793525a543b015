"""Owns the command of the studies: it runs the simulations that a results file lacks, in parallel, and saves each
result.
Never repeats a simulation that the file holds, unless `--anew` discards the file."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import subprocess
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtest.server import ROOT
from loadtest.sim.specs import GOALS, GPU_LIKE, SECONDS, STUDIES, Spec, run_spec, twins
from loadtest.sim.step_time import MEASURED, measured

RESULTS = ROOT / "loadtest" / "results"
Document = dict[str, Any]


def empty(study: str) -> Document:
    """Return a results file without runs. It has the inputs that all runs share."""
    step_time, error = measured()
    return {
        "study": study,
        "simulated": True,
        "goal": asdict(GOALS[study]),
        "step_time": {"measured_in": f"loadtest/results/{MEASURED.name}", **asdict(step_time), "largest_error": error},
        **_made_up(study),
        "runs": [],
    }


def _made_up(study: str) -> Document:
    """Step times of a made-up machine."""
    return {"gpu_like_step_time": asdict(GPU_LIKE)} if study in ("reservation", "targets") else {}


def current_commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def load(path: Path, study: str, *, anew: bool) -> Document:
    """Load the results file, or an empty one if the file was made with other step times or for another goal."""
    fresh = empty(study)
    if anew or not path.exists():
        return fresh
    document: Document = json.loads(path.read_text())
    same = all(document.get(name) == fresh[name] for name in fresh if name not in ("simulated", "runs"))
    return document if same else fresh


def missing(document: Document, specs: Sequence[Spec]) -> list[Spec]:
    """Return the specs that have no figures yet. Runs whose spec differs from all of these in more than the seed are
    dropped: they belong to another form of the study."""
    forms = {_key({**spec, "seed": None}) for spec in specs}
    document["runs"] = [run for run in document["runs"] if _key({**run["spec"], "seed": None}) in forms]
    done = {_key(run["spec"]) for run in document["runs"]}
    return [spec for spec in specs if _key(spec) not in done]


def take_over(document: Document, specs: Sequence[Spec], folder: Path) -> None:
    """Copy runs that another study's results already hold, so that a million requests are not simulated twice."""
    for study in twins(document["study"]):
        wanted = {_key(spec) for spec in missing(document, specs)}
        theirs = load(folder / f"sim_{study}.json", study, anew=False)["runs"]
        document["runs"] += [run for run in theirs if _key(run["spec"]) in wanted]


def _key(spec: Spec) -> str:
    return json.dumps(spec, sort_keys=True)


def save(document: Document, path: Path) -> None:
    """Write a line for each run, in an order that does not depend on which ended first. The file is replaced
    atomically."""
    document["runs"].sort(key=lambda run: _key(run["spec"]))
    head = json.dumps({name: value for name, value in document.items() if name != "runs"})
    runs = ",\n".join(json.dumps(run) for run in document["runs"])
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".tmp")
    fresh.write_text(f'{head[:-1]}, "runs": [\n{runs}\n]}}\n')
    fresh.replace(path)


def run_all(document: Document, specs: Sequence[Spec], path: Path, processes: int, reports: Path | None) -> None:
    """Run the specs in parallel, and save each result as soon as it is there. The first failure ends the study."""
    commit = current_commit()
    with ProcessPoolExecutor(processes, initializer=_prepare_worker) as pool:
        pending = {pool.submit(run_spec, document["study"], spec, reports): spec for spec in specs}
        try:
            for future in as_completed(pending):
                spec, figures = pending[future], future.result()
                document["runs"].append({"spec": spec, "commit": commit, "figures": figures})
                save(document, path)
                outcome = f"good {figures['good_share']:.3f}, {figures['wall_s']:.1f} s"
                print(json.dumps(spec), outcome, flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _prepare_worker() -> None:
    """Silence the log of thousands of simulated moves, and collect garbage rarely: the millions of young tuples are
    never in a cycle."""
    logging.getLogger("serve_app").setLevel(logging.ERROR)
    gc.set_threshold(100_000, 50, 100)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.sim.studies",
        description="Simulate what a study's results file lacks, in several processes, and add each result to the "
        "file.",
    )
    parser.add_argument("study", choices=[*STUDIES])
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (%(default)s)")
    parser.add_argument("--seconds", type=float, help="seconds of each trace; the study's own if not given")
    parser.add_argument("--size", type=float, default=1.0, help="factor of the load or of the fleet (%(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="simulations at a time (%(default)s)")
    parser.add_argument("--anew", action="store_true", help="discard the results that the file holds")
    parser.add_argument("--out", type=Path, help="results file; loadtest/results/sim_STUDY.json if not given")
    parser.add_argument("--reports", type=Path, help="folder for each run's report.html and report.json")
    options = parser.parse_args(arguments)
    for name in ("seeds", "processes"):
        if (count := getattr(options, name)) < 1:
            parser.error(f"--{name} is 1 or more, not {count}")
    for name in ("seconds", "size"):
        if (value := getattr(options, name)) is not None and not 0 < value < math.inf:
            parser.error(f"--{name} is a positive number, not {value:g}")
    path = options.out or RESULTS / f"sim_{options.study}.json"
    document = load(path, options.study, anew=options.anew)
    specs = list(STUDIES[options.study](options.seeds, options.seconds or SECONDS[options.study], options.size))
    if not options.anew:
        take_over(document, specs, path.parent)
    run_all(document, missing(document, specs), path, options.processes, options.reports)
    save(document, path)


if __name__ == "__main__":
    main()
