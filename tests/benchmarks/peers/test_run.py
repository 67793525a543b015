"""The comparison with peers: servers run in turn on the same prompts, nothing is left of them, and failures fail the
run."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest

from benchmarks.peers import run as peers
from benchmarks.peers import servers as peer_servers
from benchmarks.peers.servers import SERVERS, Contender, NotInstalled, Setup
from engine.checkpoints import default_model
from loadtest.scenarios import SCENARIOS, Closed, Mixed
from loadtest.server import ROOT, Server, ended, free_port, launched, session_members

pytestmark = pytest.mark.server

FAKE = Path(__file__).parents[2] / "loadtest" / "fake_openai.py"
SMALL = {
    "single": Closed(requests=2, clients=1, prompt=4, answer=5),
    "mixed": Mixed(2, prompt=4, answer=5, long_requests=1, long_prompt=100, long_answer=2, every_s=0.1, lead_s=0.1),
}


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(1000))
    args = {"model": "tiny", "engine": {"max_model_len": 512, "kv_cache_memory_gib": 1.0}}
    return Setup({"applications": [{"args": args}]}, tmp_path / "model", tmp_path / "venv")


class Machine:
    """Fake contenders, and when each of them ran."""

    def __init__(self, tmp_path: Path) -> None:
        self.events: list[str] = []
        self._tmp_path = tmp_path

    def contender(self, name: str, lose: int = 0, fails: Exception | None = None) -> Contender:
        """Make a server that drops `lose` tokens of each answer, or that `fails` to start."""

        @contextmanager
        def start(setup: Setup) -> Iterator[Server]:
            if fails:
                raise fails
            port = free_port()
            command = [sys.executable, str(FAKE), str(port), str(lose)]
            self.events.append(f"{name} begins")
            with launched(command, port, {}, self._tmp_path / f"{name}.log") as server:
                yield server
            self.events.append(f"{name} is gone")
            assert list(session_members(server.process.pid)) == []

        return Contender(name, start, "/health")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def compare(monkeypatch: pytest.MonkeyPatch, setup: Setup, *contenders: Contender, rounds: int = 1) -> dict[str, Any]:
    monkeypatch.setattr(peers, "SERVERS", {contender.title: contender for contender in contenders})
    kept: list[int] = []
    titles = [contender.title for contender in contenders]
    document = peers.compare(titles, setup, SMALL, rounds, 7, lambda so_far: kept.append(len(so_far["rounds"])))
    assert kept == list(range(1, rounds + 1)), "what a round has measured is not lost with the next"
    return document


# --- rounds ---------------------------------------------------------------------------------------------------------


def test_servers_run_one_after_another_and_every_other_round_backwards(
    monkeypatch: pytest.MonkeyPatch, setup: Setup, machine: Machine
) -> None:
    document = compare(monkeypatch, setup, machine.contender("a"), machine.contender("b"), rounds=2)
    assert machine.events == [f"{name} {what}" for name in "abba" for what in ("begins", "is gone")]
    assert peers.failures(document) == []


def test_a_life_has_the_figures_of_each_scenario_its_first_token_and_its_memory(
    monkeypatch: pytest.MonkeyPatch, setup: Setup, machine: Machine
) -> None:
    (lives,) = compare(monkeypatch, setup, machine.contender("a"))["rounds"]
    life = lives["a"]
    assert set(life["scenarios"]) == set(SMALL)
    assert {"ttft_ms", "tpot_ms", "tokens_per_s", "wall_s", "seed"} <= set(life["scenarios"]["single"])
    assert {"longest_gap_ms", "long_ttft_ms"} <= set(life["scenarios"]["mixed"])
    assert life["cold_start_s"] > 0
    assert life["resident_gb"] == pytest.approx(sum(life["resident_gb_by_kind"].values()))
    assert life["resident_gb"] - life["beyond_gb"] == pytest.approx((1000 + 2**30) / 1e9)
    assert life["engine_gb"] == life["resident_gb"], "no process of this server is an engine alone"


def test_all_servers_of_a_round_get_the_same_prompts_and_each_round_and_scenario_gets_others(
    monkeypatch: pytest.MonkeyPatch, setup: Setup, machine: Machine
) -> None:
    document = compare(monkeypatch, setup, machine.contender("a"), machine.contender("b"), rounds=2)
    seeds = [
        {name: [run["seed"] for run in life["scenarios"].values()] for name, life in lives.items()}
        for lives in document["rounds"]
    ]
    assert all(of_round["a"] == of_round["b"] for of_round in seeds)
    assert len({seed for of_round in seeds for seed in of_round["a"]}) == 4


# --- what fails a run -----------------------------------------------------------------------------------------------


def test_a_server_that_does_not_start_is_named_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, setup: Setup, machine: Machine
) -> None:
    broken = machine.contender("broken", fails=NotInstalled("it is not here"))
    document = compare(monkeypatch, setup, broken, machine.contender("a"), rounds=2)
    assert document["failed"] == {"broken": "it is not here"}
    assert [list(lives) for lives in document["rounds"]] == [["a"], ["a"]]
    assert peers.failures(document) == ["broken: it is not here"]


def test_requests_that_fail_fail_the_run_those_of_the_warm_up_too(
    monkeypatch: pytest.MonkeyPatch, setup: Setup, machine: Machine
) -> None:
    def live_with_errors(*given: Any) -> dict[str, Any]:
        bad = {"seed": 1, "num_errors": 2, "errors": ["cut"]}
        return {"warm_up_errors": ["refused"], "scenarios": {"single": bad, "mixed": {**bad, "num_errors": 0}}}

    monkeypatch.setattr(peers, "live", live_with_errors)
    document = compare(monkeypatch, setup, machine.contender("a"))
    assert peers.failures(document) == ["a, warm-up, round 0: refused", "a, single, round 0: 2 errors, ['cut']"]


def test_a_server_whose_first_answer_is_wrong_has_failed(
    monkeypatch: pytest.MonkeyPatch, setup: Setup, machine: Machine
) -> None:
    document = compare(monkeypatch, setup, machine.contender("short", lose=1))
    assert "the first request failed: 0 tokens instead of 1" in document["failed"]["short"]


@pytest.mark.parametrize(("lose", "status"), [(0, 0), (1, 1)])
def test_the_command_prints_tables_and_the_document_last_and_says_by_its_status_whether_it_is_valid(
    monkeypatch: pytest.MonkeyPatch,
    setup: Setup,
    machine: Machine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    lose: int,
    status: int,
) -> None:
    contender = machine.contender("vLLM", lose)
    monkeypatch.setattr(peers, "SERVERS", {"vllm": contender})
    monkeypatch.setattr(peers, "SCENARIOS", SMALL)
    monkeypatch.setattr(Setup, "of_this_repository", staticmethod(lambda venv: setup))
    out = tmp_path / "out.json"
    assert peers.main(["--servers", "vllm", "--rounds", "1", "--scenarios", "single", "--out", str(out)]) == status
    printed = capsys.readouterr().out
    document = json.loads(printed.splitlines()[-1])
    assert document == json.loads(out.read_text())
    assert {"commit", "cpu", "ray", "peers", "seed", "scenarios", "rounds"} <= set(document)
    assert "alone: ms a token" in printed


# --- how the servers are started ------------------------------------------------------------------------------------


def install(setup: Setup, *programs: str) -> None:
    (setup.venv / "bin").mkdir(parents=True)
    for program in programs:
        (setup.venv / "bin" / program).touch()


def command_of(monkeypatch: pytest.MonkeyPatch, setup: Setup, name: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that would have been run."""
    found: list[tuple[list[str], dict[str, str]]] = []

    @contextmanager
    def launched(command: list[str], port: int, environment: dict[str, str], log: Path, cwd: Path) -> Iterator[None]:
        found.append((list(command), environment))
        yield

    monkeypatch.setattr(peer_servers, "launched", launched)
    with SERVERS[name].start(setup):
        ((command, environment),) = found
        return command, environment


