"""Owns the proof that adapters are served over HTTP:
from the config and at run time, with two engines and two ingresses.
Judges a text only by the text of transformers' model into which the adapter is merged."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.support.serve_process import PYTHON_PROXY, serve_run
from tests.support.tiny_adapters import ATTENTION, merged, save_adapter
from tests.support.tiny_models import VOCAB, greedy_answer, save_model, save_tokenizer

pytestmark = [pytest.mark.server, pytest.mark.slow]

ADMIN = "sk-admin"
PROMPT = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
NEW_TOKENS = 8


def test_adapters_of_the_config_and_of_the_routes_are_served_by_every_replica(tmp_path: Path) -> None:
    base = save_model("llama", tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    paths = {
        "first": save_adapter(base, tmp_path / "first", seed=1),
        "second": save_adapter(base, tmp_path / "second", seed=2, modules=ATTENTION),
    }
    want = {"tiny": greedy_answer(base, PROMPT, NEW_TOKENS)} | {
        name: greedy_answer(merged(base, path), PROMPT, NEW_TOKENS) for name, path in paths.items()
    }
    assert len({tuple(text) for text in want.values()}) == 3
    args: dict[str, Any] = {
        "model": str(tmp_path / "model"),
        "served_model_name": "tiny",
        "engine": {"dtype": "float32", "num_kv_blocks": 200, "num_threads": 1, "max_loras": 4},
        "engine_replicas": 2,
        "ingress_replicas": 2,
        "lora_adapters": {"first": str(paths["first"])},
        "allow_lora_updates": True,
        "auth": {"admin_sha256": hashlib.sha256(ADMIN.encode()).hexdigest()},
    }
    with serve_run(args, env=PYTHON_PROXY) as server, ThreadPoolExecutor(6) as pool:

        def ask(path: str, **body: Any) -> httpx.Response:
            headers = {"Authorization": f"Bearer {ADMIN}"}
            return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)

        def complete(name: str) -> httpx.Response:
            body = {"prompt": PROMPT, "temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
            return ask("/v1/completions", model=name, return_token_ids=True, **body)

        def answer(name: str) -> list[int]:
            told = complete(name)
            assert told.status_code == 200, told.text
            found: list[int] = told.json()["choices"][0]["token_ids"]
            return found

        assert (
            list(pool.map(answer, ["tiny", "first", "tiny:first"] * 4))
            == [
                want["tiny"],
                want["first"],
                want["first"],
            ]
            * 4
        )
        assert {complete("second").status_code for _ in range(8)} == {404}
        refused = ask("/v1/load_lora_adapter", lora_name="second", lora_path=str(tmp_path / "nowhere"))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path")
        loaded = ask("/v1/load_lora_adapter", lora_name="second", lora_path=str(paths["second"]))
        assert loaded.status_code == 200, loaded.text
        names = ["tiny", "first", "second"] * 6
        assert list(pool.map(answer, names)) == [want[name] for name in names], "every ingress and every engine has it"
        listed = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
        assert [(one["id"], one.get("parent")) for one in listed] == [
            ("tiny", None),
            ("first", "tiny"),
            ("second", "tiny"),
        ]
        swapped = ask("/v1/load_lora_adapter", lora_name="second", lora_path=str(paths["first"]), load_inplace=True)
        assert swapped.status_code == 200, swapped.text
        assert list(pool.map(answer, ["second"] * 8)) == [want["first"]] * 8, "and no KV of its old weights is used"
        assert ask("/v1/unload_lora_adapter", lora_name="second").status_code == 200
        assert {complete("second").status_code for _ in range(8)} == {404}
        assert answer("first") == want["first"], "whose weights the other name had, too"
