"""`chunkserve check` names every mistake of a config in a line of its own, and does nothing that takes long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.build import machine, resolve
from engine.build.machine import Machine, gpus
from engine.config import EngineConfig
from engine.host import cores
from engine.host.memory import HostMemory
from loadtest.server import ROOT
from serve_app.front.command.check import machine_lines, main
from serve_app.replicas.served_model import share_threads
from tests.support.chunkserve import chunkserve, refusal
from tests.test_architecture import run_python

Change = Callable[[dict[str, Any]], object]

# What is wrong: a change of config.yaml, and what must stand in the line: field, limit and value.
WRONG: dict[str, tuple[Change, str]] = {
    "an unknown key": (
        lambda c: args(c).update(modle="x"),
        "args.modle: no such setting here; did you mean model? (given: 'x')",
    ),
    "an unknown key of the engine": (
        lambda c: engine(c).update(max_seqs=3),
        "args.engine.max_seqs: no such setting here; did you mean max_num_seqs?",
    ),
    "a wrong type": (lambda c: engine(c).update(max_num_seqs="many"), "args.engine.max_num_seqs: Input should be a va"),
    "a value out of bounds": (
        lambda c: engine(c).update(block_size=0),
        "args.engine.block_size: Input should be greater than or equal to 1 (given: 0)",
    ),
    "numbers that contradict each other": (
        lambda c: engine(c).update(max_num_seqs=600),
        "max_num_batched_tokens (512) must be at least max_num_seqs + 1 (601)",
    ),
    "more threads than cores": (
        lambda c: engine(c).update(num_threads=1000),
        f"args.engine.num_threads is 1000: expected at most {cores.usable_cores()}, the cores that this",
    ),
    "values that exclude each other": (
        lambda c: engine(c).update(device="cuda"),
        "engine.device is cuda, but engine_num_gpus is 0",
    ),
    "a file of keys that is not there": (
        lambda c: args(c).update(auth={"keys_file": "/no/keys"}),
        "args.auth.keys_file: /no/keys: No such file or directory",
    ),
    "a file of keys without any": (
        lambda c: args(c).update(auth={"keys_file": "/dev/null"}),
        "args.auth.keys_file: /dev/null has no keys: everybody could use the server",
    ),
    "an unknown model": (lambda c: args(c).update(model="/no/model"), "args.model: No model '/no/model': expected an"),
    "a GGUF file that is not there": (
        lambda c: args(c).update(model="/no/x.gguf"),
        "args.model: /no/x.gguf is not there: expected a GGUF file.",
    ),
    "a draft model that is not there": (
        lambda c: engine(c).update(speculative={"method": "draft_model", "model": "/no/draft"}),
        "args.engine.speculative.model: No model '/no/draft'",
    ),
    "an adapter that is not there": (
        lambda c: (engine(c).update(max_loras=1), args(c).update(lora_adapters={"law": "/no/law"})),
        "args.lora_adapters.law: there is no directory /no/law",
    ),
    "a tier's key that is not there": (
        lambda c: engine(c).update(kv_tiers={"disk_path": "/kv", "disk_key_file": "/no/key"}),
        "args.engine.kv_tiers.disk_key_file: there is no file /no/key",
    ),
    "a tier of no size": (
        lambda c: engine(c).update(kv_tiers={"disk_path": "/kv", "disk_gib": 0}),
        "args.engine.kv_tiers.disk_gib: Input should be greater than 0 (given: 0)",
    ),
    "a misspelt setting of tiers": (
        lambda c: engine(c).update(kv_tiers={"disk_pth": "/kv"}),
        "args.engine.kv_tiers.disk_pth: no such setting here; did you mean disk_path?",
    ),
    "an unknown key of the file": (lambda c: c.update(http_option=1), "unknown key http_option: did you mean http_op"),
    "no port": (lambda c: http(c).update(port=0), "http_options.port: expected a number from 1 to 65535 (given: 0)"),
    "no such module": (
        lambda c: c["applications"][0].update(import_path="serv_app.app:build"),
        "import_path: there is no module 'serv_app.app'",
    ),
    "a certificate that is not there": (
        lambda c: http(c).update(ssl_certfile="/no/certificate"),
        "http_options.ssl_certfile: there is no file /no/certificate",
    ),
}


def http(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["http_options"]
    return found


def args(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["applications"][0]["args"]
    return found


def engine(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = args(config)["engine"]
    return found


def shipped() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "config.yaml").read_text())
    return found


def written(tmp_path: Path, config: dict[str, Any]) -> str:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    return str(tmp_path / "c.yaml")


@pytest.mark.parametrize("name", ["config.yaml", "config.gpu.yaml"])
def test_the_projects_own_configs_have_no_problem(name: str) -> None:
    done = chunkserve("check", str(ROOT / name))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{ROOT / name}: no problem found\n"


@pytest.mark.parametrize("wrong", WRONG)
def test_a_mistake_is_a_line_that_names_file_field_and_value(
    wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = WRONG[wrong]
    config = shipped()
    change(config)
    path = written(tmp_path, config)
    assert main([path], "chunkserve check") == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith(f"{path}, line ")
    assert message in line


def test_a_user_sees_a_mistake_as_the_only_line(tmp_path: Path) -> None:
    config = shipped()
    args(config)["modle"] = "x"
    assert "args.modle: no such setting here; did you mean model?" in refusal("check", written(tmp_path, config))


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "c.yaml: No such file or directory"), ("", "c.yaml is empty"), ("a: [", "c.yaml, line 1: not YAML")],
)
def test_a_file_that_is_no_config_is_named(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "c.yaml").write_text(text)
    assert refusal("check", "c.yaml", cwd=tmp_path).startswith(message)


def test_all_mistakes_are_reported_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the second application, too: `serve run` once stopped at the first that was wrong."""
    config = shipped()
    engine(config).update(block_size=0, dtype="int4")
    args(config)["modle"] = "x"
    config["applications"] += [
        {"name": "b", "route_prefix": "/b", "import_path": "serve_app.app:build", "args": {"pooling": "most"}},
        {"name": "c", "route_prefix": "/c", "import_path": "no_such_module:app"},
        {"name": "d", "route_prefix": "/d", "import_path": "nor_this_one:app"},
    ]
    assert main([written(tmp_path, config)], "chunkserve check") == 2
    lines = capsys.readouterr().err.splitlines()
    for field in ("engine.block_size", "engine.dtype", "modle", "pooling", "no_such_module", "nor_this_one"):
        assert sum(field in line for line in lines) == 1, (field, lines)
    assert len(lines) == 6


