"""Contracts of where a request's wall time goes: it adds up, and what slowed a request down is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.config import Targets
from engine.core.wall_times import Chunk, Shares, WallTimes, predict, split
from engine.protocol import EngineTimes, Failed, Finished, SamplingParams, Submission, TimeCause
from engine.scheduling.request import create_request
from engine.scheduling.step_prediction import Prediction
from engine.scheduling.step_time import StepCosts, StepWork, chunk_work, decode_work
from tests.support.engines import TimedCore, policy, prompt_only
from tests.support.seeds import seeded_random

COSTS = StepCosts((1, 64), (0.010, 0.073))
"""A step takes 10 ms, and 1 ms for each token after the first."""
OWN = (TimeCause.PREFILL, TimeCause.DECODE)


def prompt_of(length: int) -> list[int]:
    return [1 + i % 31 for i in range(length)]


def times_of(core: TimedCore, request_id: str) -> EngineTimes:
    last = core.events[request_id][-1]
    assert isinstance(last, Finished | Failed)
    assert last.times is not None
    return last.times


def slowed_by(core: TimedCore, request_id: str) -> list[TimeCause]:
    """The causes besides the request's own work, the largest first."""
    seconds = times_of(core, request_id).seconds
    return sorted((cause for cause in seconds if cause not in OWN), key=lambda cause: -seconds[cause])


def run_until(core: TimedCore, is_so: Callable[[], bool]) -> None:
    while not is_so():
        core.keep(core.step())


# --- it adds up ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("targets", [Targets(), Targets(tpot_ms=40, ttft_ms=400)], ids=["no targets", "targets"])
def test_the_causes_of_every_request_add_up_to_its_time(targets: Targets, overlap: bool) -> None:
    random = seeded_random()
    core = TimedCore(
        COSTS,
        noise=lambda: random.choice((1.0, 1.1, 0.9, 5.0)),
        targets=targets,
        overlap=overlap,
        scheduler=prompt_only(),
        num_kv_blocks=40,
        max_num_seqs=6,
    )
    sent: dict[str, float] = {}
    ended: dict[str, float] = {}
    for number in range(60):
        request_id = f"r{number}"
        sent[request_id] = core.now
        prepared = random.random() < 0.9
        prompt = [random.randrange(1, 32) for _ in range(random.randint(1, 60))]
        core.send(request_id, prompt, prepared=prepared, max_tokens=random.randint(1, 30), ignore_eos=True)
        for _ in range(random.randrange(4)):
            core.now += random.random() / 100  # commands, and what else happens between steps
            events = core.keep(core.step())
            ended |= {event.request_id: core.now for event in events if isinstance(event, Finished | Failed)}
        if random.random() < 0.2:
            name = random.choice(sorted(sent.keys() - ended.keys()))
            core.keep(core.abort(name))
            ended[name] = core.now
        if not prepared:
            core.keep(core.prepared(request_id))
    while core.has_work:
        events = core.keep(core.step())
        ended |= {event.request_id: core.now for event in events if isinstance(event, Finished | Failed)}
    assert ended.keys() == sent.keys()
    assert any(TimeCause.PREEMPTION in times_of(core, name).seconds for name in sent), "the test should preempt"
    for name, at in ended.items():
        seconds = times_of(core, name).seconds
        assert sum(seconds.values()) == pytest.approx(at - sent[name], abs=1e-4)
        assert min(seconds.values(), default=0) >= 0
    assert not core._wall_times._accounts


def test_a_call_that_launches_alone_is_time_of_the_prompts_in_its_step() -> None:
    """With overlap the first call reads nothing back. Its time was booked as that of other answers, of which there were
    none."""
    core = TimedCore(COSTS, overlap=True, max_num_batched_tokens=64, max_prefill_tokens=32)
    core.send("alone", prompt_of(150), max_tokens=3, ignore_eos=True)
    core.run()
    assert slowed_by(core, "alone") == []


