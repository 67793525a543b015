"""Owns the proof that `serve run config.yaml` does what the docs promise, on a free port, with OpenAI's client.
Never looks inside the server: what cannot be seen over HTTP is not promised."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from loadtest.server import START_TIMEOUT_S, Server
from tests.support.serve_process import PYTHON_PROXY, left_of, listening, members_of, serve_run, starting

pytestmark = pytest.mark.server

MODEL = "smollm2-135m-instruct"
INGRESS_PORTS = ("RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT", "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT")
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(default_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{default_server.url}/v1", api_key="none", max_retries=0, timeout=120) as opened:
        yield opened


def loads(server: Server) -> list[dict[str, int]]:
    engines: list[dict[str, int]] = httpx.get(f"{server.url}/load", timeout=30).json()["engines"]
    return engines


def wait_until_idle(server: Server, timeout_s: float = 30) -> list[dict[str, int]]:
    """Poll until no request is live and no block is held; return the last answer either way."""
    deadline = time.monotonic() + timeout_s
    while True:
        engines = loads(server)
        idle = not any(e["num_running"] or e["num_waiting"] or e["num_held_blocks"] for e in engines)
        if idle or time.monotonic() > deadline:
            return engines
        time.sleep(0.05)


# --- the main job, on the real model ---------------------------------------------------------------------------------


def test_the_capital_of_france_is_paris(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=30)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_a_chat_streams_the_text_that_it_answers_whole_and_counts_the_same(client: openai.OpenAI) -> None:
    request: dict[str, Any] = dict(model=MODEL, messages=FRANCE, temperature=0, max_tokens=40)
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_an_answer_is_json_by_a_schema_and_what_only_the_engine_refuses_is_a_400_that_names_the_field(
    client: openai.OpenAI,
) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "minimum": 1}},
        "required": ["capital", "people"],
        "additionalProperties": False,
    }
    request: dict[str, Any] = dict(model=MODEL, messages=FRANCE, temperature=0, max_tokens=80)
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "country", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(**request, response_format=wanted)
    found = json.loads(answer.choices[0].message.content or "")
    assert (list(found), type(found["capital"]), type(found["people"])) == (["capital", "people"], str, int)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**request, extra_body={"structured_outputs": {"grammar": "start: <[999999]>"}})
    assert refused.value.param == "structured_outputs.grammar"


def test_a_completion_streams_the_text_that_it_answers_whole(client: openai.OpenAI) -> None:
    request: dict[str, Any] = dict(model=MODEL, prompt="Once upon a time", temperature=0, max_tokens=24)
    whole = client.completions.create(**request)
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (4, 24)
    assert whole.choices[0].finish_reason == "length"
    chunks = list(client.completions.create(**request, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_the_same_seed_gives_the_same_text_and_another_seed_another(client: openai.OpenAI) -> None:
    """Each request runs alone: neighbours change bfloat16's last bits.
    A golden test shows that they change nothing in float32."""

    def ask(seed: int) -> str:
        request: dict[str, Any] = dict(model=MODEL, prompt="My favourite food is", temperature=0.8, max_tokens=12)
        return client.completions.create(**request, seed=seed).choices[0].text

    assert ask(7) == ask(7)
    assert ask(7) != ask(8)


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    request: dict[str, Any] = dict(model=MODEL, messages=FRANCE, temperature=0, max_tokens=30)
    answer = client.chat.completions.create(**request, stop=[" France"])
    assert answer.choices[0].message.content == "The capital of"
    assert answer.choices[0].finish_reason == "stop"


def test_a_prompt_is_scored_and_the_likelier_word_has_the_better_score(client: openai.OpenAI) -> None:
    def score(word: str) -> float:
        """Return the score of ` word` after the text; check the whole object on the way."""
        prompt = f"The capital of France is {word}"
        answer = client.completions.create(
            model=MODEL, prompt=prompt, echo=True, logprobs=2, max_tokens=0, temperature=0
        )
        choice, usage = answer.choices[0], answer.usage
        assert (choice.text, choice.finish_reason) == (prompt, "length")
        assert usage is not None
        assert choice.logprobs is not None
        tokens, scores = choice.logprobs.tokens or [], choice.logprobs.token_logprobs or []
        assert "".join(tokens) == prompt
        assert (usage.completion_tokens, usage.prompt_tokens) == (0, len(tokens))
        assert scores[0] is None
        assert all(value <= 0 for value in scores[1:])
        offsets = choice.logprobs.text_offset or []
        assert [prompt[at:].startswith(token) for at, token in zip(offsets, tokens, strict=True)] == [True] * len(
            tokens
        )
        for token, value, top in zip(tokens[1:], scores[1:], (choice.logprobs.top_logprobs or [])[1:], strict=True):
            assert top[token] == value
            assert max(top.values()) >= value
        return sum(scores[5:])

    assert score("Paris") > score("banana") + 1


def test_a_long_prompt_is_prefilled_while_streams_go_on(client: openai.OpenAI) -> None:
    long_prompt = "time year people way day man thing woman life child world school state " * 100
    stream = client.completions.create(
        model=MODEL, prompt="Count:", max_tokens=120, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    answers: list[Any] = []
    other = threading.Thread(
        target=lambda: answers.append(client.completions.create(model=MODEL, prompt=long_prompt, max_tokens=1))
    )
    other.start()
    while_prefilling = 0
    for _ in stream:
        while_prefilling += not answers
    other.join()
    assert answers[0].usage.prompt_tokens > 1000
    assert while_prefilling > 0, "the stream has chunks between the long prompt's arrival and its answer"


def test_errors_are_openais(client: openai.OpenAI, default_server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=FRANCE)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="word " * 5000, max_tokens=1)
    assert long.value.code == "context_length_exceeded"
    assert "maximum context length is 4096 tokens" in long.value.message
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model=MODEL, prompt="a", max_tokens="many")  # type: ignore[call-overload]
    assert wrong.value.param == "max_tokens"
    broken = httpx.post(
        f"{default_server.url}/v1/completions", content=b'{"model": ', headers={"content-type": "application/json"}
    )
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")


def test_models_and_health(client: openai.OpenAI, default_server: Server) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    for path in ("/health", "/ready", "/version", "/docs"):
        assert httpx.get(f"{default_server.url}{path}").status_code == 200


def test_a_text_is_tokenized_and_back_by_the_models_own_tokenizer(default_server: Server) -> None:
    given = httpx.post(f"{default_server.url}/tokenize", json={"model": MODEL, "prompt": "Hello, world"}).json()
    assert 0 < given["count"] == len(given["tokens"]) < len("Hello, world")
    back = httpx.post(f"{default_server.url}/detokenize", json={"tokens": given["tokens"]}).json()
    assert back == {"prompt": "Hello, world"}


def test_the_log_says_what_the_engine_resolved_and_why(client: openai.OpenAI, default_server: Server) -> None:
    assert "num_kv_blocks: kv_cache_memory_gib 2" in default_server.output
    assert "kernels: " in default_server.output
    assert "tool_parser is auto: none, because the chat template writes no known format." in default_server.output


# --- clients that go away --------------------------------------------------------------------------------------------


def leave_early(server: Server, seed: int) -> None:
    """Ask for a long answer on a bare socket, streamed or not, and hang up at a random moment."""
    rng = random.Random(seed)
    is_streamed = rng.random() < 0.7
    prompt = "word " * rng.randrange(1, 600)
    fields = {"model": MODEL, "prompt": prompt, "max_tokens": 1000, "ignore_eos": True, "stream": is_streamed}
    body = json.dumps(fields).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        sock.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        patience_s = rng.choice([0.001, 0.05, 0.5, 1.5, 3.0])
        # Some streams wait for their first token, however slow the machine is.
        sock.settimeout(60.0 if is_streamed and patience_s == 3.0 else patience_s)
        try:
            for _ in range(rng.randrange(1, 20)):
                sock.recv(4096)
        except TimeoutError:  # before the first token, or not streaming
            return


def test_fifty_clients_that_leave_at_random_moments_leave_nothing_behind(
    default_server: Server, client: openai.OpenAI
) -> None:
    steps_before = loads(default_server)[0]["num_steps"]
    with ThreadPoolExecutor(50) as pool:
        list(pool.map(lambda seed: leave_early(default_server, seed), range(50)))
    (after,) = wait_until_idle(default_server)
    assert after["num_steps"] > steps_before, "some of them were served before they left"
    assert (after["num_running"], after["num_waiting"], after["num_held_blocks"]) == (0, 0, 0)
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=30)
    assert "Paris" in (answer.choices[0].message.content or "")


def test_a_stream_ends_at_its_deadline_with_an_error_frame(default_server: Server) -> None:
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    headers = {"Request-Timeout-Ms": "700"}
    url = f"{default_server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=120) as response:
        payloads = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert json.loads(payloads[-2])["error"]["code"] == "deadline_exceeded"
    assert payloads[-1] == "[DONE]"
    after = wait_until_idle(default_server)[0]
    assert (after["num_running"], after["num_waiting"], after["num_held_blocks"]) == (0, 0, 0)


# --- what is in front -----------------------------------------------------------------------------------------------


def pids_of(server: Server, name: str) -> list[int]:
    """Return the processes of a server whose name begins so. A reload replaces HAProxy's."""
    return [pid for pid, member in members_of(server.process.pid).items() if member.startswith(name)]


