"""Owns the proof that one `serve run` serves several models: two real ones of different families, and scripted ones
that sleep, wake, and make room for each other without any effect on a running stream.
Judges a text only by that of transformers' model with the same weights."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from ray._private.utils import get_num_cpus

from loadtest.server import Server
from tests.support.serve_process import PYTHON_PROXY, serve_several
from tests.support.tiny_models import VOCAB, greedy_answer, save_model, save_tokenizer

pytestmark = [pytest.mark.server, pytest.mark.slow]

PROMPT = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
NEW_TOKENS = 8
STEP_MS = 60
PATIENCE_S = 4
"""How long a request waits for the model that cannot be woken."""
LONG = int(3 * PATIENCE_S * 1000 / STEP_MS)
"""The tokens of a stream that is longer than that."""
ROOM = get_num_cpus()
"""The CPUs of the cluster. `echo` and `qwen` fit together, and `large` fits beside none that sleeps."""


def entries(directory: Path) -> list[dict[str, Any]]:
    """Return the entries of the models, of which only `llama` never sleeps."""
    real = {"dtype": "float32", "num_kv_blocks": 200, "num_threads": 1}
    fake = {"executor": "fake", "fake": {"step_delay_ms": STEP_MS}}
    sleeps = {"min_replicas": 0, "max_replicas": 1}
    return [
        {
            "model": str(directory / "llama"),
            "served_model_name": "llama",
            "engine": real,
            "engine_num_cpus": 0.05,
            "model_aliases": {"gpt-*": "llama"},
        },
        {
            "model": str(directory / "qwen"),
            "served_model_name": "qwen",
            "engine": real,
            "engine_num_cpus": 0.3 * ROOM,
            "autoscaling": sleeps,
        },
        {
            "served_model_name": "echo",
            "engine": fake,
            "engine_num_cpus": 0.3 * ROOM,
            "autoscaling": sleeps,
        },
        {
            "served_model_name": "late",
            "engine": fake,
            "engine_num_cpus": 0.3 * ROOM,
            "autoscaling": sleeps,
            "wake_timeout_s": PATIENCE_S,
        },
        {"served_model_name": "large", "engine": fake, "engine_num_cpus": 0.75 * ROOM, "autoscaling": sleeps},
    ]


class Client:
    def __init__(self, server: Server, pool: ThreadPoolExecutor) -> None:
        self.url = server.url
        self._pool = pool

    def complete(self, model: str, **more: Any) -> httpx.Response:
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "model": model}
        return httpx.post(f"{self.url}/v1/completions", json=body | more, timeout=120)

    def token_ids(self, model: str) -> list[int]:
        told = self.complete(model, return_token_ids=True)
        assert told.status_code == 200, told.text
        found: list[int] = told.json()["choices"][0]["token_ids"]
        return found

    def stream(self, model: str, num_tokens: int) -> Stream:
        return Stream(self.url, model, num_tokens, self._pool)

    def engines(self, model: str) -> list[Any]:
        told = httpx.get(f"{self.url}/load", timeout=30)
        told.raise_for_status()
        found: list[Any] = told.json()["models"][model]["engines"]
        return found


class Stream:
    """Reads a stream in a thread, whose result is the number of tokens that came, with the finish reason."""

    def __init__(self, url: str, model: str, num_tokens: int, pool: ThreadPoolExecutor) -> None:
        self._body = {"model": model, "prompt": "hi", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        self._url = url
        self.num_read = 0
        self.result: Future[tuple[int, str]] = pool.submit(self._read)

    def _read(self) -> tuple[int, str]:
        reason = ""
        body = self._body | {"return_token_ids": True}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=120) as answer:
            assert answer.status_code == 200, answer.read()
            for frame in _frames(answer):
                (choice,) = frame["choices"]
                self.num_read += len(choice["token_ids"] or ())
                reason = choice["finish_reason"] or reason
        return self.num_read, reason

    def wait_until_begun(self) -> None:
        deadline = time.monotonic() + 60
        while not self.num_read and not self.result.done() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.num_read or self.result.result()


def _frames(answer: httpx.Response) -> Iterator[Any]:
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def test_models_of_several_families_share_one_server_and_wake_and_sleep_without_harm_to_streams(tmp_path: Path) -> None:
    want = {}
    for name in ("llama", "qwen3"):
        directory = tmp_path / name.removesuffix("3")
        want[directory.name] = greedy_answer(save_model(name, directory), PROMPT, NEW_TOKENS)
        save_tokenizer(directory)
    args = {"models": entries(tmp_path), "ingress_num_cpus": 0.1}
    with serve_several(args, env=PYTHON_PROXY) as server, ThreadPoolExecutor(4) as pool:
        client = Client(server, pool)
        listed = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
        assert [(one["id"], one["max_model_len"]) for one in listed][:2] == [("llama", 256), ("qwen", 256)]
        assert [one["id"] for one in listed] == ["llama", "qwen", "echo", "late", "large"]
        assert client.token_ids("gpt-4o") == want["llama"]
        asleep = ("qwen", "echo", "large")
        assert [client.engines(name) for name in asleep] == [[], [], []], "nothing has woken them"

        # Another model is loaded beside a stream.
        stream = client.stream("echo", 300)
        stream.wait_until_begun()
        assert client.token_ids("qwen") == want["qwen"]
        assert not stream.result.done(), "the model was loaded while the stream ran"
        assert list(pool.map(client.token_ids, ["llama", "qwen"] * 3)) == [want["llama"], want["qwen"]] * 3
        assert stream.result.result() == (300, "length")

        # One that is too large sends both to sleep, and is not sent to sleep itself while it streams.
        large = client.stream("large", LONG)
        large.wait_until_begun()
        assert (client.engines("qwen"), client.engines("echo")) == ([], [])
        refused = client.complete("late")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_asleep"), refused.text
        assert int(refused.headers["retry-after"]) > 0
        assert not large.result.done(), "it was refused while the other streamed"
        assert large.result.result() == (LONG, "length")
        assert client.token_ids("qwen") == want["qwen"], "it is woken again, and reads the same weights"

        text = httpx.get(f"{server.url}/metrics", timeout=30).text
        (requests,) = (one for one in text_string_to_metric_families(text) if one.name == "chunkserve:requests")
        counted = {
            one.labels["model_name"]: one.value for one in requests.samples if one.labels["outcome"] == "complete"
        }
        assert counted == {"llama": 4, "qwen": 5, "echo": 1, "late": 0, "large": 1}
        missing = client.complete("nobody")
        assert missing.status_code == 404
        assert "this server serves `llama`, `qwen`, `echo`, `late`, `large`" in missing.json()["error"]["message"]
