"""The loads by which servers are compared: what they ask, what their client reads,
and how their figures are computed."""

from __future__ import annotations

import dataclasses
import json

import pytest

from loadtest.completions import Client, Completion, Exchange
from loadtest.scenarios import SCENARIOS, Closed, Mixed, Outcome, Scenario, errors, figures, lacks
from tests.loadtest.fake_openai import HEAD, LONG, FakeServer, listening

pytestmark = pytest.mark.anyio

MIXED = Mixed(3, prompt=5, answer=4, long_requests=3, long_prompt=LONG, long_answer=2, every_s=0.2, lead_s=0.05)


def completion(
    arrivals: tuple[float, ...], *, sent: float = 0.0, tokens: int | None = None, error: str | None = None
) -> Completion:
    return Completion(sent, arrivals, 10, len(arrivals) if tokens is None else tokens, error)


async def run(server: FakeServer, scenario: Scenario, seed: int = 1) -> Outcome:
    async with listening(server) as port, Client(port, "fake") as client:
        return await scenario.run(client, seed)


async def prompts_of(scenario: Scenario, seed: int, server: FakeServer | None = None) -> list[str]:
    server = server or FakeServer()
    await run(server, scenario, seed)
    return [body["prompt"] for body in server.bodies]


# --- figures --------------------------------------------------------------------------------------------------------


def test_times_to_first_token_and_a_token_are_medians_over_requests() -> None:
    found = figures(
        Outcome([completion((1.0, 1.1, 1.2), sent=0.9), completion((2.0, 2.6), sent=1.0), completion((3.0,))], 6.0)
    )
    assert found["ttft_ms"] == pytest.approx(1000)
    assert found["tpot_ms"] == pytest.approx((100 + 600) / 2)  # a single token has no pace


def test_a_token_takes_as_long_where_a_server_sends_several_in_one_event() -> None:
    one_by_one = completion((1.0, 1.1, 1.2, 1.3, 1.4))
    merged = completion((1.0, 1.4), tokens=5)
    assert figures(Outcome([merged], 1.0))["tpot_ms"] == pytest.approx(figures(Outcome([one_by_one], 1.0))["tpot_ms"])


def test_throughput_is_all_output_tokens_by_the_length_of_the_load() -> None:
    found = figures(Outcome([completion((1.0, 2.0))], 4.0, [completion((1.0,), tokens=6)], (0.0, 4.0)))
    assert (found["tokens_per_s"], found["requests"], found["prompt_tokens"]) == (2.0, 2, 20)


def test_the_longest_gap_is_within_a_stream_and_ends_while_long_prompts_are_in_hand() -> None:
    before, between_streams, inside, after = (1.0, 5.0), (7.0, 7.1), (8.0, 8.5, 8.6), (8.9, 20.0)
    answers = [completion(arrivals) for arrivals in (before, between_streams, inside, after)]
    found = figures(Outcome(answers, 20.0, [completion((7.5,), sent=7.0)], (6.0, 10.0)))
    assert found["longest_gap_ms"] == pytest.approx(500)
    assert found["long_ttft_ms"] == pytest.approx(500)
    assert found["ttft_ms"] == pytest.approx(1e3 * (7.0 + 8.0) / 2)  # the tokens of the streams alone


def test_of_a_hundred_gaps_beside_long_prompts_one_is_longer_than_the_99th_percentile() -> None:
    arrivals = tuple(sum(range(number)) / 1e3 for number in range(1, 102))  # gaps of 1 to 100 ms
    found = figures(Outcome([completion(arrivals)], 20.0, [completion((7.5,), sent=7.0)], (0.0, 10.0)))
    assert [round(found[name], 6) for name in ("gap_p50_ms", "gap_p99_ms", "longest_gap_ms")] == [50.5, 99, 100]


def test_a_load_whose_streams_ended_before_the_long_prompts_came_is_no_short_gap() -> None:
    outcome = Outcome([completion((1.0, 2.0))], 9.0, [completion((7.5,))], (6.0, 10.0))
    assert "longest_gap_ms" not in figures(outcome)
    assert lacks(outcome) == ["no stream ran beside the long prompts"]


