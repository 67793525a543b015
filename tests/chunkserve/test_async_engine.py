"""The asynchronous library over the scripted executor. Long, because it is about all of the library: it answers as the
server does, requests share steps, and what happens to one is nothing to another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any
from unittest.mock import Mock

import pytest

from chunkserve import AsyncEngine, ConfigError, RequestFailed, RequestRefused
from chunkserve.running import Running
from chunkserve.settings import read_settings
from serve_app.api.ingress import create_app
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import ServedModel
from tests.serve_app.harness import LocalClient, post

pytestmark = pytest.mark.anyio

REPLY = "Bonjour à tous 🦜. The end."
HI = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TIMEOUT_S = 10  # only ever reached by a failure


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine("m", executor="fake", fake={"reply": REPLY}) as engine:
        yield engine


def slow(**fake: Any) -> AsyncEngine:
    """An engine whose answers take long enough to be interrupted."""
    return AsyncEngine("m", executor="fake", fake={"step_delay_ms": 5.0} | fake)


def inside(engine: AsyncEngine) -> Running:
    assert engine._running is not None
    return engine._running


async def until_idle(engine: AsyncEngine) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while inside(engine).engine._streams or inside(engine)._gate.snapshot().num_live:
            await asyncio.sleep(0.005)


# --- answers ----------------------------------------------------------------------------------------------------------


async def test_text_in_text_out(engine: AsyncEngine) -> None:
    answer = await engine.generate("hi", max_tokens=100)
    assert (answer.text, answer.finish_reason, answer.stop) == (REPLY, "stop", 256)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, len(REPLY.encode()) + 1)
    assert answer.prompt_token_ids == (104, 105)
    assert bytes(answer.token_ids[:-1]).decode() == REPLY
    assert (answer.logprobs, answer.prompt_logprobs) == (None, None)


async def test_tokens_in_tokens_out(engine: AsyncEngine) -> None:
    assert await engine.generate(engine.tokenize("hi"), max_tokens=100) == await engine.generate("hi", max_tokens=100)
    assert engine.detokenize(engine.tokenize("à")) == "à"


BODIES: dict[str, dict[str, Any]] = {
    "a limit": {"max_tokens": 5},
    "a stop string": {"stop": ["The"]},
    "a stop string that is shown": {"stop": "The", "include_stop_str_in_output": True},
    "several answers": {"n": 3, "max_tokens": 4, "seed": 1},
    "log-probabilities": {"logprobs": True, "top_logprobs": 2, "max_tokens": 3},
    "scores of the prompt": {"prompt_logprobs": 1, "max_tokens": 1},
    "a regex": {"regex": "[a-c]{3}", "seed": 1},
    "a schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 7}}}},
    "tools": {"tools": TOOLS},
    "the tool that is named": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"const": {}}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "seed": 1,
    },
}


@pytest.mark.parametrize("name", BODIES)
async def test_an_answer_is_that_of_the_server(name: str) -> None:
    """Whole and in chunks. The server's app runs on the very same engine."""
    body, reply = BODIES[name], CALL if "tool" in name else REPLY
    async with AsyncEngine("m", executor="fake", fake={"reply": reply}, tool_parser="hermes") as engine:
        running = inside(engine)
        model = ServedModel(id="m", max_model_len=4096, created=0, tool_parser="hermes")
        app = create_app(LocalClient(running.engine), Tokenizer.byte_level(), model)
        served = await post(
            app, "/v1/chat/completions", {"model": "m", "messages": HI, "return_token_ids": True} | body
        )
        answer = await engine.chat(HI, **body)
        assert served.status == 200
        for choice, theirs in zip(answer.choices, served.json["choices"], strict=True):
            assert choice.text == (theirs["message"]["content"] or "")
            assert (choice.finish_reason, choice.stop) == (theirs["finish_reason"], theirs["matched_stop"])
            assert list(choice.token_ids) == theirs["token_ids"]
            calls = theirs["message"].get("tool_calls", [])
            assert [(call.name, call.arguments) for call in choice.tool_calls] == [
                (call["function"]["name"], call["function"]["arguments"]) for call in calls
            ]
            if choice.logprobs is not None:
                listed = [(one.token, one.logprob, len(one.top)) for one in choice.logprobs]
                shown = theirs["logprobs"]["content"]
                assert listed == [(one["token"], one["logprob"], len(one["top_logprobs"])) for one in shown]
            else:
                assert theirs["logprobs"] is None
        usage = served.json["usage"]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
            usage["prompt_tokens"],
            usage["completion_tokens"],
        )
        if (scores := answer.prompt_logprobs) is not None:
            assert [None if one is None else one.rank for one in scores] == [
                None if one is None else one[str(token)]["rank"]
                for one, token in zip(served.json["prompt_logprobs"], answer.prompt_token_ids, strict=True)
            ]
            return  # which a stream does not have
        chunks = [chunk async for chunk in engine.stream_chat(HI, **body)]
        for index, choice in enumerate(answer.choices):
            own = [chunk for chunk in chunks if chunk.index == index]
            assert "".join(chunk.text for chunk in own) == choice.text
            assert tuple(token for chunk in own for token in chunk.token_ids) == choice.token_ids
            assert [chunk.finish_reason for chunk in own if chunk.finish_reason] == [choice.finish_reason]
            assert own[-1].stop == choice.stop
            arguments = "".join(part.arguments for chunk in own for part in chunk.tool_calls)
            assert arguments == "".join(call.arguments for call in choice.tool_calls)
        assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