def environ_of(server: Server, name: str) -> dict[str, str]:
    """Return the environment of such a process. One that has just been replaced has none any more."""
    for pid in reversed(pids_of(server, name)):
        with suppress(FileNotFoundError, ProcessLookupError):
            entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            return dict(entry.split("=", 1) for entry in entries if "=" in entry)
    raise AssertionError(f"the server has no process {name}")


def test_haproxy_is_in_front_and_listens_only_where_the_config_says(default_server: Server) -> None:
    """Ray binds its two pages about itself to every interface;
    a newcomer who asks for 127.0.0.1 wants neither there."""
    (haproxy,) = pids_of(default_server, "haproxy")
    assert [f"http://{address}:{port}" for address, port in listening([haproxy])] == [default_server.url]


def test_the_fallback_proxy_and_the_ingress_replica_are_no_more_reachable_than_the_server(
    default_server: Server,
) -> None:
    """Ray's own ports (gRPC) listen on every interface. A replica's port may be any of its range: others have some."""
    environ = environ_of(default_server, "haproxy")
    fallback = int(environ["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"])
    lowest, highest = (int(environ[name]) for name in INGRESS_PORTS)
    proxies, replicas = (pids_of(default_server, name) for name in ("ray::ProxyActor", "ray::ServeRepli"))
    of_proxy = [address for address, port in listening(proxies) if port == fallback]
    of_ingress = [address for address, port in listening(replicas) if lowest <= port <= highest]
    assert of_proxy == of_ingress == ["127.0.0.1"]


