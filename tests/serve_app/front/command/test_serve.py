"""`chunkserve serve` makes the config that its options describe, refuses what cannot be served, and serves the rest."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.checkpoints.model_name import ready_directory
from engine.host.cores import usable_threads
from loadtest.server import ROOT, free_port, launched
from serve_app.front.command.base_config import base_config
from serve_app.front.command.serve import main
from serve_app.settings.application import AppSettings
from tests.support.chunkserve import COMMAND, chunkserve, environment, refusal
from tests.support.serve_process import left_of

MODEL = "smollm2-135m-instruct"
FAKE = {"applications": [{"import_path": "serve_app.app:build", "args": {"engine": {"executor": "fake"}}}]}


def made(tmp_path: Path, *words: str) -> dict[str, Any]:
    """Return the config that these arguments make."""
    to = tmp_path / "made.yaml"
    to.unlink(missing_ok=True)
    assert main([*words, "--write-config", str(to)], "chunkserve serve") == 0
    config: dict[str, Any] = yaml.safe_load(to.read_text())
    return config


def args(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["applications"][0]["args"]
    return found


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """The command decides for its process what a signal does."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# --- what is served by default ----------------------------------------------------------------------------------------


def without(config: dict[str, Any], *places: str) -> dict[str, Any]:
    """Take settings of the application out of a config."""
    for place in places:
        *above, last = place.split(".")
        inside = args(config)
        for name in above:
            inside = inside[name]
        del inside[last]
    return config


def test_a_model_is_served_as_by_the_projects_config_without_limits_of_one_model() -> None:
    shipped = yaml.safe_load((ROOT / "config.yaml").read_text())
    limits = ("engine.max_model_len", "engine.kv_cache_memory_gib")
    defaults = ("engine_replicas", "ingress_replicas", "engine.max_num_seqs")
    for place in defaults:
        name = place.rpartition(".")[2]
        of = args(shipped)["engine"] if place.startswith("engine.") else args(shipped)
        settings = AppSettings().engine if place.startswith("engine.") else AppSettings()
        assert of[name] == getattr(settings, name), "left out below, because it is the default"
    assert base_config(MODEL, on_gpu=False) == without(shipped, *limits, *defaults)


def test_on_a_gpu_a_model_is_served_as_by_the_projects_config_for_gpus() -> None:
    shipped = yaml.safe_load((ROOT / "config.gpu.yaml").read_text())
    assert base_config("Qwen/Qwen3-8B", on_gpu=True) == without(shipped, "engine.max_model_len", "autoscaling")


def test_a_model_is_put_on_gpus_where_they_are_asked_for(tmp_path: Path) -> None:
    assert args(made(tmp_path, MODEL, "--device", "cuda"))["engine_num_gpus"] == 1
    assert args(made(tmp_path, MODEL, "--device", "cpu"))["engine"]["device"] == "cpu"


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "place", "value"),
    [
        ("--max-model-len 512", "engine.max_model_len", 512),
        ("--max-num-seqs 8", "engine.max_num_seqs", 8),
        ("--max-num-batched-tokens 256", "engine.max_num_batched_tokens", 256),
        ("--kv-cache-memory-gib 0.5", "engine.kv_cache_memory_gib", 0.5),
        ("--gpu-memory-utilization 0.5 --device cuda", "engine.gpu_memory_utilization", 0.5),
        ("--dtype float32", "engine.dtype", "float32"),
        ("--quantize int8", "engine.quantize", "int8"),
        ("--kv-cache-dtype int8", "engine.kv_cache_dtype", "int8"),
        ("--replicas 3", "engine_replicas", 3),
        ("--replicas 1:4", "autoscaling", {"min_replicas": 1, "max_replicas": 4}),
        ("--served-model-name a --served-model-name b", "served_model_name", ["a", "b"]),
    ],
)
def test_an_option_is_its_setting(option: str, place: str, value: Any, tmp_path: Path) -> None:
    changed: Any = args(made(tmp_path, MODEL, *option.split()))
    AppSettings.model_validate(changed)
    for name in place.split("."):
        changed = changed[name]
    assert changed == value


def test_host_and_port_are_where_it_listens(tmp_path: Path) -> None:
    http = made(tmp_path, MODEL, "--host", "0.0.0.0", "--port", "8001")["http_options"]
    assert http == {"host": "0.0.0.0", "port": 8001}


