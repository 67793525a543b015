"""Owns the contract of the executor for devices: the plain one's outputs, without a wait. Long: each way to end a row.
Never needs a device: a fake one runs on the CPU what is queued on it."""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.batch.grammar import Grammars
from engine.batch.row_order import NO_LOGIT
from engine.build.gpu import start_on_device
from engine.config import EngineConfig, ResolvedConfig, SpeculativeConfig
from engine.core.core import EngineCore
from engine.execution.answers import LOST_TOKEN, NO_TOKEN_LEFT
from engine.execution.executor import TorchExecutor
from engine.execution.gpu.executor import DeviceExecutor
from engine.models.eager import EagerModel
from engine.models.kv_cache import KVCache
from engine.protocol import ErrorCode, Event, Failed, SamplingParams, Submission, Token
from engine.scheduling.request import create_request
from engine.step import (
    PENDING_TOKEN,
    Capabilities,
    ExecutorFatalError,
    ExecutorOutOfMemoryError,
    LogitControls,
    ScheduledRequest,
    StepOutput,
    StepPlan,
)
from kernels.eager.ops import TORCH
from tests.support.fake_device import EOS, VOCAB, FakeDevice, write_model
from tests.support.plans import chunk, decode, greedy_text

TOKENS = torch.randint(0, 256, (90,), generator=torch.Generator().manual_seed(5)).tolist()
BLOCKS, OTHER_BLOCKS = (9, 3, 11, 0, 7, 12), (1, 2, 4, 5, 6, 13)
DIGITS = r"start: /[0-9]{2,6}(,[0-9]+)*\./"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def config(**settings: Any) -> EngineConfig:
    engine = {"load_format": "dummy", "dtype": "float32", "num_kv_blocks": 40, "num_threads": 1, "attention": "torch"}
    return EngineConfig(**engine | {"max_num_seqs": 8, "max_num_batched_tokens": 48} | settings)


def make(model: Path, **settings: Any) -> tuple[DeviceExecutor, ResolvedConfig]:
    executor, resolved = start_on_device(model, config(**settings), FakeDevice(), "a test").build()
    executor._answers.grammars = Grammars.of_bytes(VOCAB, EOS)
    return executor, resolved


def plain(executor: DeviceExecutor) -> TorchExecutor:
    """Make the executor that waits for everything, with the same weights and the same operators."""
    weights, own = executor.model.decoder, executor.model.cache
    layers = tuple((k.clone(), v.clone()) for k, v in own.layers)
    other = EagerModel(weights, TORCH, KVCache(layers), own.layers[0][0].shape[1])
    return TorchExecutor(other, num_threads=1, grammars=Grammars.of_bytes(VOCAB, EOS))


@pytest.fixture
def executor(model: Path) -> Iterator[DeviceExecutor]:
    made, _ = make(model)
    yield made
    made.shutdown()


# --- the outputs of the plain executor -------------------------------------------------------------------------------


class Both:
    """An engine.step.Executor that runs each plan on two executors, and compares their outputs."""

    def __init__(self, one: TorchExecutor, other: TorchExecutor) -> None:
        self.both = (one, other)
        self.steps = 0

    @property
    def capabilities(self) -> Capabilities:
        return self.both[0].capabilities

    def launch(self, plan: StepPlan) -> None:
        for executor in self.both:
            executor.launch(plan)

    def collect(self) -> StepOutput:
        one, other = (executor.collect() for executor in self.both)
        assert_same(one, other)
        self.steps += 1
        return one

    def forget(self, request_ids: Sequence[str]) -> None:
        for executor in self.both:
            executor.forget(request_ids)

    def shutdown(self) -> None: ...


def assert_same(one: StepOutput, other: StepOutput) -> None:
    """Compare two outputs. Floats may differ in their last bits:
    torch's products depend on where in memory a tensor begins."""
    assert without_floats(one) == without_floats(other)
    assert floats(one) == pytest.approx(floats(other), abs=1e-4, nan_ok=True)