async def test_thoughts_stand_apart() -> None:
    reply = "<think>So it is.</think>Yes."
    async with AsyncEngine("m", executor="fake", fake={"reply": reply}, reasoning_parser="qwen3") as engine:
        answer = await engine.chat(HI)
        assert (answer.reasoning, answer.text) == ("So it is.", "Yes.")
        chunks = [chunk async for chunk in engine.stream_chat(HI)]
        assert "".join(chunk.reasoning for chunk in chunks) == "So it is."
        assert "".join(chunk.text for chunk in chunks) == "Yes."


async def test_a_plain_prompt_has_the_scores_that_it_asks_for(engine: AsyncEngine) -> None:
    answer = await engine.generate("hi", max_tokens=2, logprobs=1, prompt_logprobs=0)
    assert answer.logprobs is not None
    assert [one.token_id for one in answer.logprobs] == list(answer.token_ids)
    assert all(one.logprob <= 0 and len(one.top) == 1 for one in answer.logprobs)
    assert answer.prompt_logprobs is not None
    assert [one and one.token for one in answer.prompt_logprobs] == [None, "i"]


async def test_vectors_have_length_one_and_need_the_setting(engine: AsyncEngine) -> None:
    with pytest.raises(RequestRefused, match="setting `pooling` is none"):
        await engine.embed(["a"])
    async with AsyncEngine("m", executor="fake", pooling="mean") as pooling:
        vectors = await pooling.embed(["a", "b c"] * 100)
        assert await pooling.embed([]) == []
    assert [round(sum(x * x for x in vector), 6) for vector in vectors] == [1] * 200


async def test_many_vectors_are_made_to_length_one_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a list of two thousand long vectors stopped the program's own loop for seconds."""
    from chunkserve import running
    from serve_app.api.openai.embeddings import normalized

    threads = set[int]()

    def noted(vector: Sequence[float]) -> list[float]:
        threads.add(threading.get_ident())
        return normalized(vector)

    monkeypatch.setattr(running, "normalized", noted)
    async with AsyncEngine("m", executor="fake", pooling="mean") as engine:
        assert len(await engine.embed(["a"] * 520)) == 520
    assert threads
    assert threading.get_ident() not in threads


