"""Owns `Engine`, the library for programs without an event loop: scripts, notebooks, threads.
Never does a request's work itself: `AsyncEngine` does, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from chunkserve.answers import Answer, Chunk
from chunkserve.async_engine import AsyncEngine
from chunkserve.errors import RequestError, RequestFailed, RequestRefused
from chunkserve.fields import ChatFields, CompletionFields, EmbeddingFields, Message, refuse_unknown
from chunkserve.loop_thread import LoopThread
from chunkserve.settings import EngineSettings
from engine.config import DEFAULT_MODEL, ResolvedConfig

Asked = TypeVar("Asked")


class Engine:
    """A model in this process.

        with Engine("smollm2-135m-instruct") as engine:
            print(engine.chat([{"role": "user", "content": "Hello"}], max_tokens=64).text)
            for chunk in engine.stream("Once upon a time", max_tokens=64):
                print(chunk.text, end="")

    Any thread may use it, and so may a notebook, whose own event loop is not touched. Requests share steps: send many
    at once by threads, or by `generate_all` and `chat_all`. Closing a stream, or Ctrl-C, ends its request. Wrong
    requests and failures raise RequestError, and touch no other request.
    """

    def __init__(self, model: str | os.PathLike[str] = DEFAULT_MODEL, **settings: Unpack[EngineSettings]) -> None:
        """Prepare the model, unless that was done, load it, and run its first steps.

        Args:
            model: a hub id, a directory in Hugging Face's format, a .gguf file, or the packaged default.
            settings: those below `engine` in a server's config, and those of EngineSettings that stand beside it.

        Raises:
            ConfigError: a setting is unknown, wrong, or does not fit the model or the machine.
            ModelError: the model cannot be found, downloaded, read or run.
            RequestFailed: the engine does not work here.
        """
        self._inner = AsyncEngine(model, **settings)
        self._loop = LoopThread()
        try:
            self._loop.call(self._inner.start())
        except BaseException:
            self._loop.stop()
            raise
        self._streams = set[AsyncGenerator[Chunk, None]]()  # begun and not closed, so no stream is kept by it
        self._closing = threading.RLock()  # reentrant: a handler of a signal may close, too
        self._end = weakref.finalize(self, _collected, self._inner, self._loop, self._streams)  # also at program's end

    def close(self) -> None:
        """End all requests with RequestFailed, and free the model. Whoever closes second waits for it, too. If Ctrl-C
        interrupts that, it can be called again. Idempotent."""
        with self._closing:
            if self._end.alive:
                _end(self._inner, self._loop, self._streams)
                self._end.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    # --- requests ---------------------------------------------------------------------------------------------------

    def generate(self, prompt: str | Sequence[int], **fields: Unpack[CompletionFields]) -> Answer:
        """Continue a text, or the ids of its tokens. Fields are those of `/v1/completions`; see CompletionFields.

        Raises:
            RequestRefused: a field is unknown or wrong, or the prompt does not fit.
            RequestFailed: the deadline has passed, or the engine failed or was closed.
        """
        return self._loop.call(self._inner.generate(prompt, **fields))

    def stream(self, prompt: str | Sequence[int], **fields: Unpack[CompletionFields]) -> Generator[Chunk, None, None]:
        """Do as `generate`, but yield the answer in chunks. The request begins with the first one, and ends when the
        iterator is closed. A wrong field raises at once, and all else with a chunk.

        Raises: as `generate`.
        """
        return self._read(self._inner.stream(prompt, **fields))

    def chat(self, messages: Sequence[Message], **fields: Unpack[ChatFields]) -> Answer:
        """Answer a conversation. Fields are those of `/v1/chat/completions`; see ChatFields.

        Raises: as `generate`.
        """
        return self._loop.call(self._inner.chat(messages, **fields))

    def stream_chat(self, messages: Sequence[Message], **fields: Unpack[ChatFields]) -> Generator[Chunk, None, None]:
        """Do as `chat`, but yield the answer in chunks, as `stream` does."""
        return self._read(self._inner.stream_chat(messages, **fields))

    def generate_all(
        self, prompts: Iterable[str | Sequence[int]], **fields: Unpack[CompletionFields]
    ) -> list[Answer | RequestError]:
        """Run `generate` for each prompt, all at once. A request that is refused or fails has its error in the list, in
        the place of its answer: the others are not lost.

        Raises RequestRefused: a field is unknown, or `prompts` is one text.
        """
        refuse_unknown(CompletionFields, fields)
        if isinstance(prompts, str):
            raise RequestRefused("prompts: should be several, but it is one text", "invalid_value", "prompts")
        return self._loop.call(_all(lambda prompt: self._inner.generate(prompt, **fields), list(prompts)))

    def chat_all(
        self, conversations: Iterable[Sequence[Message]], **fields: Unpack[ChatFields]
    ) -> list[Answer | RequestError]:
        """Run `chat` for each conversation, all at once, as `generate_all` does."""
        refuse_unknown(ChatFields, fields)
        return self._loop.call(_all(lambda messages: self._inner.chat(messages, **fields), list(conversations)))

    def embed(self, texts: Sequence[str], **fields: Unpack[EmbeddingFields]) -> list[list[float]]:
        """Return a vector of length 1 for each text. The engine needs the setting `pooling`.

        Raises: as `generate`.
        """
        return self._loop.call(self._inner.embed(texts, **fields))

    # --- facts ------------------------------------------------------------------------------------------------------

    @property
    def config(self) -> ResolvedConfig:
        """What the engine made of its settings on this machine, and why: device, types, memory.

        Raises RequestFailed: the engine was closed.
        """
        return self._inner.config

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a prompt's tokens, with those that the model puts before it.

        Raises RequestFailed: the engine was closed.
        """
        return self._inner.tokenize(text)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, including special ones.

        Raises RequestFailed: the engine was closed.
        """
        return self._inner.detokenize(token_ids)

    def _read(self, chunks: AsyncGenerator[Chunk, None]) -> Generator[Chunk, None, None]:
        """Read an asynchronous stream from this thread."""
        self._streams.add(chunks)
        try:
            while (chunk := self._loop.call(_next(chunks))) is not None:
                yield chunk
        finally:
            with suppress(RequestFailed):  # the engine was closed, and its streams with it
                self._loop.finish(_close(chunks))
                self._streams.discard(chunks)


async def _next(chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
    return await anext(chunks, None)


async def _close(chunks: AsyncGenerator[Chunk, None]) -> None:
    with suppress(RuntimeError):  # it runs: its read was cancelled, which ends it as well
        await chunks.aclose()


async def _all(ask: Callable[[Asked], Coroutine[Any, Any, Answer]], asked: list[Asked]) -> list[Answer | RequestError]:
    async def one(item: Asked) -> Answer | RequestError:
        try:
            return await ask(item)
        except RequestError as error:
            return error

    return await asyncio.gather(*map(one, asked))


async def _close_all(streams: set[AsyncGenerator[Chunk, None]]) -> None:
    """Close the streams that nobody reads any more, each from its outside. What is inside of them would else be closed
    beside them when the loop ends, and fail."""
    for chunks in list(streams):  # in one step, whatever other threads do meanwhile
        await _close(chunks)


def _end(inner: AsyncEngine, loop: LoopThread, streams: set[AsyncGenerator[Chunk, None]]) -> None:
    with suppress(RequestFailed):  # the loop was stopped already
        running = loop.call(inner._retire())
        if running is not None:
            running.shutdown()  # here, because the loop has no threads for it when the program ends
            inner._forget(running)
    # Streams are closed last, when none can begin any more: who reads a closed one would take it for complete.
    loop.stop(lambda: _close_all(streams))


def _collected(inner: AsyncEngine, loop: LoopThread, streams: set[AsyncGenerator[Chunk, None]]) -> None:
    """Close an engine that nobody closed. The garbage collector runs in any thread, and a thread of the engine's own
    cannot wait for its own end."""
    if threading.current_thread().daemon:
        threading.Thread(target=_end, args=(inner, loop, streams), name="chunkserve-end").start()
    else:
        _end(inner, loop, streams)