def without_floats(output: StepOutput) -> StepOutput:
    ids = {number: tuple(logprob.token_id for logprob in found) for number, found in output.logprobs.items()}
    scored = {
        number: tuple((logprob.token_id, logprob.rank is None) for logprob in found)
        for number, found in output.prompt_logprobs.items()
    }
    pooled = {number: len(sums) for number, sums in output.pooled.items()}
    return dataclasses.replace(output, logprobs=ids, prompt_logprobs=scored, pooled=pooled)  # type: ignore[arg-type]


def floats(output: StepOutput) -> list[float]:
    logprobs = [
        logprob
        for found in (output.logprobs, output.prompt_logprobs)
        for number in sorted(found)
        for logprob in found[number]
    ]
    values = [value for logprob in logprobs for value in (logprob.logprob, *(value for _, value in logprob.top))]
    return [*values, *(value for number in sorted(output.pooled) for value in output.pooled[number])]


def traffic(seed: int) -> list[tuple[Submission, int]]:
    """Make requests with every kind of row, and the number of steps after which each arrives."""
    draw = random.Random(seed)
    found = []
    for number in range(14):
        prompt = tuple(draw.choices(range(256), k=draw.choice([1, 2, 9, 16, 17, 40, 60])))
        options: dict[str, Any] = {"max_tokens": draw.randint(1, 12), "ignore_eos": draw.random() < 0.7}
        if draw.random() < 0.6:
            options |= {"temperature": draw.choice([0.3, 1.0, 2.0]), "seed": draw.randrange(99)}
            options |= {"top_k": draw.choice([0, 1, 7]), "top_p": draw.choice([1.0, 0.8, 0.2])}
            options |= {"min_p": draw.choice([0.0, 0.1])}
        else:
            options["temperature"] = 0.0
        if draw.random() < 0.3:
            options["logprobs"] = draw.randint(0, 3)
        if draw.random() < 0.3:
            options |= draw.choice(
                [
                    {"repetition_penalty": 1.5},
                    {"frequency_penalty": 1.0, "presence_penalty": 0.5},
                    {"logit_bias": ((65, 5.0), (66, -100.0))},
                    {"allowed_token_ids": (1, 2, 3, 50, 60)},
                    {"bad_words": ((5, 6), (7,))},
                    {"grammar": DIGITS, "max_tokens": 9},
                ]
            )
        pooling = None
        if draw.random() < 0.15:
            options = {"prompt_logprobs": 1, "max_tokens": 3, "temperature": 0.0}
        elif draw.random() < 0.15:
            options, pooling = {"max_tokens": 0}, draw.choice(["mean", "last"])
        submission = Submission(f"r{number}", prompt, SamplingParams(**options), pooling=pooling)
        found.append((submission, draw.choice([0, 0, 1, 3])))
    return found


def serve(executor: Any, resolved: ResolvedConfig, seed: int, cancel: float = 0.0) -> dict[str, list[Event]]:
    """Return every event of the traffic, by request."""
    core = EngineCore(executor, resolved)
    events: dict[str, list[Event]] = defaultdict(list)
    draw = random.Random(seed)

    def keep(found: Sequence[Event]) -> None:
        for event in found:
            events[event.request_id].append(event)

    for arrival_index, (submission, steps) in enumerate(traffic(seed)):
        keep(core.submit(create_request(submission, resolved, arrival_index)))
        for _ in range(steps):
            keep(core.step())
        if draw.random() < cancel:
            keep(core.abort(f"r{draw.randint(0, arrival_index)}"))
    for _ in range(2000):
        if not core.has_work:
            break
        keep(core.step())
        if draw.random() < cancel / 3:
            keep(core.abort(f"r{draw.randrange(14)}"))
    assert not core.has_work
    assert core.load().num_held_blocks == 0
    return events


def texts(events: dict[str, list[Event]]) -> dict[str, tuple[list[int], object]]:
    """Return the tokens of each request and how it ended. Log-probabilities are left out: they differ in the last bit
    where a step holds other rows."""
    return {
        request: ([event.token_id for event in found if isinstance(event, Token)], getattr(found[-1], "reason", found))
        for request, found in events.items()
    }