async def test_all_texts_of_a_list_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression guard: each request of several had the whole time."""
    from chunkserve import running

    monkeypatch.setattr(running, "MAX_INPUTS", 128)
    clock = Mock(side_effect=asyncio.get_running_loop().time)
    deadline_of = Mock(side_effect=running.deadline_of)
    monkeypatch.setattr(running, "now", clock)
    monkeypatch.setattr(running, "deadline_of", deadline_of)
    async with AsyncEngine("m", executor="fake", pooling="mean") as engine:
        assert len(await engine.embed(["a"] * 300, timeout_ms=60_000)) == 300
        assert len({call.args for call in deadline_of.call_args_list}) == 1
        clock.side_effect = lambda: asyncio.get_running_loop().time() - 60
        with pytest.raises(RequestFailed, match="ended after 60 s"):
            await engine.embed(["a"] * 300, timeout_ms=60_000)


# --- several requests -------------------------------------------------------------------------------------------------


async def test_requests_share_steps() -> None:
    async with slow(reply="x" * 40) as engine:
        before = inside(engine).engine.load().num_steps
        await asyncio.gather(*(engine.chat(HI) for _ in range(16)))
        assert inside(engine).engine.load().num_steps - before < 2 * 41, "sixteen answers of 41 tokens"


async def test_more_requests_than_an_engine_holds_wait_for_their_turn() -> None:
    async with AsyncEngine("m", executor="fake", fake={"reply": "ab"}, max_num_seqs=2, max_queued_requests=1) as engine:
        answers = await asyncio.gather(*(engine.chat(HI) for _ in range(40)))
    assert [answer.text for answer in answers] == ["ab"] * 40


async def test_a_refusal_and_a_failure_touch_no_other_request(engine: AsyncEngine) -> None:
    asked = [engine.chat(HI), engine.chat(HI, temperature=9), engine.generate("x" * 5000), engine.chat(HI, n=2)]
    first, hot, long, two = await asyncio.gather(*asked, return_exceptions=True)
    assert getattr(first, "text", None) == REPLY
    assert isinstance(hot, RequestRefused)
    assert (hot.param, "temperature: Input should be less than or equal to 2" in str(hot)) == ("temperature", True)
    assert isinstance(long, RequestRefused)
    assert (long.code, "maximum context length is" in str(long)) == ("context_length_exceeded", True)
    assert [choice.text for choice in getattr(two, "choices", ())] == [REPLY] * 2


# --- ends -------------------------------------------------------------------------------------------------------------


async def test_closing_a_stream_ends_its_request() -> None:
    async with slow() as engine:
        async with aclosing(engine.stream_chat(HI, ignore_eos=True)) as chunks:
            await anext(chunks)
            assert inside(engine).engine._streams
        await until_idle(engine)


async def test_cancelling_a_task_ends_its_request_and_no_other() -> None:
    async with slow() as engine:
        kept, dropped = (asyncio.ensure_future(engine.chat(HI, max_tokens=60, ignore_eos=True)) for _ in range(2))
        while len(inside(engine).engine._streams) < 2:
            await asyncio.sleep(0.005)
        dropped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dropped
        assert len((await kept).token_ids) == 60
        await until_idle(engine)


async def test_a_deadline_ends_a_request_with_an_error() -> None:
    async with slow() as engine:
        with pytest.raises(RequestFailed, match=r"ended after 0\.05 s") as failed:
            await engine.chat(HI, timeout_ms=50, ignore_eos=True)
    assert failed.value.code == "deadline_exceeded"


async def test_closing_the_engine_fails_what_runs_and_what_waits() -> None:
    async with slow() as engine:
        asked = [asyncio.ensure_future(engine.chat(HI, ignore_eos=True)) for _ in range(100)]
        while not inside(engine).engine._streams:
            await asyncio.sleep(0.005)
        await engine.close()
        ends = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), TIMEOUT_S)
        assert {(type(end), getattr(end, "code", None)) for end in ends} == {(RequestFailed, "closed")}
        with pytest.raises(RequestFailed, match="does not run"):
            await engine.chat(HI)
        await engine.close()


@pytest.mark.parametrize("then", ["close", "start"])
@pytest.mark.parametrize("cancelled", [False, True])
async def test_an_engine_that_is_being_closed_is_waited_for(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, cancelled: bool, then: str
) -> None:
    """Regression: a second close returned while the engine still ran, and so did one after a close with a timeout."""
    running, entered, may_end = inside(engine), threading.Event(), threading.Event()
    shutdown = running.shutdown

    def slowly() -> None:
        entered.set()
        assert may_end.wait(TIMEOUT_S)
        shutdown()

    monkeypatch.setattr(running, "shutdown", slowly)
    first = asyncio.ensure_future(engine.close())
    assert await asyncio.to_thread(entered.wait, TIMEOUT_S)
    if cancelled:
        first.cancel()
    second = asyncio.ensure_future(getattr(engine, then)())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not second.done()
    may_end.set()
    await asyncio.gather(first, second, return_exceptions=True)
    assert running.engine._has_ended.is_set()
    assert (engine._running is None) == (then == "close")
    assert engine._retired is None


async def test_an_engine_that_was_not_started_says_so() -> None:
    engine = AsyncEngine("m", executor="fake")
    with pytest.raises(RequestFailed, match="was closed, or not started"):
        engine.stream("hi")


async def test_a_cancelled_start_leaves_no_engine_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    from chunkserve import running

    made, build = [], running.build

    def slowly(settings: Any) -> Any:
        parts = build(settings)
        made.append(parts.engine)
        return parts

    monkeypatch.setattr(running, "build", slowly)
    starting = asyncio.ensure_future(AsyncEngine("m", executor="fake").start())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    async with asyncio.timeout(TIMEOUT_S):
        while not made or made[0]._thread.is_alive():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("when", ["while it builds", "when it is built"])
async def test_what_a_cancelled_start_has_built_is_shut_down_without_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Regression guard: Ctrl-C while `Engine(...)` loaded ended its event loop, whose callback should have shut the
    engine down."""
    from chunkserve import async_engine, running

    made, may_end = Mock(), threading.Event()

    def build(settings: Any) -> Any:
        assert may_end.wait(TIMEOUT_S)
        return made

    monkeypatch.setattr(running, "build", build)
    building = async_engine._Building(read_settings("m", {}))
    thread = threading.Thread(target=building.run)
    thread.start()
    if when == "when it is built":
        may_end.set()
        thread.join()
    building.drop()
    may_end.set()
    thread.join()
    made.engine.shutdown.assert_called_once_with()


