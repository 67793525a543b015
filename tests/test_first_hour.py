"""Owns what the first hour on a GPU promises of itself: what fails costs itself alone, nothing that came is lost. Long,
because it has every part.
Never runs a real part but in the rehearsal, which takes minutes: others are lines of Python."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.engine.gpu import BATCH_INVARIANT, BLOCK_SIZE
from tests.gpu.hour import main as hour
from tests.gpu.hour.compiling import EXPERTS
from tests.gpu.hour.phases import CUDA, LARGE, MOST_SHARDS, SANITIZED, SMALL, STAND_IN, Phase, phases
from tests.gpu.hour.running import ROOT, Outcome, Part, run_part
from tests.gpu.hour.store import Store
from tests.gpu.hour.table import aims_of, lines_of, missing_of
from tests.support.conditions import until

SCRIPT = ROOT / "tests/gpu/first_hour.py"
KEEPS = "import json, sys; json.dump({'kept': 1}, open(sys.argv[1], 'w'))"


def python(name: str, code: str = KEEPS, limit_s: float = 60, copies: int = 1) -> Part:
    return Part(name, limit_s, [sys.executable, "-S", "-c", code, "{result}", "{copy}"], copies=copies)


def document(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


@pytest.fixture
def hanging() -> str:
    """The phase whose second part hangs, and gets a second for it."""
    return ""


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch, hanging: str) -> None:
    """Phases of lines of Python."""

    def few(device: str, again: str | None = None) -> list[Phase]:
        made = []
        for name in ("right", "where", "aims"):
            second = python(f"{name}-2", limit_s=1 if name == hanging else 60)
            made.append(Phase(name, name.title(), 8, [python(f"{name}-1"), second, python(f"{name}-3")]))
        return [*made, Phase("rest", "Rest", 4, [python("right-1")] if again else [])]

    monkeypatch.setattr(hour, "phases", few)


FAULTS = {
    "raise": ("failed", "status 1"),
    "hang": ("limit", "killed after 1 s"),
    "signal": ("signal", "ended by SIGSEGV"),
}


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(
    ("hanging", "faults"),
    [
        ("where", {"right": "raise", "where": "hang", "aims": "signal"}),
        ("aims", {"right": "signal", "where": "raise", "aims": "hang"}),
        ("right", {"right": "hang", "where": "signal", "aims": "raise"}),
    ],
)
def test_a_part_that_fails_costs_itself_alone_and_is_named(
    faults: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"{phase}-2={fault}" for phase, fault in faults.items()]
    assert hour.main(["--device", STAND_IN, "--out", str(tmp_path), "--again", "right-1", "--fault", *given]) == 1
    words = document(tmp_path, "summary")["outcomes"]
    assert words.pop("rest") == {"right-1": "passed"}
    table = (tmp_path / "table.txt").read_text()
    for phase, fault in faults.items():
        word, why = FAULTS[fault]
        assert words[phase] == {f"{phase}-1": "passed", f"{phase}-2": word, f"{phase}-3": "passed"}
        first, second, third = document(tmp_path, phase)["parts"]
        assert first["results"] == third["results"] == [{"kept": 1}]
        assert (second["results"], second["why"]) == ([None], why)
        assert ("RuntimeError: injected" in second["tail"]) == (fault == "raise")
        assert f"{phase}-2".ljust(16) + f" {word.upper()}" in table
    assert "NO FIGURE COUNTS" in table
    assert capsys.readouterr().out.endswith(table), "the table comes last"


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize("phase", ["right", "where", "aims"])
def test_a_phase_whose_file_cannot_be_written_costs_itself_alone(tmp_path: Path, phase: str) -> None:
    (tmp_path / f"{phase}.json").mkdir()
    assert hour.main(["--device", STAND_IN, "--out", str(tmp_path)]) == 1
    words = document(tmp_path, "summary")["outcomes"]
    for name, found in words.items():
        assert set(found.values()) == {"not kept" if name == phase else "passed"}
    assert "passed, but: [Errno 21] Is a directory" in (tmp_path / "table.txt").read_text()


@pytest.mark.usefixtures("four")
def test_phases_that_do_not_run_keep_what_they_had_of_the_same_device(tmp_path: Path) -> None:
    call = ["--device", STAND_IN, "--out", str(tmp_path)]
    assert hour.main([*call, "--phases", "right", "--fault", "right-1=raise"]) == 1
    assert hour.main([*call, "--phases", "where"]) == 0
    assert list(document(tmp_path, "summary")["outcomes"]) == ["right", "where"]
    assert hour.main([*call, "--phases", "right", "--parts", "right-1"]) == 0
    assert set(document(tmp_path, "summary")["outcomes"]["right"].values()) == {"passed"}
    assert Store(tmp_path, ["right", "where"], CUDA).outcomes == {}, "a rehearsal is no result of a card"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["right.json", "summary.json", "table.txt", "where.json"]


@pytest.mark.usefixtures("four")
def test_what_is_left_of_a_phase_bounds_its_parts(tmp_path: Path) -> None:
    faults = ["--fault", "right-1=hang"]
    assert (
        hour.main(["--device", STAND_IN, "--out", str(tmp_path), "--phases", "right", "--minutes", "0.02", *faults])
        == 1
    )
    words = document(tmp_path, "summary")["outcomes"]["right"]
    assert list(words.values()) == ["limit", "not reached", "not reached"]


@pytest.mark.usefixtures("four")
def test_a_prediction_is_on_disk_before_the_run_that_it_is_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr(
        hour.Hour, "_run", lambda *_: found.append(document(tmp_path, "rest")) or Outcome("x", "passed")
    )
    call = ["--device", STAND_IN, "--out", str(tmp_path), "--phases", "rest"]
    assert hour.main([*call, "--again", "right-1", "--prediction", "8.1 to 6.9 ms"]) == 0
    assert (found[0]["prediction"], found[0]["parts"]) == ("8.1 to 6.9 ms", [])


def test_what_a_part_kept_before_its_limit_is_kept_and_its_children_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child outlives a parent that is killed alone, and holds the card's memory. A lock ends with who holds it."""
    lock = tmp_path / "lock"
    child = f"""
import fcntl, signal
file = open({str(lock)!r}, "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
signal.pause()
"""
    code = f"""
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", {child!r}], stdout=subprocess.PIPE)
child.stdout.readline()
open(sys.argv[1] + ".new", "w").write('{{"kept": 1}}')
import os
os.replace(sys.argv[1] + ".new", sys.argv[1])
signal.pause()
"""
    seen: list[Outcome] = []
    monkeypatch.setattr("tests.gpu.hour.running.monotonic", lambda: 100.0 if seen else 0.0)
    outcome = run_part(python("part", code), 60, tmp_path, seen.append)
    assert (outcome.word, outcome.results) == ("limit", ({"kept": 1},))
    assert [(found.word, found.results) for found in seen] == [("running", ({"kept": 1},))]
    asyncio.run(until(lambda: is_free(lock)))  # a killed process takes a moment to end


