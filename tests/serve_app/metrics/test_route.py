"""Contracts of /metrics on the app: a scrape counts exactly the requests that were made, whatever became of each.
Never goes through Ray; the engine is a real one in this process, over the fake executor."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp

from engine.build.engine import build_engine
from engine.config import EngineConfig, FakeConfig, SchedulerConfig, SpeculativeConfig
from engine.protocol import EngineError, ErrorCode
from serve_app.admission.gate import Gate
from serve_app.api.ingress import create_app
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.auth.keys import Keys
from serve_app.errors.api_error import ApiError, cannot_wake, overloaded, rate_limited, to_api_error
from serve_app.metrics.catalogue import INGRESS
from serve_app.metrics.channel_counts import ChannelCounts
from serve_app.metrics.exposition import Scrape
from serve_app.metrics.ingress_recorder import IngressRecorder
from serve_app.metrics.request_times import RequestTimes
from serve_app.metrics.values import ReplicaSamples
from serve_app.settings.auth import ApiKey
from serve_app.settings.limits import GatePolicy, Limits
from tests.serve_app.harness import (
    CHAT,
    MODEL,
    PROMPT,
    TIMEOUT_S,
    Exchange,
    LocalClient,
    ScriptedClient,
    app_for,
    failed,
    finished,
    make_time_pass,
    post,
    scheduled,
    tokens,
)

pytestmark = pytest.mark.anyio

REPLY = "Bonjour."
NUM_TOKENS = len(REPLY) + 1  # and the stop token
PROMPT_ALONE = SchedulerConfig(reserve_mode="prompt", watermark_blocks=0)  # so that answers have to be preempted
COMPLETIONS = "/v1/completions"


class Numbers(dict[str, float]):
    """The values of a scrape by `name{labels besides the model's and the replica's}`."""

    def of(self, name: str) -> dict[str, float]:
        """Return the values by their one label; those that are zero are left out."""
        found = {key: value for key, value in self.items() if key.startswith(f"{name}{{") and value}
        return {key.partition('="')[2].removesuffix('"}'): value for key, value in found.items()}


async def scrape(app: ASGIApp, **headers: str) -> Numbers:
    answer = await Exchange(app, "GET", "/metrics", headers=tuple(headers.items())).finish()
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = Numbers()
    for family in text_string_to_metric_families(b"".join(answer.parts).decode()):
        for sample in family.samples:
            labels = [f'{k}="{v}"' for k, v in sample.labels.items() if k not in ("model_name", "engine", "ingress")]
            key = f"{sample.name}{{{','.join(labels)}}}" if labels else sample.name
            assert key not in found
            found[key] = sample.value
    return found


@asynccontextmanager
async def local_app(reply: str | None = REPLY, step_delay_ms: float = 0, **options: Any) -> AsyncIterator[ASGIApp]:
    fake = FakeConfig(reply=reply, step_delay_ms=step_delay_ms)
    engine = build_engine("", EngineConfig(executor="fake", fake=fake, **options))
    client, gate = LocalClient(engine), Gate()
    client.ingress = IngressRecorder(gate)
    try:
        yield create_app(client, Tokenizer.byte_level(), MODEL, gate=gate, recorder=client.ingress)
    finally:
        await asyncio.to_thread(engine.shutdown)


def measured(client: ScriptedClient, policy: GatePolicy | None = None) -> tuple[ASGIApp, Gate]:
    """Make an app over a scripted engine, of which a scrape only asks this replica."""
    gate = Gate() if policy is None else Gate(policy)
    recorder = IngressRecorder(gate)

    async def metrics() -> Scrape:
        return Scrape(ingresses=[ReplicaSamples("ingress-1", recorder.samples())])

    client.metrics = metrics  # type: ignore[method-assign]
    return app_for(client, gate=gate, recorder=recorder), gate


# --- a workload over an engine ---------------------------------------------------------------------------------------


async def test_a_scrape_equals_the_requests_that_were_made() -> None:
    async with local_app() as app:
        for stream in (False, True, True):
            assert (await post(app, "/v1/chat/completions", CHAT | {"stream": stream})).status == 200
        assert (await post(app, COMPLETIONS, PROMPT | {"max_tokens": 3})).status == 200
        assert (await post(app, COMPLETIONS, PROMPT | {"max_tokens": 3, "stream": True})).status == 200
        assert (await post(app, COMPLETIONS, PROMPT | {"prompt": "x" * 10_000})).status == 400
        assert (await post(app, COMPLETIONS, PROMPT | {"model": "other"})).status == 404
        found = await scrape(app)
    assert found.of("vllm:request_success_total") == {"stop": 3, "length": 2}
    assert found["vllm:generation_tokens_total"] == 3 * NUM_TOKENS + 2 * 3
    assert found["vllm:request_generation_tokens_sum"] == found["vllm:generation_tokens_total"]
    assert found["vllm:request_prompt_tokens_sum"] == found["vllm:prompt_tokens_total"]
    assert found["vllm:time_to_first_token_seconds_count"] == 5
    assert found["vllm:inter_token_latency_seconds_count"] == found["vllm:generation_tokens_total"] - 5
    assert found["vllm:request_params_max_tokens_count"] == 2
    assert found.of("chunkserve:requests_total") == {"complete": 5, "error": 2}
    assert found["chunkserve:time_to_first_token_seconds_count"] == 5
    assert found["chunkserve:e2e_request_latency_seconds_count"] == 5
    assert found["vllm:num_requests_running"] == found["chunkserve:num_requests_live"] == 0
    assert found.of("chunkserve:replicas_missing") == {}


@pytest.mark.parametrize("stop", [None, "tra-la! la la "])
async def test_an_answer_that_was_drafted_is_the_same_and_its_drafts_are_counted(stop: str | None) -> None:
    """A stop string may also end it inside a run of accepted drafts."""
    reply = "la la la la tra-la! la la la tra-la! la la la tra-la!"
    answers = []
    for method in ("none", "suffix", "ngram"):
        speculative = SpeculativeConfig(method=method)
        async with local_app(reply=reply, speculative=speculative, max_num_seqs=8) as app:
            body = PROMPT | {"max_tokens": 100, "return_token_ids": True} | ({"stop": stop} if stop else {})
            answer = (await post(app, COMPLETIONS, body)).json
            found = await scrape(app)
        answers.append((answer["choices"], answer["usage"]))
        drafted, accepted = (found[f"vllm:spec_decode_num_{what}_tokens_total"] for what in ("draft", "accepted"))
        assert (3 < accepted <= drafted) if method != "none" else drafted == accepted == 0
        by_place = found.of("vllm:spec_decode_num_accepted_tokens_per_pos_total")
        assert sum(by_place.values()) == accepted
        assert found.get(f'chunkserve:draft_tokens_total{{method="{method}",result="accepted"}}', 0) == accepted
    assert answers[0] == answers[1] == answers[2]
    text = answers[0][0][0]["text"]
    assert text == (reply if stop is None else reply[: reply.index(stop)])


async def test_the_engines_part_of_a_requests_time_and_the_rest_add_up() -> None:
    async with local_app(step_delay_ms=2) as app:
        for stream in (False, True):
            assert (await post(app, "/v1/chat/completions", CHAT | {"stream": stream})).status == 200
        found = await scrape(app)
    parts = [found[f"chunkserve:request_{part}_seconds_sum"] for part in ("gate_time", "engine_time", "overhead")]
    assert sum(parts) == pytest.approx(found["chunkserve:e2e_request_latency_seconds_sum"])
    assert min(parts) > 0
    assert found["vllm:e2e_request_latency_seconds_sum"] < found["chunkserve:request_engine_time_seconds_sum"]
    assert found["vllm:time_to_first_token_seconds_sum"] < found["chunkserve:time_to_first_token_seconds_sum"]


async def test_a_client_that_leaves_is_counted_where_it_left_and_as_an_abort_in_the_engine() -> None:
    async with local_app(reply=None, step_delay_ms=1) as app:
        body = b'{"model": "org/tiny", "prompt": "hi", "max_tokens": 150, "ignore_eos": true, "stream": true}'
        exchange = Exchange(app, "POST", COMPLETIONS, body)
        for _ in range(3):
            await exchange.next()
        running = await scrape(app)
        exchange.disconnect()
        await exchange.task
        async with asyncio.timeout(TIMEOUT_S):
            while not (found := await scrape(app)).of("vllm:request_success_total"):
                pass
    assert (running["vllm:num_requests_running"], running["chunkserve:num_requests_live"]) == (1, 1)
    assert found.of("vllm:request_success_total") == {"abort": 1}
    assert found.of("chunkserve:requests_total") == {"client_gone": 1}
    assert found["vllm:e2e_request_latency_seconds_count"] == found["chunkserve:e2e_request_latency_seconds_count"] == 0
    assert 3 <= found["vllm:generation_tokens_total"] < 150


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_a_stop_string_ends_has_stopped_and_was_not_aborted(stream: bool) -> None:
    async with local_app(reply="One. Two. Three. Four.", step_delay_ms=1) as app:
        assert (
            await post(app, COMPLETIONS, PROMPT | {"stop": "Two", "max_tokens": 100, "stream": stream})
        ).status == 200
        async with asyncio.timeout(TIMEOUT_S):
            while not (found := await scrape(app)).of("vllm:request_success_total"):
                pass
    assert found.of("vllm:request_success_total") == {"stop": 1}
    assert found["vllm:e2e_request_latency_seconds_count"] == 1
    assert 8 <= found["vllm:request_generation_tokens_sum"] == found["vllm:generation_tokens_total"] < 22


async def test_preempted_requests_are_counted_once_and_their_preemptions_too() -> None:
    async with local_app(reply=None, step_delay_ms=2, num_kv_blocks=16, block_size=4, scheduler=PROMPT_ALONE) as app:
        body = PROMPT | {"prompt": "0123456789", "max_tokens": 40, "ignore_eos": True}
        answers = await asyncio.gather(*(post(app, COMPLETIONS, body) for _ in range(4)))
        found = await scrape(app)
    assert [answer.status for answer in answers] == [200] * 4
    assert found["vllm:num_preemptions_total"] == found["vllm:request_num_preemptions_sum"] > 0
    assert found["vllm:generation_tokens_total"] == 160
    assert found.of("vllm:request_success_total") == {"length": 4}


# --- what becomes of requests at the ingress, over a scripted engine -------------------------------------------------


async def test_a_stream_that_breaks_is_incomplete_and_a_refusal_before_it_an_error() -> None:
    broken = EngineError(ErrorCode.STEP_FAILED, "broken")
    client = ScriptedClient([scheduled()], tokens("a"), [failed(broken)])
    app, _ = measured(client)
    assert (await post(app, COMPLETIONS, PROMPT | {"stream": True})).status == 200
    assert (await post(app, COMPLETIONS, PROMPT)).status == 500
    found = await scrape(app)
    assert found.of("chunkserve:requests_total") == {"incomplete": 1, "server_error": 1}
    assert found["chunkserve:e2e_request_latency_seconds_count"] == 0
    assert found["chunkserve:time_to_first_token_seconds_count"] == 1  # of the one that had been sent a token


async def test_refusals_of_the_gate_and_of_the_engines_are_counted_by_their_code() -> None:
    hold = asyncio.Event()
    app, gate = measured(
        ScriptedClient([scheduled()], hold, [finished()]), GatePolicy(deployment=Limits(max_concurrent_requests=1))
    )
    first = asyncio.ensure_future(post(app, COMPLETIONS, PROMPT))
    async with asyncio.timeout(TIMEOUT_S):
        while not gate.snapshot().num_live:
            await asyncio.sleep(0)
    assert (await post(app, COMPLETIONS, PROMPT)).status == 503
    assert (await scrape(app))["chunkserve:num_requests_live"] == 1
    hold.set()
    assert (await first).status == 200
    gate.close()
    assert (await post(app, COMPLETIONS, PROMPT)).status == 503
    found = await scrape(app)  # also while the deployment drains
    assert found.of("chunkserve:admission_rejections_total") == {"queue_full": 1, "draining": 1}
    assert found.of("chunkserve:requests_total") == {"complete": 1, "error": 2}


async def test_refusals_have_their_series_before_the_first() -> None:
    """Prometheus counts from the first value that it sees: a burst before that was none."""
    app, _ = measured(ScriptedClient())
    found = {name for name in await scrape(app) if name.startswith("chunkserve:admission_rejections_total")}
    errors = [*(to_api_error(EngineError(code, "")) for code in ErrorCode), cannot_wake("tiny", 1.0)]
    errors += [overloaded("requests", 1, 1.0), rate_limited("requests", 1, 0, 1.0)]
    codes = {error.code for error in errors if error.status in (429, 503)} | {"aborted"}
    assert found == {f'chunkserve:admission_rejections_total{{reason="{code}"}}' for code in codes}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_without_its_whole_answer_at_the_deadline_has_missed_it(stream: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serve_app.api.generation.live.GRACE_S", 0)
        script = [scheduled()], tokens("a"), make_time_pass(5, patch), asyncio.Event()
        app, _ = measured(ScriptedClient(*script))
        answer = await post(app, COMPLETIONS, PROMPT | {"timeout_ms": 5000, "stream": stream})
        assert answer.status == (200 if stream else 504)
    found = await scrape(app)
    assert found["chunkserve:deadline_misses_total"] == 1
    assert found.of("chunkserve:requests_total") == {"incomplete" if stream else "server_error": 1}
    assert found["chunkserve:first_tokens_missed_total"] == 0, "it had one"


@pytest.mark.parametrize(("waited_s", "missed"), [(4, 1), (1, 0)])
async def test_a_client_that_leaves_without_a_token_has_missed_it_if_it_was_late_by_then(
    waited_s: float, missed: int
) -> None:
    """During an outage all clients left, and no first token was late because none came."""
    with pytest.MonkeyPatch.context() as patch:
        waiting = asyncio.Event()
        script = [scheduled()], make_time_pass(waited_s, patch), waiting.set, asyncio.Event()
        app, _ = measured(ScriptedClient(*script))
        exchange = Exchange(app, "POST", COMPLETIONS, json.dumps(PROMPT | {"stream": True}).encode())
        await asyncio.wait_for(waiting.wait(), TIMEOUT_S)
        exchange.disconnect()
        await asyncio.wait_for(exchange.task, TIMEOUT_S)
    found = await scrape(app)
    assert found.of("chunkserve:requests_total") == {"client_gone": 1}
    assert found["chunkserve:first_tokens_missed_total"] == missed
    assert found["chunkserve:time_to_first_token_seconds_count"] == 0


async def test_who_leaves_without_an_embedding_has_missed_no_token() -> None:
    with pytest.MonkeyPatch.context() as patch:
        waiting, recorder = asyncio.Event(), IngressRecorder(Gate())
        client = ScriptedClient([scheduled()], make_time_pass(4, patch), waiting.set, asyncio.Event())
        app = create_app(client, Tokenizer.byte_level(), replace(MODEL, pooling="mean"), recorder=recorder)
        body = json.dumps({"model": MODEL.id, "input": "hi"}).encode()
        exchange = Exchange(app, "POST", "/v1/embeddings", body)
        await asyncio.wait_for(waiting.wait(), TIMEOUT_S)
        exchange.disconnect()
        await asyncio.wait_for(exchange.task, TIMEOUT_S)
    counted = {sample.name: sample.value for sample in recorder.samples() if sample.labels in ((), ("client_gone",))}
    assert counted["chunkserve:requests"] == 1
    assert counted["chunkserve:first_tokens_missed"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_that_passes_before_the_first_token_has_missed_it(stream: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serve_app.api.generation.live.GRACE_S", 0)
        app, _ = measured(ScriptedClient([scheduled()], make_time_pass(5, patch), asyncio.Event()))
        await post(app, COMPLETIONS, PROMPT | {"timeout_ms": 5000, "stream": stream})
    found = await scrape(app)
    assert found["chunkserve:first_tokens_missed_total"] == 1


async def ended_after(waited_s: float, error: Exception | None, *, has_tokens: bool = True, sent: bool = True) -> Any:
    """Return what an ingress replica counts of one request that ends so, without a token."""
    times, recorder = RequestTimes(), IngressRecorder(Gate())
    begun = times.arrived
    times.now = lambda: begun + waited_s
    if sent:
        times.has_body()
    recorder.ended(times, "client_gone" if error is None else "error", error, has_tokens=has_tokens)
    counted = {sample.name: sample.value for sample in recorder.samples() if not sample.labels}
    outcomes = [s.labels[0] for s in recorder.samples() if s.name == "chunkserve:requests" and s.value]
    return outcomes, counted["chunkserve:first_tokens_missed"]


async def test_only_failures_of_the_server_are_server_errors() -> None:
    """A refusal is counted by its reason, and a mistake of a client is none of the server's."""
    for status in (400, 404, 429, 503):
        assert await ended_after(9, ApiError(status, "no")) == (["error"], 0)
    for failure in (ApiError(500, "no"), ApiError(504, "late"), RuntimeError("a bug")):
        assert await ended_after(9, failure) == (["server_error"], 1)
        assert await ended_after(1, failure) == (["server_error"], 0)