# --- several replicas, and the end -----------------------------------------------------------------------------------


def read_stream(server: Server, max_tokens: int) -> list[str]:
    """Return the `data:` payloads of a streamed completion, up to the end of the response."""
    body = {"model": MODEL, "prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as response:
        return [line.removeprefix("data: ") for line in response.iter_lines() if line]


def fake(**overrides: Any) -> dict[str, Any]:
    return {"engine": {"executor": "fake", "fake": {"step_delay_ms": 20}}, **overrides}


def test_two_engine_replicas_answer_at_once_and_sigterm_lets_streams_finish() -> None:
    with serve_run(fake(engine_replicas=2, ingress_replicas=2)) as server, ThreadPoolExecutor(8) as pool:
        own_directory = Path(environ_of(server, "haproxy")["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).parent
        streams = [pool.submit(read_stream, server, 200) for _ in range(8)]
        deadline = time.monotonic() + 10
        while sum(running := [engine["num_running"] for engine in loads(server)]) < 8 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(running) == 2
        assert sum(running) == 8, "every stream has begun: what comes after SIGTERM is refused"
        assert all(running), f"both engines have streams at the same moment: {running}"

        assert server.end(signal.SIGTERM) == 0
        for stream in streams:
            payloads = stream.result(timeout=30)
            assert payloads[-1] == "[DONE]"
            assert json.loads(payloads[-2])["choices"][0]["finish_reason"] == "length"
        assert not left_of(server), "nothing that serve run started outlives it"
        assert not own_directory.exists(), "and no file"


@pytest.mark.slow
def test_sigterm_lets_streams_finish_in_time_while_replicas_are_still_starting() -> None:
    one_too_many = {"ingress_num_cpus": 1, "ingress_replicas": 1 + (os.cpu_count() or 1), "engine_num_cpus": 0}
    settings = fake(**one_too_many, drain_timeout_s=15)
    with serve_run(settings) as server, ThreadPoolExecutor(5) as pool:
        streams = [pool.submit(read_stream, server, 200) for _ in range(4)]
        late = pool.submit(read_stream, server, 3000)
        deadline = time.monotonic() + 10
        while (running := sum(engine["num_running"] for engine in loads(server))) < 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert running == 5
        assert server.end(signal.SIGTERM) == 0
        for stream in streams:
            payloads = stream.result(timeout=30)
            assert payloads[-1] == "[DONE]"
            assert json.loads(payloads[-2])["choices"][0]["finish_reason"] == "length"
        payloads = late.result(timeout=30)
        assert json.loads(payloads[-2])["error"]["code"] == "draining"
        assert payloads[-1] == "[DONE]"
        assert not left_of(server)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_what_cannot_finish_in_time_ends_with_an_error_frame_where_the_whole_group_is_signalled(
    signum: signal.Signals,
) -> None:
    """As a terminal signals the foreground group at Ctrl-C; `timeout`, or a shell's `kill %1`, likewise."""
    with serve_run(fake(drain_timeout_s=1)) as server, ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(read_stream, server, 3000) for _ in range(3)]
        while sum(engine["num_running"] for engine in loads(server)) < 3:
            time.sleep(0.05)
        os.killpg(server.process.pid, signum)
        assert server.process.wait(60) == 0
        for stream in streams:
            payloads = stream.result(timeout=30)
            assert json.loads(payloads[-2])["error"]["code"] == "draining"
            assert payloads[-1] == "[DONE]"
        assert not left_of(server)


# --- Ray Serve's Python proxy in front, and no ingress at all --------------------------------------------------------


@pytest.mark.slow
def test_with_the_python_proxy_clients_may_leave_and_sigterm_ends_streams_as_it_does_behind_haproxy() -> None:
    with serve_run(fake(drain_timeout_s=3), env=PYTHON_PROXY) as server, ThreadPoolExecutor(4) as pool:
        assert pids_of(server, "haproxy") == []
        list(pool.map(lambda seed: leave_early(server, seed), range(4)))
        assert [engine["num_running"] for engine in wait_until_idle(server)] == [0]

        short, long = pool.submit(read_stream, server, 100), pool.submit(read_stream, server, 3000)
        while sum(engine["num_running"] for engine in loads(server)) < 2:
            time.sleep(0.05)
        assert server.end(signal.SIGTERM) == 0
        assert json.loads(short.result(timeout=30)[-2])["choices"][0]["finish_reason"] == "length"
        assert json.loads(long.result(timeout=30)[-2])["error"]["code"] == "draining"
        assert short.result()[-1] == long.result()[-1] == "[DONE]"
        assert not left_of(server)


@pytest.mark.slow
def test_sigterm_ends_a_server_whose_engine_never_starts_and_whose_ingress_therefore_never_runs() -> None:
    """Regression: `serve run` waited for ever for an answer of the first ingress replica."""
    with starting(fake(engine_num_cpus=1 + (os.cpu_count() or 1))) as server:
        deadline = time.monotonic() + START_TIMEOUT_S
        while "Engine waits: " not in server.output and time.monotonic() < deadline:
            assert server.process.poll() is None, server.output
            time.sleep(0.1)
        assert "Engine waits: " in server.output
        assert server.end(signal.SIGTERM) == 0
        assert not left_of(server)