def test_files_are_looked_for_in_every_application_that_is_right_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = shipped()
    args(config).update(auth={"keys_file": "/no/keys"}, model="/no/model")
    config["applications"].append(
        {"name": "b", "route_prefix": "/b", "import_path": "serve_app.app:build", "args": {"model": "/no/other"}}
    )
    assert main([written(tmp_path, config)], "chunkserve check") == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert "/no/keys" in first
    assert "'/no/model'" in second
    assert "application b: args.model: No model '/no/other'" in third


def test_a_key_in_the_place_of_its_digest_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = shipped()
    args(config)["auth"] = {"admin_sha256": "sk-secret"}
    assert main([written(tmp_path, config)], "chunkserve check") == 2
    assert "secret" not in capsys.readouterr().err


def test_tls_is_refused_only_where_haproxy_would_be_in_front(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pem").write_text("")
    config = shipped()
    http(config).update(ssl_certfile=str(tmp_path / "pem"), ssl_keyfile=str(tmp_path / "pem"))
    path = written(tmp_path, config)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    assert main([path], "chunkserve check") == 0
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    assert main([path], "chunkserve check") == 2
    assert "HAProxy in front of this server has no TLS" in capsys.readouterr().err


QUOTA = (
    "of which 2 can compute at a time (the container's CPU quota is 2.5 of 8 cores); unset, they share what there is"
)


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"engine_replicas": 1}, None),
        ({"engine_replicas": 2}, f"2 engines on this machine have 4 threads, {QUOTA}"),
        ({"autoscaling": {"min_replicas": 1, "max_replicas": 3}}, f"3 engines on this machine have 6 threads, {QUOTA}"),
        ({"engine": {"num_threads": 8}}, f"1 engine has 8 threads, {QUOTA}"),
        (
            {"engine": {"num_threads": 12, "tensor_parallel_size": 2}, "tensor_parallel_placement": "spread"},
            f"1 engine has 12 threads, {QUOTA}",
        ),
        ({"engine": {"num_threads": None}, "engine_replicas": 9}, None),
        ({"engine": {"executor": "fake", "num_threads": 8}}, None),
        ({"engine_num_gpus": 1, "engine_replicas": 4}, None),
    ],
    ids=str,
)
def test_threads_that_would_wait_for_each_other_are_a_warning_with_the_numbers(
    changes: dict[str, Any],
    warning: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not a refusal: engines may be on several machines, and a short step may use more than the quota's cores."""
    monkeypatch.setattr(cores, "_cpu_quota", lambda root: 2.5)
    monkeypatch.setattr(cores, "usable_cores", lambda: 8)
    config = shipped()
    config["applications"][0]["args"] = {"engine": {"num_threads": 2}} | changes
    path = written(tmp_path, config)
    assert main([path], "chunkserve check") == 0
    *warnings, last = capsys.readouterr().out.splitlines()
    assert last == f"{path}: no problem found"
    assert [line.partition("engine.num_threads: ")[2] for line in warnings] == [warning] * (warning is not None)
    assert all(line.startswith(f"warning: {path}, line ") for line in warnings)


def test_models_of_several_applications_share_the_cores_of_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 3)
    monkeypatch.setattr(cores, "_cpu_quota", lambda root: None)
    config = shipped()
    config["applications"][0]["args"] = {"engine": {}}
    second = {"name": "b", "route_prefix": "/b", "import_path": "serve_app.app:build", "args": {}}
    config["applications"].append(second)
    named = [{"model": "smollm2-135m-instruct", "served_model_name": name} for name in ("x", "y")]
    second["args"] = {"models": [named[0], named[1] | {"engine": {"num_threads": 2}}]}
    assert main([written(tmp_path, config)], "chunkserve check") == 0
    warning, _ = capsys.readouterr().out.splitlines()
    assert (
        "application b: args.models.1.engine.num_threads: 3 engines on this machine have 6 threads, of whi" in warning
    )