async def test_a_client_that_waits_for_itself_or_for_no_token_misses_none() -> None:
    assert await ended_after(9, None) == (["client_gone"], 1)
    assert await ended_after(9, None, sent=False) == (["client_gone"], 0)
    assert await ended_after(9, None, has_tokens=False) == (["client_gone"], 0)


async def test_a_request_that_meets_its_deadline_or_has_none_has_not_missed_it() -> None:
    app, _ = measured(ScriptedClient([scheduled()], tokens("a"), [finished()]))
    for body in (PROMPT, PROMPT | {"timeout_ms": 60_000}):
        assert (await post(app, COMPLETIONS, body)).status == 200
    assert (await scrape(app))["chunkserve:deadline_misses_total"] == 0


async def test_an_answer_that_a_stop_string_ends_is_complete() -> None:
    app, _ = measured(ScriptedClient([scheduled()], tokens("one. two"), [finished()]))
    assert (await post(app, COMPLETIONS, PROMPT | {"stop": "."})).status == 200
    assert (await scrape(app)).of("chunkserve:requests_total") == {"complete": 1}


async def test_a_request_for_several_answers_is_one_request_with_its_n() -> None:
    app, _ = measured(ScriptedClient([scheduled()], tokens("a"), [finished()]))
    for n in (1, 3):
        assert (await post(app, COMPLETIONS, PROMPT | {"n": n})).status == 200
    found = await scrape(app)
    assert found.of("chunkserve:requests_total") == {"complete": 2}
    assert (found["vllm:request_params_n_count"], found["vllm:request_params_n_sum"]) == (2, 4)


# --- the route itself -------------------------------------------------------------------------------------------------


async def test_a_scraper_needs_no_key_and_who_has_none_is_not_counted() -> None:
    client = ScriptedClient()
    keys = Keys([ApiKey(tenant="ann", sha256="0" * 64)])
    app = app_for(client, keys=keys)
    assert (await post(app, COMPLETIONS, PROMPT)).status == 401
    assert [name for name in await scrape(app) if "requests" in name] == []


async def test_what_the_channel_counts_is_in_the_scrape_under_its_name() -> None:
    counts = ChannelCounts(frames=1, gaps=2, completions=3, migrations=4, failed_migrations=5)
    samples = {sample.name: sample.value for sample in IngressRecorder(Gate(), counts).samples()}
    names = ("channel_frames", "channel_gaps", "channel_completions", "migrations", "migrations_failed")
    assert [samples[f"chunkserve:{name}"] for name in names] == [1, 2, 3, 4, 5]


async def test_every_name_of_the_catalogue_is_there_before_the_first_request() -> None:
    """Hints are excepted, because they have no list of their own."""
    names = {metric.name for metric in INGRESS} - {"chunkserve:ignored_fields"}
    assert {sample.name for sample in IngressRecorder(Gate()).samples()} == names
