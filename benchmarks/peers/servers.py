"""Owns the servers that are compared: how to start each on this machine, with the same weights, dtype and cache.
Never runs two at once, and never installs one: env.sh does."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from loadtest.server import ROOT, Server, free_port, launched, starting

_VERSIONS = """
import importlib.metadata, json
print(json.dumps({name: importlib.metadata.version(name) for name in ("vllm", "ray", "torch", "transformers")}))
"""

_DEFAULT_GGUF = """
import pathlib, sys
from engine.checkpoints.default_model import download_default_gguf
directory, name = sys.argv[1:]
with download_default_gguf(pathlib.Path(directory), progress=False, stored=True, hasty=False) as file:
    file.rename(pathlib.Path(directory, name))
"""


class NotInstalled(RuntimeError):
    """The peers' environment lacks what a server needs."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What all servers share. config.yaml defines it for ours, and the others are started to match."""

    config: dict[str, Any]
    """The config of `serve run`."""
    model_dir: Path
    venv: Path
    """The peers' virtual environment."""

    @staticmethod
    def of_this_repository(venv: Path) -> Setup:
        config = yaml.safe_load((ROOT / "config.yaml").read_text())
        command = [sys.executable, "-m", "engine.checkpoints.prepare", "--quantize", "none", _args(config)["model"]]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        return Setup(config, Path(done.stdout.strip()), venv.expanduser().absolute())

    @property
    def max_model_len(self) -> int:
        return int(_args(self.config)["engine"]["max_model_len"])

    @property
    def kv_cache_gib(self) -> float:
        return float(_args(self.config)["engine"]["kv_cache_memory_gib"])

    @property
    def weights_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.model_dir.glob("*.safetensors"))

    def installed(self, name: str, by: str = "make bench-peers") -> Path:
        """Return the path of a program in the peers' environment, where `by` installs it.

        Raises:
            NotInstalled: the program is not there.
        """
        program = self.venv / "bin" / name
        if not program.exists():
            raise NotInstalled(f"no {name} in {self.venv.name}: `{by}` installs it")
        return program

    def gguf(self) -> Path:
        """Return the file that the default model is made from, which is downloaded to the peers' environment once."""
        kept = self.venv / "default.gguf"
        if not kept.exists():
            command = [sys.executable, "-c", _DEFAULT_GGUF, str(self.venv), kept.name]
            subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
        return kept

    def versions(self) -> dict[str, str]:
        """Return the versions of the peers' packages; empty if none is installed."""
        command = [str(self.venv / "bin" / "python"), "-c", _VERSIONS]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return {}
        found: dict[str, str] = json.loads(done.stdout)
        return found

    @property
    def vllm_environment(self) -> dict[str, str]:
        return {
            "VLLM_CPU_KVCACHE_SPACE": f"{self.kv_cache_gib:g}",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # the default would leave one of two cores idle
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }


def _args(config: dict[str, Any]) -> dict[str, Any]:
    args: dict[str, Any] = config["applications"][0]["args"]
    return args


# --- the servers ----------------------------------------------------------------------------------------------------


def chunkserve(setup: Setup) -> AbstractContextManager[Server]:
    """Start the whole server with config.yaml, except for the port, and for weights in bfloat16 as the others have
    them."""
    return _chunkserve(setup, {})


def _chunkserve(setup: Setup, settings: dict[str, Any]) -> AbstractContextManager[Server]:
    """Start the server with these settings of the engine."""
    config = copy.deepcopy(setup.config)
    _args(config)["engine"] |= {"quantize": "none", **settings}
    return starting(config, {"PYTHONPATH": str(ROOT)})


def chunkserve_no_drafts(setup: Setup, **settings: Any) -> AbstractContextManager[Server]:
    """Start the same server without drafts, so that every token takes a step. vLLM does not draft by default either.
    settings: others of the engine."""
    return _chunkserve(setup, {"speculative": {"method": "none"}, **settings})


def chunkserve_250_ms(setup: Setup) -> AbstractContextManager[Server]:
    """Start the same, with a target between two tokens that vLLM keeps with its smallest steps: what is left of the
    difference is not the gap's."""
    targets = _args(setup.config)["engine"].get("targets", {})
    return chunkserve_no_drafts(setup, targets={**targets, "tpot_ms": 250})


def chunkserve_stored(setup: Setup) -> AbstractContextManager[Server]:
    """Start the same, with weights computed as their file stores them, which is the default on most processors."""
    return chunkserve_no_drafts(setup, quantize="stored")