TIGHT = {"num_kv_blocks": 14, "max_model_len": 200}


LOOKED_UP = {
    "num_speculative_tokens": 3,
    "speculative": SpeculativeConfig(method="suffix", min_match=1, adaptive=False),
}


@pytest.mark.parametrize(
    "settings",
    [{}, TIGHT, {"num_speculative_tokens": 3}, LOOKED_UP],
    ids=["plain", "tight", "drafts", "looked up"],
)
@pytest.mark.parametrize("seed", range(4))
def test_every_plan_of_a_random_workload_gives_what_the_plain_executor_gives(
    model: Path, seed: int, settings: dict[str, Any]
) -> None:
    executor, resolved = make(model, **settings)
    both = Both(executor, plain(executor))
    events = serve(both, resolved, seed)
    assert both.steps > 10
    assert not [last for *_, last in events.values() if isinstance(last, Failed)]


UNDRAFTED = {"num_speculative_tokens": 0, "speculative": SpeculativeConfig(method="none")}


@pytest.mark.parametrize(
    "settings",
    [{}, TIGHT, {"num_speculative_tokens": 4}, LOOKED_UP, TIGHT | LOOKED_UP],
    ids=["plain", "tight", "drafts", "looked up", "tight and looked up"],
)
@pytest.mark.parametrize("seed", range(4))
def test_with_a_step_in_flight_the_events_are_the_same(model: Path, seed: int, settings: dict[str, Any]) -> None:
    executor, resolved = make(model, **settings | UNDRAFTED)
    want = serve(plain(executor), resolved, seed)
    overlapped, resolved = make(model, overlap=True, **settings)
    assert texts(serve(overlapped, resolved, seed)) == texts(want)
    asked: Any = overlapped._device
    waits = [i for i, what in enumerate(asked.asked) if what == "wait"]
    behind = sum(asked.asked[:i].count("download") - 1 > n for n, i in enumerate(waits))
    assert behind, "steps are read when the next one is queued already"


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_is_left_of_requests_that_end_at_any_moment(model: Path, overlap: bool) -> None:
    executor, resolved = make(model, overlap=overlap, num_speculative_tokens=0)
    for seed in range(10, 16):
        serve(executor, resolved, seed, cancel=0.5)
        assert (executor._answers.newest, executor._flying, list(executor._launched)) == ({}, {}, [])


def test_a_pending_token_is_taken_on_the_device_from_the_step_before(executor: DeviceExecutor) -> None:
    want = greedy_text(plain(executor), TOKENS[:20], BLOCKS, 4)
    device: Any = executor._device
    device.asked.clear()
    executor.launch(StepPlan(0, (chunk("a", TOKENS[:20], 0, 20, BLOCKS),)))
    for step in (1, 2, 3):
        executor.launch(StepPlan(step, (decode("a", PENDING_TOKEN, 19 + step, BLOCKS),)))
    assert "wait" not in device.asked
    assert [executor.collect().sampled[0][0] for _ in range(4)] == want


def test_drafts_are_verified_while_the_rows_of_others_go_on_from_steps_in_flight(executor: DeviceExecutor) -> None:
    want = greedy_text(plain(executor), TOKENS[:20], BLOCKS, 4)
    others = greedy_text(plain(executor), TOKENS[:9], OTHER_BLOCKS, 5)
    executor.launch(StepPlan(0, (chunk("a", TOKENS[:20], 0, 20, BLOCKS), chunk("b", TOKENS[:9], 0, 9, OTHER_BLOCKS))))
    executor.collect()
    device: Any = executor._device
    device.asked.clear()
    drafted = (want[0], want[1], (want[2] + 1) % 256)
    executor.launch(StepPlan(1, (decode("b", others[0], 9, OTHER_BLOCKS),)))
    row = decode("a", want[0], 20, BLOCKS)._replace(token_ids=drafted)
    executor.launch(StepPlan(2, (decode("b", PENDING_TOKEN, 10, OTHER_BLOCKS), row)))
    executor.launch(StepPlan(3, (decode("b", PENDING_TOKEN, 11, OTHER_BLOCKS),)))
    assert "wait" not in device.asked
    assert executor.collect().sampled == ((others[1],),)
    assert executor.collect().sampled == ((others[2],), (want[1], want[2])), "the second draft was wrong"
    rows = (decode("b", PENDING_TOKEN, 12, OTHER_BLOCKS), decode("a", want[2], 22, BLOCKS))
    executor.launch(StepPlan(4, rows))
    assert executor.collect().sampled == ((others[3],),)
    assert executor.collect().sampled == ((others[4],), (want[3],))


