"""Contracts of requests with images when the encoder cache is full: each gets its turn, whatever arrives after it."""

from __future__ import annotations

import itertools

import pytest

from engine.build.engine import _build_fake
from engine.config import EngineConfig, FakeConfig
from engine.core.core import EngineCore
from engine.multimodal_inputs import SpanInput
from engine.protocol import Finished, SamplingParams, Submission
from engine.scheduling.request import create_request

PAD, LETTER = 262, 97
CACHE_BYTES = 64 * 1024
"""Room for 64 tokens: one large image, or two small ones."""


class ImageCore:
    """A core that has twenty requests with small images at any time, each with another image."""

    def __init__(self, *, overlap: bool) -> None:
        asked = EngineConfig(
            executor="fake",
            max_num_batched_tokens=128,
            max_num_seqs=64,
            max_encoder_tokens=32,
            encoder_cache_memory_gib=CACHE_BYTES / 2**30,
            overlap=overlap,
            fake=FakeConfig(images=True),
        )
        executor, config = _build_fake(asked)
        self._core = EngineCore(executor, config)
        self._arrivals = itertools.count()
        self._num_small = 0
        self.ended: list[str] = []

    def send(self, name: str, *, rows: int, text: int = 0) -> None:
        arrival_index, num_tokens = next(self._arrivals), rows * 8
        pixels = arrival_index.to_bytes(4, "big").ljust(num_tokens * 28 * 28 * 3, b"\0")
        image = SpanInput.of("image", text, (1, rows, 8), pixels)
        prompt = (LETTER,) * text + (PAD,) * num_tokens + (LETTER,)
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        submission = Submission(name, prompt, params, inputs=(image,))
        self._core.submit(create_request(submission, self._core.config, arrival_index))

    def step(self) -> None:
        while self._num_small < 20 + sum(name != "large" for name in self.ended):
            self.send(f"small {self._num_small}", rows=4)
            self._num_small += 1
        self.ended += [event.request_id for event in self._core.step() if isinstance(event, Finished)]


@pytest.mark.parametrize("text", [0, 1], ids=["whole", "after a first chunk of text"])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_image_that_needs_the_whole_cache_gets_it_though_smaller_ones_keep_coming(overlap: bool, text: int) -> None:
    """Regression: the requests behind it took what each step gave back, for ever.
    With overlap, a step in flight holds its images."""
    core = ImageCore(overlap=overlap)
    core.step()
    core.send("large", rows=8, text=text)
    for _ in range(100):
        core.step()
    assert "large" in core.ended
    assert len(core.ended) > 60, "and the others go on"