def test_the_shares_of_a_step_add_up_whatever_it_was() -> None:
    random = seeded_random()
    for _ in range(500):
        chunks = [
            Chunk(str(i), chunk_work(random.randrange(99), random.randint(1, 40), last=random.random() < 0.5), 0, False)
            for i in range(random.randrange(3))
        ]
        works = [decode_work(random.randrange(9), random.randint(1, 99)), *(chunk.work for chunk in chunks)]
        whole = StepWork(*map(sum, zip(*works, strict=True)))._replace(encoded=random.choice((0, 0, 50)))
        if not whole.tokens:
            continue
        costs = StepCosts((1, 64), (0.01, 0.073), 1e-4, 1e-5, 1e-6, random.choice((0.0, 1e-3)))
        prediction = random.choice((None, Prediction(costs, 1.2, 0.001, random.choice((0.0, 0.1)))))
        seconds = random.choice((1e-4, 0.02, 3.0))
        took = split(seconds, predict([whole], chunks, prediction), grammar_s=random.choice((0.0, 1e-5, 1.0)))
        assert sum(took) == pytest.approx(seconds)
        assert min(took) >= 0


def test_a_step_as_long_as_predicted_divides_as_predicted() -> None:
    chunk = Chunk("a", chunk_work(0, 20, last=False), 20, False)
    works = [decode_work(3, 7).plus(chunk.work)]
    took = split(0.032, predict(works, [chunk], Prediction(COSTS)))
    assert took == pytest.approx(Shares(prompts=0.020, answer=0.010, answers=0.002))
    late = split(0.132, predict(works, [chunk], Prediction(COSTS, deviation=0.1)))
    assert late == pytest.approx(Shares(prompts=0.020, answer=0.010, answers=0.002, excess=0.1))
    noisy = split(0.036, predict(works, [chunk], Prediction(COSTS, deviation=0.1)))
    assert noisy.excess == 0, "ordinary noise is nobody's fault"


def test_a_step_for_which_a_row_stood_aside_is_its_own_time_and_others_pay_for_their_neighbours() -> None:
    """With overlap, a row with drafts has no row in the step after: that step is as long as it is for its own sake."""
    times = WallTimes()
    chunk = Chunk("a", chunk_work(0, 4, last=True), 4, True)
    for name in ("a", "b"):
        times.open(name, 0.0, prepared=True, ahead=(0, 0), spent={})
        times.admitted(name, 0.0)
        times.step(Shares(), [chunk._replace(request_id=name)], predict([], [], None)._replace(chunks=(1.0,)), 0.0)
    took = Shares(prompts=0.4, answer=0.1, answers=0.2, grammar=0.2, excess=0.1)
    times.step(took, [], predict([], [], None), 1.0, aside=["a", "gone"])
    times.step(took, [], predict([], [], None), 2.0)
    own, other = times.close("a", 2.0), times.close("b", 2.0)
    assert own is not None
    assert other is not None
    assert own.seconds == pytest.approx(
        {
            TimeCause.DECODE: 0.8,
            TimeCause.DECODE_BESIDE_PROMPTS: 0.4,
            TimeCause.DECODE_BESIDE_ANSWERS: 0.2,
            TimeCause.GRAMMAR: 0.4,
            TimeCause.SLOW_STEPS: 0.2,
        }
    )
    assert other.seconds[TimeCause.DECODE] == pytest.approx(0.2)
    assert other.seconds[TimeCause.DECODE_BESIDE_ANSWERS] == pytest.approx(0.4)


def test_what_is_not_explained_in_a_step_that_encodes_went_to_that() -> None:
    works = [decode_work(1, 7)._replace(encoded=400)]
    took = split(0.5, predict(works, [], Prediction(COSTS)))
    assert took == pytest.approx(Shares(answer=0.010, inputs=0.490))


def test_without_predictions_a_step_divides_by_tokens_and_the_reading_of_weights_is_each_answers_own() -> None:
    chunk = Chunk("a", chunk_work(0, 64, last=False), 64, False)
    took = split(1.0, predict([decode_work(4, 9).plus(chunk.work)], [chunk], None))
    assert took == pytest.approx(Shares(prompts=0.64, answer=0.33, answers=0.03))


# --- what slowed a request down is named -----------------------------------------------------------------------------


