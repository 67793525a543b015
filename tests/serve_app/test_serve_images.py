"""Owns the proof that a served model is shown images over HTTP, as data URLs and from a listed host, with two engines.
Judges what the model says of them only by transformers' own answer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from serve_app.api.text.tokenizer import Tokenizer
from tests.support.image_files import Given, data_url, image_file, image_server, make_image
from tests.support.serve_process import PYTHON_PROXY, serve_run
from tests.support.tiny_vision import save_vision_model, show

pytestmark = [pytest.mark.server, pytest.mark.slow]

NEW_TOKENS = 6


def test_images_are_shown_over_http_by_data_urls_and_by_urls_of_listed_hosts(tmp_path: Path) -> None:
    model = save_vision_model(tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    images = [make_image(seed, 64, 40) for seed in range(3)]
    prompts = [
        show(tokenizer.encode("<|im_start|>user\n"), image, tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n"))
        for image in images
    ]
    want = [
        model.generate(
            **prompt.for_transformers(), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(prompt.token_ids) :].tolist()
        for prompt in prompts
    ]
    engine = {"dtype": "float32", "num_kv_blocks": 200, "num_threads": 1}
    with image_server({"/a.png": Given(image_file(images[0]))}) as elsewhere:
        args = {
            "model": str(tmp_path),
            "served_model_name": "tiny",
            "engine": engine,
            "engine_replicas": 2,
            "images": {"allowed_hosts": [elsewhere.host]},
        }
        urls = [elsewhere.url("/a.png"), *map(data_url, images[1:])]
        with serve_run(args, env=PYTHON_PROXY) as server, ThreadPoolExecutor(6) as pool:

            def answer(url: str) -> list[int]:
                part = {"type": "image_url", "image_url": {"url": url}}
                body = {"model": "tiny", "messages": [{"role": "user", "content": [part]}], "temperature": 0}
                body |= {"max_tokens": NEW_TOKENS, "ignore_eos": True, "return_token_ids": True}
                told = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
                assert told.status_code == 200, told.text
                found: list[int] = told.json()["choices"][0]["token_ids"]
                return found

            assert list(pool.map(answer, urls * 2)) == want * 2
            refused = httpx.post(
                f"{server.url}/v1/chat/completions",
                json={
                    "model": "tiny",
                    "messages": [
                        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/a"}}]}
                    ],
                },
                timeout=60,
            )
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "messages.0.content.0.image_url"
