"""Owns the promise that a burst of many images leaves no growth after it ends, from HTTP to the encoder's outputs.
Never measures a first burst: what is made once is no growth."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from pathlib import Path

from engine.async_engine import AsyncEngine
from engine.build.executor import create_executor
from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.models.encoding import EncodingModel
from engine.models.native_encoding import NativeEncodingModel
from serve_app.api.ingress import create_app
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.api.timing.recent import RecentTimes
from serve_app.engines.engine_client import ServedModel
from serve_app.images.intake import ImageIntake
from serve_app.settings.images import ImageSettings
from tests.serve_app.harness import LocalClient, post
from tests.support.image_files import data_url, make_image
from tests.support.tiny_vision import save_vision_model

KEPT_TOKENS = 200
NUM_REQUESTS = 24


def test_a_burst_of_images_leaves_no_growth(tmp_path: Path) -> None:
    save_vision_model(tmp_path)
    memory = KEPT_TOKENS * 96 * 4 / 2**30
    config = EngineConfig(dtype="float32", num_kv_blocks=80, num_threads=1, encoder_cache_memory_gib=memory)
    executor, resolved = create_executor(tmp_path, config)
    model = executor.model
    assert isinstance(model, EncodingModel | NativeEncodingModel)
    engine = AsyncEngine(EngineCore(executor, resolved))
    images = ImageIntake(resolved.inputs[0], ImageSettings())
    served = ServedModel(id="tiny", max_model_len=512, created=0, images=images)
    times = RecentTimes(most=NUM_REQUESTS)  # full after a burst
    app = create_app(LocalClient(engine), Tokenizer.from_dir(tmp_path), served, recent_times=times)

    async def burst(number: int) -> None:
        seeds = range(number * NUM_REQUESTS, (number + 1) * NUM_REQUESTS)
        urls = [data_url(make_image(seed, 64, 64)) for seed in seeds]
        bodies = [
            {
                "model": "tiny",
                "max_tokens": 2,
                "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}],
            }
            for url in urls
        ]
        answers = await asyncio.gather(*(post(app, "/v1/chat/completions", body) for body in bodies))
        assert {answer.status for answer in answers} == {200}

    def measured() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    try:
        asyncio.run(burst(0))
        tracemalloc.start()
        asyncio.run(burst(1))
        before = measured()
        for number in (2, 3):
            asyncio.run(burst(number))
        grown = measured() - before
    finally:
        tracemalloc.stop()
        engine.shutdown()
    kept = model.contents.embeddings.values()
    assert len(kept) == KEPT_TOKENS // 64
    assert sum(len(embeddings) for embeddings in kept) <= KEPT_TOKENS
    one_request = 64 * 64 * 3
    assert grown < 2 * NUM_REQUESTS * one_request / 4, "less than a quarter of what two bursts brought"
    load = engine.load()
    assert (load.num_running, load.num_waiting, load.num_held_blocks) == (0, 0, 0)
