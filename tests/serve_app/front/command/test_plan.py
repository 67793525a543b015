"""`chunkserve plan` says what to set for a load, writes a config that `check` accepts, and refuses in one line."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.build.step_times import identity, kept_step_times
from engine.config import DEFAULT_MODEL, EngineConfig, SchedulerConfig
from engine.scheduling.step_time import StepCosts
from loadtest.server import ROOT
from loadtest.sim.planning.machine import engine_of, read_machine
from serve_app.front.command import plan
from serve_app.front.command.problems import find_problems
from tests.docsite.blocks import BLOCKS
from tests.loadtest.sim.planning.cases import START, case
from tests.support.chunkserve import COMMAND, chunkserve, environment, refusal
from tests.support.engines import resolved_config

STEPS = ROOT / "loadtest" / "results" / "step_model.json"
SAMPLES = ROOT / "tests" / "loadtest" / "traces"
DOCUMENTED = [command for one in BLOCKS if one.kind == "bash" for command in one.commands]
QUICK = ("--seconds", "15", "--seeds", "1", "--processes", "1")
TARGETS = ("--ttft-ms", "2000", "--tpot-ms", "150")
NUMBERS = ("--rate", "1", "--prompt-tokens", "100:300", "--answer-tokens", "15")


def planned(tmp_path: Path, *words: str, status: int = 0) -> tuple[str, dict[str, Any]]:
    """Make a plan; return what it printed, and its document."""
    out = tmp_path / "plan.json"
    done = chunkserve("plan", *words, *QUICK, "--json", str(out))
    assert done.returncode == status, done.stderr
    assert "\x1b" not in done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return done.stdout, found


def test_numbers_make_a_plan_with_a_config_that_check_accepts(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    told, found = planned(
        tmp_path, *NUMBERS, *TARGETS, "--steps", str(STEPS), "--cost", "2", "--write-config", str(config)
    )
    assert found["holds"]
    assert "What to set" in told
    assert f"wrote {config}" in told
    assert find_problems(config).problems == []
    args = yaml.safe_load(config.read_text())["applications"][0]["args"]
    assert args == found["config"]["applications"][0]["args"]
    assert args["engine_replicas"] == found["set"]["engine_replicas"]
    assert args["engine"]["max_num_seqs"] == found["set"]["max_num_seqs"]
    assert found["costs"]["cost_per_hour"] == 2 * found["set"]["engine_replicas"]


@pytest.mark.slow
def test_files_are_written_before_the_plan_is_printed_to_a_reader_that_may_have_left(tmp_path: Path) -> None:
    out, config = tmp_path / "plan.json", tmp_path / "config.yaml"
    files = ("--json", str(out), "--write-config", str(config))
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as unread:
        done = subprocess.run(
            [*COMMAND, "plan", *NUMBERS, *TARGETS, *QUICK, "--steps", str(STEPS), *files],
            stdout=unread, stderr=subprocess.PIPE, timeout=120, env=environment({"PYTHONUNBUFFERED": "1"}), check=False,
        )  # fmt: skip
    assert done.returncode == 141
    assert b"Traceback" not in done.stderr
    assert json.loads(out.read_text())["holds"]
    assert find_problems(config).problems == []


@pytest.mark.slow
@pytest.mark.parametrize("sample", ["azure_sample.csv", "mooncake_sample.jsonl"])
def test_a_trace_makes_a_plan_at_the_rate_that_is_asked_for(tmp_path: Path, sample: str) -> None:
    trace = ("--trace", str(SAMPLES / sample), "--rate", "0.2", "--ttft-ms", "60000", "--kv-tokens", "200000")
    _, found = planned(tmp_path, *trace, "--steps", str(STEPS), "--attainment", "50")
    assert found["demand"]["rate_per_s"] == pytest.approx(0.2)
    assert found["wanted"] == {"ttft_ms": 60_000, "tpot_ms": None, "attainment": 0.5}


@pytest.mark.slow
def test_a_plan_changes_the_config_that_it_is_given_and_takes_its_targets(tmp_path: Path) -> None:
    out = tmp_path / "planned.yaml"
    given = yaml.safe_load((ROOT / "config.yaml").read_text())
    _, found = planned(
        tmp_path, *NUMBERS, "--config", str(ROOT / "config.yaml"), "--steps", str(STEPS), "--write-config", str(out),
        "--kv-tokens", "20000", "--attainment", "80",
    )  # fmt: skip
    assert (found["wanted"]["ttft_ms"], found["wanted"]["tpot_ms"]) == (2000, 75)
    args, before = (one["applications"][0]["args"] for one in (found["config"], given))
    assert args["engine"]["kv_cache_memory_gib"] == before["engine"]["kv_cache_memory_gib"]
    assert args["model"] == before["model"]
    assert find_problems(out).problems == []


@pytest.mark.slow
@pytest.mark.parametrize("command", [one for one in DOCUMENTED if one.startswith(".venv/bin/chunkserve plan ")])
def test_a_documented_command_makes_a_plan(tmp_path: Path, command: str) -> None:
    words = [str(tmp_path / word) if word == "planned.yaml" else word for word in shlex.split(command)[2:]]
    done = chunkserve("plan", *words, *QUICK, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "What to set" in done.stdout


@pytest.mark.slow
def test_what_cannot_be_held_is_said_and_is_the_status(tmp_path: Path) -> None:
    load = ("--rate", "6", "--prompt-tokens", "400", "--answer-tokens", "30", "--max-replicas", "2")
    told, found = planned(tmp_path, *load, *TARGETS, "--steps", str(STEPS), status=3)
    assert "CANNOT BE HELD: with 2 replicas" in told
    assert 0 < found["nearest"]["rate_per_s"] < 6


def test_without_steps_those_that_an_engine_has_kept_of_the_model_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has three: the model's, another's, and one that is broken."""
    model = tmp_path / "model"
    model.mkdir()
    shape = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
    (model / "config.json").write_text(json.dumps(shape | {"num_attention_heads": 2, "vocab_size": 64}))
    costs = StepCosts((1, 512), (0.005, 0.2), key_s=1e-7)
    of = identity(model, resolved_config(max_num_seqs=16, max_num_batched_tokens=512, num_kv_blocks=2000))
    folder = tmp_path / "cache" / "step_times"
    folder.mkdir(parents=True)
    document = {"costs": costs.document(), "deviation": 0.02, "of": of}
    (folder / "of-it.json").write_text(json.dumps(document))
    (folder / "of-another.json").write_text(json.dumps(document | {"of": of | {"shape": "x"}}))
    (folder / "broken.json").write_text("{")
    monkeypatch.setenv("CHUNKSERVE_CACHE", str(tmp_path / "cache"))
    assert kept_step_times(model) == folder / "of-it.json"
    assert plan._steps(None, str(tmp_path / "model")) == folder / "of-it.json"
    (folder / "of-it.json").unlink()
    assert kept_step_times(model) is None


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes models of different shapes, whose step times are kept in `<name>.json` beside them."""
    monkeypatch.setenv("CHUNKSERVE_CACHE", str(tmp_path / "cache"))

    def made(name: str) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        shape = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": len(name)}
        (directory / "config.json").write_text(json.dumps(shape | {"hidden_size": 64, "vocab_size": 64}))
        of = identity(directory, resolved_config(max_num_seqs=16, max_num_batched_tokens=512, num_kv_blocks=2000))
        costs = StepCosts((1, 512), (0.005, 0.2), key_s=1e-7).document()
        (tmp_path / f"{name}.json").write_text(json.dumps({"costs": costs, "deviation": 0.02, "of": of}))
        return directory

    return made


def compared(steps: Path, model: str | Path, capsys: pytest.CaptureFixture[str]) -> str:
    plan._check_model(steps, read_machine(steps), str(model))
    return capsys.readouterr().err


def test_step_times_of_another_model_are_refused_by_name_and_digest(
    models: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They made a plan that looked as sure as any: only settings were compared, and these were the same."""
    one, other = models("one"), models("other")
    assert compared(tmp_path / "one.json", one, capsys) == ""
    with pytest.raises(
        ValueError, match=rf"one\.json: measured with another model than {other}: the digest"
    ) as refused:
        compared(tmp_path / "one.json", other, capsys)
    begins = [json.loads((tmp_path / f"{name}.json").read_text())["of"]["shape"][:8] for name in ("one", "other")]
    assert all(digest in str(refused.value) for digest in begins)