def test_a_check_loads_neither_torch_nor_ray() -> None:
    code = """
import sys
from serve_app.front.command.check import main
status = main(["config.yaml"], "chunkserve check")
print(status, sorted({"torch", "ray", "transformers"} & set(sys.modules)))
"""
    assert run_python(code).splitlines()[-1] == "0 []"


# --- explain ----------------------------------------------------------------------------------------------------------


def test_explain_says_what_this_machine_makes_of_the_shipped_config() -> None:
    done = chunkserve("check", "config.yaml", "--explain", cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    for begins in (
        "cores ",
        "memory ",
        "GPUs ",
        "model    smollm2-135m-instruct: 4,096 tokens of context, 1 engine",
        "device   cpu, ",
        "kernels ",
        "KV cache ",
        "  dtype ",
        "  num_threads ",
        "  speculative ",
    ):
        assert sum(line.startswith(begins) for line in lines) == 1, (begins, lines)
    assert lines[-1] == "config.yaml: no problem found"


def test_explain_reports_what_only_the_checkpoint_can_refuse(tmp_path: Path) -> None:
    config = shipped()
    engine(config)["max_model_len"] = 100_000
    done = chunkserve("check", written(tmp_path, config), "--explain")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "max_model_len is 100000, but the checkpoint serves at most 8192 positions" in line


def test_explain_prepares_no_model_and_says_how_to(tmp_path: Path) -> None:
    done = chunkserve("check", "config.yaml", "--explain", env={"CHUNKSERVE_CACHE": str(tmp_path / "none")}, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "`chunkserve prepare smollm2-135m-instruct` does it now" in done.stdout
    assert not (tmp_path / "none").exists()


def test_explain_describes_the_fake_executor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = shipped()
    config["applications"][0]["args"] = {"model": "m", "engine": {"executor": "fake"}}
    assert main([written(tmp_path, config), "--explain"], "chunkserve check") == 0
    assert "kernels  executor is fake: tokens are scripted, no model is loaded." in capsys.readouterr().out


def test_explain_says_that_engines_on_gpus_cannot_start_on_a_machine_without_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = shipped()
    config["applications"][0]["args"] = {"model": "org/a-model-that-nobody-has", "engine_num_gpus": 1}
    assert main([written(tmp_path, config), "--explain"], "chunkserve check") == 0
    said = capsys.readouterr().out
    assert "chunkserve: engine_num_gpus is 1: no engine can start here" in said
    assert "org/a-model-that-nobody-has is not prepared" in said


# --- the machine ------------------------------------------------------------------------------------------------------


def test_a_machine_is_described_in_three_lines() -> None:
    memory = HostMemory(2**30, 2**32, "MemAvailable in /proc/meminfo")
    threads = 2, "this process may use 2 cores"
    assert machine_lines(Machine(threads, "A processor", ("AVX2", "AVX-512"), memory, ("NVIDIA H100",))) == [
        "cores    2 of A processor: AVX2, AVX-512 (this process may use 2 cores)",
        "memory   1.0 of 4.0 GiB are free (MemAvailable in /proc/meminfo)",
        "GPUs     NVIDIA H100",
    ]
    assert machine_lines(Machine(threads, "B", (), None, ()))[1:] == ["memory   unknown", "GPUs     none"]


@pytest.mark.parametrize(
    ("limit", "threads", "why"),
    [
        ("150000 100000", 1, "the container's CPU quota is 1.5 of 4 cores"),
        ("20000 100000", 1, "the container's CPU quota is 0.2 of 4 cores"),
        ("400000 100000", 4, "this process may use 4 cores"),
        ("max 100000", 4, "this process may use 4 cores"),
        (None, 4, "this process may use 4 cores"),
    ],
)
def test_cores_are_those_that_a_containers_quota_leaves(
    limit: str | None, threads: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 4)
    if limit is not None:
        (tmp_path / "sys" / "fs" / "cgroup").mkdir(parents=True)
        (tmp_path / "sys" / "fs" / "cgroup" / "cpu.max").write_text(f"{limit}\n")
    assert cores.usable_threads(tmp_path) == (threads, why)


def test_the_machine_and_an_engine_count_threads_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check once promised all cores where the engine ran as many threads as the quota allowed; and the server ran
    as many as there were cores, whatever the quota."""
    monkeypatch.setattr(cores, "_cpu_quota", lambda root: 1.0)
    monkeypatch.setattr(cores, "usable_cores", lambda: 8)
    assert machine.this_machine().threads == resolve._num_threads(EngineConfig())
    assert share_threads(EngineConfig(), 1).num_threads == 1


@pytest.mark.parametrize(
    ("visible", "shown"),
    [(None, 2), ("0", 1), ("1,0", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("0,1,2", 2)],
)
def test_gpus_are_those_that_cuda_would_show(visible: str | None, shown: int, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for number in (0, 1):
        (tmp_path / "dev" / f"nvidia{number}").touch()
        about = tmp_path / "proc" / "driver" / "nvidia" / "gpus" / f"0000:0{number}:00.0" / "information"
        about.parent.mkdir(parents=True)
        about.write_text("Model: \t\t NVIDIA H100\nIRQ: 1\n")
    (tmp_path / "dev" / "nvidiactl").touch()
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpus(environ, tmp_path) == ("NVIDIA H100",) * shown


def test_a_gpu_without_a_name_counts(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert gpus({}, tmp_path) == ("an Nvidia GPU",)
