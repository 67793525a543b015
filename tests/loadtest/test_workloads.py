"""The named loads, and what they ask."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from loadtest.plan import Closed, Open, Plan, Replay, Shape, Source, ask, turn
from loadtest.workloads import WORKLOADS, Settings, plan_of

MOONCAKE = Path(__file__).parent / "traces" / "mooncake_sample.jsonl"
SHORT = Settings(seconds=20.0, lengths=0.1, has_command=True)
OWN = {"trace": {"trace": MOONCAKE}, "tenants": {"tenants": ("ann", "bob", "cy")}}


def short(name: str) -> Plan:
    return plan_of(name, dataclasses.replace(SHORT, **OWN.get(name, {})))  # type: ignore[arg-type]


def sources(plan: Plan) -> list[Source]:
    return [source for point in plan.points for source in point.sources]


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_load_is_a_plan_that_asks_something(name: str) -> None:
    plan = short(name)
    assert plan.points
    assert plan.limits, "a load without a limit passes whatever happens"
    for source in sources(plan):
        if isinstance(source, Closed):
            assert source.clients > 0
        else:
            assert list(source.due("1", 0, 1))
    for point in plan.points:
        assert 0 <= point.warm_up_s < point.seconds <= 20.0
    assert plan.judged is None or plan.judged in {source.kind for source in sources(plan)}
    assert len({point.name for point in plan.points}) == len(plan.points), "their figures go by name"


@pytest.mark.parametrize("name", ["smoke", "trace", "interference", "prefix", "burst"])
def test_the_workers_shares_are_the_whole_load_once(name: str) -> None:
    for source in sources(short(name)):
        assert not isinstance(source, Closed)
        whole = [(at, one.body["prompt"]) for at, one in source.due("s", 0, 1)]
        shares = [[(at, one.body["prompt"]) for at, one in source.due("s", i, 3)] for i in range(3)]
        assert sorted(one for share in shares for one in share) == sorted(whole)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_another_seed_asks_for_other_texts_at_other_times() -> None:
    (source,) = sources(plan_of("rates", dataclasses.replace(SHORT, rates=(2.0,))))
    assert isinstance(source, Open)
    one, other = (dict(source.due(seed, 0, 1)) for seed in ("1", "2"))
    assert not set(one) & set(other)
    assert not {found.body["prompt"] for found in one.values()} & {found.body["prompt"] for found in other.values()}


def test_a_prompt_has_the_words_that_were_asked_for_and_shares_what_it_should() -> None:
    shape = Shape(prompt=20, answer=5, shared=30)
    first, second = (ask("k", shape, "s", i).body["prompt"].split() for i in (1, 2))
    assert len(first) == len(second) == 50
    assert first[:30] == second[:30]
    assert first[30:] != second[30:]


def test_an_answer_is_streamed_greedy_of_a_fixed_length_and_counted() -> None:
    body = ask("k", Shape(4, 7), "s", 0).body
    body.pop("prompt")
    assert body == {
        "max_tokens": 7,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_turn_brings_all_that_was_said_before() -> None:
    said = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    found = turn("k", Shape(3, 7), "s", "1", said)
    assert found.body["messages"][:2] == said
    assert found.body["messages"][2]["role"] == "user"
    assert (found.path, found.asked_tokens) == ("/v1/chat/completions", 6)
    assert "prompt" not in found.body


def test_as_many_clients_leave_as_should() -> None:
    shape = Shape(2, 2, cancel_share=0.3, cancel_after_s=1.5)
    found = [ask("k", shape, "s", i).cancel_after_s for i in range(2000)]
    assert set(found) == {None, 1.5}
    assert found.count(1.5) == pytest.approx(600, rel=0.1)


def test_a_trace_is_asked_with_its_own_times_lengths_and_answers() -> None:
    (source,) = sources(plan_of("trace", Settings(trace=MOONCAKE, lengths=0.1)))
    assert isinstance(source, Replay)
    for row, (at, one) in zip(source.trace.rows, source.due("s", 0, 1), strict=True):
        assert (at, one.asked_tokens, one.body["max_tokens"]) == (row.at_s, row.prompt_tokens, row.output_tokens)
        assert len(one.body["prompt"].split()) == row.prompt_tokens


def test_a_traces_last_request_is_within_its_point_and_its_window_is_no_longer_than_the_trace() -> None:
    plan = plan_of("trace", Settings(trace=MOONCAKE, seconds=10_000.0))
    (source,) = sources(plan)
    assert isinstance(source, Replay)
    last = source.trace.rows[-1].at_s
    assert last < plan.points[0].seconds < last + 1
    assert plan.series["ideal_hit_share"] > 0.3


def test_what_is_left_out_of_a_trace_is_noted() -> None:
    (note,) = plan_of("trace", Settings(trace=MOONCAKE, longest=2500)).notes
    assert note.endswith("longer than 2500 tokens, and left out")


def test_overload_is_once_twice_and_five_times_the_rate() -> None:
    plan = plan_of("overload", dataclasses.replace(SHORT, rate=3.0))
    assert [point.x for point in plan.points] == [3.0, 6.0, 15.0]
    assert (plan.no_collapse, plan.retry_after) == (0.7, True)


def test_a_burst_is_much_denser_than_the_rest() -> None:
    (source,) = sources(plan_of("burst", dataclasses.replace(SHORT, seconds=200.0, rate=2.0)))
    assert isinstance(source, Open)
    times = [at for at, _ in source.due("s", 0, 1)]
    inside = sum(90 <= at < 110 for at in times)
    assert inside == pytest.approx(8 * 2 * 20, rel=0.2)
    assert len(times) - inside == pytest.approx(2 * 180, rel=0.2)


def test_the_first_tenant_asks_ten_times_as_much_as_each_other_and_the_second_is_judged() -> None:
    plan = short("tenants")
    rates = [source.profile.steps[0][1] for source in sources(plan) if isinstance(source, Open)]
    assert rates == [5.0, 0.5, 0.5]
    assert plan.judged == "bob"
    assert [source.shape.tenant for source in sources(plan) if isinstance(source, Open)] == ["ann", "bob", "cy"]


def test_a_short_interference_has_long_prompts_too() -> None:
    long = [source for source in sources(short("interference")) if source.kind == "long"]
    assert isinstance(long[0], Open)
    assert len(list(long[0].due("s", 0, 1))) == 2


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("trace", Settings(), "--trace"),
        ("head-kill", Settings(), "--do"),
        ("tenants", Settings(), "two or more"),
        ("smoke", Settings(limits="ttft<1"), "a limit is"),
        ("soak", Settings(seconds=5.0, warm_up_s=5.0), "warm-up"),
        ("rates", Settings(rates=(1.0,), rate=2.0), "not both"),
        ("rates", Settings(arrivals="gamma"), "--cv"),
        ("rates", Settings(cv=2.0), "--cv"),
        ("sessions", Settings(clients=(1, 2)), "one number"),
        ("sessions", Settings(rate=1.0), "--rate: sessions has no use for it"),
        ("smoke", Settings(arrivals="poisson"), "--arrivals: smoke"),
        ("overload", Settings(rates=(1.0,)), "--rates: overload"),
        ("rates", Settings(tenants=("a", "b")), "several --keys: rates"),
        ("prefix", Settings(longest=5), "--longest: prefix"),
    ],
)
def test_a_setting_that_a_load_lacks_or_has_no_use_for_is_refused(name: str, settings: Settings, reason: str) -> None:
    """A setting that is accepted but changes nothing would make one run look like another."""
    with pytest.raises(ValueError, match=reason):
        plan_of(name, settings)


def test_limits_of_the_user_replace_the_loads_own() -> None:
    plan = plan_of("smoke", Settings(limits="ttft_p99_ms<=5"))
    assert [limit.figure for limit in plan.limits] == ["ttft_p99_ms"]


def test_a_sweep_has_a_line_of_points_for_each_shape() -> None:
    plan = plan_of("sweep", Settings(clients=(2, 3)))
    assert [source.clients for source in sources(plan) if isinstance(source, Closed)] == [2, 3] * 3
    assert [point.line for point in plan.points[::2]] == ["1000/1000", "8000/1000", "1000/8000"]


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        (
            "rates",
            Settings(rates=(2.0, 4.0, 2.0, 2.0)),
            ["2 requests/s", "4 requests/s", "2 requests/s (2)", "2 requests/s (3)"],
        ),
        ("rates", Settings(rates=(1e6, 1e6 + 1)), ["1e+06 requests/s", "1e+06 requests/s (2)"]),
        (
            "sweep",
            Settings(clients=(8, 8)),
            [f"{line} x 8{number}" for line in ("1000/1000", "8000/1000", "1000/8000") for number in ("", " (2)")],
        ),
    ],
)
def test_a_load_that_is_measured_twice_has_a_point_for_each_time(
    name: str, settings: Settings, expected: list[str]
) -> None:
    """Figures are counted by the points' names: two of one name each had the requests of both."""
    assert [point.name for point in plan_of(name, settings).points] == expected