def is_free(lock: Path) -> bool:
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_each_copy_of_a_part_keeps_its_own_and_one_that_fails_is_told(tmp_path: Path) -> None:
    code = "import sys; open(sys.argv[1], 'w').write(sys.argv[2]); sys.exit('lost' if sys.argv[2] == '1' else 0)"
    outcome = run_part(python("part", code, copies=3), 60, tmp_path, [].append)
    assert (outcome.word, outcome.why, outcome.results) == ("failed", "status 1", (0, 1, 2))
    assert outcome.tail == "lost\n"


@pytest.mark.parametrize("cores", [1, 6, 16, 40])
def test_copies_of_a_part_take_no_more_threads_than_there_are_cores(
    cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    (kernels,) = (part for part in phases(CUDA)[0].parts if part.name == "kernels")
    assert cores // 2 < kernels.copies * int(kernels.environment["OMP_NUM_THREADS"]) <= cores


def test_without_a_gpu_it_ends_at_once_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out")],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("first_hour: torch ")
    assert done.stderr.endswith("sees no GPU; --device stand-in rehearses without one\n")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_without_a_place_for_results_it_ends_at_once_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert hour.main(["--device", STAND_IN, "--out", str(tmp_path / "file" / "out")]) == 2
    assert (
        capsys.readouterr().err
        == f"first_hour: --out {tmp_path}/file/out: [Errno 20] Not a directory: '{tmp_path}/file/out'\n"
    )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--phases", "rest"], "--phases rest needs --again"),
        (["--again", "nothing"], "--again is 'nothing': expected one of machine, precompile"),
        (["--parts", "nothing"], "part 'nothing': expected one of machine"),
        (["--device", CUDA, "--fault", "machine=raise"], "--fault is for a rehearsal"),
        (["--fault", "machine=explode"], "--fault 'explode': expected one of raise, hang, signal"),
        (["--minutes", "0"], "0: expected more than 0"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_by_its_name(
    arguments: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        hour.main(["--device", STAND_IN, "--out", str(tmp_path), *arguments])
    assert why in " ".join(capsys.readouterr().err.split())


def outcome_of(name: str, *results: Any) -> Outcome:
    return Outcome(name, "passed", results=results)


def test_the_table_has_each_aim_with_what_was_measured_and_each_that_was_not(tmp_path: Path) -> None:
    aims = [
        {"what": "decode, 64 rows: device time over ...", "value": 1.4, "aim": "<= 1.35", "met": False, "valid": True},
        {"what": "longest gap, chunks over whole prompts", "value": 0.2, "aim": "<= 0.3", "met": False, "valid": False},
        {"what": "host gap between decode steps, percent", "value": 2.0, "aim": "<= 3", "met": True, "valid": True},
    ]
    cells = [
        {"shape": "decode 64 x 1024", "by": "triton", "us": 100.0},
        {"shape": "decode 64 x 1024", "by": "flash_attn", "us": 90.0},
        {"shape": "decode 64 x 1024", "by": "other", "us": 300.0},
        {"shape": "decode 1 x 1024", "by": "triton", "failed": "RuntimeError"},
        {"shape": "decode 64 x 8192", "by": "triton", "us": 800.0},
        {"shape": "decode 64 x 8192", "by": "triton over K and V in fp8", "us": 480.0},
        {"shape": "decode 64 x 8192", "by": "triton over K and V in int8", "us": 600.0},
    ]
    steps = [{"cell": "decode", "size": rows, "device_ms": 4.0} for rows in (1, 64)] + [
        {"cell": "host_gap", "size": 64}
    ]
    invariant: Any = [
        {"cell": f"decode{BATCH_INVARIANT}", "size": rows, "device_ms": ms}
        for rows, ms in ((1, 5.0), (64, 4.2), (256, 9))
    ]
    store = Store(tmp_path, [], STAND_IN)
    tests = {"tests": [{"outcome": "passed"}, {"outcome": "failed"}]}
    store.outcomes["right"] = {"machine": outcome_of("machine", {"peaks": {"copy_gb_s": 3000, "matrix_gflop_s": 7e5}})}
    store.outcomes["right"]["kernels"] = outcome_of("kernels", tests, tests)
    store.outcomes["aims"] = {
        "steps": outcome_of("steps", {"model": "llama-3.1-8b", "targets": aims, "cells": steps}),
        "batch-invariant": outcome_of("batch-invariant", {"model": "llama-3.1-8b", "targets": [], "cells": invariant}),
        "loop": outcome_of("loop", None),
        "packages": outcome_of("packages", {"cells": cells}),
    }
    text = "\n".join(lines_of(phases(STAND_IN), store, "HEADING"))
    assert "llama-3.1-8b: decode, 64 rows: device time over ...: 1.40 (aim <= 1.35): MISSED" in text
    assert "longest gap, chunks over whole prompts: 0.20 (aim <= 0.3): NOT VALIDLY MEASURED" in text
    assert "host gap between decode steps, percent: 2.00 (aim <= 3): met" in text
    assert "attention, decode 64 x 1024: speed over flash_attn: 0.90 (aim >= 0.95): MISSED" in text
    of_bytes = "attention, decode 64 x 8192: time with K and V in {}, which are 0.52 of the bytes: {} (aim <= 0.65): {}"
    assert of_bytes.format("fp8", "0.60", "met") in text
    assert of_bytes.format("int8", "0.75", "MISSED") in text
    assert "(2 passed, 2 failed)" in text
    assert "peaks: copy 3000 GB/s, matrix 700000 GFLOP/s" in text
    assert "where: not run" in text
    of_invariant = "llama-3.1-8b: decode, batch-invariant, {}: time over an ordinary step's: {} (aim <= 1.1): {}"
    assert of_invariant.format(64, "1.05", "met") in text
    assert of_invariant.format(1, "1.25", "MISSED") in text
    assert "  llama-3.1-8b: decode, 16 rows: not measured" in text
    assert len(missing_of(aims_of(store))) == 9


def test_every_part_has_a_name_of_its_own_and_a_limit_within_its_phase() -> None:
    for device in (CUDA, STAND_IN):
        found = phases(device, again="steps")
        names = [part.name for phase in found[:3] for part in phase.parts]
        assert len(set(names)) == len(names)
        assert all(part.limit_s <= 60 * phase.minutes for phase in found for part in phase.parts)
        assert sum(phase.minutes for phase in found) == 30
    on_a_card = [part for phase in phases(CUDA) for part in phase.parts]
    assert not any("TRITON_INTERPRET" in part.environment for part in on_a_card)
    assert not any(STAND_IN in part.command or "tests.support.gpu_stand_in" in part.command for part in on_a_card)


def test_a_command_of_the_page_gives_its_minutes_to_one_phase() -> None:
    """Phases share them, and what one leaves is not another's: an engine's tests had the time of a part of another."""
    page = (ROOT / "docs/how-to/first-hour-on-a-gpu.md").read_text()
    commands = [shlex.split(line)[2:] for line in page.splitlines() if line.startswith("python3 tests/gpu/first_hour")]
    chosen = [found for found in map(hour._options, commands) if found.minutes is not None]
    assert chosen
    assert [found.phases for found in chosen if len(found.phases) != 1] == []


def test_every_test_for_a_gpu_is_in_a_part_but_those_that_need_two() -> None:
    """KV tiers on a GPU had tests that no part ran."""
    named = {Path(argument).name for part in phases(CUDA)[0].parts for argument in part.command}
    there = {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert there - named == {"test_ranks.py"}


def test_operations_are_compiled_on_all_cores_in_blocks_of_engines_before_they_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One process compiled for longer than its limit, so that products of experts and in fp8 were never timed."""
    calls: list[list[str]] = []
    monkeypatch.setattr("benchmarks.kernels.main", calls.append)
    from tests.gpu.hour import benches

    options = Namespace(device=CUDA, result="result", share="3/16")
    benches.compile_operations(options, print)
    benches.operations(options, print)
    alike = [call[: call.index("--runs")] for call in calls]
    assert alike[0] == alike[1]
    assert alike[0][-2:] == ["--block-size", str(BLOCK_SIZE)]
    assert calls[0][-2:] == ["--share", "3/16"]
    compiled, timed = phases(CUDA)[1].parts[-2:]
    assert (compiled.name, timed.name, timed.copies) == ("operations-ahead", "operations", 1)
    assert compiled.copies == min(MOST_SHARDS, os.cpu_count() or 1)
    assert compiled.command[-2:] == ["--share", "{copy}/{copies}"]


def test_batch_invariant_kernels_are_compiled_beside_all_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's own start would compile them one after another, for most of its part's limit."""
    from tests.gpu.hour import compiling

    commands: list[list[str]] = []
    kept: list[dict[str, Any]] = []
    started: list[tuple[str, bool]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=0)

    @contextmanager
    def start(device: str, shape: str, **settings: Any) -> Iterator[None]:
        started.append((shape, settings.get("batch_invariant", False)))
        yield

    monkeypatch.setattr(compiling, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(compiling, "started", start)
    compiling.precompile(Namespace(device=CUDA, result="result"), kept.append)
    assert set(kept[-1]["configurations"].values()) == {"compiled"}
    invariant = [command for command in commands if "--batch-invariant" in command]
    assert (len(commands), len(invariant)) == (compiling.CONFIGURATIONS + 1, 1)
    compiling.compile_one(Namespace(device=CUDA, batch_invariant=True), kept.append)
    assert started == [(LARGE, True)]
    started.clear()
    compiling.compile_one(Namespace(device=CUDA, batch_invariant=False), kept.append)
    assert set(started) == {(shape, False) for shape in (LARGE, SMALL, compiling.EXPERTS)}, "what `tuning` starts"


@pytest.mark.slow
def test_a_rehearsal_goes_from_end_to_end_and_what_fails_in_each_phase_costs_itself_alone(tmp_path: Path) -> None:
    """On a stand-in, with the real parts."""
    faults = {"precompile": "raise", "tuning": "signal", "transformers": "raise"}
    command = [sys.executable, str(SCRIPT), "--device", STAND_IN, "--out", str(tmp_path), "--minutes", "120"]
    again = [
        "--again",
        "operations",
        "--prediction",
        "none",
        "--fault",
        *(f"{part}={how}" for part, how in faults.items()),
    ]
    done = subprocess.run([*command, *again], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    words = document(tmp_path, "summary")["outcomes"]
    assert list(words) == ["right", "where", "aims", "rest"]
    failed = {part for found in words.values() for part, word in found.items() if word != "passed"}
    assert failed == set(faults), done.stdout[-6000:]
    mode = document(tmp_path, "summary")["mode"]
    assert mode["device"] == "fake GPU"
    parts = {part["name"]: part for phase in words for part in document(tmp_path, phase)["parts"]}
    tests = [test for name in ("kernels", "engine", "cancels") for test in parts[name]["results"][0]["tests"]]
    assert sum(test["outcome"] == "passed" for test in tests) > 40
    assert any("share" in test for test in tests)
    assert {cell["shape"] for cell in parts["packages"]["results"][0]["cells"]} == {
        "decode 2 x 40",
        "chunk of 24",
        "chunk of 3 after 1 x 30",
    }
    assert [step["step"] for step in parts["profile"]["results"][0]["steps"]] == [
        "decode 1 x 16",
        "decode 3 x 40",
        "prefill 24",
    ]
    assert {aim["model"] for aim in document(tmp_path, "summary")["aims"]} >= {"llama-3.1-8b", "qwen3-0.6b"}


@pytest.mark.slow
def test_the_cases_that_a_memory_checker_watches_are_there() -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this machine")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/gpu/test_kernels.py", "-k", SANITIZED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.count("::test_") == 6, done.stdout


def test_a_profile_has_the_kernels_of_the_device_and_no_operator() -> None:
    """Each event has its own object for its type, as torch's profiler makes them. The first profile on a GPU was empty,
    because types were compared as objects."""
    from torch.autograd import DeviceType

    from tests.gpu.hour.profiling import STEPS, kernels_of

    def event(name: str, kind: DeviceType, us: float) -> SimpleNamespace:
        return SimpleNamespace(key=name, device_type=DeviceType(kind.value), self_device_time_total=us, count=2 * STEPS)

    assert DeviceType(DeviceType.CUDA.value) is not DeviceType.CUDA
    events = [
        event("aten::mm", DeviceType.CPU, 90),
        event("norm", DeviceType.CUDA, 30),
        event("gemm", DeviceType.CUDA, 60),
    ]
    found = kernels_of(events, rehearsal=False)
    assert found == [{"name": "gemm", "us": 60 / STEPS, "calls": 2}, {"name": "norm", "us": 30 / STEPS, "calls": 2}]


@pytest.mark.slow
def test_what_an_engine_launches_on_a_card_is_compiled_without_one(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this machine")
    places = {"TRITON_CACHE_DIR": str(tmp_path), "CHUNKSERVE_TRITON_TUNING": "0", "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.gpu.hour.ahead", "--shapes", "qwen3-0.6b"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | places, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    compiled = {path.stem for path in tmp_path.rglob("*.cubin")}
    assert {"attend", "few_rows", "few_rows_gated", "sample_row", "_norm"} <= compiled


@pytest.mark.slow
def test_what_is_compiled_without_a_card_is_of_all_shapes_that_the_hour_starts(tmp_path: Path) -> None:
    """In a process of its own: the module changes torch. Nothing is compiled, because no engine starts."""
    pytest.importorskip("triton", reason="Triton has no wheel for this machine")
    code = (
        "import contextlib\n"
        "from tests.gpu.hour import ahead\n"
        "ahead.started = lambda device, shape, **settings: contextlib.nullcontext()\n"
        "ahead.main([])"
    )
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [LARGE, SMALL, EXPERTS]
