"""Our server class answers as our own server does, in the objects that Ray's ingress reads, and lets go of a request
whose client leaves. Never starts Ray: the class runs in this process, on the fake engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from starlette.exceptions import HTTPException

from serve_app.ray_llm import ChunkserveServer
from serve_app.ray_llm.server import NotOffered
from tests.support.conditions import until
from tests.support.ray_llm import FAKE, import_ray_llm, llm_config

pytestmark = pytest.mark.anyio

MODEL = "tiny"
HI: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
PROMPT: dict[str, Any] = {"model": MODEL, "prompt": "hi"}


def config(engine: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    own = {"engine": FAKE | {"max_model_len": 256, "num_kv_blocks": 512} | (engine or {})}
    return llm_config(model_loading_config={"model_id": MODEL}, engine_kwargs={"chunkserve": own, **kwargs})


async def started(llm_config: Any) -> ChunkserveServer:
    server = ChunkserveServer.sync_init(llm_config)
    await server.start()
    return server


def end(server: ChunkserveServer) -> None:
    server._watchdog.end()
    assert server._engine is not None
    server._engine.shutdown()


@pytest.fixture
async def server() -> AsyncIterator[ChunkserveServer]:
    made = await started(config())
    yield made
    end(made)


@pytest.fixture
async def slow_server() -> AsyncIterator[ChunkserveServer]:
    made = await started(config({"fake": {"step_delay_ms": 5}}))
    yield made
    end(made)


def types() -> Any:
    return import_ray_llm("ray.llm._internal.serve.core.configs.openai_api_models")


async def answers(asked: Any) -> list[Any]:
    return [one async for one in await asked]


async def test_a_chat_is_answered_with_an_object_of_rays_type(server: ChunkserveServer) -> None:
    (answer,) = await answers(server.chat(types().ChatCompletionRequest(**HI, max_tokens=3)))
    assert isinstance(answer, types().ChatCompletionResponse)
    shown = answer.model_dump()
    assert shown["model"] == MODEL
    assert shown["choices"][0]["finish_reason"] == "length"
    assert shown["usage"]["completion_tokens"] == 3
    assert shown["choices"][0]["message"]["annotations"] is None  # vLLM's type cannot hold OpenAI's empty list


async def test_a_stream_has_lists_of_whole_events_and_ends_with_done(server: ChunkserveServer) -> None:
    request = types().ChatCompletionRequest(**HI, max_tokens=3, stream=True, stream_options={"include_usage": True})
    lists = await answers(server.chat(request))
    assert all(isinstance(one, list) for one in lists)
    text = "".join(event for one in lists for event in one)
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert all(event.endswith("\n\n") for one in lists for event in one), "no event is cut in two"


async def test_a_completion_is_the_same_streamed_and_whole(server: ChunkserveServer) -> None:
    (whole,) = await answers(server.completions(types().CompletionRequest(**PROMPT, max_tokens=5, temperature=0)))
    assert isinstance(whole, types().CompletionResponse)
    request = types().CompletionRequest(**PROMPT, max_tokens=5, temperature=0, stream=True)
    events = "".join(event for one in await answers(server.completions(request)) for event in one).split("\n\n")
    pieces = [json.loads(one.removeprefix("data: "))["choices"] for one in events if one.startswith("data: {")]
    text = "".join(choices[0]["text"] for choices in pieces if choices)
    assert text == whole.model_dump()["choices"][0]["text"] != ""


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"temperature": -1.0}, 400, "temperature"),
        ({"model": "nobody"}, 404, "nobody"),
        ({"prompt": "a " * 5000}, 400, "maximum context length"),
        ({"no_such_field": 1}, 400, "no_such_field"),
    ],
    ids=["temperature", "model", "length", "field"],
)
async def test_a_refusal_has_our_message_and_the_status_for_rays_ingress(
    server: ChunkserveServer, fields: dict[str, Any], status: int, said: str, stream: bool
) -> None:
    request = types().CompletionRequest(**{**PROMPT, "max_tokens": 2, "stream": stream, **fields})
    (error,) = await answers(server.completions(request))
    assert isinstance(error, types().ErrorResponse)
    assert error.error.code == status
    assert said in error.error.message


async def test_tokens_and_texts_are_converted(server: ChunkserveServer) -> None:
    tokenized = types().TokenizeCompletionRequest(model=MODEL, prompt="hé")
    (tokens,) = await answers(server.tokenize(tokenized))
    assert isinstance(tokens, types().TokenizeResponse)
    (text,) = await answers(server.detokenize(types().DetokenizeRequest(model=MODEL, tokens=tokens.tokens)))
    assert text.prompt == "hé"


@pytest.mark.parametrize("name", ["transcriptions", "score", "embeddings"])
async def test_what_the_model_cannot_do_is_refused_with_a_reason(server: ChunkserveServer, name: str) -> None:
    request = types().EmbeddingCompletionRequest(model=MODEL, input="hi")
    (error,) = await answers(getattr(server, name)(request))
    assert error.error.code == 400
    assert len(error.error.message) > 20


async def test_a_client_that_leaves_ends_its_request_in_the_engine(slow_server: ChunkserveServer) -> None:
    """Ray cancels the generator; without an abort the engine would compute to the end for nobody."""
    request = types().CompletionRequest(**PROMPT, max_tokens=200, stream=True, ignore_eos=True)
    stream = await slow_server.completions(request)
    await anext(stream)
    assert slow_server._engine is not None
    assert slow_server._engine.load().num_running == 1
    await stream.aclose()
    await until(lambda: slow_server._engine is not None and slow_server._engine.load().num_running == 0)
    assert slow_server._engine.load().num_steps < 150


async def test_a_cancelled_task_ends_its_request_in_the_engine(slow_server: ChunkserveServer) -> None:
    request = types().CompletionRequest(**PROMPT, max_tokens=200, ignore_eos=True)
    waiting = asyncio.ensure_future(answers(slow_server.completions(request)))
    await until(lambda: slow_server._engine is not None and slow_server._engine.load().num_running == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: slow_server._engine is not None and slow_server._engine.load().num_running == 0)


async def test_the_clients_request_id_is_the_requests(slow_server: ChunkserveServer) -> None:
    request = types().CompletionRequest(**PROMPT, max_tokens=200, ignore_eos=True, request_id="mine-1")
    waiting = asyncio.ensure_future(answers(slow_server.completions(request, SimpleNamespace(headers={"Host": "x"}))))
    await until(lambda: slow_server._live.abort("mine-1") > 0)
    (error,) = await waiting
    assert "aborted" in error.error.message


async def test_a_paused_server_lets_requests_wait_until_it_resumes(server: ChunkserveServer) -> None:
    await server.pause()
    assert await server.is_paused()
    waiting = asyncio.ensure_future(answers(server.completions(types().CompletionRequest(**PROMPT, max_tokens=2))))
    done, _ = await asyncio.wait([waiting], timeout=0.05)
    assert not done
    await server.resume()
    (answer,) = await waiting
    assert isinstance(answer, types().CompletionResponse)
    assert not await server.is_paused()


async def test_a_pause_ends_what_runs_or_waits_for_it(slow_server: ChunkserveServer) -> None:
    long = types().CompletionRequest(**PROMPT, max_tokens=200, ignore_eos=True)
    for mode, kind in (("abort", types().ErrorResponse), ("wait", types().CompletionResponse)):
        running = asyncio.ensure_future(answers(slow_server.completions(long)))
        await until(lambda: slow_server._engine is not None and slow_server._engine.load().num_running == 1)
        await slow_server.pause(mode=mode)
        (answer,) = await running
        assert isinstance(answer, kind)
        await slow_server.resume()
    with pytest.raises(ValueError, match="mode: expected one of abort, wait"):
        await slow_server.pause(mode="keep")


async def test_what_the_engine_has_not_is_refused_with_a_status(server: ChunkserveServer) -> None:
    for call in (server.sleep(level=1), server.start_profile(), server.stop_profile(), server.collective_rpc("m")):
        with pytest.raises(NotOffered) as refused:
            await call
        assert refused.value.status_code == 501
    await server.wakeup()
    assert not await server.is_sleeping()


async def test_a_healthy_server_resets_its_cache_and_a_dead_one_says_so(server: ChunkserveServer) -> None:
    await server.check_health()
    await server.reset_prefix_cache()
    assert server._engine is not None
    server._engine.shutdown()
    with pytest.raises(Exception, match="shut down"):
        await server.check_health()


async def test_the_config_is_returned(server: ChunkserveServer) -> None:
    assert (await server.llm_config()).model_id == MODEL


async def test_the_app_for_direct_streaming_serves_our_routes(server: ChunkserveServer) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": f"/v1/models/{MODEL}", "headers": [], "query_string": b""}
    await server.__serve_build_asgi_app__()(scope, receive, send)
    assert sent[0]["status"] == 200
    assert json.loads(sent[1]["body"])["id"] == MODEL


# --- adapters ---------------------------------------------------------------------------------------------------------


class Downloader:
    """Stands for Ray's loader of adapters from a cloud."""

    asked: ClassVar[list[str]] = []
    directory = ""

    def __init__(self, **_: Any) -> None:
        pass

    async def load_model_from_config(self, lora_model_id: str, llm_config: Any) -> Any:
        self.asked.append(lora_model_id)
        if lora_model_id.endswith("gone"):
            raise HTTPException(404, "Unable to find the adapter")
        return SimpleNamespace(local_path=self.directory)