def chunkserve_rounded(setup: Setup) -> AbstractContextManager[Server]:
    """Start the same, with activations rounded to 8 bits besides, as llama.cpp rounds them."""
    return chunkserve_no_drafts(setup, quantize="stored", activations="int8")


def chunkserve_float32(setup: Setup) -> AbstractContextManager[Server]:
    """Start the same with everything but the weights in float32: the definition of the file's answers."""
    return chunkserve_no_drafts(setup, quantize="stored", dtype="float32")


@contextmanager
def vllm(setup: Setup, *flags: str) -> Iterator[Server]:
    port = free_port()
    of_model = ("--served-model-name", "peer", "--max-model-len", str(setup.max_model_len), "--dtype", "bfloat16")
    address = ("--host", "127.0.0.1", "--port", str(port))
    command = (str(setup.installed("vllm")), "serve", str(setup.model_dir), *of_model, *address, *flags)
    with _launched(command, port, setup.vllm_environment) as server:
        yield server


def vllm_512(setup: Setup) -> AbstractContextManager[Server]:
    """Start vLLM with smaller steps: running streams pause for a shorter time, and first tokens come later."""
    return vllm(setup, "--max-num-batched-tokens", "512")


def vllm_128(setup: Setup) -> AbstractContextManager[Server]:
    """Start vLLM with steps as small as ours are beside streams. A step must hold a token for each sequence."""
    return vllm(setup, "--max-num-batched-tokens", "128", "--max-num-seqs", "64")


@contextmanager
def llama_cpp(setup: Setup) -> Iterator[Server]:
    """Start llama.cpp's own server on the file that our model is made from, with a slot for each of 16 clients."""
    port = free_port()
    of_load = ("--threads", str(os.cpu_count()), "--parallel", "16", "--ctx-size", str(16 * 2560))
    address = ("--host", "127.0.0.1", "--port", str(port), "--alias", "peer")
    command = (str(setup.installed("llama-server", "benchmarks/peers/llama_cpp.sh")), "--model", str(setup.gguf()))
    with _launched((*command, *of_load, *address), port, {}) as server:
        yield server


@contextmanager
def ray_llm(setup: Setup) -> Iterator[Server]:
    setup.installed("serve")
    port = free_port()
    program = (str(setup.installed("python")), "-P", str(ROOT / "benchmarks" / "peers" / "ray_llm.py"))
    variables = (f"{name}={value}" for name, value in setup.vllm_environment.items())
    command = (*program, str(setup.model_dir), str(setup.max_model_len), str(port), *variables)
    with _launched(command, port, {"RAY_USAGE_STATS_ENABLED": "0"}) as server:
        yield server


@contextmanager
def _launched(command: tuple[str, ...], port: int, environment: dict[str, str]) -> Iterator[Server]:
    """Start a command in its own directory, without this repository on its path: transformers would import our
    `kernels`."""
    temp = Path(tempfile.mkdtemp(prefix="cs", dir="/tmp"))  # short: Ray's sockets live below it
    own = {"PYTHONPATH": "", "RAY_TMPDIR": str(temp)}
    try:
        with launched(command, port, {**own, **environment}, temp / "server.log", cwd=temp) as server:
            yield server
    finally:
        shutil.rmtree(temp, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Contender:
    title: str
    start: Callable[[Setup], AbstractContextManager[Server]]
    ready_path: str = "/health"


SERVERS = {
    "chunkserve": Contender("chunkserve", chunkserve),
    "chunkserve-no-drafts": Contender("chunkserve, no drafts", chunkserve_no_drafts),
    "chunkserve-250-ms": Contender("chunkserve, no drafts, 250 ms", chunkserve_250_ms),
    "chunkserve-stored": Contender("chunkserve, weights as stored", chunkserve_stored),
    "chunkserve-rounded": Contender("chunkserve, weights as stored, activations in int8", chunkserve_rounded),
    "chunkserve-float32": Contender("chunkserve, weights as stored, in float32", chunkserve_float32),
    "vllm": Contender("vLLM", vllm),
    "vllm-512": Contender("vLLM, 512 a step", vllm_512),
    "vllm-128": Contender("vLLM, 128 a step", vllm_128),
    "llama-cpp": Contender("llama.cpp", llama_cpp),
    "ray-llm": Contender("Ray Serve LLM", ray_llm, ready_path="/v1/models"),  # it has no /health
}
USUAL = ("chunkserve", "chunkserve-no-drafts", "vllm", "vllm-512", "ray-llm")
"""What docs/benchmarks/peers.md compares."""


def served_model(server: Server) -> str:
    """Return the name of the server's model."""
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=30) as response:
        name: str = json.load(response)["data"][0]["id"]
    return name