def test_results_of_a_benchmark_are_of_the_model_that_they_name(
    models: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = models("one"), models("other")
    result = json.loads((tmp_path / "one.json").read_text())
    del result["of"]
    (tmp_path / "result.json").write_text(json.dumps(result | {"benchmark": "step_model", "model": str(one)}))
    assert compared(tmp_path / "result.json", one, capsys) == ""
    with pytest.raises(ValueError, match=f"another model, {one}, than {other}"):
        compared(tmp_path / "result.json", other, capsys)


@pytest.mark.parametrize(
    ("changes", "model", "why"),
    [
        ({}, "org/far-away", "org/far-away is not prepared here"),
        ({"of": {}}, "one", "they do not say which model was measured"),
        ({"of": {}, "model": "nothing-here"}, "one", "they do not say which model was measured"),
    ],
)
def test_step_times_that_cannot_be_compared_are_taken_with_a_line(
    changes: dict[str, Any],
    model: str,
    why: str,
    models: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, steps = models("one"), tmp_path / "one.json"
    steps.write_text(json.dumps(json.loads(steps.read_text()) | changes))
    line = f"{steps}: step times are not compared with the model: {why}\n"
    assert compared(steps, one if model == "one" else model, capsys) == line


def test_a_plan_with_step_times_of_another_model_is_refused(
    refused: Callable[..., str], models: Callable[[str], Path], tmp_path: Path
) -> None:
    models("one")
    words = (*NUMBERS, *TARGETS, "--steps", str(tmp_path / "one.json"), "--model", str(models("other")))
    assert "one.json: measured with another model than " in refused(*words)


def test_where_nothing_is_kept_one_line_says_how_to_get_it(tmp_path: Path) -> None:
    line = refusal("plan", *NUMBERS, *TARGETS, env={"CHUNKSERVE_CACHE": str(tmp_path)})
    assert line.startswith(f"chunkserve plan: no engine has kept step times of {DEFAULT_MODEL} here")
    assert f"`chunkserve serve {DEFAULT_MODEL}`" in line
    assert "--steps" in line


def test_ctrl_c_ends_it_at_once_with_all_its_processes(tmp_path: Path) -> None:
    load = ("--rate", "20", "--prompt-tokens", "400", "--answer-tokens", "200", "--steps", str(STEPS), *TARGETS)
    command = [*COMMAND, "plan", *load, "--processes", "2"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True
    ) as process:
        assert process.stderr is not None
        while "searching" not in process.stderr.readline():
            assert process.poll() is None
        time.sleep(1.0)  # for its processes to have begun
        process.send_signal(signal.SIGINT)
        told, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert told == ""
    assert "Traceback" not in errors


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command in this process, which must refuse its input, and return the only line that it prints."""
    monkeypatch.setattr(plan, "exit_on_signals", lambda: None)

    def run(*words: str) -> str:
        try:
            status = plan.main(words, "chunkserve plan")
        except SystemExit as end:
            status = int(str(end.code))
        told = capsys.readouterr()
        assert (status, told.out) == (2, "")
        (line,) = told.err.splitlines()
        return line

    return run


def test_a_config_with_an_odd_name_can_be_read_again(tmp_path: Path) -> None:
    plan._write({"applications": []}, tmp_path / "two\nlines.yaml")
    assert yaml.safe_load((tmp_path / "two\nlines.yaml").read_text()) == {"applications": []}


BAD = {
    "a negative rate": (["--rate", "-1"], "--rate: expected a number from 0.0001 to 1e+06, not -1"),
    "no number": (["--ttft-ms", "nan"], "--ttft-ms: expected a number from 1 to 1e+07, not nan"),
    "no share": (["--attainment", "101"], "--attainment: expected a number from 50 to 100, not 101"),
    "bounds in the wrong order": (["--min-replicas", "20"], "--min-replicas 20 is more than --max-replicas 16"),
    "no lengths": (
        ["--prompt-tokens", "many"],
        "--prompt-tokens: expected MEAN or MEAN:P95, such as 500:1500, not 'many'",
    ),
    "impossible lengths": (
        ["--answer-tokens", "100:9000"],
        "--answer-tokens: a 95th percentile of 9000: expected from",
    ),
    "too long for an engine": (["--prompt-tokens", "9000"], "are more than the 8192 tokens that a request may have"),
    "no such steps": (["--steps", "/no/steps.json"], "/no/steps.json"),
    "no steps in a file": (["--steps", str(ROOT / "loadtest/results/peers.json")], "peers.json is not a result of"),
    "no such config": (["--config", "/no/config.yaml"], "/no/config.yaml: No such file or directory"),
    "two models": (["--config", str(ROOT / "config.yaml"), "--model", "x"], "--model: the config names the model"),
    "a trace besides numbers": (
        ["--trace", str(SAMPLES / "azure_sample.csv")],
        "--prompt-tokens: a trace has lengths of its own",
    ),
    "no place to write": (["--json", "/no/folder/x"], "argument --json: expected a file that can be written"),
    "no name of a file": (["--json", "x" * 300 + "/y"], "argument --json: expected a file that can be written"),
}


@pytest.mark.parametrize(("words", "reason"), BAD.values(), ids=BAD)
def test_what_makes_no_plan_is_refused_in_one_line(refused: Callable[..., str], words: list[str], reason: str) -> None:
    assert reason in refused(*NUMBERS, *TARGETS, "--steps", str(STEPS), *words)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("arrival_s,prompt_tokens,answer_tokens\n0,100,5\n1,,5\n", "line 3: invalid literal"),
        ("arrival_s,prompt_tokens,answer_tokens\n0,100,5\nnan,100,5\n", "line 3: a time of nan s"),
        ("arrival_s,prompt_tokens,answer_tokens\n0,100,5\n1,100,-5\n", "line 3: lengths of 100 and -5 tokens"),
        ("arrival_s,prompt_tokens,answer_tokens\n0,100,5\n", "1 requests of up to 8192 tokens over no time"),
        ("a,b,c\n", "line 1: the columns are arrival_s, prompt_tokens, answer_tokens"),
    ],
)
def test_a_trace_with_holes_is_refused_with_its_line(
    refused: Callable[..., str], tmp_path: Path, text: str, reason: str
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    line = refused("--trace", str(path), *TARGETS, "--steps", str(STEPS))
    assert str(path) in line
    assert reason in line


def test_a_load_or_targets_that_are_missing_are_named(refused: Callable[..., str]) -> None:
    assert "a plan needs targets: --ttft-ms, --tpot-ms or both" in refused(*NUMBERS, "--steps", str(STEPS))
    assert "a plan needs a load: --trace, or --rate" in refused(*TARGETS, "--steps", str(STEPS))


def test_step_times_of_other_settings_than_the_configs_are_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    """They would make a plan for a GPU of what a CPU took."""
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    config["applications"][0]["args"]["engine"] |= {"dtype": "float16"}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    line = refused(*NUMBERS, *TARGETS, "--steps", str(STEPS), "--config", str(path), "--kv-tokens", "20000")
    assert line.endswith("measured with dtype bfloat16, but the config's engine.dtype is float16")


def test_a_config_of_several_models_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    config["applications"][0]["args"] = {"models": [{"model": "smollm2-135m-instruct"}]}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    assert "args.models: a plan is for one model; give a config that has it alone" in refused(
        *NUMBERS, *TARGETS, "--steps", str(STEPS), "--config", str(path)
    )


def test_the_configs_scheduler_is_the_one_that_is_simulated() -> None:
    machine = read_machine(STEPS)
    config = EngineConfig(max_prefill_tokens=16, scheduler=SchedulerConfig(reserve_mode="full", preempt_policy="none"))
    engine = engine_of(machine, config, kv_tokens=20_000, max_model_len=None)
    made = case(machine=machine, engine=engine).config(START)
    assert (made.max_prefill_tokens, made.scheduler.reserve_mode) == (16, "full")


def test_runs_too_short_to_say_anything_are_refused(refused: Callable[..., str]) -> None:
    """Without a request, every target is kept."""
    words = ("--rate", "0.1", "--prompt-tokens", "50", "--answer-tokens", "10", *TARGETS, "--seconds", "5")
    assert "--seconds 5 is time for 0.5 requests: expected at least 30" in refused(*words, "--steps", str(STEPS))


def test_a_config_that_is_there_is_not_overwritten(refused: Callable[..., str], tmp_path: Path) -> None:
    there = tmp_path / "planned.yaml"
    there.write_text("mine")
    assert "planned.yaml is there already" in refused(*NUMBERS, *TARGETS, "--write-config", str(there))
    assert there.read_text() == "mine"