@pytest.fixture
async def with_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ChunkserveServer]:
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(Downloader, "directory", str(tmp_path))
    monkeypatch.setattr(Downloader, "asked", [])
    monkeypatch.setattr("ray.serve.multiplexed", lambda **_: lambda load: load)  # it asks for a replica of Serve
    asked = config()
    asked.lora_config = import_ray_llm().LoraConfig(
        dynamic_lora_loading_path="s3://bucket/adapters", max_num_adapters_per_replica=2
    )
    made = ChunkserveServer.sync_init(asked, model_downloader=Downloader)
    await made.start()
    yield made
    end(made)


async def test_an_adapter_that_serve_routes_by_is_downloaded_and_answers_under_its_name(
    with_adapters: ChunkserveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {}
    for name in (MODEL, f"{MODEL}:law"):
        monkeypatch.setattr("ray.serve.get_multiplexed_model_id", lambda name=name: "" if name == MODEL else name)
        request = types().CompletionRequest(**PROMPT | {"model": name}, max_tokens=8, temperature=0)
        (answer,) = await answers(with_adapters.completions(request))
        assert answer.model_dump()["model"] == name
        texts[name] = answer.model_dump()["choices"][0]["text"]
    assert texts[MODEL] != texts[f"{MODEL}:law"]
    assert Downloader.asked == [f"{MODEL}:law"]


async def test_an_adapter_that_is_nowhere_is_a_404(
    with_adapters: ChunkserveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.serve.get_multiplexed_model_id", lambda: f"{MODEL}:gone")
    (error,) = await answers(with_adapters.completions(types().CompletionRequest(**PROMPT)))
    assert (error.error.code, error.error.message) == (404, "Unable to find the adapter")


# --- the config -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"tensor_parallel_size": 2}, "engine_kwargs.tensor_parallel_size: behind Ray Serve LLM's own ingress"),
        ({"max_sequences": 2}, "engine_kwargs.max_sequences: chunkserve knows no such engine argument"),
        ({"chunkserve": {"ingress_replicas": 2}}, "engine_kwargs.chunkserve.ingress_replicas: it has no effect"),
        ({"max_num_seqs": 0}, "engine.max_num_seqs: Input should be greater than or equal to 1"),
    ],
    ids=str,
)
def test_what_the_engine_cannot_do_is_refused_where_the_app_is_built(kwargs: dict[str, Any], said: str) -> None:
    asked = llm_config(model_loading_config={"model_id": MODEL}, engine_kwargs=kwargs)
    with pytest.raises(ValueError, match="LLMConfig tiny: ") as refused:
        ChunkserveServer.get_deployment_options(asked)
    assert said in str(refused.value)