def test_a_request_alone_has_only_its_own_work() -> None:
    core = TimedCore(COSTS)
    core.send("a", prompt_of(99), max_tokens=5, ignore_eos=True)
    core.run()
    assert slowed_by(core, "a") == []
    seconds = times_of(core, "a").seconds
    assert seconds[TimeCause.PREFILL] == pytest.approx(sum(core.took[:4]))
    assert seconds[TimeCause.DECODE] == pytest.approx(sum(core.took[4:]))


def test_the_time_in_which_an_engine_had_nothing_to_do_is_nobodys() -> None:
    core = TimedCore(COSTS)
    for name in ("a", "b"):
        core.send(name, prompt_of(30)[:: -1 if name == "a" else 1], max_tokens=5, ignore_eos=True)
        core.run()
        core.now += 100
    assert slowed_by(core, "b") == []


def test_a_request_behind_others_says_how_much_was_ahead_of_it() -> None:
    core = TimedCore(COSTS, max_num_seqs=1)
    core.send("running", prompt_of(39), max_tokens=20, ignore_eos=True)
    core.keep(core.step())  # 32 of its 39 tokens
    core.send("next", [1, 2, 3], max_tokens=1)
    core.send("last", [4, 5, 6], max_tokens=1)
    core.run()
    assert slowed_by(core, "last") == [TimeCause.QUEUE]
    times = times_of(core, "last")
    assert (times.requests_ahead, times.tokens_ahead) == (1, 3 + 7)


def test_a_full_cache_is_named() -> None:
    core = TimedCore(COSTS, num_kv_blocks=16, scheduler=policy(reserve_mode="full", preempt_policy="none"))
    core.send("large", prompt_of(29), max_tokens=20, ignore_eos=True)
    core.keep(core.step())
    core.send("small", prompt_of(19)[::-1], max_tokens=10, ignore_eos=True)
    core.run()
    assert slowed_by(core, "small")[0] is TimeCause.MEMORY


def test_a_long_prompt_that_short_ones_overtake_says_so() -> None:
    core = TimedCore(COSTS, max_num_seqs=64, num_kv_blocks=999, targets=Targets(ttft_ms=200))
    core.send("long", prompt_of(199), max_tokens=1)
    core.keep(core.step())
    for number in range(30):
        core.send(f"short {number}", [1 + number % 30] * 16, max_tokens=1)
    core.run()
    assert slowed_by(core, "long")[0] in (TimeCause.PREFILL_BESIDE_PROMPTS, TimeCause.QUEUE)


def test_a_stream_beside_a_long_prompt_and_the_prompt_beside_streams_name_each_other() -> None:
    core = TimedCore(COSTS, max_num_batched_tokens=64, num_kv_blocks=999, max_num_seqs=64)
    for number in range(40):
        core.send(f"stream {number}", [number % 31 + 1], max_tokens=12, ignore_eos=True)
    run_until(core, lambda: core.load().num_queued_tokens == 0)
    core.send("prompt", prompt_of(199), max_tokens=1)
    core.run()
    assert slowed_by(core, "prompt")[0] is TimeCause.PREFILL_BESIDE_ANSWERS
    assert slowed_by(core, "stream 0")[:2] == [TimeCause.DECODE_BESIDE_ANSWERS, TimeCause.DECODE_BESIDE_PROMPTS]
    few = TimedCore(COSTS, max_num_batched_tokens=64, max_prefill_tokens=60)
    few.send("stream", [1], max_tokens=12, ignore_eos=True)
    few.keep(few.step())
    few.send("prompt", prompt_of(199), max_tokens=1)
    few.run()
    assert slowed_by(few, "stream") == [TimeCause.DECODE_BESIDE_PROMPTS]


def test_a_preempted_request_counts_all_that_it_lost_until_it_has_it_again() -> None:
    core = TimedCore(COSTS, num_kv_blocks=12, scheduler=prompt_only(), enable_prefix_caching=False)
    for name in ("a", "b"):
        core.send(name, prompt_of(19), max_tokens=20, ignore_eos=True)
    core.run()
    assert core.load().num_preemptions
    assert slowed_by(core, "b")[0] is TimeCause.PREEMPTION
    seconds = times_of(core, "b").seconds
    assert TimeCause.MEMORY not in seconds, "it waits because it was preempted"
    assert seconds[TimeCause.PREFILL] < 0.040, "its prompt once: a chunk of 13 tokens and one of 6"


