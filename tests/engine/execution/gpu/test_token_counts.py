"""Owns the contract of the counts behind penalties: those of each row's text, at any moment, without waiting.
Never judges by a penalty's effect alone: counts are compared with a text's own, tokens with the plain executor's."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch.grammar import Grammars
from engine.build.gpu import start_on_device
from engine.config import EngineConfig, ResolvedConfig
from engine.core.core import EngineCore
from engine.execution.executor import TorchExecutor
from engine.execution.gpu.executor import DeviceExecutor
from engine.execution.gpu.token_counts import SLOTS_AT_A_TIME, TokenCounts
from engine.models.eager import EagerModel
from engine.models.kv_cache import KVCache
from engine.protocol import SamplingParams, Submission, Token
from engine.scheduling.request import create_request
from engine.step import PENDING_TOKEN, LogitControls, RowSampling, ScheduledRequest, StepPlan
from kernels.eager.ops import TORCH
from kernels.rows.row_tokens import RowTokens
from tests.support.fake_device import EOS, VOCAB, FakeDevice, write_model
from tests.support.plans import chunk, decode

PROMPT = tuple(torch.randint(0, 256, (20,), generator=torch.Generator().manual_seed(5)).tolist())
BLOCKS = (9, 3, 11)
PENALIZED = LogitControls(
    repetition_penalty=1.7, frequency_penalty=2.0, presence_penalty=1.0, prompt_token_ids=tuple(dict.fromkeys(PROMPT))
)


def sampling(controls: LogitControls | None = PENALIZED) -> RowSampling:
    return RowSampling(0.0, 0, 1.0, 0.0, seed=0, controls=controls)


# --- counts ----------------------------------------------------------------------------------------------------------


def text_of(tokens: RowTokens, place: int) -> dict[int, int]:
    """Return the counts that the kernels find for a place, by token; see RowTokens."""
    counts = tokens.counts[tokens.slots[place]].clone()
    for token in tokens.latest[place].tolist():
        if token >= 0:
            counts[token] += 2
    return {int(token): int(counts[token]) for token in counts.nonzero()}


def expected(controls: LogitControls, answer: tuple[int, ...]) -> dict[int, int]:
    found = Counter({token: 2 * times for token, times in Counter(answer).items()})
    return dict(found + Counter(controls.prompt_token_ids))


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_those_of_each_rows_text_whatever_happened_before(seed: int) -> None:
    """Requests come and go, miss steps, lose tokens when they begin anew, have drafts, or a token in flight."""
    draw, device = random.Random(seed), FakeDevice()
    counts, answers = TokenCounts(device, 40), dict[str, list[int]]()
    for _ in range(60):
        if draw.random() < 0.4:
            answers.setdefault(f"r{draw.randrange(30)}", [])
        if answers and draw.random() < 0.15:
            gone = draw.choice(sorted(answers))
            del answers[gone]
            counts.forget([gone])
        begun, names, rows, texts, known = set[str](), [], [], [], []
        flying: dict[str, tuple[torch.Tensor, int | None]] = {}
        sampled = torch.tensor([draw.randrange(40) for _ in range(9)])
        for name in draw.sample(sorted(answers), draw.randint(0, min(len(answers), 12))):
            if draw.random() < 0.1:
                begun.add(name)
                answers[name] = answers[name][: draw.randrange(len(answers[name]) + 1)]
            answers[name] += draw.choices(range(40), k=draw.randrange(3))
            controls = replace(PENALIZED, prompt_token_ids=tuple({int(name[1:]), 3}))
            answer, is_pending, num_places = tuple(answers[name]), draw.random() < 0.5, 1
            if is_pending:
                flying[name] = (sampled, draw.randrange(9))
            else:
                num_places = draw.randint(1, 4)
            for place in range(num_places):
                drafts = tuple(draw.choices(range(40), k=place))
                names.append(name)
                rows.append(sampling(controls))
                texts.append(answer + ((PENDING_TOKEN,) if is_pending else drafts))
                last = (int(sampled[flying[name][1] or 0]),) if is_pending else drafts
                known.append(expected(controls, answer + last))
        found = counts.rows(names, rows, texts, begun=begun, flying=flying)
        assert (found is None) == (not rows)
        if found is not None:
            assert [text_of(found, place) for place in range(len(rows))] == known
            assert len(found.counts) <= -(-12 // SLOTS_AT_A_TIME) * SLOTS_AT_A_TIME, "a slot for each row of a step"


def test_a_prompt_is_copied_once_and_then_a_token_a_step() -> None:
    device = FakeDevice()
    counts, answer = TokenCounts(device, VOCAB), (5, 6)
    counts.rows(["a"], [sampling()], [answer])
    first = device.uploaded[-1]
    for token in (7, 8, 9):
        answer = (*answer, token)
        counts.rows(["a"], [sampling()], [answer])
    assert device.uploaded[1:] == [4, 4, 4], "a slot, the end of the answer, and one token with its amount"
    assert first > len(PENALIZED.prompt_token_ids)


def test_slots_of_a_step_are_allocated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They grew by eight at a time. torch kept each smaller tensor's memory, and a start counted that as activations: 2
    GiB less for KV with 256 rows and a vocabulary of 152,000."""
    counts, zeros, allocated = TokenCounts(FakeDevice(), VOCAB), torch.zeros, list[int]()

    def noted(*shape: int, **options: Any) -> torch.Tensor:
        allocated.append(shape[0])
        return zeros(*shape, **options)

    monkeypatch.setattr(torch, "zeros", noted)
    answers = {f"r{number}": (number % 40,) for number in range(70)}
    for count in (60, 3, 70):
        names = [*answers][:count]
        found = counts.rows(names, [sampling()] * count, [answers[name] for name in names])
        assert found is not None
        assert [text_of(found, place) for place in range(count)] == [expected(PENALIZED, answers[n]) for n in names]
    assert allocated == [64, 72]