def test_a_file_of_keys_is_found_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys.yaml").write_text(f"- {{tenant: ann, sha256: {'a' * 64}}}")
    monkeypatch.chdir(tmp_path)
    config = made(tmp_path, MODEL, "--api-keys", "keys.yaml")
    assert args(config)["auth"] == {"keys_file": str(tmp_path / "keys.yaml")}


def test_options_replace_what_a_config_says_and_nothing_else(tmp_path: Path) -> None:
    shipped = yaml.safe_load((ROOT / "config.yaml").read_text())
    config = made(tmp_path, str(ROOT / "config.yaml"), "--max-num-seqs", "8", "--port", "8001", "--replicas", "2")
    args(shipped)["engine"]["max_num_seqs"] = 8
    args(shipped)["engine_replicas"] = 2
    shipped["http_options"]["port"] = 8001
    assert config == shipped


def test_a_number_of_engines_replaces_their_bounds_and_the_other_way_round(tmp_path: Path) -> None:
    config = {"applications": [{"import_path": "serve_app.app:build", "args": {"engine": {"executor": "fake"}}}]}
    settings: Any = args(config)
    settings["autoscaling"] = {"min_replicas": 1, "max_replicas": 2, "target_queue_s": 1}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    assert args(made(tmp_path, str(tmp_path / "c.yaml"), "--replicas", "2")) == {
        "engine": {"executor": "fake"},
        "engine_replicas": 2,
    }
    bounds = args(made(tmp_path, str(tmp_path / "c.yaml"), "--replicas", "2:3"))["autoscaling"]
    assert bounds == {"min_replicas": 2, "max_replicas": 3, "target_queue_s": 1}


def test_a_written_config_can_be_checked_and_is_not_written_over(tmp_path: Path) -> None:
    words = ("serve", MODEL, "--max-num-seqs", "8", "--write-config", "c.yaml")
    done = chunkserve(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "wrote c.yaml\n", "")
    before = (tmp_path / "c.yaml").read_text()
    assert chunkserve("check", "c.yaml", cwd=tmp_path).returncode == 0
    assert refusal(*words, cwd=tmp_path) == "--write-config: c.yaml is there already: choose another name, or remove it"
    assert (tmp_path / "c.yaml").read_text() == before


@pytest.mark.parametrize("form", ["directory", "file"])
def test_a_written_config_finds_a_local_model_from_any_directory(form: str, tmp_path: Path) -> None:
    """A relative path was once written as it was given, and meant something else from elsewhere."""
    (tmp_path / "here" / "models").mkdir(parents=True)
    if form == "directory":
        path, prepared = Path("models/tiny"), ready_directory(MODEL, either=True)
        assert prepared is not None
        (tmp_path / "here" / path).symlink_to(prepared)
    else:
        path = Path("models/tiny.gguf")
        (tmp_path / "here" / path).write_bytes(b"GGUF")
    done = chunkserve("serve", str(path), "--write-config", "../c.yaml", cwd=tmp_path / "here")
    assert (done.returncode, done.stderr) == (0, "")
    written = args(yaml.safe_load((tmp_path / "c.yaml").read_text()))
    assert (written["model"], written["served_model_name"]) == (str(tmp_path / "here" / path), [str(path)])
    assert chunkserve("check", "c.yaml", cwd=tmp_path).returncode == 0


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("smollm3", "No model 'smollm3': expected an existing directory"),
        ("no.gguf", "no.gguf is not there: expected a GGUF file."),
        ("a" * 300, "a" * 300),
        ("no.yaml", "no.yaml: No such file or directory: expected the YAML file of a Serve config."),
        (f"{MODEL} --max-num-seqs 0", "--max-num-seqs: Input should be greater than or equal to 1 (given: 0)"),
        (f"{MODEL} --port 99999", "--port: expected a number from 1 to 65535 (given: 99999)"),
        (f"{MODEL} --api-keys /no/keys", "--api-keys: /no/keys: No such file or directory"),
        (f"{MODEL} --max-num-seqs 600", "max_num_batched_tokens (512) must be at least max_num_seqs + 1 (601)"),
        (f"{MODEL} --dtype int4", "argument --dtype: invalid choice: 'int4'"),
        (f"{MODEL} --port x", "argument --port: invalid int value: 'x'"),
        (f"{MODEL} --replicas many", "argument --replicas: expected a number or MIN:MAX, such as 1:4, not 'many'"),
        (f"{MODEL} --replicas 3:1", "--replicas"),
        (f"{MODEL} --replicas 0", "--replicas: Input should be greater than or equal to 1 (given: 0)"),
    ],
)
def test_bad_input_is_refused_in_a_line_that_names_it(words: str, line: str, tmp_path: Path) -> None:
    said = refusal("serve", *words.split(), cwd=tmp_path)
    assert line in said
    assert "config.yaml, line" not in said, "that file is gone"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"modle": "x"},
            "c.yaml, line 3, application default: args.modle: no such setting here; did you mean model? (given: 'x')",
        ),
        ({"engine": {"max_num_seqs": "many"}}, "args.engine.max_num_seqs: Input should be a valid integer"),
    ],
)
def test_a_wrong_config_is_refused_in_its_own_words(settings: dict[str, Any], line: str, tmp_path: Path) -> None:
    config = {"applications": [{"args": settings, "import_path": "serve_app.app:build"}]}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    assert line in refusal("serve", "c.yaml", "--port", "8001", cwd=tmp_path)