def test_what_is_left_out_is_logged_by_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        ChunkserveServer.get_deployment_options(config(compilation_config=3, seed=7))
    assert "left out: engine_kwargs.compilation_config: how a step is computed" in caplog.text
    assert "engine_kwargs.seed" in caplog.text


def test_a_replica_reserves_what_the_config_says_and_keeps_rays_options() -> None:
    asked = llm_config(
        model_loading_config={"model_id": MODEL},
        deployment_config={
            "num_replicas": 2,
            "max_ongoing_requests": 7,
            "ray_actor_options": {"resources": {"rack": 1}, "runtime_env": {"env_vars": {"A": "1"}}},
        },
        runtime_env={"env_vars": {"B": "2"}},
    )
    options = ChunkserveServer.get_deployment_options(asked)
    assert options["num_replicas"] == 2
    assert options["max_ongoing_requests"] == 7
    assert options["ray_actor_options"] == {
        "num_cpus": 0.5,
        "num_gpus": 0,
        "resources": {"rack": 1},
        "runtime_env": {"env_vars": {"B": "2"}},
    }


def test_without_a_word_on_hardware_a_replica_reserves_a_gpu_as_in_ray() -> None:
    asked = llm_config(model_loading_config={"model_id": MODEL}, placement_group_config=None, accelerator_type="H100")
    actor = ChunkserveServer.get_deployment_options(asked)["ray_actor_options"]
    assert actor == {"num_cpus": 1, "num_gpus": 1, "accelerator_type": "H100"}