def test_steps_that_stand_still_are_named() -> None:
    factors = iter([1.0, 1.0, 40.0])
    core = TimedCore(COSTS, noise=lambda: next(factors, 1.0))
    core.send("a", [1, 2, 3], max_tokens=20, ignore_eos=True)
    core.run()
    assert slowed_by(core, "a") == [TimeCause.SLOW_STEPS]
    assert times_of(core, "a").seconds[TimeCause.SLOW_STEPS] == pytest.approx(39 * 0.010, rel=0.1)


def test_a_prompt_that_was_prepared_late_says_so() -> None:
    core = TimedCore(COSTS)
    core.send("a", [1, 2, 3], prepared=False, max_tokens=2, ignore_eos=True)
    core.now += 3.0
    core.prepared("a")
    core.run()
    assert times_of(core, "a").seconds[TimeCause.INPUTS] == pytest.approx(3.0)


def test_a_request_that_fails_says_where_its_time_went_too() -> None:
    core = TimedCore(COSTS, max_num_seqs=1)
    core.send("running", [1], max_tokens=50, ignore_eos=True)
    core.keep(core.step())
    core.send("late", [1, 2, 3], timeout_s=0.1, max_tokens=1)
    core.run()
    assert isinstance(core.events["late"][-1], Failed)
    assert slowed_by(core, "late") == [TimeCause.QUEUE]


def test_what_was_spent_before_a_request_came_is_part_of_its_time() -> None:
    core = TimedCore(COSTS)
    core.now = 10.0
    request = create_request(Submission("a", (1, 2, 3), SamplingParams(max_tokens=1)), core.config, 0)
    spent = {TimeCause.ADAPTER: 2.0, TimeCause.GRAMMAR: 0.5}
    core.keep(core.submit(request, handed_over=9.25, spent=spent))
    core.run()
    seconds = times_of(core, "a").seconds
    assert seconds == pytest.approx(spent | {TimeCause.QUEUE: 0.75, TimeCause.PREFILL: 0.012})


def test_a_step_that_waits_for_grammars_says_so() -> None:
    costs = predict([decode_work(2, 9)], [], Prediction(COSTS))
    took = split(0.311, costs, grammar_s=0.3)
    assert took == pytest.approx(Shares(answer=0.010, answers=0.001, grammar=0.3))


def test_steps_that_stand_still_are_named_by_those_that_wait_too() -> None:
    """Regression: what waited for a seat, or came while a step stood still, was told that others were before it."""
    factors = iter([1.0, 1.0, 500.0])
    core = TimedCore(COSTS, noise=lambda: next(factors, 1.0))
    core.send("running", [1, 2, 3], max_tokens=20, ignore_eos=True)
    run_until(core, lambda: len(core.took) == 2)
    request = create_request(Submission("late", (1, 2, 3), SamplingParams(max_tokens=1)), core.config, 99)
    began = core.now
    core.keep(core.step())  # it stands for five seconds
    core.keep(core.submit(request, handed_over=began + 0.01))
    core.run()
    assert slowed_by(core, "running")[0] is TimeCause.SLOW_STEPS
    assert slowed_by(core, "late")[0] is TimeCause.SLOW_STEPS


def test_steps_that_stand_still_are_named_by_those_that_lack_a_seat() -> None:
    factors = iter([1.0, 500.0])
    core = TimedCore(COSTS, noise=lambda: next(factors, 1.0), max_num_seqs=1)
    core.send("running", [1, 2, 3], max_tokens=5, ignore_eos=True)
    core.keep(core.step())
    core.send("waiting", [1, 2, 3], max_tokens=1)
    core.run()
    assert slowed_by(core, "waiting")[:2] == [TimeCause.SLOW_STEPS, TimeCause.QUEUE]