def test_vllm_serves_the_same_weights_in_bfloat16_with_the_context_and_cache_of_our_config(
    monkeypatch: pytest.MonkeyPatch, setup: Setup
) -> None:
    install(setup, "vllm")
    command, environment = command_of(monkeypatch, setup, "vllm")
    assert command[1:3] == ["serve", str(setup.model_dir)]
    assert command[command.index("--max-model-len") + 1] == "512"
    assert command[command.index("--dtype") + 1] == "bfloat16"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    smaller_steps, _ = command_of(monkeypatch, setup, "vllm-512")
    assert smaller_steps[-2:] == ["--max-num-batched-tokens", "512"]


def test_vllms_smallest_steps_hold_as_many_tokens_as_ours_and_no_more_sequences(
    monkeypatch: pytest.MonkeyPatch, setup: Setup
) -> None:
    install(setup, "vllm")
    command, _ = command_of(monkeypatch, setup, "vllm-128")
    assert command[-4:] == ["--max-num-batched-tokens", "128", "--max-num-seqs", "64"]


def test_llama_cpp_serves_the_file_that_our_model_is_made_from_with_a_slot_for_each_client(
    monkeypatch: pytest.MonkeyPatch, setup: Setup
) -> None:
    install(setup, "llama-server")
    (setup.venv / "default.gguf").write_bytes(b"GGUF")
    command, _ = command_of(monkeypatch, setup, "llama-cpp")
    assert command[command.index("--model") + 1] == str(setup.venv / "default.gguf")
    slots, context = (int(command[command.index(name) + 1]) for name in ("--parallel", "--ctx-size"))
    assert slots == 16
    assert context // slots >= 48 + 400 + 2000, "a slot holds the longest load"


