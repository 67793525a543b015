"""Implements the server class of Ray Serve LLM on this project's engine and API, in one process.
Never answers by itself: every request goes through the ASGI app that the project serves, so that answers are the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from importlib import import_module
from typing import Any

from ray import serve
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.async_engine import AsyncEngine
from engine.build.engine import build_engine
from engine.protocol import EngineError
from serve_app.adapters.named_adapters import NamedAdapters
from serve_app.adapters.names import AdapterNames
from serve_app.admission.gate import Gate
from serve_app.api.generation.live import LiveRequests
from serve_app.errors.api_error import ApiError, to_api_error
from serve_app.errors.refusal import refusal
from serve_app.metrics.engine_recorder import EngineRecorder
from serve_app.metrics.ingress_recorder import IngressRecorder
from serve_app.ray_llm.answers import error_object, read_answer, refusal_object
from serve_app.ray_llm.exchange import Exchange
from serve_app.ray_llm.local_engine import MeasuredEngine
from serve_app.ray_llm.pausing import Pausing
from serve_app.ray_llm.reading import deployment_options, read_settings
from serve_app.replicas.deployment import log_as_serve_does
from serve_app.replicas.interpreter import spare_garbage_collections, take_short_turns
from serve_app.replicas.served_model import read_text_side, served_model, share_threads, warm_up
from serve_app.replicas.watchdog import Watchdog
from serve_app.tracing.export import make_tracer

logger = logging.getLogger(__name__)

Answers = AsyncGenerator[Any, None]
"""What Ray's ingress reads: a whole answer, an ErrorResponse, or lists of server-sent events."""
_MODELS = "ray.llm._internal.serve.core.configs.openai_api_models"
_LOADER = "ray.llm._internal.serve.utils.lora_serve_utils"
_PAUSES = ("abort", "wait")


class NotOffered(Exception):
    """The engine has no such operation. Ray's ingress answers with the status."""

    status_code = 501