def test_a_row_cannot_go_on_from_drafts_in_flight(executor: DeviceExecutor) -> None:
    executor.launch(StepPlan(0, (chunk("a", TOKENS[:20], 0, 20, BLOCKS),)))
    (newest,) = executor.collect().sampled[0]
    executor.launch(StepPlan(1, (decode("a", newest, 20, BLOCKS)._replace(token_ids=(newest, 5)),)))
    with pytest.raises(ValueError, match="a goes on from drafts that are in flight"):
        executor.launch(StepPlan(2, (decode("a", PENDING_TOKEN, 22, BLOCKS),)))
    assert executor.collect().sampled[0], "the drafts are verified nevertheless"


def test_a_row_whose_token_was_never_sampled_fails_with_the_one_before_and_alone(executor: DeviceExecutor) -> None:
    good = greedy_text(plain(executor), TOKENS[:9], OTHER_BLOCKS, 2)
    executor.model.decoder.weights.embedding[7] = torch.nan  # the row that reads this token gets NaN
    prompt = [token if token != 7 else 8 for token in TOKENS[:9]]
    assert prompt == TOKENS[:9]
    executor.launch(StepPlan(0, (chunk("bad", [1, 7], 0, 2, BLOCKS), chunk("good", prompt, 0, 9, OTHER_BLOCKS))))
    rows = (decode("bad", PENDING_TOKEN, 2, BLOCKS), decode("good", PENDING_TOKEN, 9, OTHER_BLOCKS))
    executor.launch(StepPlan(1, rows))
    first, second = executor.collect(), executor.collect()
    assert (first.failed, second.failed) == (((0, NO_LOGIT),), ((0, LOST_TOKEN),))
    assert (first.sampled[1][0], second.sampled[1][0]) == tuple(good)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_row_that_its_own_controls_leave_no_token_is_the_clients_mistake_and_fails_alone(
    executor: DeviceExecutor, on_device: bool
) -> None:
    """It was told as a failed step, which clients try again."""
    words = LogitControls(allowed_token_ids=(5, 6), bad_words=((5, 5), (5, 6)), logit_bias=((6, 100.0),))
    five = dataclasses.replace(words, logit_bias=((5, 100.0),))

    def row(name: str, tokens: tuple[int, ...], block: int, controls: LogitControls) -> ScheduledRequest:
        sampling = dataclasses.replace(decode(name, 0, 0, ()).sampling, controls=controls)  # type: ignore[type-var]
        return decode(name, 0, 0, (block,))._replace(token_ids=tokens, answer=tokens[:1], sampling=sampling)

    rows = (
        row("stuck", (5,), 1, words),
        row("free", (6,), 2, words),
        row("stuck behind a draft", (6, 5), 3, five),
        row("a wrong draft leads nowhere", (6, 5), 4, words),
    )
    one = executor if on_device else plain(executor)
    one.launch(StepPlan(0, rows))
    output = one.collect()
    assert output.failed == ((0, NO_TOKEN_LEFT), (2, NO_TOKEN_LEFT))
    assert NO_TOKEN_LEFT.code is ErrorCode.INVALID_PARAMETER
    assert output.sampled == ((), (6,), (), (6,))


def test_a_request_that_is_forgotten_in_flight_leaves_no_token_behind(executor: DeviceExecutor) -> None:
    executor.launch(StepPlan(0, (chunk("a", TOKENS[:5], 0, 5, BLOCKS),)))
    executor.forget(["a"])
    executor.collect()
    assert executor._answers.newest == {}
    executor.launch(StepPlan(1, (decode("a", PENDING_TOKEN, 5, BLOCKS),)))
    assert executor.collect().failed == ((0, LOST_TOKEN),)


