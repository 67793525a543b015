"""Owns `AsyncEngine`, the library for programs with an event loop.
Never blocks the loop: models are loaded in a thread, and steps run in the engine's own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from chunkserve.answers import Answer, Chunk
from chunkserve.errors import ConfigError, RequestFailed, closed
from chunkserve.fields import ChatFields, CompletionFields, EmbeddingFields, Message, refuse_unknown
from chunkserve.settings import EngineSettings, read_settings
from engine.config import DEFAULT_MODEL, ResolvedConfig
from engine.protocol import EngineError, RequestRejected

if TYPE_CHECKING:
    from chunkserve.running import Parts, Running
    from serve_app.settings.application import AppSettings


class AsyncEngine:
    """A model in this process. Its requests share steps, whoever sends them: run as many as you like at a time.

        async with AsyncEngine("smollm2-135m-instruct") as engine:
            answer = await engine.chat([{"role": "user", "content": "Hello"}], max_tokens=64)

    It belongs to the event loop on which it was started. Cancelling a task that waits for an answer ends the request,
    and so does closing a stream. Wrong requests and failures raise RequestError, and touch no other request.
    """

    def __init__(self, model: str | os.PathLike[str] = DEFAULT_MODEL, **settings: Unpack[EngineSettings]) -> None:
        """Read the settings; `start` loads the model.

        Args:
            model: a hub id, a directory in Hugging Face's format, a .gguf file, or the packaged default.
            settings: those below `engine` in a server's config, and those of EngineSettings that stand beside it.

        Raises:
            ConfigError: a setting is unknown, or has a wrong value; a line for each.
        """
        self._settings = read_settings(os.fspath(model), settings)
        self._running: Running | None = None
        self._retired: Running | None = None  # lets nothing in any more, and is not shut down yet
        self._starting = asyncio.Lock()

    async def start(self) -> Self:
        """Prepare the model, unless that was done, load it, and run its first steps. Returns this engine.

        Raises:
            ModelError: the model cannot be found, downloaded, read or run.
            ConfigError: the settings do not fit the model or the machine.
            RequestFailed: the engine does not work here.
        """
        async with self._starting:
            if self._running is None:
                await self._shut_down(self._retired)  # frees the memory that the model needs
                await self._start()
        return self

    async def _start(self) -> None:
        parts = await self._built()
        from chunkserve.running import Running  # loaded by now, in the thread that built the parts

        try:
            self._running = await Running.started(parts, self._settings)
        except (RequestRejected, ValueError) as error:  # of an adapter, or of the limits of images
            raise ConfigError(str(error)) from error
        except EngineError as error:
            raise RequestFailed(str(error), str(error.code)) from error

    async def _built(self) -> Parts:
        building = _Building(self._settings)
        try:
            return await asyncio.to_thread(building.run)
        except asyncio.CancelledError:  # the thread goes on; what it makes must not be left running
            building.drop()
            raise

    async def close(self) -> None:
        """End all requests with RequestFailed, and free the model. A start that is under way ends first. Whoever closes
        second waits for it, too. If it is cancelled, it can be called again. Idempotent."""
        await self._shut_down(await self._retire())

    async def _retire(self) -> Running | None:
        """Let nothing in any more, and return what is still to be shut down, if anything is."""
        async with self._starting:
            running = self._retired = self._running or self._retired
            self._running = None
        if running is not None:
            await running.refuse_more()
        return running

    async def _shut_down(self, running: Running | None) -> None:
        if running is not None:
            await asyncio.to_thread(running.shutdown)
            self._forget(running)

    def _forget(self, running: Running) -> None:
        """Let go of what was shut down."""
        if self._retired is running:
            self._retired = None

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()

    # --- requests ---------------------------------------------------------------------------------------------------

    async def generate(self, prompt: str | Sequence[int], **fields: Unpack[CompletionFields]) -> Answer:
        """Continue a text, or the ids of its tokens. Fields are those of `/v1/completions`; see CompletionFields.

        Raises:
            RequestRefused: a field is unknown or wrong, or the prompt does not fit.
            RequestFailed: the deadline has passed, or the engine failed or was closed.
        """
        refuse_unknown(CompletionFields, fields)
        running = self._require()
        return await running.answer(running.read_completion(prompt, fields, stream=False))

    def stream(self, prompt: str | Sequence[int], **fields: Unpack[CompletionFields]) -> AsyncGenerator[Chunk, None]:
        """Do as `generate`, but yield the answer in chunks. The request begins with the first one, and ends when the
        iterator is closed. A wrong field raises at once, and all else with a chunk.

        Raises: as `generate`.
        """
        refuse_unknown(CompletionFields, fields)
        running = self._require()
        return running.chunks(running.read_completion(prompt, fields, stream=True))

    async def chat(self, messages: Sequence[Message], **fields: Unpack[ChatFields]) -> Answer:
        """Answer a conversation. Fields are those of `/v1/chat/completions`; see ChatFields.

        Raises: as `generate`.
        """
        refuse_unknown(ChatFields, fields)
        running = self._require()
        return await running.answer(running.read_chat(messages, fields, stream=False))

    def stream_chat(self, messages: Sequence[Message], **fields: Unpack[ChatFields]) -> AsyncGenerator[Chunk, None]:
        """Do as `chat`, but yield the answer in chunks, as `stream` does."""
        refuse_unknown(ChatFields, fields)
        running = self._require()
        return running.chunks(running.read_chat(messages, fields, stream=True))

    async def embed(self, texts: Sequence[str], **fields: Unpack[EmbeddingFields]) -> list[list[float]]:
        """Return a vector of length 1 for each text. The engine needs the setting `pooling`.

        Raises: as `generate`.
        """
        refuse_unknown(EmbeddingFields, fields)
        return await self._require().vectors(texts, fields)

    # --- facts ------------------------------------------------------------------------------------------------------

    @property
    def config(self) -> ResolvedConfig:
        """What the engine made of its settings on this machine, and why: device, types, memory.

        Raises RequestFailed: the engine does not run.
        """
        return self._require().engine.config

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a prompt's tokens, with those that the model puts before it.

        Raises RequestFailed: the engine does not run.
        """
        return self._require().tokenizer.encode(text)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, including special ones.

        Raises RequestFailed: the engine does not run.
        """
        return self._require().tokenizer.decode(token_ids)

    def _require(self) -> Running:
        if self._running is None:
            raise closed()
        return self._running


class _Building:
    """Makes the parts in a thread. If nobody wants them any more, they are shut down by whoever notices last: the event
    loop may have ended by then."""

    def __init__(self, settings: AppSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._is_wanted = True
        self._parts: Parts | None = None

    def run(self) -> Parts:
        from chunkserve.running import build

        parts = build(self._settings)
        with self._lock:
            self._parts, is_wanted = parts, self._is_wanted
        if not is_wanted:
            parts.engine.shutdown()
        return parts

    def drop(self) -> None:
        with self._lock:
            self._is_wanted, parts = False, self._parts
        if parts is not None:
            parts.engine.shutdown()