def test_llama_cpp_that_is_not_built_says_what_builds_it(setup: Setup) -> None:
    with pytest.raises(NotInstalled, match=r"llama_cpp\.sh"), SERVERS["llama-cpp"].start(setup):
        pass


def test_ray_llm_is_given_the_same_as_vllm(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    install(setup, "serve", "python")
    command, _ = command_of(monkeypatch, setup, "ray-llm")
    assert command[0] == str(setup.venv / "bin" / "python")
    assert command[2:5] == [str(ROOT / "benchmarks" / "peers" / "ray_llm.py"), str(setup.model_dir), "512"]
    assert "VLLM_CPU_KVCACHE_SPACE=1" in command


@pytest.mark.parametrize(("name", "programs"), [("vllm", ["vllm"]), ("ray-llm", ["serve", "python"])])
def test_a_peer_does_not_see_this_repository(
    monkeypatch: pytest.MonkeyPatch, setup: Setup, name: str, programs: list[str]
) -> None:
    """transformers takes a package named `kernels` for Hugging Face's, and breaks on ours."""
    install(setup, *programs)
    command, environment = command_of(monkeypatch, setup, name)
    assert environment["PYTHONPATH"] == ""
    assert name == "vllm" or "-P" in command  # The directory of the script that is run stays off the path, too.


@pytest.mark.parametrize("name", ["vllm", "vllm-512", "ray-llm"])
def test_a_peer_that_is_not_installed_says_how_to_install_it(setup: Setup, name: str) -> None:
    with pytest.raises(NotInstalled, match="make bench-peers"), SERVERS[name].start(setup):
        pass
    assert setup.versions() == {}


def test_ours_is_config_yaml_with_weights_in_bfloat16(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    given: list[dict[str, Any]] = []

    def starting(config: dict[str, Any], environment: dict[str, str]) -> AbstractContextManager[Server]:
        given.append(config)
        return contextmanager(lambda: iter([Server(None, 0, Path())]))()  # type: ignore[arg-type]

    monkeypatch.setattr(peer_servers, "starting", starting)
    with SERVERS["chunkserve"].start(setup):
        pass
    asked = copy.deepcopy(setup.config)
    asked["applications"][0]["args"]["engine"] |= {"quantize": "none"}
    assert given == [asked]
    with SERVERS["chunkserve-no-drafts"].start(setup):
        pass
    for name in ("chunkserve-stored", "chunkserve-250-ms", "chunkserve-rounded"):
        with SERVERS[name].start(setup):
            pass
    engines = [config["applications"][0]["args"].pop("engine") for config in copy.deepcopy(given)]
    assert engines[1] == engines[0] | {"speculative": {"method": "none"}}
    assert engines[2] == engines[1] | {"quantize": "stored"}
    assert engines[3] == engines[1] | {"targets": {"tpot_ms": 250}}
    assert engines[4] == engines[2] | {"activations": "int8"}
    assert "speculative" not in engines[0]


# --- processes ------------------------------------------------------------------------------------------------------


def test_a_worker_that_outlives_its_parent_is_gone_when_the_server_has_ended() -> None:
    """vLLM's workers do outlive it: the next server would share the cores with them."""
    worker = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {worker!r}]).wait()"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with ended(process):
        assert process.stdout.readline() == "up\n"
        assert len(list(session_members(process.pid))) == 2
    assert list(session_members(process.pid)) == []
    process.stdout.close()


