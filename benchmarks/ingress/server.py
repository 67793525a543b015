"""Owns the server of `benchmarks.ingress.stalls`: an ingress with its routes, a model's tokenizer, and an engine of
constant pace. Never computes a token: the benchmark measures what the ingress does between two tokens."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import uvicorn

from engine.protocol import (
    Event,
    Finished,
    FinishReason,
    PromptLogprobs,
    Scheduled,
    Submission,
    Token,
    TokenLogprobs,
    Usage,
)
from serve_app.api.ingress import create_app
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import ServedModel, StreamRecord
from serve_app.engines.lone_engine import LoneEngine
from serve_app.replicas.interpreter import spare_garbage_collections, take_short_turns

STEP_S = 0.02
_TOKEN = 100


class PacedEngine(LoneEngine):
    """Gives every request a token each `STEP_S`, and the prompt's log-probabilities if they are requested."""

    async def stream(
        self, submission: Submission, *, session: str | None = None, record: StreamRecord | None = None
    ) -> AsyncGenerator[list[Event], None]:
        name, sampling = submission.request_id, submission.sampling
        first: list[Event] = [Scheduled(name, 0)]
        if sampling.prompt_logprobs is not None:
            top = tuple((token, -1.5 - token) for token in range(sampling.prompt_logprobs))
            scores = [TokenLogprobs(token, -1.25, top) for token in submission.prompt_token_ids[1:]]
            first.append(PromptLogprobs(name, tuple(scores)))
        yield first
        count = sampling.max_tokens or 1
        for _ in range(count):
            await asyncio.sleep(STEP_S)
            yield [Token(name, _TOKEN)]
        usage = Usage(len(submission.prompt_token_ids), count, 0)
        yield [Finished(name, FinishReason.LENGTH, usage)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Serve an engine of constant pace behind the real ingress on loopback."
    )
    parser.add_argument("directory", type=Path, help="directory of the model, for its tokenizer")
    parser.add_argument("port", type=int)
    parser.add_argument("max_model_len", type=int)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_dir(options.directory)
    model = ServedModel(id="bench", max_model_len=options.max_model_len, created=0)
    app = create_app(PacedEngine(), tokenizer, model)
    take_short_turns()
    spare_garbage_collections()
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