class ChunkserveServer:
    """Serves an LLMConfig: `LLMConfig(..., server_cls=ChunkserveServer)`. See docs/how-to/from-ray-serve-llm.md."""

    async def __init__(self, llm_config: Any, *, model_downloader: Any = None) -> None:  # type: ignore[misc]
        """`model_downloader`: gets adapters from a cloud; None means Ray Serve LLM's own.

        Raises:
            ValueError: the config asks for what the engine cannot do.
        """
        self._prepare(llm_config, model_downloader)
        await self.start()

    @classmethod
    def sync_init(cls, llm_config: Any, *, model_downloader: Any = None) -> ChunkserveServer:
        """Make a server that is not started: await `start`."""
        server = cls.__new__(cls)
        server._prepare(llm_config, model_downloader)
        return server

    def _prepare(self, llm_config: Any, model_downloader: Any) -> None:
        log_as_serve_does()
        self._llm_config = llm_config
        self._settings = read_settings(llm_config)
        self._downloads = _downloads(llm_config, model_downloader)
        self._engine: AsyncEngine | None = None

    async def start(self) -> None:
        """Load the model and build the API. Idempotent."""
        if self._engine is not None:
            return
        settings = self._settings
        self._models = await asyncio.to_thread(import_module, _MODELS)
        config = share_threads(settings.replica_engine, settings.most_engines)
        self._engine = await asyncio.to_thread(build_engine, settings.model, config, settings.most_engines)
        await warm_up(self._engine)
        self._adapters = NamedAdapters(self._engine)
        await self._adapters.load_all(settings.lora_adapters)
        await self._build_app(self._engine)
        engine = self._engine
        self._watchdog = Watchdog(settings.hang_timeout_s, lambda: not engine.has_stalled)
        take_short_turns()
        spare_garbage_collections()

    async def _build_app(self, engine: AsyncEngine) -> None:
        from serve_app.api.ingress import create_app

        settings = self._settings
        text = await asyncio.to_thread(read_text_side, settings)
        model = served_model(settings, text, engine.config)
        recorder = EngineRecorder(engine.config)
        engine.observe(recorder)  # only now, so that the warm-up does not count as a request
        self._live, gate = LiveRequests(), Gate(settings.gate_policies[0], lambda: 1)
        self._names = AdapterNames(model, self._adapters.known)
        ingress = IngressRecorder(gate)
        name = _replica_name()
        self._client = MeasuredEngine(engine, self._adapters, recorder, ingress, gate, name)
        self._tracer = make_tracer(settings.tracing, settings.model_id, name)
        self._app = Pausing(
            create_app(
                self._client,
                text.tokenizer,
                model,
                max_body_bytes=settings.max_body_bytes,
                sse_keep_alive_s=settings.sse_keep_alive_s,
                names_responses=False,
                gate=gate,
                live=self._live,
                recorder=ingress,
                trace=self._tracer,
                adapters=self._names,
                strict=settings.strict,
            )
        )

    # --- requests -----------------------------------------------------------------------------------------------------

    async def chat(self, request: Any, raw_request_info: Any = None) -> Answers:
        """Answer a ChatCompletionRequest: with a ChatCompletionResponse, lists of events, or an ErrorResponse."""
        return self._ask("/v1/chat/completions", request, raw_request_info, self._models.ChatCompletionResponse)

    async def completions(self, request: Any, raw_request_info: Any = None) -> Answers:
        """Answer a CompletionRequest, in the same way."""
        return self._ask("/v1/completions", request, raw_request_info, self._models.CompletionResponse)

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> Answers:
        """Answer an EmbeddingRequest with an EmbeddingResponse; refused without `pooling`."""
        return self._ask("/v1/embeddings", request, raw_request_info, self._models.EmbeddingResponse)

    async def tokenize(self, request: Any, raw_request_info: Any = None) -> Answers:
        """Answer a TokenizeRequest with a TokenizeResponse."""
        return self._ask("/tokenize", request, raw_request_info, self._models.TokenizeResponse)

    async def detokenize(self, request: Any, raw_request_info: Any = None) -> Answers:
        """Answer a DetokenizeRequest with a DetokenizeResponse."""
        return self._ask("/detokenize", request, raw_request_info, self._models.DetokenizeResponse)

    async def transcriptions(self, request: Any, raw_request_info: Any = None) -> Answers:
        """Refuse: no model of ours takes audio."""
        return self._refuse("Audio is not transcribed: no model here takes it.")

    async def score(self, request: Any, raw_request_info: Any = None) -> Answers:
        """Refuse: no model of ours ranks pairs of texts."""
        return self._refuse("Pairs of texts are not scored: no model here does that. /v1/embeddings has vectors.")

    async def _ask(self, path: str, request: Any, raw_request_info: Any, kind: Any) -> Answers:
        """Send a request of Ray's form to our own app, and yield its answer in Ray's form. Closing the generator, or
        cancelling the task that waits on it, aborts the request."""
        try:
            await self._find_adapter()
        except ApiError as error:
            yield refusal_object(self._models, error)
            return
        # Without fields that the client has not sent: each means its default, and ours refuses foreign ones by name.
        body = request.model_dump_json(exclude_unset=True, by_alias=True, exclude={"request_id"}, warnings=False)
        headers = dict(getattr(raw_request_info, "headers", None) or {})
        if "request_id" in request.model_fields_set:
            headers["x-request-id"] = request.request_id
        async with Exchange(self._app, path, body.encode(), headers) as exchange:
            if (status := await exchange.status()) != 200:
                yield error_object(self._models, status, await exchange.body())
            elif getattr(request, "stream", None):
                async for part in exchange.parts():
                    yield [part.decode()]
            else:
                yield read_answer(kind, await exchange.body())

    async def _refuse(self, text: str) -> Answers:
        yield refusal_object(self._models, ApiError(400, text))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the app that serves HTTP itself, for RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                try:
                    await self._find_adapter()
                except ApiError as error:
                    await refusal(error, scope)(scope, receive, send)
                    return
            await self._app(scope, receive, send)

        return app

    # --- adapters -----------------------------------------------------------------------------------------------------

    async def _find_adapter(self) -> None:
        """Load the adapter that Serve routed this request by, unless it is known.

        Raises:
            ApiError: it cannot be had.
        """
        asked = serve.get_multiplexed_model_id()
        name = asked.partition(":")[2]
        if not name or self._downloads is None or name in self._settings.lora_adapters:
            return  # an unknown one is refused by the API
        try:
            directory = await self._downloads(asked)
            if (known := self._names.get(name)) is None or known.path != directory:
                self._names.put(await self._adapters.load(name, directory))
        except HTTPException as error:
            raise ApiError(error.status_code, str(error.detail), param="model", code="model_not_found") from error
        except EngineError as error:
            raise to_api_error(error) from error

    # --- lifecycle ----------------------------------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raise EngineError if the engine cannot serve: Serve then replaces the replica."""
        if self._engine is not None:
            await self._engine.check_health()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return nothing: only vLLM's events of its KV cache are read here."""
        return {}

    async def reset_prefix_cache(self) -> None:
        """Drop the cached prefixes that no running request holds."""
        await self._client.reset_prefix_cache()

    async def pause(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Let new requests wait until `resume`, and end those that run, or wait for their ends with mode `wait`; then
        drop the cached prefixes."""
        if mode not in _PAUSES:
            raise ValueError(f"mode: expected one of {', '.join(_PAUSES)} (given: {mode!r}); a step is never frozen")
        self._app.pause()
        if mode == "abort":
            self._live.abort_all()
        await self._app.emptied()
        if clear_cache:
            await self.reset_prefix_cache()

    async def resume(self) -> None:
        self._app.resume()

    async def is_paused(self) -> bool:
        return self._app.is_paused

    async def sleep(self, **options: Any) -> None:
        """Refuse: weights stay where they are. `min_replicas: 0` frees what an idle engine holds."""
        raise NotOffered("An engine does not sleep; with min_replicas 0 an idle replica ends.")

    async def wakeup(self, **options: Any) -> None:
        """Do nothing: the engine is awake."""

    async def is_sleeping(self) -> bool:
        return False

    async def start_profile(self) -> None:
        """Refuse: the engine has no profiler of torch's kind."""
        raise NotOffered("The engine has no profiler; /metrics and engine.step_trace show where its time goes.")

    async def stop_profile(self) -> None:
        """Refuse, as `start_profile`."""
        await self.start_profile()

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109 - Ray's name
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> list[Any]:
        """Refuse: an engine is one process without workers."""
        raise NotOffered(f"An engine has no workers that {method} could be called on.")

    async def llm_config(self) -> Any:
        return self._llm_config

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """Return the options of the deployment that serves `llm_config`; called by Ray's builder.

        Raises:
            ValueError: the config asks for what the engine cannot do.
        """
        read_settings(llm_config)  # here, so that whoever starts the app sees the error
        return deployment_options(llm_config)

    def __del__(self) -> None:
        """Stop the engine; called by Serve when the replica stops. The constructor may have failed before it
        existed."""
        if engine := getattr(self, "_engine", None):
            engine.shutdown()
        if tracer := getattr(self, "_tracer", None):
            tracer.shutdown()


def _downloads(llm_config: Any, model_downloader: Any) -> Callable[[str], Awaitable[str]] | None:
    """Return what gets an adapter's directory by the name that a client asks for; None without lora_config."""
    if (multiplex := llm_config.multiplex_config()) is None:
        return None
    if llm_config.lora_config.dynamic_lora_loading_path is None:
        return None
    if model_downloader is None:
        model_downloader = import_module(_LOADER).LoraModelLoader
    loader = model_downloader(download_timeout_s=multiplex.download_timeout_s, max_tries=multiplex.max_download_tries)

    async def directory_of(name: str) -> str:
        disk = await loader.load_model_from_config(lora_model_id=name, llm_config=llm_config)
        return str(disk.local_path)

    # Serve reports to its routers which adapters a replica has, and asks for the least recently used one again.
    limited: Callable[[str], Awaitable[str]] = serve.multiplexed(
        max_num_models_per_replica=multiplex.max_num_models_per_replica
    )(directory_of)
    return limited


def _replica_name() -> str:
    try:
        return str(serve.get_replica_context().replica_id.unique_id)
    except serve.exceptions.RayServeException:
        return "local"