def with_grammar(row: ScheduledRequest, grammar: str = DIGITS) -> ScheduledRequest:
    assert row.sampling is not None
    return row._replace(sampling=dataclasses.replace(row.sampling, controls=LogitControls(grammar=grammar)))


def test_a_request_with_a_grammar_that_is_forgotten_in_flight_disturbs_nobody(executor: DeviceExecutor) -> None:
    """Regression: its matcher was gone when the step was read, and every other request of the step failed with it."""
    rows = (with_grammar(chunk("a", TOKENS[:5], 0, 5, BLOCKS)), chunk("b", TOKENS[:9], 0, 9, OTHER_BLOCKS))
    executor.launch(StepPlan(0, rows))
    executor.forget(["a"])
    output = executor.collect()
    assert output.sampled[1] == tuple(greedy_text(plain(executor), TOKENS[:9], OTHER_BLOCKS, 1))
    assert not output.failed
    assert executor._answers.newest.keys() == {"b"}


def test_a_request_id_that_comes_again_is_not_told_the_tokens_of_the_one_in_flight(executor: DeviceExecutor) -> None:
    row = with_grammar(chunk("a", TOKENS[:5], 0, 5, BLOCKS), 'start: "yes, sure"')
    executor.launch(StepPlan(0, (row,)))
    executor.forget(["a"])
    executor.launch(StepPlan(1, (row,)))
    assert executor.collect().sampled == ((ord("y"),),)
    assert executor._answers.newest == {}
    output = executor.collect()
    assert output.sampled == ((ord("y"),),)
    assert output.drafts == {0: tuple(b"es, sure")}


def test_an_abort_in_flight_ends_no_other_stream(model: Path) -> None:
    executor, resolved = make(model, overlap=True)
    core = EngineCore(executor, resolved)
    events: list[Event] = []

    def send(name: str, first: int, **sampling: Any) -> None:
        params = SamplingParams(temperature=0, max_tokens=12, **sampling)
        submission = Submission(name, tuple(TOKENS[first : first + 9]), params)
        events.extend(core.submit(create_request(submission, resolved, first)))

    send("a", 0)
    for _ in range(4):
        events.extend(core.step())
    send("b", 20, grammar=DIGITS)
    events.extend(core.step())
    assert "b" in {row.request_id for row in executor._launched[-1].plan.rows}
    events.extend(core.abort("b"))
    while core.has_work:
        events.extend(core.step())
    assert not [event for event in events if isinstance(event, Failed)]
    assert sum(isinstance(event, Token) and event.request_id == "a" for event in events) == 12


def test_without_memory_for_a_step_it_says_so_and_goes_on_with_a_smaller_one(
    executor: DeviceExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = greedy_text(plain(executor), TOKENS[:20], BLOCKS, 4)
    start = executor.model.start

    def small_only(plan: StepPlan, *rest: Any) -> Any:
        if plan.num_tokens > 8:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return start(plan, *rest)

    monkeypatch.setattr(executor.model, "start", small_only)
    with pytest.raises(ExecutorOutOfMemoryError, match=r"2.00 GiB"):
        executor.launch(StepPlan(0, (chunk("a", TOKENS[:20], 0, 20, BLOCKS),)))
    device: Any = executor._device
    assert device.asked[-1] == "release"
    assert not executor._launched
    assert greedy_text(executor, TOKENS[:20], BLOCKS, 4, chunk_size=8) == want


def test_a_fault_of_the_device_ends_the_engine(executor: DeviceExecutor) -> None:
    executor.launch(StepPlan(0, (chunk("a", TOKENS[:5], 0, 5, BLOCKS),)))

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    executor._launched[0].download = SimpleNamespace(wait=fail)  # type: ignore[assignment]
    with pytest.raises(ExecutorFatalError, match="illegal memory access"):
        executor.collect()