def test_rows_whose_controls_do_not_look_back_upload_nothing() -> None:
    device = FakeDevice()
    rows = [sampling(None), sampling(LogitControls(logit_bias=((3, 1.0),), bad_words=((4, 5),)))]
    assert TokenCounts(device, VOCAB).rows("ab", rows, [(), (4,)]) is None
    assert device.asked == []


def test_what_the_device_did_not_count_is_counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that ran out of memory is tried again with the same rows."""
    device = FakeDevice()
    counts = TokenCounts(device, VOCAB)
    counts.rows(["a"], [sampling()], [(5,)])

    def fail(host: torch.Tensor) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patch:
        patch.setattr(device, "upload", fail)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            counts.rows(["a"], [sampling()], [(5, 6)])
    found = counts.rows(["a"], [sampling()], [(5, 6)])
    assert found is not None
    assert text_of(found, 0) == expected(PENALIZED, (5, 6))


# --- steps in flight -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def make(model: Path, **settings: Any) -> tuple[DeviceExecutor, ResolvedConfig]:
    engine = {"load_format": "dummy", "dtype": "float32", "num_kv_blocks": 40, "num_threads": 1, "attention": "torch"}
    config = EngineConfig(**engine | {"max_num_seqs": 8, "max_num_batched_tokens": 48} | settings)
    executor, resolved = start_on_device(model, config, FakeDevice(), "a test").build()
    executor._answers.grammars = Grammars.of_bytes(VOCAB, EOS)
    return executor, resolved


@pytest.fixture
def executor(model: Path) -> Iterator[DeviceExecutor]:
    made, _ = make(model)
    yield made
    made.shutdown()


def plain(executor: DeviceExecutor) -> TorchExecutor:
    weights, own = executor.model.decoder, executor.model.cache
    layers = tuple((k.clone(), v.clone()) for k, v in own.layers)
    other = EagerModel(weights, TORCH, KVCache(layers), own.layers[0][0].shape[1])
    return TorchExecutor(other, num_threads=1, grammars=Grammars.of_bytes(VOCAB, EOS))


def first_row(controls: LogitControls) -> ScheduledRequest:
    return chunk("a", PROMPT, 0, len(PROMPT), BLOCKS)._replace(sampling=sampling(controls))


def next_row(controls: LogitControls, answer: tuple[int, ...]) -> ScheduledRequest:
    position = len(PROMPT) + len(answer) - 1
    return decode("a", answer[-1], position, BLOCKS)._replace(sampling=sampling(controls), answer=answer)


def text(executor: Any, controls: LogitControls, count: int) -> tuple[int, ...]:
    """Return `count` tokens, each read before the next step."""
    executor.launch(StepPlan(0, (first_row(controls),)))
    answer: tuple[int, ...] = executor.collect().sampled[0]
    while len(answer) < count:
        executor.launch(StepPlan(len(answer), (next_row(controls, answer),)))
        answer += executor.collect().sampled[0]
    return answer


def text_in_flight(executor: DeviceExecutor, controls: LogitControls, count: int) -> tuple[int, ...]:
    """Return `count` tokens, each read when the next step is queued already."""
    executor.launch(StepPlan(0, (first_row(controls),)))
    answer: tuple[int, ...] = ()
    while len(answer) < count - 1:
        executor.launch(StepPlan(len(answer) + 1, (next_row(controls, (*answer, PENDING_TOKEN)),)))
        answer += executor.collect().sampled[0]
    return answer + executor.collect().sampled[0]


def bad_words_of(executor: DeviceExecutor) -> LogitControls:
    """Return words that forbid what the model would answer: the second pair, and then the fourth token after two."""
    own = text(plain(executor), LogitControls(), 6)
    return LogitControls(bad_words=((own[0], own[1]), (own[2], own[3], own[4]), (1, 2, own[2])))


@pytest.mark.parametrize("kind", ["penalties", "bad words", "both"])
def test_a_step_whose_controls_look_back_is_queued_before_the_token_is_read(
    executor: DeviceExecutor, kind: str
) -> None:
    """Regression guard: one such row made all rows of the step wait for the step in flight."""
    words = bad_words_of(executor).bad_words
    controls = {
        "penalties": PENALIZED,
        "bad words": LogitControls(bad_words=words),
        "both": replace(PENALIZED, bad_words=words),
    }[kind]
    want = text(plain(executor), controls, 12)
    assert want != text(plain(executor), LogitControls(), 12)
    device: Any = executor._device
    device.asked.clear()
    assert text_in_flight(executor, controls, 12) == want
    order = [what for what in device.asked if what in ("download", "wait")]
    assert order == ["download", *["download", "wait"] * 11, "wait"]


def test_only_a_row_with_a_grammar_waits_for_its_token_and_only_if_it_is_in_flight(executor: DeviceExecutor) -> None:
    digits = LogitControls(grammar=r"start: /[0-9]+/")
    device: Any = executor._device
    executor.launch(StepPlan(0, (first_row(digits),)))
    device.asked.clear()
    other = decode("b", 5, 3, (1,))._replace(sampling=sampling(digits), answer=())
    executor.launch(StepPlan(1, (other,)))
    assert "wait" not in device.asked, "the grammar of another request needs no token in flight"
    executor.launch(StepPlan(2, (next_row(digits, (PENDING_TOKEN,)),)))
    assert "wait" in device.asked
    for _ in range(3):
        executor.collect()


def test_a_request_that_begins_anew_while_its_step_is_in_flight_keeps_none_of_its_tokens(
    executor: DeviceExecutor,
) -> None:
    """A preempted request computes its text again, and drops what the step in flight sampled."""
    want = text(plain(executor), PENALIZED, 6)
    executor.launch(StepPlan(0, (first_row(PENALIZED),)))
    executor.launch(StepPlan(1, (next_row(PENALIZED, (PENDING_TOKEN,)),)))
    executor.collect()
    known = want[:1]
    again = chunk("a", (*PROMPT, *known), 0, len(PROMPT) + 1, BLOCKS)._replace(sampling=sampling(), answer=known)
    executor.launch(StepPlan(2, (again,)))
    executor.collect()
    answer = known + executor.collect().sampled[0]
    while len(answer) < 6:
        executor.launch(StepPlan(9, (next_row(PENALIZED, answer),)))
        answer += executor.collect().sampled[0]
    assert answer == want


def test_a_new_request_of_a_forgotten_ones_name_has_its_own_counts(executor: DeviceExecutor) -> None:
    want = text(plain(executor), PENALIZED, 5)
    executor.launch(StepPlan(0, (first_row(PENALIZED),)))
    executor.launch(StepPlan(1, (next_row(PENALIZED, (PENDING_TOKEN,)),)))
    executor.forget(["a"])
    executor.collect()
    executor.collect()
    assert text_in_flight(executor, PENALIZED, 5) == want


# --- whole answers ---------------------------------------------------------------------------------------------------


def answers(executor: Any, resolved: ResolvedConfig, seed: int) -> dict[str, list[int]]:
    """Return the tokens of requests that all have penalties, bad words, or both."""
    draw, core = random.Random(seed), EngineCore(executor, resolved)
    found: dict[str, list[int]] = {}
    for number in range(9):
        options: dict[str, Any] = {"max_tokens": draw.randint(5, 25), "ignore_eos": True, "seed": number}
        options |= {"temperature": draw.choice([0.0, 0.9])}
        options |= draw.choice(
            [
                {"repetition_penalty": 1.5},
                {"frequency_penalty": 1.5, "presence_penalty": 0.5},
                {"repetition_penalty": 0.8, "bad_words": tuple((i, j) for i in range(30) for j in range(0, 256, 3))},
            ]
        )
        prompt = tuple(draw.choices(range(256), k=draw.choice([1, 9, 17, 40])))
        request = create_request(Submission(f"r{number}", prompt, SamplingParams(**options)), resolved, number)
        core.submit(request)
    for _ in range(2000):
        if not core.has_work:
            break
        for event in core.step():
            if isinstance(event, Token):
                found.setdefault(event.request_id, []).append(event.token_id)
    assert not core.has_work
    return found


@pytest.mark.parametrize("settings", [{}, {"num_kv_blocks": 14, "max_model_len": 200}], ids=["plain", "tight"])
@pytest.mark.parametrize("seed", range(3))
def test_in_flight_and_preempted_requests_with_penalties_get_the_tokens_of_the_plain_executor(
    model: Path, seed: int, settings: dict[str, Any]
) -> None:
    executor, resolved = make(model, num_speculative_tokens=0, **settings)
    want = answers(plain(executor), resolved, seed)
    overlapped, resolved = make(model, overlap=True, **settings)
    device: Any = overlapped._device
    device.asked.clear()
    assert answers(overlapped, resolved, seed) == want
    order = [what for what in device.asked if what in ("download", "wait")]
    waits = [index for index, what in enumerate(order) if what == "wait"]
    early = sum(order[:index].count("download") - 1 == number for number, index in enumerate(waits))
    assert early < len(waits) / 4, "most steps are read when the next one is queued"
    assert not overlapped._counts._counted
