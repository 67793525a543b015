"""Owns a running engine of the library with what turns text into its requests, and its events into answers.
Never imported before an engine starts: it imports most of the server's API, which takes a second."""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from chunkserve.answers import Answer, Chunk
from chunkserve.errors import RequestRefused, closed, of_another_process, of_request
from chunkserve.fields import Message
from chunkserve.reading import Reading
from engine.async_engine import AsyncEngine
from engine.build.engine import build_engine
from engine.checkpoints.model_name import ready_directory
from engine.protocol import EngineError, RequestRejected
from serve_app.adapters.named_adapters import NamedAdapters
from serve_app.adapters.names import AdapterNames
from serve_app.admission.gate import AdmissionTicket, Gate
from serve_app.api.generation.answer_readers import content_stops
from serve_app.api.generation.completion import Completion
from serve_app.api.generation.field_grammars import refused
from serve_app.api.generation.live import Lifecycle
from serve_app.api.generation.submission import Prepared, prepare_chat, prepare_completion
from serve_app.api.http.offload import run_sized
from serve_app.api.http.turns import TenantTurns
from serve_app.api.openai.choices import MAX_AT_ONCE, Choices
from serve_app.api.openai.embeddings import normalized, prepare_embeddings
from serve_app.api.requests.deadline import deadline_of, now
from serve_app.api.requests.embedding_schema import EmbeddingRequest
from serve_app.api.requests.hints import Hints, keeping
from serve_app.api.requests.prompt_schema import MAX_INPUTS
from serve_app.api.requests.schema import ChatRequest, CompletionRequest, parse_request
from serve_app.api.requests.targets import targets_of
from serve_app.engines.engine_client import ServedModel
from serve_app.engines.own_engine import OwnEngine
from serve_app.errors.api_error import ApiError
from serve_app.metrics.request_times import RequestTimes
from serve_app.replicas.served_model import TextSide, read_text_side, served_model, warm_up
from serve_app.settings.application import AppSettings
from serve_app.settings.limits import GatePolicy

Request = TypeVar("Request", ChatRequest, CompletionRequest, EmbeddingRequest)


@dataclass(frozen=True, slots=True)
class Parts:
    """What `build` makes in a thread."""

    engine: AsyncEngine
    text: TextSide


def build(settings: AppSettings) -> Parts:
    """Prepare the model, unless that was done, and start its engine. Blocks for seconds, or for a download's time.

    Raises:
        ModelError: the model cannot be found, read or run.
        ConfigError: the settings do not fit the model or the machine.
    """
    weights, progress = settings.engine.load_format != "dummy", False
    if settings.engine.executor == "torch":
        ready = ready_directory(settings.model, weights=weights, thorough=False, **settings.gguf_form)
        progress = ready is None  # a library says nothing, unless there is something to wait for
    engine = build_engine(settings.model, settings.replica_engine, progress=progress)
    try:
        return Parts(engine, read_text_side(settings, progress=False))
    except BaseException:
        engine.shutdown()
        raise