def test_memory_is_that_of_all_processes_of_the_session_and_a_shared_page_counts_once(tmp_path: Path) -> None:
    size = 64 * 2**20
    code = f"""
import mmap, os, time
shared = mmap.mmap(-1, {size})
shared.write(b"x" * {size})
if os.fork() == 0:
    shared[0:{size}]
open({str(tmp_path / "up")!r} + str(os.getpid()), "w").close()
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    server = Server(process, 0, tmp_path / "log")
    with ended(process):
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("up*"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert size < sum(server.resident_bytes().values()) < 2 * size


@pytest.mark.parametrize("target", ["bench-peers", "chart"])
def test_make_knows_the_target(target: str) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    command = ["make", "--dry-run", target, "PEERS_VENV=/nowhere", "BENCH=--rounds 1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=True)
    said = {
        "bench-peers": "-m benchmarks.peers.run --peers-venv /nowhere --rounds 1",
        "chart": "-m benchmarks.peers.chart",
    }
    assert said[target] in done.stdout
    assert ("benchmarks/peers/env.sh /nowhere" in done.stdout) is (target == "bench-peers")


@pytest.mark.slow
def test_our_own_server_is_measured_end_to_end_and_nothing_fails() -> None:
    setup = Setup.of_this_repository(Path("/nowhere"))
    small = {"single": SMALL["single"], "prefix": SCENARIOS["prefix"].warm_up}
    document = peers.compare(["chunkserve"], setup, small, 1, time.time_ns(), lambda document: None)
    assert peers.failures(document) == []
    life = document["rounds"][0]["chunkserve"]
    assert life["engine_gb"] == life["resident_gb_by_kind"]["engine"] > 0.2


def test_the_default_file_is_downloaded_by_what_the_function_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression guard: the function had got arguments that the program for llama.cpp's file did not give, and only a
    machine without the file noticed."""
    downloaded = tmp_path / "downloaded"
    downloaded.write_text("a file")
    download = create_autospec(default_model.download_default_gguf)
    download.return_value = nullcontext(downloaded)
    monkeypatch.setattr(default_model, "download_default_gguf", download)
    monkeypatch.setattr(sys, "argv", ["-c", str(tmp_path), "wanted"])
    exec(peer_servers._DEFAULT_GGUF, {})
    assert (tmp_path / "wanted").read_text() == "a file"