def test_a_load_without_long_prompts_lacks_nothing() -> None:
    assert lacks(Outcome([completion((1.0,))], 1.0)) == []


def test_every_failed_request_is_an_error_those_with_long_prompts_too() -> None:
    bad = completion((), error="refused")
    assert errors(Outcome([bad, completion((1.0,)), bad], 1.0, [bad])) == ["refused"] * 3


def test_answers_that_all_failed_have_no_times() -> None:
    found = figures(Outcome([completion((), error="refused")], 2.0))
    assert not {"ttft_ms", "tpot_ms"} & found.keys()
    assert found["tokens_per_s"] == 0


# --- the client -----------------------------------------------------------------------------------------------------


def stream(*payloads: object) -> bytes:
    events = [p if isinstance(p, str) else json.dumps(p) for p in payloads]
    data = [f"data: {event}\n\n".encode() for event in events]
    return HEAD + b"".join(f"{len(d):x}\r\n".encode() + d + b"\r\n" for d in data) + b"0\r\n\r\n"


TEXT = {"choices": [{"text": "a"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (stream(TEXT, USAGE), "the stream ends with"),
        (stream(TEXT, "[DONE]"), "0 tokens instead of 2"),
        (stream(TEXT, {"usage": {"prompt_tokens": 3, "completion_tokens": 1}}, "[DONE]"), "1 tokens instead of 2"),
        (stream({"choices": [{"text": ""}]}, USAGE, "[DONE]"), "an answer without text"),
        (stream(TEXT, {"error": {"message": "it broke"}}, "[DONE]"), "it broke"),
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n", "503"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_an_error(raw: bytes, reason: str) -> None:
    error = Exchange(0.0, [(1.0, raw)], 2, None).read().error
    assert error is not None
    assert reason in error


def test_an_event_without_text_is_no_arrival() -> None:
    raw = [stream({"choices": [{"text": ""}]})[: -len(b"0\r\n\r\n")], stream(TEXT, USAGE, "[DONE]")[len(HEAD) :]]
    answer = Exchange(0.0, [(1.0, raw[0]), (2.0, raw[1])], 2, None).read()
    assert (answer.arrivals, answer.prompt_tokens, answer.error) == ((2.0,), 3, None)


async def test_a_server_that_is_not_there_is_an_error_of_the_request() -> None:
    async with listening(FakeServer()) as port:
        pass
    assert "Connect" in ((await Client(port, "fake").ask("a", 1)).read().error or "")


async def test_an_answer_that_does_not_end_in_time_is_an_error_and_the_next_has_a_connection_of_its_own() -> None:
    server = FakeServer(long_s=3600)
    async with listening(server) as port, Client(port, "fake", timeout_s=0.3) as client:
        late = await client.ask("word " * LONG, 1)
        server._may_step.set()
        after = await client.ask("word", 1)
    assert (late.read().error, after.read().error) == ("no end within 0.3 s", None)
    assert server.num_connections == 2


async def test_a_connection_that_the_server_announced_to_close_is_not_used_again() -> None:
    """HAProxy announces it after a reload, and closes right after the answer: before the client has seen it closed."""
    server = FakeServer(says_close=True)
    outcome = await run(server, Closed(requests=6, clients=2, prompt=3, answer=2))
    assert errors(outcome) == []
    assert server.num_connections == 6


async def test_a_request_on_a_kept_connection_that_closes_without_an_answer_is_asked_again_on_another() -> None:
    """llama.cpp's server closes kept connections without a word: half of its answers were errors of this client."""
    server = FakeServer(drops_every=2)
    outcome = await run(server, Closed(requests=6, clients=2, prompt=3, answer=2))
    assert errors(outcome) == []
    assert (server.num_connections, len(server.bodies)) == (6, 6)


async def test_a_request_on_a_new_connection_that_closes_without_an_answer_is_an_error() -> None:
    server = FakeServer(drops_every=1)
    outcome = await run(server, Closed(requests=2, clients=1, prompt=3, answer=2))
    assert errors(outcome) == ["the server closed the connection"] * 2
    assert server.num_connections == 2


async def test_a_head_that_ends_as_a_last_chunk_does_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's ends with `Keep-Alive: timeout=5, max=100`, and arrives by itself."""
    monkeypatch.setattr("tests.loadtest.fake_openai.HEAD", HEAD[:-2] + b"Keep-Alive: timeout=5, max=100\r\n\r\n")
    outcome = await run(FakeServer(step_s=0.02), Closed(requests=1, clients=1, prompt=3, answer=2))
    assert errors(outcome) == []


async def test_a_request_is_greedy_of_a_fixed_length_and_asks_for_usage() -> None:
    server = FakeServer()
    await run(server, Closed(requests=1, clients=1, prompt=3, answer=7))
    (body,) = server.bodies
    assert len(body.pop("prompt").split()) == 3
    assert body == {
        "model": "fake",
        "max_tokens": 7,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


# --- closed loads ---------------------------------------------------------------------------------------------------


async def test_so_many_clients_ask_at_once_each_on_one_connection_until_all_requests_are_answered() -> None:
    server = FakeServer(step_s=0.005)
    outcome = await run(server, Closed(requests=11, clients=3, prompt=4, answer=5))
    assert errors(outcome) == []
    assert [answer.output_tokens for answer in outcome.answers] == [5] * 11
    assert (server.most_in_hand, server.num_connections) == (3, 3)
    assert len({body["prompt"] for body in server.bodies}) == 11


async def test_a_shared_prefix_is_the_same_for_all_prompts_of_a_load_and_another_with_another_seed() -> None:
    scenario = Closed(requests=4, clients=2, prompt=6, answer=1, shared=50)
    prompts = [prompt.split() for prompt in await prompts_of(scenario, 1)]
    assert {len(prompt) for prompt in prompts} == {56}
    assert len({tuple(prompt[:50]) for prompt in prompts}) == 1
    assert len({tuple(prompt[50:]) for prompt in prompts}) == 4
    (other, *_) = await prompts_of(scenario, 2)
    assert other.split()[:50] != prompts[0][:50]


async def test_the_same_seed_asks_the_same_and_another_asks_otherwise() -> None:
    scenario = Closed(requests=3, clients=1, prompt=8, answer=1)
    first, again, other = [await prompts_of(scenario, seed) for seed in (1, 1, 2)]
    assert first == again
    assert not set(first) & set(other)


async def test_a_request_that_fails_is_counted_and_the_others_go_on() -> None:
    outcome = await run(FakeServer(lose=1), Closed(requests=4, clients=2, prompt=4, answer=3))
    assert errors(outcome) == ["2 tokens instead of 3"] * 4


# --- long prompts beside streams ------------------------------------------------------------------------------------


async def test_streams_run_until_the_last_long_prompt_is_answered_however_fast_they_end() -> None:
    outcome = await run(FakeServer(step_s=0.01), MIXED)
    assert errors(outcome) + lacks(outcome) == []
    assert len(outcome.answers) > MIXED.streams
    last_sent = max(answer.sent for answer in outcome.long)
    assert sum(answer.arrivals[-1] >= last_sent for answer in outcome.answers) >= MIXED.streams
    assert [answer.output_tokens for answer in outcome.long] == [2] * 3


async def test_a_pause_of_the_streams_for_a_long_prompt_is_their_longest_gap() -> None:
    found = figures(await run(FakeServer(step_s=0.01, long_s=0.15), dataclasses.replace(MIXED, answer=100)))
    assert found["longest_gap_ms"] >= 100  # the pause, less the time since a stream's last token
    assert found["long_ttft_ms"] >= 150


async def test_a_faster_server_gets_the_same_prompts() -> None:
    def long_and_first(prompts: list[str]) -> tuple[list[str], set[str]]:
        return [p for p in prompts if len(p.split()) >= LONG], set(prompts[: MIXED.streams])

    slow, fast = [long_and_first(await prompts_of(MIXED, 1, FakeServer(step_s=step_s))) for step_s in (0.05, 0.002)]
    assert slow == fast


# --- all ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_warm_up_is_of_the_same_kind_and_shorter(name: str) -> None:
    def work(scenario: Scenario) -> int:
        if isinstance(scenario, Closed):
            return scenario.requests * scenario.answer
        return scenario.long_requests

    scenario = SCENARIOS[name]
    assert type(scenario.warm_up) is type(scenario)
    assert work(scenario.warm_up) < work(scenario)