class Running:
    """A warm engine. Everything but `shutdown` must be called on the event loop on which it was started."""

    def __init__(self, parts: Parts, settings: AppSettings, names: AdapterNames) -> None:
        self.engine = parts.engine
        self.tokenizer = parts.text.tokenizer
        self._client = OwnEngine(parts.engine)
        self._model_id = settings.model_id
        self._names = names
        # As many are with the engine as by the server's settings. All others wait here, and none is refused for it.
        self._gate = Gate(GatePolicy(dispatch_per_engine=settings.gate_policies[0].dispatch_per_engine))
        self._turns = TenantTurns()
        self._closed, self._pid = False, os.getpid()

    @classmethod
    async def started(cls, parts: Parts, settings: AppSettings) -> Running:
        """Run the engine's first steps and load the adapters. The engine is shut down if that fails.

        Raises:
            ValueError: a setting does not fit the model.
            EngineError: the engine does not work, or an adapter cannot be used.
        """
        try:
            model = served_model(settings, parts.text, parts.engine.config)
            await warm_up(parts.engine)
            adapters = NamedAdapters(parts.engine)
            await adapters.load_all(settings.lora_adapters)
            return cls(parts, settings, AdapterNames(model, adapters.known))
        except BaseException:
            await asyncio.to_thread(parts.engine.shutdown)
            raise

    async def refuse_more(self) -> None:
        """Let nothing in any more, and fail what waits."""
        self._closed = True
        await self._gate.drain(0)

    def shutdown(self) -> None:
        """Fail what runs, and free the engine's memory. Blocks until the running step ends. Any threads may call it at
        the same time. Idempotent."""
        if os.getpid() == self._pid:  # the engine's thread was left behind at the fork, and would never end
            self.engine.shutdown()

    # --- requests ---------------------------------------------------------------------------------------------------

    def read_chat(self, messages: Sequence[Message], fields: Mapping[str, Any], *, stream: bool) -> ChatRequest:
        return self._read(ChatRequest, {"messages": messages, "return_token_ids": True, "stream": stream, **fields})

    def read_completion(
        self, prompt: str | Sequence[int], fields: Mapping[str, Any], *, stream: bool
    ) -> CompletionRequest:
        of_ids = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes | bytearray)
        if not isinstance(prompt, str) and not (of_ids and all(isinstance(one, int) for one in prompt)):
            raise RequestRefused("prompt: should be one text, or the ids of its tokens", "invalid_value", "prompt")
        given = prompt if isinstance(prompt, str) else list(prompt)
        content = {"prompt": given, "return_token_ids": True, "stream": stream, **fields}
        return self._read(CompletionRequest, content)

    def _read(self, kind: type[Request], content: dict[str, Any]) -> Request:
        """Read a request as the server reads a body, which refuses what is not honoured."""
        content = {"model": self._model_id} | {name: value for name, value in content.items() if value is not None}
        for name, value in content.items():
            try:
                json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # which has no lone surrogates
            except (TypeError, ValueError, RecursionError) as error:
                text = f"{name}: should be made of what JSON has: {error}"
                raise RequestRefused(text, "invalid_value", name) from None
        with _told(), keeping(Hints(strict=True)):
            return parse_request(kind, json.dumps(content).encode())

    async def answer(self, request: ChatRequest | CompletionRequest) -> Answer:
        async with self._choices(request) as (choices, model):
            return Reading(request, choices, self.tokenizer, model).answer(await choices.whole())

    async def chunks(self, request: ChatRequest | CompletionRequest) -> AsyncGenerator[Chunk, None]:
        async with self._choices(request) as (choices, model), aclosing(choices.pieces()) as pieces:
            reading = Reading(request, choices, self.tokenizer, model)
            async for index, piece in pieces:
                if (chunk := reading.chunk(index, piece)) is not None:
                    yield chunk

    async def vectors(self, texts: Sequence[str], fields: Mapping[str, Any]) -> list[list[float]]:
        several = isinstance(texts, Sequence) and not isinstance(texts, str | bytes)
        if not several or any(isinstance(one, int) for one in texts):  # ids are those of one text
            raise RequestRefused("texts: should be a list of texts", "invalid_value", "texts")
        found, arrived = list[list[float]](), now()  # all parts of the list have one deadline
        for first in range(0, len(texts), MAX_INPUTS):
            request = self._read(EmbeddingRequest, {"input": list(texts[first : first + MAX_INPUTS]), **fields})
            async with self._choices(request, arrived) as (choices, _):
                await choices.whole()
                vectors = choices.vectors
                found += await run_sized(sum(map(len, vectors)), partial(list, map(normalized, vectors)))
        return found

    @asynccontextmanager
    async def _choices(
        self, request: ChatRequest | CompletionRequest | EmbeddingRequest, arrived: float | None = None
    ) -> AsyncIterator[tuple[Choices, ServedModel]]:
        """Prepare a request and wait for its place with the engine. Leaving the block ends it. `arrived`: when its
        time began, if not now."""
        if os.getpid() != self._pid:  # the engine's thread was left behind at the fork, and would never answer
            raise of_another_process()
        with _told(lambda: self._closed), self._gate.enter() as ticket:
            model, lifecycle = self._names.served(request.model), Lifecycle()
            lifecycle.until(deadline_of(now() if arrived is None else arrived, None, request.timeout_ms))
            try:
                choices = await self._start(request, model, ticket, lifecycle)
                try:
                    yield choices, model
                except RequestRejected as error:
                    if error.param != "grammar":
                        raise
                    raise refused(choices.constrained_by, error.message) from error
            finally:
                lifecycle.close()

    async def _start(
        self,
        request: ChatRequest | CompletionRequest | EmbeddingRequest,
        model: ServedModel,
        ticket: AdmissionTicket,
        lifecycle: Lifecycle,
    ) -> Choices:
        times = RequestTimes()
        with keeping(Hints(strict=True)):
            targets: dict[str, Any] = {**targets_of({}, request, model.targets)}
            with lifecycle.bound():
                groups = await self._prepared(request, uuid.uuid4().hex, model)
        num_tokens = sum(len(group[0].submission.prompt_token_ids) for group in groups)
        with lifecycle.bound():
            await ticket.dispatched(num_tokens, sum(map(len, groups)), MAX_AT_ONCE)

        def completion(ready: Prepared) -> Completion:
            ready = replace(ready, submission=replace(ready.submission, **targets))
            stops = content_stops(request, self.tokenizer, model, ready) if isinstance(request, ChatRequest) else None
            return Completion(self._client, ready, lifecycle, ticket, times, None, stops=stops)

        return await Choices.of(groups, completion)

    async def _prepared(
        self, request: ChatRequest | CompletionRequest | EmbeddingRequest, request_id: str, model: ServedModel
    ) -> list[list[Prepared]]:
        def patiently(work: Callable[[], Any]) -> Awaitable[Any]:
            return self._turns.run("", work)

        if isinstance(request, ChatRequest):
            return await prepare_chat(request, request_id, self.tokenizer, model, patiently)
        if isinstance(request, CompletionRequest):
            return await prepare_completion(request, request_id, self.tokenizer, model, patiently)
        return await prepare_embeddings(request, request_id, self.tokenizer, model, patiently)


@contextmanager
def _told(is_closed: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Raise the server's errors as the library's. Of a closed engine, any other part may complain first."""
    try:
        yield
    except Exception as error:
        if is_closed():
            raise closed() from error
        if isinstance(error, ApiError | EngineError):
            raise of_request(error) from error
        raise