async def test_what_is_closed_while_it_starts_does_not_run_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    from chunkserve import running

    may_end, build = threading.Event(), running.build

    def slowly(settings: Any) -> Any:
        assert may_end.wait(TIMEOUT_S)
        return build(settings)

    monkeypatch.setattr(running, "build", slowly)
    engine = AsyncEngine("m", executor="fake")
    starting = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(engine.close())
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(starting, closing)
    with pytest.raises(RequestFailed, match="was closed"):
        await engine.generate("hi")


async def test_to_start_twice_starts_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from chunkserve import running

    build = Mock(side_effect=running.build)
    monkeypatch.setattr(running, "build", build)
    engine = AsyncEngine("m", executor="fake", fake={"reply": REPLY})
    assert await asyncio.gather(engine.start(), engine.start()) == [engine, engine]
    async with engine:
        assert (await engine.generate("hi", max_tokens=100)).text == REPLY
    build.assert_called_once()


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {5: float("nan")}}, "logit_bias"),
        ({"stop": {1, 2}}, "stop"),
        ({"regex": "("}, "regex"),
        ({"max_tokens": 100_000}, "messages"),
        ({"slo_tpot_ms": 100.0}, "slo_tpot_ms"),
        ({"model": "law"}, "model"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_a_wrong_field_is_named(engine: AsyncEngine, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        await engine.chat(HI, **fields)
    assert refused.value.param == param


async def test_an_unknown_field_raises_before_a_stream_is_read(engine: AsyncEngine) -> None:
    unknown: dict[str, Any] = {"max_token": 3}
    with pytest.raises(RequestRefused, match="did you mean max_tokens"):
        engine.stream("hi", **unknown)


async def test_several_prompts_in_one_are_refused(engine: AsyncEngine) -> None:
    prompts: Any = ["a", "b"]
    with pytest.raises(RequestRefused, match="prompt: should be one text"):
        await engine.generate(prompts)


async def test_an_adapter_that_cannot_be_used_ends_the_start_and_its_engine() -> None:
    engine = AsyncEngine("m", executor="fake", max_loras=1, lora_adapters={"law": "/no/such/adapter"})
    with pytest.raises(ConfigError, match="lora_adapters, law"):
        await engine.start()


async def test_one_text_is_no_list_of_texts(engine: AsyncEngine) -> None:
    """It would be taken letter by letter, and a list of ids for a list of texts."""
    for given in ("hello", None, {"hello"}, [104, 105]):
        with pytest.raises(RequestRefused, match="texts: should be a list of texts"):
            await engine.embed(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [None, 5, b"ab", ["a", 1], {1}])
async def test_what_is_neither_text_nor_ids_is_refused(engine: AsyncEngine, prompt: Any) -> None:
    with pytest.raises(RequestRefused, match="prompt: should be one text, or the ids of its tokens"):
        await engine.generate(prompt)


async def test_text_that_is_no_unicode_is_refused_by_its_field(engine: AsyncEngine) -> None:
    with pytest.raises(RequestRefused, match="prompt: should be made of what JSON has"):
        await engine.generate("a\ud800b")