def test_an_address_that_is_not_free_or_not_known_is_refused_in_options(tmp_path: Path) -> None:
    """The config that is made of them is a temporary file, whose name and lines tell nothing."""
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(FAKE))
    own = {"RAY_ADDRESS": "local"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refusal("serve", "c.yaml", "--host", "127.0.0.1", "--port", str(port), cwd=tmp_path, env=own)
    assert line.startswith(f"--port {port} on 127.0.0.1 is not free: Address already in use.")
    line = refusal("serve", "c.yaml", "--host", "a..b", "--port", "8001", cwd=tmp_path, env=own)
    assert line == "--host: not a host name (given: 'a..b')"


def test_a_start_warns_of_more_threads_than_can_compute(tmp_path: Path) -> None:
    threads, _ = usable_threads()
    settings = {"engine": {"num_threads": threads}, "engine_replicas": 2}
    config = {"applications": [{"import_path": "serve_app.app:build", "args": settings}]}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as taken:  # ends the start after the warning
        words = ["serve", "c.yaml", "--host", "127.0.0.1", "--port", str(taken.getsockname()[1])]
        done = chunkserve(*words, cwd=tmp_path, env={"RAY_ADDRESS": "local"})
    assert done.returncode == 2
    assert (
        f"engine.num_threads: 2 engines on this machine have {2 * threads} threads, of which {threads} " in done.stdout
    )


def test_a_closed_terminal_changes_neither_the_status_nor_what_is_said(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(FAKE))
    env = environment({"RAY_ADDRESS": "local"})
    for closed, said in (("<&- >&-", "--host: not a host name (given: 'a..b')\n"), ("2>&-", "")):
        shell = ["sh", "-c", f'"$@" {closed}', "sh", *COMMAND, "serve", "c.yaml", "--host", "a..b", "--port", "8001"]
        done = subprocess.run(shell, capture_output=True, text=True, timeout=120, env=env, cwd=tmp_path, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_a_file_without_keys_is_refused_because_the_server_would_be_open(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").touch()
    line = refusal("serve", MODEL, "--api-keys", "keys.yaml", cwd=tmp_path)
    assert line == f"--api-keys: {tmp_path / 'keys.yaml'} has no keys: everybody could use the server"


def test_the_home_of_a_user_that_there_is_not_is_a_directory_that_there_is_not(tmp_path: Path) -> None:
    assert "~nobody-has-this-name/keys: No such file" in refusal(
        "serve", MODEL, "--api-keys", "~nobody-has-this-name/keys"
    )


def test_device_auto_replaces_the_device_of_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = yaml.safe_load(yaml.safe_dump(FAKE))
    config["applications"][0]["args"] |= {"engine_num_gpus": 1, "engine": {"device": "cuda"}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    changed = args(made(tmp_path, str(tmp_path / "c.yaml"), "--device", "auto"))
    assert (changed["engine_num_gpus"], changed["engine"]["device"]) == (0, "cpu")


def test_device_cuda_has_a_gpu_for_each_rank_of_a_config(tmp_path: Path) -> None:
    """Regression: it asked for one GPU, which was then refused beside two ranks."""
    config: Any = yaml.safe_load(yaml.safe_dump(FAKE))
    config["applications"][0]["args"] = {"engine": {"tensor_parallel_size": 2}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    changed = args(made(tmp_path, str(tmp_path / "c.yaml"), "--device", "cuda"))
    assert (changed["engine_num_gpus"], changed["engine"]["device"]) == (2, "cuda")
    AppSettings.model_validate(changed)


@pytest.mark.parametrize("name", ["my config.yaml", "two\nlines.yaml", "--odd"])
def test_a_config_with_an_odd_name_can_be_read_again(name: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(FAKE))
    done = chunkserve("serve", "c.yaml", f"--write-config={name}", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    done = chunkserve("check", "--", name, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_config_that_begins_with_a_mark_of_the_byte_order_can_be_written_again(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(FAKE), encoding="utf-8-sig")
    assert made(tmp_path, str(tmp_path / "c.yaml")) == FAKE


def test_options_of_one_application_are_refused_for_several(tmp_path: Path) -> None:
    one = {"import_path": "serve_app.app:build", "args": {"engine": {"executor": "fake"}}}
    config = {"applications": [one | {"name": "a"}, one | {"name": "b", "route_prefix": "/b"}]}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    assert "the config has 2 applications" in refusal("serve", "c.yaml", "--max-num-seqs", "8", cwd=tmp_path)
    assert made(tmp_path, str(tmp_path / "c.yaml"), "--port", "8001")["http_options"] == {"port": 8001}


def test_options_are_refused_for_a_config_of_several_models(tmp_path: Path) -> None:
    models = [{"model": name, "engine": {"executor": "fake"}} for name in ("one", "two")]
    config = {"applications": [{"name": "a", "import_path": "serve_app.app:build", "args": {"models": models}}]}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    line = refusal("serve", "c.yaml", "--replicas", "2", cwd=tmp_path)
    assert "the config has several models, and options are for one: edit its entries" in line


# --- serving ----------------------------------------------------------------------------------------------------------


@pytest.mark.server
@pytest.mark.slow
def test_a_server_answers_is_shown_and_ends_cleanly_at_sigterm() -> None:
    """From the start to the end, as a user does it. Only the executor is not the real one."""
    temp = Path(tempfile.mkdtemp(prefix="cs", dir="/tmp"))  # short: Ray's sockets live below it
    port = free_port()
    fake = {"model": "m", "engine": {"executor": "fake", "fake": {"reply": "It is Paris."}}}
    config = {"applications": [{"name": "a", "import_path": "serve_app.app:build", "args": fake}]}
    (temp / "c.yaml").write_text(yaml.safe_dump({"proxy_location": "HeadOnly", **config}))
    own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local", "RAY_TMPDIR": str(temp), "TMPDIR": str(temp)}
    words = ["serve", str(temp / "c.yaml"), "--port", str(port), "--host", "127.0.0.1", "--max-num-seqs", "8"]
    try:
        with launched([*COMMAND, *words], port, environment(own), temp / "log") as server:
            server.wait_until_ready()
            status = chunkserve("status", "--url", server.url, env=own)
            assert status.returncode == 0, status.stderr
            assert status.stdout.startswith(f"{server.url} is healthy\nmodels: m\n")
            chat = chunkserve("chat", "--url", server.url, env=own, said="What is the capital of France?\n")
            assert (chat.returncode, chat.stdout) == (0, "It is Paris.\n"), chat.stderr
            directories = [*temp.glob("chunkserve-*/config.yaml")]
            assert len(directories) == 1
            assert server.end(signal.SIGTERM) == 0, server.output
            assert "letting running requests finish" in server.output
            assert not directories[0].parent.exists()
            assert not left_of(server)
        assert chunkserve("status", "--url", server.url, env=own).returncode == 1
    finally:
        shutil.rmtree(temp, ignore_errors=True)


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_ray_runs_ends_it_quietly_and_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """SIGINT's own number as a status would say that the options are wrong."""
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"proxy_location": "HeadOnly", **FAKE}))
    words = [*COMMAND, "serve", "c.yaml", "--port", str(free_port()), "--host", "127.0.0.1"]
    own = {"RAY_ADDRESS": "local", "RAY_TMPDIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(own), cwd=tmp_path, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("starting c.yaml; ")
        assert [*tmp_path.glob("chunkserve-*/config.yaml")]
        process.send_signal(number)
        assert process.communicate(timeout=60) == ("", "")
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + number
    assert not [*tmp_path.glob("chunkserve-*/config.yaml")]


@pytest.mark.server
@pytest.mark.slow
def test_what_only_the_engines_own_check_refuses_is_refused_before_ray_starts(tmp_path: Path) -> None:
    words = [*COMMAND, "serve", MODEL, "--port", str(free_port()), "--max-model-len", "100000"]
    own = {"RAY_ADDRESS": "local", "RAY_TMPDIR": str(tmp_path / "ray")}
    done = subprocess.run(words, env=environment(own), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "args.engine: max_model_len is 100000, but the checkpoint serves at most" in done.stderr
    assert "config.yaml" not in done.stdout + done.stderr, "that file is gone"
    assert not (tmp_path / "ray" / "ray").exists()
